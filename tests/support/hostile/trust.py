"""Hostile calls: strangers' configurations under ``--trusted_only``, from strangers' folders."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from tests.support.bad_configs import make_model
from tests.support.hostile.call import Call, command
from tests.support.hostile.configurations import good

EVIL = "open('ran', 'w').close()\n"
"""The code that no call may get to run."""
PARTS = {
    "evil.py": EVIL + "def f(*a, **k): return [0.0]\nclass Evil: ...\n",
    "evil_package/__init__.py": EVIL,
    "evil_package/inner.py": EVIL,
    "evil_space/inner.py": EVIL,
    "sitecustomize.py": EVIL,
    "evil.sh": "touch ran\n",
    "conftest.py": EVIL,
    "part.yaml": "class_path: evil.Evil\n",
    "nested/part.yml": "class_path: evil.Evil\n",
}


def refused(name: str, *says: str, begin: str = "check", more: tuple[str, ...] = (),
            make: Callable[[Path], object] | None = None, **changes: Any) -> Call:  # fmt: skip
    """Run a command with ``--trusted_only`` on a configuration with these values at ``a__b__c``.

    It fails if anything in the folder was run, whatever was said.
    """

    def play(folder: Path) -> None:
        for path, text in PARTS.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        (folder / "c.yaml").write_text(yaml.safe_dump(good(**changes)))
        if make is not None:
            make(folder)
        words = [begin, "--config", "c.yaml", *more]
        trust = () if "--trust" in more else ("--trusted_only",)
        try:
            command(*words, *trust)(folder)
        finally:
            if (folder / "ran").exists():
                print("Traceback (most recent call last): it ran")
        sys.exit(0)

    return Call(name, play, says)


def agent(name: str, *says: str, kind: str = "ScriptAgent", **arguments: Any) -> Call:
    """Return an agent of ours with these arguments."""
    spec = {"class_path": kind, "init_args": arguments}
    return refused(name, *says, data__init_args__agent=spec)


def engine(name: str, *says: str, kind: str = "VLLMLocal", **arguments: Any) -> Call:
    spec = {"class_path": kind, "init_args": arguments}
    return refused(name, *says, data__init_args__engine=spec)


def callback(name: str, *says: str, path: str = "Evaluate", **arguments: Any) -> Call:
    return refused(name, *says, trainer__callbacks=[{"class_path": path, "init_args": arguments}])


def logger(name: str, *says: str, path: str, **arguments: Any) -> Call:
    return refused(name, *says, trainer__logger={"class_path": path, "init_args": arguments})


def reward(name: str, path: Any, *says: str, **more: Any) -> Call:
    return refused(name, *says, data__init_args__rewards=[path], **more)


def checkpoint(name: str, hyper_parameters: Any, *says: str) -> Call:
    content = {"state_dict": {}, "hyper_parameters": hyper_parameters}
    return refused(name, *says, more=("--ckpt_path", "x.ckpt"),
                   make=lambda f: torch.save(content, f / "x.ckpt"))  # fmt: skip


def _environment(**arguments: Any) -> dict[str, Any]:
    kind = arguments.pop("kind", "Gym")
    env = {"class_path": kind, "init_args": arguments}
    data = {"class_path": "EnvDataModule", "init_args": {"env": env}}
    return {"model": {"class_path": "ActorCriticModule"}, "data": data}


class _Opens:
    """Leaves a file behind when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("ran", "w"))


def _pickled(folder: Path) -> None:
    torch.save({"state_dict": _Opens(), "hyper_parameters": {}}, folder / "x.ckpt")


def _old_pickle(folder: Path) -> None:
    content = {"state_dict": {}, "hyper_parameters": _Opens()}
    torch.save(content, folder / "x.ckpt", _use_new_zipfile_serialization=False)


def _model_of_pickles(folder: Path) -> None:
    model = folder / "model"
    make_model(model)
    (model / "model.safetensors").unlink()
    torch.save(_Opens(), model / "pytorch_model.bin")
    (folder / "train.jsonl").write_text('{"prompt": "3="}\n' * 12)


def _model_of_code(folder: Path) -> None:
    model = folder / "model"
    make_model(model)
    own = json.loads((model / "config.json").read_text())
    own |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (model / "config.json").write_text(json.dumps(own))
    (model / "own.py").write_text(EVIL)
    (folder / "train.jsonl").write_text('{"prompt": "3="}\n' * 12)


def _trust_of(word: str) -> Callable[[Path], object]:
    def play(folder: Path) -> None:
        (folder / "c.yaml").write_text(yaml.safe_dump(good()))
        command("check", "--config", "c.yaml", "--trust", word)(folder)

    return play


NOT_TRUSTED = "is not among the trusted modules"

CALLS: list[Call] = [
    # --------------------------------------------------------------------- code of the folder
    reward("a function of the folder", "evil.f", NOT_TRUSTED, "--trust evil"),
    reward("a function of a package of the folder", "evil_package.inner.f", NOT_TRUSTED),
    reward("a function of a folder without a package", "evil_space.inner.f", "is no module"),
    reward("a class of the folder", {"class_path": "evil.Evil"}, NOT_TRUSTED),
    reward("a path with spaces around it", " evil.f ", "rewards[0]"),
    reward("a path with a zero byte", "evil.f\0", "rewards[0]"),
    reward("letters that look alike", "еvil.f", "rewards[0]"),
    reward("letters that Python takes for others", "ｅｖｉｌ.f", "rewards[0]"),
    reward("a path of 1,000 names", ".".join(["evil"] * 1000), "rewards[0]"),
    reward("a name of 5,000 letters", "e" * 5000 + ".f", "rewards[0]"),
    reward("a name with two underscores", "evil.__builtins__.eval", NOT_TRUSTED),
    reward("what a trusted class leads to", "lightning_rl.Evaluate.__init__.__globals__",
           "rewards[0]"),
    reward("what a trusted function leads to", "lightning_rl.Sampling.__module__", "rewards[0]"),
    reward("a reward in a text of YAML", "{class_path: evil.Evil}", NOT_TRUSTED),
    reward("a reward in a text in a text", "\"{class_path: 'evil.Evil'}\"", "rewards[0]"),
    callback("a callback of the folder", NOT_TRUSTED, path="evil.Evil"),
    callback("a callback of torch", NOT_TRUSTED, path="torch.nn.Linear"),
    callback("Lightning's callback that calls", "trainer.callbacks[0]", path="LambdaCallback",
             on_fit_start="evil.f"),
    refused("a model of the folder", NOT_TRUSTED, model={"class_path": "evil.Evil"}),
    refused("data of the folder", NOT_TRUSTED, data={"class_path": "evil.Evil"}),
    refused("a strategy of the folder", NOT_TRUSTED, trainer__strategy="evil.Evil"),
    refused("a plugin of the folder", NOT_TRUSTED, trainer__plugins=["evil.Evil"]),
    refused("an optimizer of the folder", NOT_TRUSTED, model__init_args__optimizer="evil.Evil"),
    refused("a schedule that calls", "lr_scheduler", model__init_args__lr_scheduler={
        "class_path": "torch.optim.lr_scheduler.LambdaLR", "init_args": {"lr_lambda": "evil.f"}}),
    refused("a profiler that writes where it is told", "is not known", trainer__profiler={
        "class_path": "SimpleProfiler", "init_args": {"dirpath": "/tmp", "filename": "x"}}),
    # --------------------------------------------------------------------- parts in files
    refused("a part in a file", "separate configuration file", data__init_args__engine="part.yaml"),
    refused("a part in a folder's file", "separate configuration file", model="nested/part.yml"),
    refused("a part behind dots", "separate configuration file", model="./nested/../part.yaml"),
    refused("a callback in a file", "separate configuration", trainer__callbacks=["part.yaml"]),
    # --------------------------------------------------------------------- commands of agents
    agent("a script", NOT_TRUSTED, script="evil.py"),
    agent("a script above", "may be run", script="../evil.py"),
    agent("an interpreter", "may be run", script="x", python="./evil.sh"),
    agent("a module before the script", "may be run", script="x", preload=["evil"]),
    agent("arguments of a script", "may be run", script="x", arguments=["--eval", "x"]),
    agent("variables for a script", NOT_TRUSTED, script="x", env={"BASH_ENV": "evil.sh"}),
    agent("variables passed to a script", "may be run", script="x", pass_env=["HOME"]),
    agent("a place for a script", "may be run", script="x", cwd="nested"),
    agent("a command", "may be run", kind="ProgramAgent", command="sh evil.sh"),
    agent("a command in words", NOT_TRUSTED, kind="ProgramAgent", command=["sh", "evil.sh"]),
    agent("a tool of the folder", NOT_TRUSTED, kind="ToolAgent", tools=["evil.f"]),
    agent("a tool of Python", NOT_TRUSTED, kind="ToolAgent", tools=["os.system"]),
    agent("a package of environments", "is not known", kind="VerifiersAgent",
          environment="evil", python="nested"),
    agent("a server of an environment", "is not known", kind="OpenEnvAgent",
          server={"environment": "evil:Evil", "python": "nested"}),
    # --------------------------------------------------------------------- environments
    refused("a module before a colon", "names a module", **_environment(name="evil:Evil-v0")),
    refused("a module before two colons", "names a module", **_environment(name="evil::Evil-v0")),
    refused("arguments of an environment", "may be run", **_environment(
        name="CartPole-v1", arguments={"render_mode": "evil"})),
    refused("a wrapper of the folder", NOT_TRUSTED, **_environment(
        name="CartPole-v1", wrappers=["evil.Evil"])),
    refused("a maker of the folder", NOT_TRUSTED, **_environment(kind="TorchRLEnv", make="evil.f")),
    refused("a maker in a file", "would be imported", **_environment(
        kind="TorchRLEnv", make="./evil.py")),
    # --------------------------------------------------------------------- engines and servers
    engine("an extension of a worker", NOT_TRUSTED, options={"worker_extension_cls": "evil.E"}),
    engine("a plugin of a parser", "may run code", options={"tool_parser_plugin": "./evil.py"}),
    engine("a transport of weights", "may run code", options={"kv_transfer_config": {"a": "evil"}}),
    engine("options in a text", NOT_TRUSTED, options="{worker_cls: evil.E}"),
    engine("code of a model, by the engine", "runs code", options={"trust_remote_code": True}),
    engine("a cluster elsewhere", "a Ray cluster", kind="RayEngine", address="ray://10.0.0.9:10001"),
    engine("a library for Ray", "may run code", kind="RayEngine", environment={"LD_AUDIT": "x"}),
    engine("packages for Ray", "may run code", kind="RayEngine",
           ray_options={"runtime_env": {"pip": ["evil"]}}),
    # --------------------------------------------------------------------- loggers
    logger("a logger of the folder", NOT_TRUSTED, path="evil.Evil"),
    logger("a command for git", "trainer.logger", path="WandbLogger", settings={"program": "evil"}),
    logger("a server for MLflow", "trainer.logger", path="MLFlowLogger", tracking_uri="http://x"),
    # --------------------------------------------------------------------- models, checkpoints
    refused("a model of pickles", "pickles of more than tensors", make=_model_of_pickles),
    refused("a model with code", "comes with code of its own", make=_model_of_code),
    refused("code of a model", "runs code", model__init_args__trust_remote_code=True),
    refused("code of a model in a text", "runs code", model__init_args__trust_remote_code="true"),
    refused("kernels of a model", "may run code",
            model__init_args__model_kwargs={"attn_implementation": "evil/kernel"}),
    refused("a pickle", "x.ckpt", make=_pickled, more=("--ckpt_path", "x.ckpt")),
    refused("a pickle of old", "x.ckpt", make=_old_pickle, more=("--ckpt_path", "x.ckpt")),
    refused("a pickle, as it says itself", "unpickles", weights_only=False),
    refused("a pickle, by option", "unpickles", more=("--weights_only", "false")),
    refused("a checkpoint from elsewhere", "would be unpickled", ckpt_path="http://127.0.0.1:9/x"),
    checkpoint("a class in a checkpoint", {"_class_path": "evil.Evil"}, NOT_TRUSTED),
    checkpoint("a class deep in a checkpoint", {"a": [{"b": {"class_path": "evil.Evil"}}]},
               NOT_TRUSTED),
    checkpoint("a script in a checkpoint", {"agent": {"class_path": "ScriptAgent", "init_args": {
        "script": "evil.py"}}}, "x.ckpt"),
    checkpoint("an instantiator in a checkpoint", {"_instantiator": "evil.f"}, NOT_TRUSTED),
    # --------------------------------------------------------------------- the option itself
    Call("trust in nothing", _trust_of(""), ("--trust needs a module's name",)),
    Call("trust in a path", _trust_of("./evil.py"), ("--trust needs a module's name",)),
    Call("trust in an option", _trust_of("--model"), ("--trust needs a module's name",)),
    refused("trust in another module", NOT_TRUSTED, data__init_args__rewards=["evil.f"],
            more=("--trust", "nested")),
    refused("trust in the beginning of a name", NOT_TRUSTED, data__init_args__rewards=["evil.f"],
            more=("--trust", "ev")),
    refused("a rollout of a stranger", NOT_TRUSTED, begin="rollout",
            data__init_args__rewards=["evil.f"], more=("--output", "x.jsonl")),
    refused("a test of a stranger", NOT_TRUSTED, begin="test", data__init_args__rewards=["evil.f"]),
]  # fmt: skip
