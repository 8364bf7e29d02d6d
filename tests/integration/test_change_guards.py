"""Test guards of how completions change: by hand, and in a real run that games its reward."""

import logging
from types import SimpleNamespace

import pytest
import torch

from lightning_rl.callbacks import DuplicatesGuard, LengthGuard, RunReport, WeightSync
from lightning_rl.callbacks.rules import duplicate_shares
from lightning_rl.engines import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import Prompt
from tests.support.small_run import data_module, numbers, trainer_of


def rollout_of(make_rollout, group, completion, **fields):
    rollout = make_rollout([3], completion, group_id=group, **fields)
    rollout.prompt = Prompt(group.rstrip("'"), "text", [3])
    return rollout


def test_duplicates_within_a_group_and_across_prompts(make_rollout):
    rollouts = [
        rollout_of(make_rollout, group, completion)
        for group, completion in [
            ("a", [4, 1]), ("a", [4, 1]), ("a", [5, 1]), ("a", [6, 1]),
            ("b", [5, 1]), ("b", [7, 1]), ("b", [8, 1]), ("b'", [8, 1]),
        ]
    ]  # fmt: skip
    # Within: both [4, 1]. Across: both [5, 1]; the [8, 1] are of one prompt, drawn twice.
    assert duplicate_shares(rollouts) == (2 / 8, 2 / 8)


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="window=0 must be >= 1"):
        LengthGuard(window=0)


def sevens(completion_ids):
    """Pays for every seven, so for long completions of nothing else."""
    return [float(ids.count(10)) for ids in completion_ids]


def other_digits(completion_ids):
    """Reward as many different digits as possible, which is what was wanted."""
    return [float(len(set(ids) - {1, 10})) for ids in completion_ids]


def run(tiny_model, tmp_path, rewards, weights, callbacks, iterations):
    torch.manual_seed(0)
    report = RunReport()
    data = data_module(
        train_prompts=numbers(100, 120, seed=1),
        evaluation=None,
        rewards=rewards,
        sampling=Sampling(max_tokens=40),
        group_size=6,
        groups_per_iteration=4,
        iterations_per_epoch=iterations,
        reward_weights=weights,
        seed=1,
    )
    module = PolicyModule(
        str(tiny_model), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), update={"seed": 1}
    )
    trainer_of(tmp_path, [WeightSync(), *callbacks, report], logger=False).fit(module, data)
    return report.history[1:]


@pytest.mark.slow
def test_a_policy_that_games_its_reward_sets_off_the_guards(tiny_model, tmp_path, caplog):
    guards = [LengthGuard(1.3, window=2), DuplicatesGuard(window=2)]
    with caplog.at_level(logging.WARNING, "lightning_rl"):
        history = run(tiny_model, tmp_path, [sevens, other_digits], [1.0, 0.0], guards, 9)
    for guard in guards:
        # Nothing can be said before 2 x 2 iterations.
        assert [f"guard/{guard.name}" in row for row in history[:4]] == [False] * 3 + [True]
        assert history[-1][f"guard/{guard.name}"] == 1.0
        assert sum(type(guard).__name__ in r.getMessage() for r in caplog.records) == 1
    # The alarms of every run say so as soon as they have groups enough at either end.
    assert "LearningAlarms (gaming), iteration 8: the reward other_digits went from" in caplog.text
    assert history[-1]["rollout/duplicates_across"] > history[0]["rollout/duplicates_across"] + 0.3


def feed(guards, make_rollout, tiny_model, rows):
    """Feed iterations of (length, prompts that share a completion); return the guards' measures."""
    module, trainer, measured = PolicyModule(str(tiny_model)), SimpleNamespace(world_size=1), []
    for guard in guards:
        guard.rollout_module_of, guard.rl_data_of = lambda _: module, lambda _: None
    module.record = lambda metrics: None
    for length, shared in rows:
        completions = [[4] * length if n < shared else [5 + n] * length for n in range(4)]
        rollouts = [rollout_of(make_rollout, str(n), ids) for n, ids in enumerate(completions)]
        for guard in guards:
            guard.on_collect_end(trainer, None, rollouts)
        measured.append(tuple(guard.measure(module) for guard in guards))
    return measured


ROWS = [(2, 0), (4, 0), (5, 2), (6, 2), (8, 2), (3, 4), (2, 4)]


def test_the_guards_by_hand(make_rollout, tiny_model):
    guards = [LengthGuard(window=2), DuplicatesGuard(window=2)]
    # Mean lengths: 3 at first; then 5.5, 7, 5.5, 2.5. Shares: 0; then 0.5, 0.5, 0.75, 1.
    *none, fourth, fifth, sixth, seventh = feed(guards, make_rollout, tiny_model, ROWS)
    assert none == [(None, None)] * 3
    assert [fourth, fifth, sixth, seventh] == [
        (5.5 / 3, 0.5), (7 / 3, 0.5), (5.5 / 3, 0.75), (3 / 2.5, 1.0)
    ]  # fmt: skip
    assert guards[0].what == "the change of completions from 3 to 2.5 tokens, as a factor,"


def test_a_resumed_run_compares_with_the_first_iterations(make_rollout, tiny_model):
    whole, before, after = (DuplicatesGuard(window=2) for _ in range(3))
    [*_, last] = feed([whole], make_rollout, tiny_model, ROWS)
    feed([before], make_rollout, tiny_model, ROWS[:3])
    after.load_state_dict(before.state_dict())
    assert feed([after], make_rollout, tiny_model, ROWS[3:])[-1] == last == (1.0,)
    assert after.state_dict() == whole.state_dict()
