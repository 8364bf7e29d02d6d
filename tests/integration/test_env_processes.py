"""Test environments in processes: what goes wrong there is told here, whoever chooses the actions.

Slow: each case starts environments in processes of their own, and some are waited for.
"""

import multiprocessing
import os
import signal
import threading
import time

import pytest
from lightning.pytorch import Callback

from lightning_rl.callbacks import IterationCheckpoint
from lightning_rl.envs import (
    ActorCriticModule,
    EnvDataModule,
    EnvError,
    PooledGym,
    TorchRLEnv,
)
from lightning_rl.envs.collectors import collector_of
from lightning_rl.envs.maker import AGENT
from lightning_rl.envs.watch import Watch
from lightning_rl.errors import RunInterrupted
from lightning_rl.run.loop.background import runtime
from tests.support.engine_checks import is_running
from tests.support.env_agents import agent_for, collected
from tests.support.small_run import trainer_of

pytestmark = pytest.mark.slow

RAISES = r"environment \d in step 3 of its episode 0, seed \d+ raised ValueError"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", RAISES),
        ("hangs", r"a step took longer than max_step_seconds=3;.*environment \d in step 3 of"),
        ("nan", r"environment [0-4] gave \[nan, 0.0\] as observation at step 3"),
    ],
)
def test_what_goes_wrong_in_a_process_says_where(started, how, words):
    env = PooledGym("tests.support.worlds:Faulty-v0", {"how": how}, workers=2)
    made = started(env, seconds=3.0)
    with pytest.raises(EnvError, match=words):
        collected(made, agent_for(made), 0, 10)


@pytest.mark.parametrize(("gone", "words"), [(0, "0, 2, 4"), (1, "1, 3")])
def test_a_process_that_is_gone_is_told(started, gone, words):
    made = started(PooledGym("tests.support.worlds:Walk-v0", workers=2))
    agents = agent_for(made)
    made.collect(agents, 0, 3)
    process = made.processes.processes[gone]
    os.kill(process.pid, signal.SIGKILL)
    process.ended_within(60)
    with pytest.raises(EnvError, match=f"the process of environments {words} is gone"):
        made.collect(agents, 1, 30)


def test_a_greedy_collector_takes_the_best_action(started):
    made = started(PooledGym("tests.support.worlds:Walk-v0", workers=2))
    made.greedy = True
    agents = agent_for(made)
    own = made.collect(agents, 0, 20)["steps", AGENT]
    distributions, _ = agents[AGENT](own["observations"])
    assert (own["actions", "action"] == distributions["action"].mode()).all()


class Terminated(Callback):
    """Sends SIGTERM to this process, once an environment hangs in another."""

    def setup(self, trainer, pl_module, stage):
        threading.Thread(target=self._wait, args=(trainer.datamodule,), daemon=True).start()

    def _wait(self, data):
        while not (
            data.collector.processes
            and runtime.stalled_seconds() > 2
            and "step 3" in data.collector.where()
        ):
            time.sleep(0.05)
        self.pids = [process.pid for process in data.collector.processes.processes]
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_a_run_and_its_processes_while_one_hangs(tmp_path):
    env = PooledGym("tests.support.rude_worlds:Rude-v0", {"how": "sleeps"}, workers=2)
    data = EnvDataModule(env, num_envs=2, frames_per_iteration=4, max_step_seconds=300.0)
    terminated = Terminated()
    callbacks = [IterationCheckpoint(), terminated]
    trainer = trainer_of(tmp_path, callbacks, enable_checkpointing=True)
    with pytest.raises(RunInterrupted) as told:
        trainer.fit(ActorCriticModule(), datamodule=data)
    assert told.value.status == 128 + signal.SIGTERM
    assert told.value.checkpoint
    assert told.value.checkpoint.endswith("iteration_1.ckpt")
    assert len(terminated.pids) == 2
    assert not any(map(is_running, terminated.pids))


@pytest.mark.parametrize("parallel", [False, True])
def test_an_environment_of_torchrls_that_hangs_is_told(parallel):
    arguments = {"env_name": "tests.support.rude_worlds:Rude-v0", "how": "sleeps", "device": "cpu"}
    env = TorchRLEnv("torchrl.envs.GymEnv", arguments, parallel=parallel)
    made = collector_of(env, None, 2.0)
    watch = Watch(made, env.name)
    before = set(multiprocessing.active_children())  # worlds of other tests
    watch.start(0, 0, 2)
    with pytest.raises(EnvError, match=r"max_step_seconds=2; .*in step 3 after a reset with seed"):
        watch(lambda: made.collect(agent_for(made), 0, 10))
    watch.close()
    assert set(multiprocessing.active_children()) <= before
