"""The run directory of a pack, in which its update is made again."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_rl.cli.pack.trees import read_tree
from lightning_rl.config.yaml_text import dump_yaml, parse_yaml
from lightning_rl.errors import CheckpointError, ConfigError
from lightning_rl.run.files.checkpoint_io import write_checkpoint


def make_run(about: Mapping[str, Any], parts: Path, run: Path, models: Mapping[str, Path]) -> None:
    """Write a pack's run directory.

    Args:
        about: what ``pack.json`` says.
        parts: the pack's members.
        run: the directory to write, which must not exist.
        models: directories that are used in place of the pack's own models.

    Raises:
        CheckpointError: if the checkpoint is damaged, or of another iteration.
        ConfigError: if the configuration is damaged.
    """
    version = about["iteration"] - 1
    checkpoint = read_tree(parts / "checkpoint") if version > 0 else None
    if checkpoint is not None:
        _require_fitting(checkpoint, version)
    text = (parts / "config.yaml").read_text(encoding="utf-8")
    config = parse_yaml(text, "the pack's config.yaml")
    if not isinstance(config, dict) or config.get("ckpt_path") is not None:
        raise ConfigError(
            "the pack's config.yaml must hold keys, and no ckpt_path; ask for the pack again"
        )
    run.mkdir(parents=True)
    for folder in ("models", "rerun", "code"):
        if (parts / folder).is_dir():
            shutil.copytree(parts / folder, run / folder)
    there = {path.relative_to(run).as_posix(): path for path in run.glob("models/*")} | dict(models)
    config["model"] = _with_paths(config.get("model"), there)
    (run / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    if checkpoint is not None:
        write_checkpoint(checkpoint, run / "checkpoints" / f"iteration_{version}.ckpt")


def _require_fitting(checkpoint: Any, version: int) -> None:
    try:
        found = checkpoint["lightning_rl"]["iteration"]
        lists = [checkpoint[name] for name in ("optimizer_states", "lr_schedulers")]
        if not all(isinstance(one, list) for one in lists):
            raise TypeError("its optimizers and schedules must be lists")
        if not isinstance(checkpoint["state_dict"], dict):
            raise TypeError("its weights must be a mapping")
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the pack's checkpoint is damaged ({error!r}); ask for the pack again"
        ) from error
    if found != version:
        raise CheckpointError(
            f"the pack's checkpoint is of version {found!r:.20}, but the update needs {version}; "
            "ask for the pack again"
        )


def _with_paths(node: Any, models: Mapping[str, Path]) -> Any:
    """Return a configuration in which the pack's models have the paths that they have here."""
    if isinstance(node, dict):
        return {key: _with_paths(value, models) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_paths(item, models) for item in node]
    return str(models[node].absolute()) if isinstance(node, str) and node in models else node
