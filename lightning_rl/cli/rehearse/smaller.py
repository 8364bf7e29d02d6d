"""The small run of a rehearsal: the big one's configuration with fewer, smaller and local parts."""

import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_rl.cli.rehearse.findings import Kind, RunFinding
from lightning_rl.cli.rehearse.tiny_model import write_tiny
from lightning_rl.cli.requested import Tree, class_of, inside_run, listed, models_in, nodes
from lightning_rl.models.pretrained import Loading

ITERATIONS = 3
_GROUP_SIZE, _MAX_TOKENS, _HELD_OUT, _SAMPLES, _MAX_BATCHES = 4, 32, 4, 2, 8
REWARD = "lightning_rl.cli.rehearse.spread.by_chance"
_GPU_ENGINES = ("VLLMLocal", "VLLMServer", "RayEngine")
_KEPT_OF_ENGINE = ("max_model_len", "enable_prefix_caching", "adapters")
_ON_CPUS = {
    "MemoryTransport": {},
    "CheckpointTransport": {},
    "CollectiveTransport": {"backend": "gloo", "host": "127.0.0.1"},
}
"""Transports that connect processes without GPUs, and their settings there."""
_ALIASES = {"None": "32-true", "32": "32-true", "64": "64-true", "16": "16-mixed",
            "bf16": "bf16-mixed"}  # fmt: skip
_OF_GPUS = {"16-mixed": "bf16-mixed", "16-true": "bf16-true"}
"""Precisions that need a GPU, with those that a CPU has in their place."""
_AXES = ("sequence", "tensor", "expert", "tensor_parallel_size")


def world_size(tree: Tree) -> int:
    """Return the number of training processes, as far as the configuration says; else 1."""
    trainer = tree["trainer"]
    devices = trainer.get("devices")
    count = len(devices) if isinstance(devices, list) else devices
    return max(1, int(count) if str(count).isdecimal() else 1) * (trainer.get("num_nodes") or 1)


def precision_of(tree: Tree) -> str:
    """Return the trainer's precision by its full name, such as ``bf16-mixed``."""
    given = str(tree["trainer"].get("precision"))
    return _ALIASES.get(given, given)


def without_weights(tree: Tree) -> Tree:
    """Return the configuration for one process on a CPU that reads no model's weights.

    All other sizes are the big run's.
    """
    planned = copy.deepcopy(tree)
    del planned["ckpt_path"]
    trainer = planned["trainer"]
    folders = (_save_dir(logger) for logger in listed(trainer.get("logger")))
    place = next((folder for folder in folders if folder), trainer.get("default_root_dir") or ".")
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": place}}
    trainer |= {
        "accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto",
        "precision": "32-true", "plugins": None,
        "logger": False if trainer.get("logger") is False else logger,
    }  # fmt: skip
    for _, node in nodes(trainer.get("callbacks")):  # transports may need a GPU to be made
        if "transport" in node:
            node["transport"] = None
    for node in models_in(planned["model"]):
        node["loading"] = (node.get("loading") or {}) | {"random_init": True}
    return planned


class Smaller:
    """Makes the small configuration, and notes what it leaves out.

    Args:
        tree: the big run's whole configuration.
        folder: for its models and its files.
        note: gets each finding on what a rehearsal cannot try.
    """

    def __init__(self, tree: Tree, folder: Path, note: Callable[[RunFinding], None]) -> None:
        self._big = tree
        self._folder = folder
        self._note = note
        self._models: dict[str, str] = {}

    def make(self) -> Tree:
        """Return the configuration of the small run, and write its models.

        Raises:
            ConfigError: if no tiny model can be made.
        """
        tree = copy.deepcopy(self._big)
        if tree.get("ckpt_path") is not None:
            self._untried("ckpt_path", "the rehearsal begins anew, not from this checkpoint")
        tree = {name: tree[name] for name in ("seed_everything", "model", "data", "trainer")}
        self._make_models(tree["model"])
        self._make_trainer(tree["trainer"])
        if tree["data"].get("class_path"):
            self._make_data(tree["data"].setdefault("init_args", {}))
        return tree

    def _untried(self, key: str, text: str) -> None:
        self._note(RunFinding(Kind.UNTRIED, key, text))

    # ---------------------------------------------------------------- model

    def _make_models(self, model: Tree) -> None:
        for node in models_in(model):
            loading = node.get("loading") or {}
            node["model"] = self._tiny(node["model"], loading)
            node["loading"] = loading | {"random_init": False, "model_kwargs": {}}
            if node.get("compile"):
                node["compile"] = False
                self._untried("model.compile", "layers are not compiled")

    def _tiny(self, model: str, loading: Tree) -> str:
        if model not in self._models:
            folder = self._folder / f"model_{len(self._models)}"
            kept = {name: loading.get(name) for name in ("trust_remote_code", "model_kwargs")}
            given = {name: value for name, value in kept.items() if value is not None}
            count = write_tiny(model, Loading(**given), folder)
            self._models[model] = str(folder)
            self._note(
                RunFinding(
                    Kind.TRIED, "", f"{model} as a model of {count:,} parameters of its kind"
                )
            )
        return self._models[model]

    # ---------------------------------------------------------------- trainer

    def _make_trainer(self, trainer: Tree) -> None:
        processes = self._strategy(trainer)
        for logger in listed(trainer.get("logger")):
            if class_of(logger) not in ("TensorBoardLogger", "CSVLogger", ""):
                self._untried("trainer.logger", f"{class_of(logger)} would send to its service")
        runs = {"save_dir": str(self._folder), "name": "run"}
        trainer |= {
            "accelerator": "cpu", "devices": processes, "num_nodes": 1,
            "precision": self._precision(), "max_epochs": 1, "max_steps": -1,
            "logger": {"class_path": "CSVLogger", "init_args": runs},
            "default_root_dir": str(self._folder), "plugins": None,
            "enable_model_summary": False, "enable_checkpointing": True,
            "callbacks": list(self._callbacks(trainer)),
        }  # fmt: skip
        if "iterations_per_epoch" not in (self._big["data"].get("init_args") or {}):
            windows = trainer.get("accumulate_grad_batches") or 1
            trainer |= {"limit_train_batches": ITERATIONS * windows, "limit_val_batches": 2}

    def _strategy(self, trainer: Tree) -> int:
        """Make the strategy small; returns the number of its processes."""
        world, strategy = world_size(self._big), trainer.get("strategy")
        if world == 1:
            trainer["strategy"] = "auto"
            return 1
        if world > 2:
            self._untried("trainer.devices", f"{world} processes; two share each axis instead")
        if isinstance(strategy, str) and ("fsdp" in strategy or "deepspeed" in strategy):
            self._untried("trainer.strategy", f"{strategy} needs GPUs; ddp was used")
            trainer["strategy"] = "ddp"
        if not isinstance(strategy, dict):
            return 2
        given = strategy.get("init_args") or {}
        given.pop("process_group_backend", None)
        axes = [name for name in _AXES if (given.get(name) or 1) not in (1, "auto")]
        strategy["init_args"] = given | dict.fromkeys(axes, 2)
        return int(2 ** max(1, len([name for name in axes if name != "expert"])))

    def _precision(self) -> str:
        precision = precision_of(self._big)
        if precision in ("32-true", "64-true", "bf16-mixed", "bf16-true"):
            return precision
        used = _OF_GPUS.get(precision, "32-true")
        self._untried("trainer.precision", f"{precision} needs a GPU; {used} was used")
        return used

    def _callbacks(self, trainer: Tree) -> Iterator[Tree]:
        classes = set()
        for node in inside_run(trainer.get("callbacks"), self._untried):
            name, given = class_of(node), node["init_args"]
            classes.add(name)
            if name in ("Evaluate", "IterationCheckpoint"):
                given["every_n_iterations"] = 1
            if name == "IterationCheckpoint":
                given |= {"keep_last": ITERATIONS, "max_time": None}
            if name == "WeightSync" and given.get("transport"):
                key = f"trainer.callbacks.{name}"
                given["transport"] = self._transport(key, given["transport"])
            yield node
        for name in ("IterationCheckpoint", "HFExport"):
            if name not in classes:
                every = {"every_n_iterations": 1} if name == "IterationCheckpoint" else {}
                yield {"class_path": name, "init_args": every}

    def _transport(self, key: str, transport: Any) -> Any:
        name = class_of(transport)
        if not self._serves:
            self._untried(key, f"{name} connects processes; weights stay in one here")
            return None
        if name not in _ON_CPUS:
            self._untried(key, f"{name} needs GPUs; weights go through shared memory instead")
            return None
        given = dict(transport.get("init_args") or {}) if isinstance(transport, dict) else {}
        if name == "CheckpointTransport":
            given["directory"] = str(self._folder / "weights")
        return {"class_path": name, "init_args": given | _ON_CPUS[name]}

    # ---------------------------------------------------------------- data

    @property
    def _serves(self) -> bool:
        """True if servers of vLLM write here too, to which weights are pushed as in the run."""
        data = self._big["data"].get("init_args") or {}
        return class_of(data.get("engine")) == "VLLMServer" and find_spec("vllm") is not None

    def _make_data(self, data: Tree) -> None:
        if "engine" in data:
            data["engine"] = self._engine(data["engine"])
        for key, node in nodes(data, "data"):
            for name, most in (("max_tokens", _MAX_TOKENS), ("group_size", _GROUP_SIZE)):
                if isinstance(node.get(name), int) and not key.startswith("data.engine"):
                    node[name] = min(node[name], most)
            if isinstance(node.get("rewards"), list):
                node["rewards"] = [*node["rewards"], REWARD]
                if node.get("reward_weights"):
                    node["reward_weights"] = [*node["reward_weights"], 1.0]
        minibatches = max(
            (node.get("minibatches") or 1 for _, node in nodes(self._big["model"])), default=1
        )
        if "groups_per_iteration" in data:
            fewest = 2 * max(minibatches, min(2, world_size(self._big)))
            data["groups_per_iteration"] = min(data["groups_per_iteration"], fewest)
        if "iterations_per_epoch" in data:
            data["iterations_per_epoch"] = ITERATIONS
        if isinstance(held_out := data.get("evaluation"), dict):
            held_out["limit"] = min(held_out.get("limit") or _HELD_OUT, _HELD_OUT)
            held_out["samples"] = min(held_out.get("samples") or 1, _SAMPLES)
        if isinstance(selection := data.get("selection"), dict):
            rounds = selection.get("max_batches") or _MAX_BATCHES
            selection["max_batches"] = min(rounds, _MAX_BATCHES)

    def _engine(self, engine: Any) -> Any:
        name = class_of(engine)
        given: Tree = engine.get("init_args") or {} if isinstance(engine, dict) else {}
        if name == "TransformersEngine":
            return {"class_path": name, "init_args": given | {"device": "cpu", "dtype": None}}
        if name not in (*_GPU_ENGINES, ""):
            return engine
        local = "VLLMLocal" if find_spec("vllm") else "TransformersEngine"
        kept = {name: given[name] for name in _KEPT_OF_ENGINE if given.get(name) is not None}
        if self._serves:
            local = name
            if given.get("urls"):
                self._untried("data.engine.urls", "a server of this machine writes in their place")
        if name not in ("", local):
            self._untried("data.engine", f"{local} writes in place of {name}")
        if local == "TransformersEngine":
            return local
        left = sorted(k for k, v in given.items() if v and k not in (*_KEPT_OF_ENGINE, "dtype"))
        ours = {
            "gpu_memory_utilization", "max_num_seqs", "replicas", "tensor_parallel_size", "urls",
        }  # fmt: skip
        if needs_gpu := [name for name in left if name not in ours]:
            self._untried("data.engine", f"settings for GPUs: {', '.join(needs_gpu)}")
        return {"class_path": local, "init_args": kept}


def _save_dir(logger: Any) -> str | None:
    given = logger.get("init_args") or {} if isinstance(logger, dict) else {}
    folder: str | None = given.get("save_dir")
    return folder
