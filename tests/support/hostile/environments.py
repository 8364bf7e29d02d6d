"""Provide hostile calls: environments."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torchrl.data import LazyTensorStorage, ReplayBuffer

from lightning_rl.callbacks import Evaluate, Watchdog
from lightning_rl.envs import (
    EnvDataModule,
    Gym,
    OffPolicyModule,
    PooledGym,
    SACAgent,
    TorchRLLoss,
)
from tests.support.hostile.call import Call, command
from tests.support.hostile.env_worlds import KINDS, NAME, Terminate, fit, script

GENEROUS = 240.0
"""Seconds: processes import much before they step, on a busy machine."""


def meets(kind: str, how: str, where: str, *says: str, right: bool = False, **data: Any) -> Call:
    """Return a run in an environment that does that."""
    return Call(
        f"{kind}: {how} in {where}",
        lambda folder: fit(folder, KINDS[kind](how, where), **data),
        says,
        right,
        GENEROUS,
    )


def hangs(kind: str, where: str = "step") -> Call:
    """Return a run in an environment that hangs, until its time is over."""
    return Call(
        f"{kind}: hangs in {where}, with a time limit",
        lambda folder: fit(folder, KINDS[kind]("hangs", where), max_step_seconds=3.0),
        ("EnvError", "max_step_seconds=3"),
        seconds=GENEROUS,
    )


def stopped(kind: str, number: int, where: str = "step", **data: Any) -> Call:
    """Return a run in an environment that hangs, and is asked to end."""
    name = signal.Signals(number).name
    return Call(
        f"{kind}: hangs in {where}, then {name}",
        lambda folder: fit(folder, KINDS[kind]("hangs", where), Terminate(number), **data),
        ("RunInterrupted", name),
        seconds=GENEROUS,
    )


def learner(module: Callable[[], Any], *says: str) -> Call:
    """Return another module in an environment that hangs."""
    name = module().__class__.__name__
    return Call(
        f"{name}: the environment hangs, then SIGTERM",
        lambda folder: fit(
            folder, KINDS["Gym"]("hangs", "step"), Terminate(signal.SIGTERM), module=module()
        ),
        says,
        seconds=GENEROUS,
    )


def evaluation(folder: Path) -> None:
    fit(folder, KINDS["Gym"]("hangs", "step"), Evaluate(), Terminate(signal.SIGTERM))


def watched(folder: Path) -> None:
    fit(folder, KINDS["Gym"]("hangs", "step"), Watchdog(timeout_s=3.0))


def configured(**data: Any) -> Callable[[Path], object]:
    """Call ``lightning-rl check`` on an environment."""

    def play(folder: Path) -> None:
        config = {
            "model": {"class_path": "ActorCriticModule"},
            "data": {"class_path": "EnvDataModule", "init_args": data},
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        command("check", "--config", "config.yaml")(folder)

    return play


def gym(name: str = NAME, kind: str = "Gym", **options: Any) -> dict[str, Any]:
    return {"class_path": kind, "init_args": {"name": name, **options}}


class Keep(Callback):
    """Gives batches to torchrl's own buffer, as they are."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        buffer.extend(batch)
        print(len(buffer), "kept, of", batch["next", "reward"].shape[1], "steps each")


SCRIPT = """
import gymnasium
from lightning.pytorch import Trainer
from lightning_rl.envs import *
from lightning_rl.errors import LightningRLError
{before}
print("the script runs")
try:
    data = EnvDataModule({env}, num_envs=2, frames_per_iteration=4, iterations_per_epoch=1)
    Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False).fit(ActorCriticModule(), datamodule=data)
    print("trained")
except LightningRLError as error:
    raise SystemExit(f"{{type(error).__name__}}: {{error}}")
"""
HERE = """
from tests.support.hostile.env_worlds import Rude
class Mine(Rude):
    pass
gymnasium.register("Mine-v0", Mine)
"""


def unguarded(env: str, before: str = "") -> Callable[[Path], object]:
    """Return a script without ``if __name__ == "__main__"``."""
    return script(SCRIPT.format(env=env, before=before))


CALLS: list[Call] = [
    *(meets(kind, "raises", "step", "EnvError", "the simulator is gone", "step 3") for kind in (
        "Gym", "PooledGym", "TorchRLEnv",
    )),
    *(meets(kind, "exits", "step", "EnvError", "SystemExit: 0") for kind in (
        "Gym", "PooledGym", "TorchRLEnv",
    )),
    meets("Gym", "quits", "step", "EnvError", "called os._exit(0)"),
    meets("PooledGym", "quits", "step", "EnvError", "ended with exit status 0"),
    meets("PooledGym", "crashes", "step", "EnvError", "killed by SIGSEGV"),
    meets("Gym", "crashes", "step", "Fatal Python error: Segmentation fault"),
    meets("Gym", "not over", "step", "EnvError", "gave None as terminated"),
    meets("PooledGym", "not over", "step", "EnvError", "gave None as terminated"),
    meets("PooledGym", "dies", "step", "EnvError", "killed by SIGKILL"),
    *(hangs(kind) for kind in KINDS),
    hangs("Gym", "reset"),
    *(stopped(kind, signal.SIGTERM) for kind in KINDS),
    stopped("Gym", signal.SIGINT),
    stopped("Gym", signal.SIGUSR1),
    stopped("Gym", signal.SIGTERM, "reset"),
    stopped("PooledGym", signal.SIGINT),
    learner(OffPolicyModule, "RunInterrupted", "SIGTERM"),
    Call("Gym: the first evaluation hangs, then SIGTERM", evaluation, ("RunInterrupted",)),
    Call("Gym: hangs, with a Watchdog", watched, ("StalledError", "at hostile/env_worlds.py")),
    meets("Gym", "raises", "reset", "EnvError", "the simulator is gone"),
    meets("Gym", "nothing", "reset", "EnvError", "reset returned None"),
    meets("PooledGym", "nothing", "reset", "EnvError", "reset returned None"),
    meets("Gym", "old", "reset", "EnvError", "gymnasium requires (observation, info)"),
    meets("Gym", "old", "step", "EnvError", "gymnasium requires (observation, reward, terminated"),
    meets("Gym", "short", "step", "EnvError", "numbers of shape (2,)"),
    meets("Gym", "long", "reset", "EnvError", "numbers of shape (2,)"),
    meets("Gym", "nan", "step", "EnvError", "as observation"),
    meets("Gym", "unpaid", "step", "EnvError", "gave None as reward"),
    meets("PooledGym", "paid nan", "step", "EnvError", "gave nan as reward"),
    meets("Gym", "raises", "init", "ConfigError", "the simulator is gone"),
    meets("Gym", "exits", "init", "EnvError", "SystemExit"),
    meets("Gym", "raises", "close", "close raised ValueError", right=True),
    meets("PooledGym", "raises", "close", "close raised ValueError", right=True),
    meets("Gym", "exits", "close", "close raised SystemExit", right=True),
    meets("Gym", "hangs", "close", "cannot be closed", right=True),
    meets("PooledGym", "hangs", "close", "EnvError", "did not finish within 5 s"),
    meets("Gym", "no space", "init", "ConfigError", "action_space of Rude is None"),
    meets("PooledGym", "text for a space", "init", "ConfigError", "action_space of Rude is 'left"),
    Call("a script without a guard: PooledGym", unguarded(f"PooledGym('{NAME}')"), ("trained",),
         True, GENEROUS),
    Call("a script that defines the environment itself", unguarded("PooledGym('Mine-v0')", HERE),
         ("ConfigError", "defined in the script itself")),
    Call("torchrl's buffer, and a batch", lambda folder: fit(folder, KINDS["Gym"]("", ""), Keep()),
         ("2 kept, of 8 steps each",), True),
    Call("a loss of torchrl's that is none", lambda folder: TorchRLLoss("torchrl.objectives.PPO"),
         ("ConfigError", "has no 'PPO'")),
    Call("a loss of torchrl's with its own networks", lambda folder: TorchRLLoss(
        "torchrl.objectives.SACLoss"), ("ConfigError", "ClipPPOLoss")),
    Call("SAC where there is a choice of actions", lambda folder: fit(
        folder, KINDS["Gym"]("", ""), module=OffPolicyModule({"agent": SACAgent()})),
         ("ConfigError", "use QAgent")),
    Call("more in a batch than may be", lambda folder: PooledGym(NAME, min_batch=3, max_batch=2),
         ("ConfigError", "max_batch=2")),
    Call("a time limit of nothing", lambda folder: EnvDataModule(Gym(NAME), max_step_seconds=0.0),
         ("ConfigError", "max_step_seconds")),
    Call("check: an environment that there is not", configured(env=gym("Rudest-v0")),
         ("cannot make 'Rudest-v0'",)),
    Call("check: an argument that it does not take", configured(env=gym(arguments={"who": 1})),
         ("who",)),
    Call("check: it hangs", configured(env=gym(arguments={"how": "hangs"}), num_envs=2,
         frames_per_iteration=16, max_step_seconds=2.0), ("max_step_seconds=2",)),
    Call("check: greedy, and all is well", configured(env=gym(), num_envs=2,
         frames_per_iteration=16, greedy=True), ("an iteration: 8 steps",), True),
]  # fmt: skip
