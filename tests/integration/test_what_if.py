"""Test reruns with a change: what it leaves alone is equal to the bit, and what it does is told."""

import shutil
from pathlib import Path

import pytest

from lightning_rl.cli import main
from lightning_rl.cli.rerun.change import RerunChange
from lightning_rl.cli.rerun.retraining import retrain
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.cli.rerun.what_if import what_if
from lightning_rl.errors import ConfigError, DataError
from tests.support.recorded_run import train

pytestmark = pytest.mark.usefixtures("there")


@pytest.fixture(scope="module")
def finished(place, tiny_model) -> Path:
    """Run four iterations with held-out prompts; the weights of versions 2 and 4 are kept."""
    return train(place, tiny_model, "--data.evaluation.prompts=train.jsonl")


@pytest.fixture
def run(finished) -> RecordedRun:
    return RecordedRun(finished)


LR = "model.init_args.optimizer.init_args.lr"


def test_without_a_group_only_what_follows_is_other(run):
    found = what_if(run, RerunChange(("4/1",)), to=4, since=2, evaluate=True)
    assert (found.first, found.left_out, found.not_reproduced) == (4, {4: 4}, None)
    plain, changed = found.plain.outcomes, found.changed.outcomes
    assert plain[3] == changed[3]
    assert plain[3].weights == run.log.outcomes()[3].weights
    assert plain[4].weights == run.log.outcomes()[4].weights != changed[4].weights
    # The lots do not depend on the weights, so neither do their rewards.
    assert found.comparisons["accuracy"].difference == 0.0
    assert found.comparisons["accuracy"].prompts == 12
    lines = list(found.lines())
    assert lines[:4] == [
        "iterations 3 to 4, from checkpoint iteration_2.ckpt: without 4/1",
        "without the change all of them are equal to the record, bit for bit",
        "iteration 4: 4 rollouts left out",
        "up to iteration 3 nothing is changed: all is equal",
    ]
    assert lines[-1] == "the held-out accuracy does not differ beyond its noise"
    assert found.status == 0


def test_the_nearest_weights_before_what_is_left_out_are_the_start(run):
    found = what_if(run, RerunChange(("4/1/36/0", "3/2")), to=4)
    assert (found.plain.kept.version, found.first) == (2, 3)
    assert found.left_out[3] == 4


def test_an_iteration_that_is_left_out_changes_nothing(run):
    found = what_if(run, RerunChange(("3",)), to=3)
    before = found.changed.outcomes[2].weights
    assert found.changed.outcomes[3].weights == before != found.plain.outcomes[3].weights
    assert "  no update: nothing is left to train on" in found.lines()


def test_a_learning_rate_of_zero_after_a_checkpoint_changes_nothing(run):
    found = what_if(run, RerunChange(settings=(f"{LR}=0.0",)), to=4, since=2)
    weights = [found.changed.outcomes[version].weights for version in (2, 3, 4)]
    assert weights[0] == weights[1] == weights[2] != found.plain.outcomes[4].weights


def test_rewards_by_the_same_weights_are_the_same(run):
    found = what_if(run, RerunChange(settings=("data.reward_weights=[1.0]",)), to=3, since=2)
    assert found.changed.outcomes == found.plain.outcomes
    zero = what_if(run, RerunChange(settings=("data.reward_weights=[0.0]",)), to=3, since=2)
    assert zero.changed.outcomes[3].weights != zero.plain.outcomes[3].weights
    [name] = run.log.rollouts(3)[0].reward_parts
    unpaid = retrain(run, 3, 2, None, RerunChange(unpaid=(name,)))
    assert unpaid.outcomes[3].weights == zero.changed.outcomes[3].weights


def test_a_filter_leaves_groups_out(run):
    rewards = {}
    for rollout in run.log.rollouts(3):
        rewards.setdefault(rollout.group_id, []).append(rollout.reward)
    spread = {group: max(own) - min(own) for group, own in rewards.items()}
    bound, *above = sorted(spread.values())  # of three groups two have more
    assert bound < min(above)
    narrow = tuple(group for group, own in spread.items() if own <= bound)
    filters = f"[{{class_path: RewardSpread, init_args: {{min_spread: {bound!r}}}}}]"
    by_filter = RerunChange(settings=(f"data.selection.filters={filters}",))
    outcomes = [
        what_if(run, change, to=3, since=2).changed.outcomes[3]
        for change in (by_filter, RerunChange(narrow))
    ]
    assert outcomes[0] == outcomes[1]


def test_where_the_policy_is_too_far_away_nothing_is_concluded(run, capsys):
    arguments = ["rerun", str(run.path), "--since", "0", "--to", "4", "--set", f"{LR}=1.0"]
    assert main(arguments) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("no conclusion: the rollouts of iteration ")
    assert "sampled by another policy than the changed one" in "".join(said)
    assert main([*arguments, "--least_share", "0"]) == 0


def test_what_cannot_be_repeated_is_said_first(run, tmp_path):
    copy = RecordedRun(shutil.copytree(run.path, tmp_path / "run", symlinks=True))
    rollouts = copy.log.rollouts(3)
    rollouts[0].reward += 1e-3
    copy.log.write_rollouts(3, 0, rollouts)
    found = what_if(copy, RerunChange(("4/1",)), to=4, since=2)
    lines = list(found.lines())
    assert lines[1].startswith("the record is NOT reproduced here: ")
    assert "so the change is compared with an unchanged rerun on this machine" in lines
    assert found.plain.outcomes[3] == found.changed.outcomes[3]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.init_args.sampling.temperature=0.5", r"temperature decides what was sampled"),
        ("model.init_args.model=elsewhere", "model.init_args.model decides what was sampled"),
        ("trainer.precision=bf16-true", "trainer.precision decides what was sampled"),
        ("model.init_args.optimzer.init_args.lr=1.0", "did you mean optimizer"),
        (f"{LR}=-1", "lr"),
        ("model.init_args.optimizer", "optimizer needs a value"),
    ],
)
def test_settings_of_more_than_the_update_are_refused(run, setting, words):
    with pytest.raises(ConfigError, match=words):
        what_if(run, RerunChange(settings=(setting,)), to=4, since=2)


def test_what_is_not_there_is_said(run):
    with pytest.raises(ConfigError, match=r"requires --since C, .* \(kept: 0, 2, 4\)"):
        what_if(run, RerunChange(settings=(f"{LR}=1.0",)), to=4)
    with pytest.raises(ConfigError, match="3 to 4 were trained on no such rollout"):
        what_if(run, RerunChange(("3/7",)), to=4)
    with pytest.raises(DataError, match="the run kept versions 0, 2, 4"):
        what_if(run, RerunChange(("4/1",)), to=4, since=1)
    words = r"4/0, 4/1: leaves too few groups of iteration 4, 1 on 1 ranks: .* 2 or more for its m"
    with pytest.raises(ConfigError, match=words):
        what_if(run, RerunChange(("4/0", "4/1")), to=4)
    with pytest.raises(DataError, match="results of iteration 9"):
        what_if(run, RerunChange(("4/1",)), to=9)


def test_options_of_a_change_go_together(capsys):
    for options, words in (
        (["--iteration", "1", "--without", "1"], "--without requires --to K"),
        (["--rollout", "x", "--evaluate"], "--evaluate requires --to K"),
        (["--to", "4"], "--to 4 requires a change"),
        (["--to", "4", "--since", "4", "--without", "4"], "--since 4 must be < --to 4"),
    ):
        assert main(["rerun", "somewhere", *options]) == 2
        assert words in capsys.readouterr().err
