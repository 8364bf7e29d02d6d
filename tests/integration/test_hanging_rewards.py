"""Rewards, agents and the loop hang in every way; signals, deadlines and Watchdog end the run."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.agents.base import SingleTurn
from lightning_rl.callbacks import (
    Evaluate,
    IterationCheckpoint,
    RLCallback,
    Watchdog,
    WeightSync,
)
from lightning_rl.callbacks.stopping import StopWhenTold
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.errors import RunInterrupted, StalledError
from lightning_rl.run.loop.background import require_awaited, run_async, runtime
from lightning_rl.run.loop.threads import hanging_threads
from tests.support.bad_configs import CONFIG
from tests.support.small_run import data_module, grpo, share_of_sevens, trainer_of
from tests.support.tiers import slow

GROUPS, GROUP_SIZE = 2, 4


@pytest.fixture
def release(monkeypatch):
    """Release what hangs in a test when it is over, and give it up sooner than in earnest."""
    monkeypatch.setattr("lightning_rl.run.loop.background._CLEAN_UP_S", 1.0)
    monkeypatch.setattr("lightning_rl.run.loop.background.TURN_S", 1.0)
    event = threading.Event()
    yield event
    event.set()


def sleeps(release):
    time.sleep(1e6)


def deadlocks(release):
    release.wait()


def spins(release):
    while not release.is_set():
        pass


def catches_everything(release):
    while not release.is_set():
        try:
            time.sleep(0.001)
        except BaseException:
            continue


def joins_a_pool(release):
    with ThreadPoolExecutor() as pool:
        pool.submit(release.wait).result()


class Hangs:
    """Grades ``healthy`` groups; then, once, sends a signal and hangs."""

    __name__ = "share_of_sevens"

    def __init__(self, healthy, hang, release, number=signal.SIGTERM) -> None:
        self.healthy, self.hang, self.release, self.number = healthy, hang, release, number
        self.graded = 0

    def __call__(self, completions, completion_ids):
        if self.graded == self.healthy:
            if self.number is not None:
                os.kill(os.getpid(), self.number)
            self.hang(self.release)
        self.graded += 1
        return share_of_sevens(completions, completion_ids)


class BlocksTheLoop(Hangs):
    """The same as an ``async`` function that does not await."""

    async def __call__(self, completions, completion_ids):
        return Hangs.__call__(self, completions, completion_ids)


class Counting(SingleTurn):
    """Counts the rollouts that are generated."""

    def __init__(self) -> None:
        self.generated = 0

    async def run(self, rollout, engine, sampling):
        self.generated += 1
        await super().run(rollout, engine, sampling)


ANOTHER_REWARD = ["data.rewards"]  # one that does not hang, which a resume must be permitted


def fit(tiny_model, tmp_path, reward, *extra, ckpt_path=None, allow_changes=None, **data):
    trainer = trainer_of(
        tmp_path,
        [WeightSync(probe_prompts=0), *extra, IterationCheckpoint(100)],
        logger=CSVLogger(tmp_path, "csv"),
        enable_checkpointing=True,
    )
    options = {
        "groups_per_iteration": GROUPS, "group_size": GROUP_SIZE, "iterations_per_epoch": 3,
        "evaluation": {"limit": 2, "samples": 1}, "agent": Counting(),
    } | data  # fmt: skip
    module = grpo(tiny_model)
    module.allow_changes = allow_changes
    trainer.fit(module, data_module(rewards=[reward], **options), ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    module = fit(tiny_model, tmp_path_factory.mktemp("whole"), share_of_sevens)
    return {name: weight.clone() for name, weight in module.policy.named_weights()}


def saved(tmp_path):
    (file,) = (tmp_path / "csv" / "version_0" / "checkpoints").glob("iteration_*.ckpt")
    return file


@pytest.mark.parametrize(
    ("hang", "kind"),
    [(sleeps, Hangs), slow(deadlocks, Hangs), slow(spins, Hangs), slow(catches_everything, Hangs),
     slow(joins_a_pool, Hangs), slow(deadlocks, BlocksTheLoop)],
)  # fmt: skip
def test_a_signal_ends_and_saves_a_run_whose_reward_hangs(
    tiny_model, tmp_path, whole, release, hang, kind
):
    reward = kind(GROUPS + 1, hang, release)  # in the second group of the second iteration
    with pytest.raises(RunInterrupted, match=r"SIGTERM; saved .*iteration_1.ckpt") as stopped:
        fit(tiny_model, tmp_path, reward)
    assert stopped.value.status == 143
    assert hanging_threads()
    agent = Counting()
    module = fit(
        tiny_model, tmp_path, share_of_sevens, ckpt_path=saved(tmp_path), agent=agent,
        allow_changes=ANOTHER_REWARD,
    )  # fmt: skip
    # The batch that was being graded is not generated again, and nothing else differs.
    assert agent.generated == GROUPS * GROUP_SIZE
    for name, weight in module.policy.named_weights():
        assert torch.equal(weight, whole[name]), name


@pytest.mark.slow
def test_a_deadline_ends_it_too(tiny_model, tmp_path, release):
    stops = StopWhenTold()

    def hang(release):
        stops._interrupts.deadline = time.monotonic()  # the deadline passes while it hangs
        os.kill(os.getpid(), signal.SIGUSR1)  # as the timer does
        release.wait()

    with pytest.raises(RunInterrupted, match="max_time is reached; saved") as stopped:
        fit(tiny_model, tmp_path, Hangs(1, hang, release, None), stops)
    assert stopped.value.status == 124
    assert saved(tmp_path).name == "iteration_0.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize("healthy", [0, 2 + GROUPS], ids=["before training", "after an iteration"])
def test_while_evaluating(tiny_model, tmp_path, release, healthy):
    with pytest.raises(RunInterrupted, match="SIGTERM"):
        fit(tiny_model, tmp_path, Hangs(healthy, deadlocks, release), Evaluate(1))
    if healthy:
        assert saved(tmp_path).name == "iteration_1.ckpt"
        module = fit(
            tiny_model, tmp_path, share_of_sevens, ckpt_path=saved(tmp_path),
            allow_changes=ANOTHER_REWARD,
        )  # fmt: skip
        assert module.iteration == 3


@pytest.mark.slow
def test_while_working_ahead(tiny_model, tmp_path, release):
    collector = AsyncCollector(max_staleness=1)
    with pytest.raises(RunInterrupted, match="SIGTERM"):
        fit(tiny_model, tmp_path, Hangs(3, deadlocks, release), collector=collector)
    module = fit(tiny_model, tmp_path, share_of_sevens, ckpt_path=saved(tmp_path),
                 collector=AsyncCollector(max_staleness=1),
                 allow_changes=ANOTHER_REWARD)  # fmt: skip
    assert module.iteration == 3


class BlockingAgent(SingleTurn):
    """Blocks the loop with the third batch's rollouts, once the trainer updates on the second."""

    def __init__(self, release) -> None:
        self.release, self.armed, self.blocks = release, threading.Event(), threading.Event()
        self.groups = []

    async def run(self, rollout, engine, sampling):
        if rollout.group_id not in self.groups:
            self.groups.append(rollout.group_id)
        if self.groups.index(rollout.group_id) >= 2 * GROUPS:
            while not self.armed.is_set():
                await asyncio.sleep(0.01)
            self.blocks.set()
            self.release.wait()
        await super().run(rollout, engine, sampling)


class SignalWhenBlocked(RLCallback):
    def on_update_start(self, trainer, pl_module, batch) -> None:
        if pl_module.iteration == 1:
            agent = trainer.datamodule.agent
            agent.armed.set()
            agent.blocks.wait()
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_an_update_while_the_loop_is_blocked(tiny_model, tmp_path, release):
    with pytest.raises(RunInterrupted, match=r"SIGTERM; saved .*iteration_2.ckpt"):
        fit(tiny_model, tmp_path, share_of_sevens, SignalWhenBlocked(),
            agent=BlockingAgent(release), collector=AsyncCollector(max_staleness=1))  # fmt: skip
    changes = ["data.agent", "data.collector"]
    module = fit(
        tiny_model, tmp_path, share_of_sevens, ckpt_path=saved(tmp_path), allow_changes=changes
    )
    assert module.iteration == 3


class Impatient(Hangs):
    """Lets the watchdog wait for a second only from when it hangs: this machine may be slow."""

    def __init__(self, healthy, release, watchdog) -> None:
        def hang(release):
            watchdog.timeout_s = 1.0
            release.wait()

        super().__init__(healthy, hang, release, number=None)


@pytest.mark.slow
@pytest.mark.parametrize("collector", [None, AsyncCollector(max_staleness=1)])
def test_the_watchdog_names_a_reward_that_hangs(tiny_model, tmp_path, release, collector):
    watchdog = Watchdog(8.0)
    reward = Impatient(GROUPS + 1, release, watchdog)
    with pytest.raises(
        StalledError,
        match=r"no rollout was finished for timeout_s=1 seconds: reward share_of_sevens hangs at "
        r".*test_hanging_rewards.py:\d+ in hang .*; all stacks are in .*watchdog_0.txt. Isolated",
    ):
        fit(tiny_model, tmp_path, reward, watchdog, collector=collector)
    assert saved(tmp_path).name == "iteration_1.ckpt"
    text = (tmp_path / "csv" / "version_0" / "watchdog_0.txt").read_text()
    assert "Thread rewards:\n" in text


@pytest.mark.slow
def test_the_watchdog_names_an_async_reward_that_never_answers(tiny_model, tmp_path):
    watchdog = Watchdog(8.0)

    async def judged(completions):
        watchdog.timeout_s = 1.0
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match=r"grading hangs and waits at .* in .*judged"):
        fit(tiny_model, tmp_path, judged, watchdog)
    assert saved(tmp_path).name == "iteration_0.ckpt"


STUCK = """
import os, signal, threading
from concurrent.futures import ThreadPoolExecutor

def length(completions):
    os.kill(os.getpid(), signal.SIGTERM)
    with ThreadPoolExecutor() as pool:  # whose threads Python waits for at its end
        pool.submit(threading.Event().wait).result()
"""


@pytest.mark.slow
def test_the_command_ends_with_its_status_whatever_the_reward_has_started(workplace):
    (workplace / "my_rewards.py").write_text(STUCK)
    trainer = CONFIG["trainer"] | {"enable_checkpointing": True, "callbacks": ["WeightSync"],
                                   "logger": {"class_path": "CSVLogger",
                                              "init_args": {"save_dir": "runs"}}}  # fmt: skip
    (workplace / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"trainer": trainer}))
    command = [sys.executable, "-m", "lightning_rl", "fit", "--config", "config.yaml"]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 143, done.stderr
    assert "run interrupted: SIGTERM; saved runs/" in done.stderr


class SignalsWhileDrawn(IterablePrompts):
    """Sends a signal after some prompts, and then takes its time for each."""

    drawn = 0

    def draw(self, count):
        self.drawn += 1
        if self.drawn == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.drawn > 5:
            time.sleep(0.01)
        return super().draw(count)


@pytest.mark.slow
def test_a_signal_is_heard_while_a_batch_of_many_groups_is_issued(tiny_model, tmp_path):
    prompts = SignalsWhileDrawn([{"prompt": f"{n}="} for n in range(100, 140)])
    many = {"train_prompts": prompts, "groups_per_iteration": 3000}
    loop = runtime.loop
    with pytest.raises(RunInterrupted, match=r"SIGTERM; saved .*iteration_0.ckpt"):
        fit(tiny_model, tmp_path, share_of_sevens, **many)
    assert 5 <= prompts.drawn < 3000
    assert runtime.loop is loop  # nothing had to be given up
    state = torch.load(saved(tmp_path), weights_only=True)["RLDataModule"]
    [rank] = state["loader"]["ranks"]
    issued = rank["source"]["collector"]["groups"]
    assert len(issued) == rank["source"]["source"]["drawn"] == prompts.drawn  # none is lost


@pytest.mark.slow
def test_a_long_computation_of_the_loop_ends_when_nobody_waits_for_it():
    async def compute():
        while True:
            require_awaited()

    async def answer():
        return 7

    loop = runtime.loop
    with pytest.raises(TimeoutError):
        run_async(compute(), timeout=0.05)
    assert run_async(answer()) == 7
    assert runtime.loop is loop
