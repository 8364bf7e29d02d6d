"""Test runs whose agent raises now and then: with every collector, and in evaluations."""

import json

import pytest

from lightning_rl.agents.base import SingleTurn
from lightning_rl.callbacks import Evaluate, RolloutRecorder, RunReport, WeightSync
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.partial import PartialCollector, TailBatchingCollector
from lightning_rl.collect.prefetch import AsyncCollector, OneStepOffCollector
from lightning_rl.errors import AgentError, RunInterrupted
from lightning_rl.rollout import Rollout
from tests.support.small_run import data_module, grpo, trainer_of
from tests.support.tiers import slow


class Breaks(SingleTurn):
    """Raises for one rollout of each group, with its lists half filled."""

    def __init__(self, error: BaseException, share: int = 8) -> None:
        self.error = error
        self.share = share

    async def run(self, rollout, engine, sampling):
        if rollout.sample_index % self.share:
            return await super().run(rollout, engine, sampling)
        row = rollout.rows[0]
        row.token_ids += [3, 4]
        row.loss_mask += [True, True]
        row.logprobs += [-1.0]
        raise self.error


def fit(tiny_model, tmp_path, agent, collector=None, **options):
    report = RunReport()
    trainer = trainer_of(tmp_path, [WeightSync(), report, RolloutRecorder()])
    data = data_module(
        agent=agent, collector=collector, iterations_per_epoch=2, groups_per_iteration=2, **options
    )
    trainer.fit(grpo(tiny_model), data)
    return report.history[1:]  # the first row is of the weights at the start


@pytest.mark.parametrize(
    "collector",
    [
        SyncCollector(),
        slow(AsyncCollector(1)),
        slow(OneStepOffCollector()),
        PartialCollector(),
        slow(TailBatchingCollector()),
    ],
    ids=lambda collector: type(collector).__name__,
)
def test_a_rollout_whose_agent_raises_fails_alone_with_every_collector(
    tiny_model, tmp_path, collector
):
    agent = Breaks(ValueError("no such move"))
    history = fit(tiny_model, tmp_path, agent, collector, max_failed_share=0.5)
    assert len(history) == 2
    for row in history:
        assert row["rollout/failed"] >= 2  # one of eight, in two groups or more
        assert row["rollout/failed_share"] == pytest.approx(1 / 8)
    [file] = tmp_path.rglob("recorded.jsonl")
    lines = map(json.loads, file.read_text().splitlines())
    failed = [Rollout.from_dict(line) for line in lines if line["status"] == "failed"]
    assert len(failed) >= 4
    for rollout in failed:
        assert rollout.error == (
            f"agent Breaks: ValueError: no such move (prompt {rollout.prompt.id!r})"
        )
        # Its lists were of different lengths: what all of them have is nothing.
        assert rollout.token_ids == rollout.loss_mask == rollout.logprobs == rollout.versions == []


def test_beyond_the_share_the_error_names_exception_agent_and_prompt(tiny_model, tmp_path):
    with pytest.raises(
        AgentError,
        match=r"4 of 16 rollouts failed \(25%, max_failed_share=0\.2\); first error: "
        r"agent Breaks: KeyError: 'board' \(prompt '\d+'\)",
    ) as stop:
        fit(tiny_model, tmp_path, Breaks(KeyError("board"), share=4), max_failed_share=0.2)
    assert len(stop.value.rollouts) == 16
    [file] = tmp_path.rglob("failed_0.jsonl")
    statuses = [json.loads(line)["status"] for line in file.read_text().splitlines()]
    assert sorted(statuses) == ["completed"] * 12 + ["failed"] * 4


class BreaksInEvaluation(Breaks):
    async def run(self, rollout, engine, sampling):
        if not rollout.group_id.startswith("-1/"):
            return await SingleTurn.run(self, rollout, engine, sampling)
        return await super().run(rollout, engine, sampling)


def test_in_an_evaluation_it_counts_as_wrong(tiny_model, tmp_path):
    report = RunReport()
    trainer = trainer_of(tmp_path, [WeightSync(), Evaluate(), report])
    agent = BreaksInEvaluation(ValueError("no such move"), share=4)
    data = data_module(
        agent=agent,
        iterations_per_epoch=1,
        evaluation={"success_reward": -1.0},
        max_failed_share=0.25,
    )
    with pytest.warns(UserWarning, match=r"8 of 32 rollouts failed: agent .*failed_0\.jsonl"):
        trainer.fit(grpo(tiny_model), data)
    # All that end are right: each of eight prompts loses one of four.
    assert report.history[0]["eval/accuracy"] == pytest.approx(0.75)


def test_keyboard_interrupt_ends_the_run_and_not_the_loops_thread(tiny_model, tmp_path):
    with pytest.raises(RunInterrupted, match="Breaks raised KeyboardInterrupt"):
        fit(tiny_model, tmp_path, Breaks(KeyboardInterrupt()))
