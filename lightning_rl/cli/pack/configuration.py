"""The configuration of a pack: what trains, by import paths, with models that are in the pack."""

import inspect
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from lightning_rl.cli.pack.base import weight_files
from lightning_rl.cli.requested import Tree, models_in
from lightning_rl.config.hints import import_object
from lightning_rl.config.secrets import without_secrets
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.pretrained import OF_FILES, Loading

_OBSERVERS: dict[str, Any] = {
    "logger": False,
    "profiler": None,
    "default_root_dir": None,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Settings of the trainer for what only watches a run, or writes to its directory."""
_PATH = re.compile(r"(?<![\w:/.~])~?/(?:[\w.+@-]+/)*(?=[\w.+@-])")
"""Matches the folders of an absolute path, up to its last part."""
_HOST = re.compile(r"(://(?:\*{3}@)?)(?!(?:localhost|127\.0\.0\.1)\b)[\w.-]+")


def anonymous(tree: Any) -> Any:
    """Return a copy without secrets, and without this machine's folders and hosts' names.

    Of an absolute path its last part stays, and hosts are called ``host``.
    """
    if isinstance(tree, dict):
        return {key: anonymous(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [anonymous(item) for item in tree]
    if not isinstance(tree, str):
        return tree
    text = _PATH.sub("", _HOST.sub(r"\1host", without_secrets(tree)))
    name = socket.gethostname()
    # A name such as "gpu" may be an ordinary word of the configuration.
    return text.replace(name, "host") if re.search(r"[\d.-]", name) else text


class PackedConfiguration:
    """The configuration by which a pack's update is made, and the models that it names.

    Args:
        config: a run's recorded configuration.
        folder: the folder of the pack's members, to which models are written.
        initial: True if no checkpoint is packed, so that the models' own weights count.
        with_code: True to include code that comes with a model.

    Raises:
        DataError: if a model has no safetensors.
    """

    def __init__(
        self, config: dict[str, Any], folder: Path, initial: bool, with_code: bool
    ) -> None:
        self._folder = folder
        self._initial, self._with_code = initial, with_code
        self._packed: dict[tuple[str, bool], str] = {}
        self.left_out: list[str] = []
        """Sentences on the parts of the run that the pack lacks."""
        self.tree = self._of(config)

    def _of(self, config: dict[str, Any]) -> dict[str, Any]:
        trainer = config["trainer"] | _OBSERVERS
        given = trainer.get("callbacks") or []
        trainer["callbacks"] = [c for c in given if _reruns(c["class_path"])]
        self.left_out += ["the data module, since recorded rollouts are trained on", "loggers"]
        self.left_out += [
            f"the callback {c['class_path']}" for c in given if c not in trainer["callbacks"]
        ]
        rollouts = {"path": "rerun", "iterations_per_epoch": 1}
        tree = {
            "seed_everything": config.get("seed_everything"),
            "trainer": trainer,
            "model": self._pack_models(config["model"]),
            "data": {"class_path": "lightning_rl.OfflineDataModule", "init_args": rollouts},
            "ckpt_path": None,
        }
        return dict(anonymous(tree))

    def _pack_models(self, tree: Tree) -> Tree:
        """Pack all models, and return a configuration that has their paths in the pack."""
        tree = deepcopy(tree)
        for node in models_in(tree):
            model, loading = node["model"], node.get("loading")
            if isinstance(loading, dict):
                node["model"], node["loading"] = self._learner(
                    model, loading, bool(node.get("lora"))
                )
            elif Path(model, "config.json").is_file():
                node["model"] = self._packed_model(model, Loading(), True)
        return tree

    def _learner(
        self, model: str, loading: dict[str, Any], lora: bool
    ) -> tuple[str, dict[str, Any]]:
        """Pack the model of a policy, and return its path in the pack and how it is loaded there.

        A checkpoint overwrites all of its weights, but for those that a LoRA leaves as they are.
        """
        kwargs = loading.get("model_kwargs") or {}
        settings = {name: value for name, value in kwargs.items() if name not in OF_FILES}
        found = Loading(loading.get("trust_remote_code", False), kwargs)
        random = bool(loading.get("random_init"))
        needed = not random and (lora or self._initial)
        packed = self._packed_model(model, found, needed)
        random = random or not needed
        return packed, loading | {"model_kwargs": settings, "random_init": random}

    def _packed_model(self, model: str, loading: Loading, weights: bool) -> str:
        key = (model, weights)
        if key in self._packed:
            return self._packed[key]
        place = self._packed[key] = f"models/{len(self._packed)}"
        folder = self._folder / place
        folder.mkdir(parents=True)
        save_skeleton(model, folder, loading)
        for code in [] if self._with_code else folder.glob("*.py"):
            code.unlink()
        if weights:
            source = _folder_of(model, loading)
            for file in (*weight_files(source), *source.glob("model.safetensors.index.json")):
                shutil.copyfile(file, folder / file.name)
        else:
            self.left_out.append(f"the initial weights of {place}, which the checkpoint replaces")
        return place


def _folder_of(model: str, loading: Loading) -> Path:
    """Return the folder of a model's files, which for a name of the hub is in the cache."""
    if Path(model).is_dir():
        return Path(model, loading.model_kwargs.get("subfolder", ""))
    where = {n: v for n, v in loading.of_files.items() if n != "trust_remote_code"}
    return Path(str(cached_file(model, "config.json", **where))).parent


def _reruns(path: str) -> bool:
    return bool(getattr(import_object(path), "reruns", False))


def write_code(tree: Any, folder: Path) -> list[str]:
    """Write the source files of the user's classes and functions that a configuration names.

    Those of installed packages are left out.

    Returns:
        The names of the modules.
    """
    installed = [Path(p).resolve() for p in (*_site_folders(), sys.prefix, sys.base_prefix)]
    written = []
    for path in sorted(set(_import_paths(tree))):
        found = import_object(path)
        module = inspect.getmodule(found)
        source = inspect.getsourcefile(found) if module is not None else None
        if module is None or source is None or module.__name__.startswith("lightning_rl."):
            continue
        if any(Path(source).resolve().is_relative_to(place) for place in installed):
            continue
        target = folder / f"{module.__name__.replace('.', '/')}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = without_secrets(Path(source).read_text(encoding="utf-8"))
        target.write_text(text, encoding="utf-8")
        written.append(module.__name__)
    return written


def _site_folders() -> list[str]:
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def _import_paths(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (node["class_path"],) if isinstance(node.get("class_path"), str) else ()
        for value in node.values():
            yield from _import_paths(value)
    elif isinstance(node, list):
        for item in node:
            yield from _import_paths(item)
    elif isinstance(node, str) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", node):
        # A function's, if its module has been imported to make the update again.
        yield from (node,) if node.split(".")[0] in sys.modules else ()
