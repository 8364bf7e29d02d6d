"""Test environments that do what they should not: each is one message, and none stops who waits."""

import logging
import os
import signal
import threading

import pytest
import torch
from lightning.pytorch import Callback

from lightning_rl.callbacks import Evaluate, IterationCheckpoint, Watchdog
from lightning_rl.envs import ActorCriticModule, EnvDataModule, EnvError, Gym, OffPolicyModule
from lightning_rl.envs.gym_collector import GymCollector
from lightning_rl.envs.watch import Watch
from lightning_rl.errors import ConfigError, RunInterrupted, StalledError
from lightning_rl.run.loop.threads import hanging_threads
from tests.support import rude_worlds
from tests.support.env_agents import agent_for, collected
from tests.support.small_run import trainer_of

RUDE = f"{rude_worlds.__name__}:Rude-v0"
PLACE = r"environment 0 in step {} of its episode 0, seed \d+"


@pytest.fixture
def release():
    """Lets what hangs go on when the test is over."""
    rude_worlds.released.clear()
    yield
    rude_worlds.released.set()
    for thread in hanging_threads():
        thread.join(60)


def rude(how, where="step", seconds=60.0):
    made = GymCollector(Gym(RUDE, {"how": how, "where": where}), None, seconds)
    Watch(made, "Rude").start(0, 0, 2)
    return made


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "raised ValueError: the simulator is gone"),
        ("exits", "raised SystemExit: 0"),
        ("ends the process", r"called os._exit\(0\), which would end the run"),
        (
            "sets an alarm",
            "raised ValueError.*main thread.*; PooledGym steps it in the main thread of a process",
        ),
    ],
)
@pytest.mark.parametrize("where", ["reset", "step"])
def test_what_an_environment_does_is_told(how, words, where):
    made = rude(how, where)
    place = PLACE.format(0 if where == "reset" else 3)
    with pytest.raises(EnvError, match=f"{place} {words}"):
        collected(made, agent_for(made), 0, 10)


@pytest.mark.parametrize(
    ("how", "where", "words"),
    [
        ("nothing", "reset", r"reset returned None; gymnasium requires \(observation, info\)"),
        ("old", "reset", r"reset returned array\(.*; gymnasium requires \(observation, info\)"),
        ("nothing", "step", r"step returned None; gymnasium requires \(observation, reward,"),
        ("old", "step", r"step returned \(array.*; gymnasium requires \(observation, reward,"),
        (
            "short",
            "reset",
            r"is array\(\[0.\].*, but observation_space declares numbers of shape \(2,\)",
        ),
        (
            "long",
            "step",
            r"is array\(\[0., 0., 0.\].*observation_space declares numbers of shape \(2,\)",
        ),
        ("ragged", "step", r"is \[\[1.0\], \[1.0, 2.0\]\], but observation_space declares numbers"),
        ("text", "reset", "is 'here', but observation_space declares numbers"),
        ("unpaid", "step", "gave None as reward, which is not a finite number"),
        ("paid nan", "step", "gave nan as reward, which is not a finite number"),
        ("paid in text", "step", "gave 'much' as reward, which is not a finite number"),
        ("paid too much", "step", "gave 1000000000.* as reward, which is not a finite number"),
        ("not over", "step", "gave None as terminated, which is neither True nor False"),
        ("over twice", "step", r"gave array\(.*True.*\) as terminated, which is neither"),
        ("not cut", "step", "gave 'no' as truncated, which is neither True nor False"),
        ("paid twice", "step", r"gave array\(\[1., 1.\]\) as reward, which is not a finite number"),
    ],
)
def test_what_an_environment_answers_is_told(how, where, words):
    made = rude(how, where)
    place = PLACE.format(0 if where == "reset" else 3)
    with pytest.raises(EnvError, match=rf"{words}.*\({place}\)"):
        collected(made, agent_for(made), 0, 10)


@pytest.mark.parametrize(("how", "words"), [("nan", "as observation"), ("paid nan", "as reward")])
def test_an_evaluation_is_of_finite_numbers(how, words):
    made = rude(how)
    with pytest.raises(EnvError, match=words):
        made.play(agent_for(made), [5, 6], greedy=True)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shows nothing", "observation_space of Odd is None; gymnasium requires one of its spaces"),
        ("does nothing", "action_space of Odd is 'left or right'; gymnasium requires one of its"),
        ("shows text", "observation 'observation' is a Text, which no body can read"),
    ],
)
def test_spaces_that_are_none_are_refused(how, words):
    made = GymCollector(Gym("tests.support.rude_worlds:Odd-v0", {"how": how}), None, 60.0)
    with pytest.raises(ConfigError, match=words):
        made.start(0, 0, 1)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shows bytes", "is float32, but observation_space declares bytes, to which it would be"),
        (
            "shows a choice",
            r"is array\(.*, but observation_space declares one of 3 integers from 0 on",
        ),
    ],
)
def test_what_is_shown_is_what_was_said(how, words):
    made = GymCollector(Gym("tests.support.rude_worlds:Odd-v0", {"how": how}), None, 60.0)
    made.start(0, 0, 1)
    with pytest.raises(EnvError, match=words):
        collected(made, agent_for(made), 0, 3)


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_an_environment_that_cannot_be_made_is_told(how):
    made = GymCollector(Gym(RUDE, {"how": how, "where": "init"}), None, 60.0)
    with pytest.raises((ConfigError, EnvError), match=r"ValueError: the simulator|SystemExit: 0"):
        Watch(made, "Rude").start(0, 0, 1)


@pytest.mark.parametrize("how", ["raises", "exits", "ends the process"])
def test_an_environment_that_cannot_be_closed_ends_no_run(how, caplog):
    made = rude(how, "close")
    with caplog.at_level(logging.WARNING):
        Watch(made, "Rude").close()
    assert "close" in caplog.text
    assert "closed" in caplog.text


def test_a_close_that_hangs_is_left_behind(release, monkeypatch, caplog):
    monkeypatch.setattr("lightning_rl.envs.watch.END_S", 0.1)
    made = rude("hangs", "close")
    with caplog.at_level(logging.WARNING):
        Watch(made, "Rude").close()
    assert "cannot be closed" in caplog.text
    assert hanging_threads()


@pytest.mark.parametrize("where", ["init", "reset", "step"])
def test_a_hanging_environment_is_named_with_its_line(release, where, monkeypatch):
    monkeypatch.setattr("lightning_rl.envs.watch.START_S", 0.2)
    made = GymCollector(Gym(RUDE, {"how": "hangs", "where": where}), None, 0.2)
    watch = Watch(made, "Rude")
    line = r"hangs at support/rude_worlds.py:\d+ in hangs"
    if where == "init":
        with pytest.raises(EnvError, match=line):
            watch.start(0, 0, 1)
    else:
        watch.start(0, 0, 1)
        place = PLACE.format(0 if where == "reset" else 3)
        with pytest.raises(EnvError, match=f"max_step_seconds=0.2.*{place}, it {line}"):
            watch(lambda: made.collect(agent_for(made), 0, 10))
    watch.close()  # at once, without a word


@pytest.fixture
def ctrl_c():
    """Let Ctrl-C raise in the main thread, also where tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_collection_that_is_broken_off_between_steps_leaves_nothing_behind(ctrl_c):
    made = GymCollector(Gym("tests.support.worlds:Walk-v0"), None, 60.0)
    watch = Watch(made, "Walk")
    watch.start(0, 0, 2)
    agents = agent_for(made)
    act, steps = agents["agent"].act, []

    def acting(*arguments):
        steps.append(threading.current_thread().name)
        if len(steps) == 20:
            signal.raise_signal(signal.SIGINT)  # heard in the main thread
        return act(*arguments)

    agents["agent"].act = acting
    with pytest.raises(KeyboardInterrupt):
        watch(lambda: made.collect(agents, 0, 10_000_000))
    assert set(steps) == {"environments"}
    assert hanging_threads() == []


# ---------------------------------------------------------------- in a run


class Hung(Callback):
    """Does something to the run once its environment hangs."""

    def __init__(self, then):
        self.then = then

    def setup(self, trainer, pl_module, stage):
        self.timer = threading.Thread(target=self._wait, args=(trainer.datamodule,), daemon=True)
        self.timer.start()

    def _wait(self, data):
        while not (found := data.hanging()) or "in step 3" not in found.what:
            threading.Event().wait(0.01)
        self.then()


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("kind", [ActorCriticModule, OffPolicyModule])
def test_a_signal_ends_a_run_whose_environment_hangs(tmp_path, release, kind):
    data = EnvDataModule(Gym(RUDE, {"how": "hangs", "at": 3}), num_envs=2, frames_per_iteration=4)
    callbacks = [IterationCheckpoint(), Hung(terminate)]
    trainer = trainer_of(tmp_path, callbacks, enable_checkpointing=True)
    with pytest.raises(RunInterrupted) as told:
        trainer.fit(kind(), datamodule=data)
    assert told.value.status == 128 + signal.SIGTERM
    # What two steps each gave is learned from: the second batch is the one that hangs.
    assert told.value.checkpoint
    assert told.value.checkpoint.endswith("iteration_1.ckpt")
    assert torch.load(told.value.checkpoint, weights_only=True)["lightning_rl"]["iteration"] == 1


def test_a_signal_ends_a_run_whose_first_evaluation_hangs(tmp_path, release):
    data = EnvDataModule(Gym(RUDE, {"how": "hangs"}), num_envs=2, frames_per_iteration=4)
    callbacks = [Evaluate(), IterationCheckpoint(), Hung(terminate)]
    trainer = trainer_of(tmp_path, callbacks, enable_checkpointing=True)
    with pytest.raises(RunInterrupted) as told:
        trainer.fit(ActorCriticModule(), datamodule=data)
    assert told.value.status == 128 + signal.SIGTERM


def test_watchdog_names_the_environment_that_hangs(tmp_path, release):
    data = EnvDataModule(Gym(RUDE, {"how": "hangs"}), num_envs=2, frames_per_iteration=16)
    trainer = trainer_of(tmp_path, [Watchdog(timeout_s=0.3)])
    place = PLACE.format(3)
    words = (
        rf"no step was finished.*Rude-v0 \({place}\) hangs at support/rude_worlds.py:\d+ in hangs"
    )
    with pytest.raises(StalledError, match=words):
        trainer.fit(ActorCriticModule(), datamodule=data)


def test_a_run_whose_environment_raises_closes_the_others(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(rude_worlds.Rude, "close", lambda self: closed.append(self))
    data = EnvDataModule(Gym(RUDE, {"how": "raises"}), num_envs=2, frames_per_iteration=16)
    with pytest.raises(EnvError, match="the simulator is gone"):
        trainer_of(tmp_path, []).fit(ActorCriticModule(), datamodule=data)
    assert len(closed) == 2
