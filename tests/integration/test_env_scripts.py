"""Test scripts that start environments in processes, as a newcomer writes them.

Slow: each script is a process that imports everything, as a newcomer's is.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.two_ranks import ROOT

pytestmark = pytest.mark.slow

SCRIPT = """
import gymnasium
from lightning.pytorch import Trainer
from lightning_rl.envs import (
    ActorCriticModule,
    EnvDataModule,
    PooledGym,
    TorchRLEnv,
)
{before}
print("the script runs")
data = EnvDataModule({env}, num_envs=2, frames_per_iteration=4, iterations_per_epoch=1)
Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False,
).fit(ActorCriticModule(), datamodule=data)
print("trained")
"""
MADE_ELSEWHERE = "gymnasium.register('Mine-v0', 'tests.support.worlds:Walk')"
MADE_HERE = """
from tests.support.worlds import Walk
class Mine(Walk):
    pass
gymnasium.register('Mine-v0', Mine)
"""
POOLED = "PooledGym('tests.support.worlds:Walk-v0')"
TORCHRL = (
    "TorchRLEnv('torchrl.envs.GymEnv', {'env_name': 'CartPole-v1', 'device': 'cpu'}, parallel=True)"
)


def run(folder: Path, env: str, before: str = "") -> subprocess.CompletedProcess:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(env=env, before=before))
    return subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # where tests.support is
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize(
    ("env", "before"),
    [
        (POOLED, ""),
        (TORCHRL, ""),
        ("PooledGym('Mine-v0')", MADE_ELSEWHERE),
    ],
)
def test_a_script_without_a_guard_runs_once(tmp_path, env, before):
    ended = run(tmp_path, env, before)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("the script runs") == 1
    assert ended.stdout.count("trained") == 1


def test_what_is_defined_in_the_script_is_refused(tmp_path):
    ended = run(tmp_path, "PooledGym('Mine-v0')", MADE_HERE)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "data.env: Mine-v0, or a wrapper of it, is defined in the script itself, which" in last
    assert "module of " in last
