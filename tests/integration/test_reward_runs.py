"""Test Isolated rewards in whole runs: graded, closed, and nothing lost where too many fail."""

import json
import os
import re
from pathlib import Path

import pytest

from lightning_rl.callbacks import RunReport, WeightSync
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import RewardError
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.pool import Isolated
from tests.support.small_run import trainer_of

# A row says whether grading its completions crashes.
REWARD = """
import os


def length(completion_ids, completions, fate, trainer_state, log_metric):
    if fate[0] == "die":
        os.abort()
    if fate[0] == "raise":
        raise KeyError("answer")
    log_metric("step", trainer_state.global_step)
    log_metric("steps", trainer_state.max_steps)
    return [float(len(completion_ids[0]))]


def worker(completions):
    return [os.getppid()]
"""


@pytest.fixture(scope="module")
def run_rewards(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rewards")
    (directory / "run_rewards.py").write_text(REWARD)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(directory))
    import run_rewards

    yield run_rewards
    patch.undo()


def fit(tiny_model, tmp_path, functions, fates, **options):
    rows = [{"prompt": f"{n}=", "fate": fate} for n, fate in enumerate(fates, 100)]
    data = RLDataModule(
        IterablePrompts(rows, shuffle=False),
        [Isolated(function, workers=1) for function in functions],
        TransformersEngine(device="cpu"),
        sampling=Sampling(max_tokens=3),
        group_size=2,
        groups_per_iteration=4,
        iterations_per_epoch=2,
        seed=0,
        **options,
    )
    report = RunReport()
    trainer_of(tmp_path, [WeightSync(), report]).fit(
        PolicyModule(str(tiny_model), update={"seed": 0}), data
    )
    return report.history[-1]


@pytest.mark.slow
def test_a_crashing_reward_costs_its_group_and_the_share_is_recorded(
    tiny_model, tmp_path, run_rewards
):
    fates = ["", "die", "", ""]
    functions = [run_rewards.length, run_rewards.worker]
    row = fit(tiny_model, tmp_path, functions, fates, max_failed_share=0.25)
    assert row["rollout/failed"] == 2
    assert row["rollout/failed_share"] == 0.25
    assert 1 <= row["reward/length"] <= 3
    assert row["reward/worker_std"] == 0  # one worker
    assert (row["logged/step"], row["logged/steps"]) == (1, 2)  # of the last iteration
    pid = int(row["reward/worker"])
    assert not Path(f"/proc/{pid}").exists()  # it ended with the run
    assert pid != os.getpid()


def test_too_many_failures_stop_the_run_and_keep_the_rollouts(tiny_model, tmp_path, run_rewards):
    fates = ["", "raise", "", "", "", "die", "raise", ""]  # of two iterations
    file = tmp_path / "csv" / "version_0" / "failed_0.jsonl"
    raised = "KeyError: 'answer', at .*run_rewards.py:9 in length; prompt '101=', completion "
    told = rf"2 of 8 rollouts failed: reward length: {raised}.*; they are in {re.escape(str(file))}"
    stop = r"4 of 8 .*50%.*length: its process was killed by SIGABRT.* rollouts are in "
    with (
        pytest.warns(UserWarning, match=told),
        pytest.raises(RewardError, match=stop + re.escape(str(file))) as stopped,
    ):
        fit(tiny_model, tmp_path, [run_rewards.length], fates, max_failed_share=0.25)
    summary = json.loads(file.with_name("summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", f"RewardError: {stopped.value}")
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    # The two of the first iteration, and all of the second.
    good = [False] * 2 + [True] * 2 + [False] * 4 + [True] * 2
    assert [r["status"] == "completed" for r in kept] == good
    assert [r["reward"] is not None for r in kept] == good
    assert kept[4]["error"].startswith("reward length: its process was killed by SIGABRT; prompt ")
    assert 'run_rewards.py", line 9, in length' in kept[0]["extra"]["traceback"]
    assert all(r["rows"][0]["token_ids"] for r in kept)
