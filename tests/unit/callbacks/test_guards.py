"""Test guards: each number by hand, what each action does to an update, and runs that they stop."""

import logging
import math
from inspect import signature

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_rl.algos.correction import TokenMIS, TokenTIS
from lightning_rl.algos.losses import PPOClip
from lightning_rl.algos.objective import Decision
from lightning_rl.callbacks import (
    Correct,
    EffectiveSampleGuard,
    EntropyGuard,
    IterationCheckpoint,
    KLGuard,
    LogprobGapGuard,
    LogprobSpikeGuard,
    Mask,
    MetricFloorGuard,
    MetricGuard,
    NonFiniteGuard,
    RLCallback,
    RunReport,
    SkipUpdate,
    StalenessGuard,
    StopRun,
    Warn,
    WeightSync,
    ZeroAdvantageGuard,
)
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError, GuardError
from lightning_rl.module import PolicyModule
from tests.support.grouped import grouped
from tests.support.small_run import Rows, adamw, data_module, grpo, trainer_of
from tests.support.tolerances import rounding

PROMPT = [3, 2]


def batch_of(make_rollout, *rollouts):
    """Make one group of (completion, reward, fields of the rollout) each."""
    return pack_rollouts(
        [make_rollout(PROMPT, ids, reward=reward, **fields) for ids, reward, fields in rollouts]
    )


@pytest.fixture
def scored(tiny_model, make_rollout):
    """Make a module and a batch whose engine logprobs are the trainer's own, so without a gap."""
    module = PolicyModule(str(tiny_model), optimizer=adamw(1e-2), update={"seed": 7})
    module.configure_model()
    batch = batch_of(
        make_rollout, ([4, 5, 1], 1.0, {}), ([6, 1], 0.0, {}), ([7, 8, 9, 1], 0.0, {})
    )  # 3 + 2 + 4 = 9 tokens, at 2-4, 7-8 and 11-14
    module.policy.score(batch, "exact", 10_000)
    batch["tokens", "rollout_logprobs"] = batch["tokens"].pop("exact")
    return module, module.learner.compute_advantages(batch)


def rounding_of(batch):
    """Bound the rounding of logprobs that are computed twice, in the shapes of other
    micro-batches."""
    largest = float(batch["tokens", "rollout_logprobs"].abs().max())
    return rounding(additions=1_500, magnitude=largest)


def shift(batch, gaps: dict[int, float]):
    """Move engine logprobs of single tokens, by place in the batch, away from the trainer's."""
    for place, gap in gaps.items():
        batch["tokens", "rollout_logprobs"][place] += gap


def test_the_logprob_gap_by_hand(scored):
    module, batch = scored
    assert LogprobGapGuard().measure(module, batch) < rounding_of(batch)
    shift(batch, {2: 0.9, 7: -0.4, 8: 0.2, 3: 0.3})
    # |gaps| of the 9 tokens: 0.9 + 0.3 in the first rollout, 0.4 + 0.2 in the second.
    assert LogprobGapGuard().measure(module, batch) == pytest.approx(1.8 / 9, rel=1e-4)
    assert LogprobSpikeGuard().measure(module, batch) == pytest.approx(0.9, rel=1e-4)
    # Means: 1.2/3 = 0.4, 0.6/2 = 0.3, 0: only the first is above 0.35, all its tokens to blame.
    blamed = LogprobGapGuard(bound=0.35, action=Mask()).offenders(module, batch)
    assert blamed.nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 4]
    spikes = LogprobSpikeGuard(bound=0.35, action=Mask()).offenders(module, batch)
    assert (spikes & batch["tokens", "loss_mask"]).nonzero().squeeze(1).tolist() == [2, 7]


def test_the_effective_sample_by_hand(scored):
    module, batch = scored
    assert EffectiveSampleGuard().measure(module, batch) == pytest.approx(1.0)
    # w = p_trainer / p_engine: the engine's logprob lowered by log 4 makes w = 4.
    shift(batch, {2: -math.log(4)})
    # (8 + 4)^2 / (9 (8 + 16)) = 144/216
    assert EffectiveSampleGuard().measure(module, batch) == pytest.approx(2 / 3, rel=1e-5)
    shift(batch, {7: -200.0})
    assert EffectiveSampleGuard().measure(module, batch) == pytest.approx(1 / 9, rel=1e-5)


def test_staleness_counts_tokens_of_the_engine_that_are_trained_on(tiny_model, make_rollout):
    module = PolicyModule(str(tiny_model))
    module.configure_model()
    module.iteration = 9
    batch = batch_of(
        make_rollout,
        ([4, 5, 1], 1.0, {"versions": [3, 9, 9]}),
        ([6, 1], 0.0, {"versions": [7, 8]}),
        ([6, 1], 0.0, {"versions": [0, 0], "loss_mask": [False, False]}),
    )
    batch = module.learner.compute_advantages(batch)
    assert StalenessGuard().measure(module, batch) == 6
    old = StalenessGuard(bound=1).offenders(module, batch) & batch["tokens", "loss_mask"]
    assert old.nonzero().squeeze(1).tolist() == [2, 7]
    batch["rollouts", "demonstration"][0] = True  # nobody sampled it
    assert StalenessGuard().measure(module, batch) == 2


def test_what_is_left_out_of_the_update_is_not_measured(scored):
    module, batch = scored
    shift(batch, {2: 5.0})
    batch["tokens", "advantages"][:5] = 0.0  # the first rollout is idle now
    assert LogprobGapGuard().measure(module, batch) < rounding_of(batch)
    assert ZeroAdvantageGuard().measure(module, batch) == pytest.approx(1 / 3)
    batch["tokens", "advantages"].zero_()
    assert LogprobGapGuard().measure(module, batch) is None
    assert ZeroAdvantageGuard().measure(module, batch) == 1.0


def test_the_trainer_is_scored_once_and_not_taken_from_the_engine(tiny_model, scored, train_on):
    _, batch = scored
    shift(batch, {2: 0.9})
    for options in ({}, {"use_rollout_logprobs": True}, {"ppo_epochs": 2}):
        module = PolicyModule(str(tiny_model), optimizer=adamw(0.0), **grouped(**options))
        rows = Rows()
        guards = [LogprobGapGuard(), LogprobSpikeGuard(), rows]
        train_on(module, [batch.clone()], callbacks=guards)
        assert rows.rows[-1]["guard/logprob_gap_value"] == pytest.approx(0.1, rel=1e-4)
        assert rows.rows[-1]["guard/logprob_spike_value"] == pytest.approx(0.9, rel=1e-4)


# ---------------------------------------------------------------- actions


def weights_after(tiny_model, train_on, batch, *callbacks, **options):
    module = PolicyModule(str(tiny_model), optimizer=adamw(1e-2), **grouped(seed=7, **options))
    rows = Rows()
    train_on(module, [batch.clone()], callbacks=[*callbacks, rows])
    assert module.iteration == 1
    weights = torch.cat([w.flatten() for _, w in module.policy.named_weights()])
    return weights, rows.rows[-1]


def test_below_the_bound_or_with_a_warning_only_nothing_changes(tiny_model, scored, train_on):
    _, batch = scored
    shift(batch, {2: 0.9, 7: -3.0})
    plain, _ = weights_after(tiny_model, train_on, batch)
    for guard, broken in ((LogprobGapGuard(0.1), 1.0), (LogprobGapGuard(0.5, SkipUpdate()), 0.0)):
        weights, row = weights_after(tiny_model, train_on, batch, guard)
        assert torch.equal(weights, plain)
        assert row["guard/logprob_gap"] == row["guard/logprob_gap_acted"] == broken


@pytest.mark.parametrize(
    ("correction", "epochs"), [(TokenTIS(cap=1.5), 1), (TokenMIS(0.5, 5.0), 2)]
)
def test_correct_trains_as_if_the_module_had_that_correction(
    tiny_model, scored, train_on, correction, epochs
):
    _, batch = scored
    shift(batch, {2: 0.9, 7: -3.0})
    options = {"ppo_epochs": epochs}
    plain, _ = weights_after(tiny_model, train_on, batch, **options)
    wanted, _ = weights_after(tiny_model, train_on, batch, correction=correction, **options)
    guard = LogprobGapGuard(0.1, Correct(correction))
    corrected, row = weights_after(tiny_model, train_on, batch, guard, **options)
    assert torch.allclose(corrected, wanted, atol=1e-7)
    assert not torch.allclose(corrected, plain, atol=1e-4)
    assert "correction/weight_max" in row


def test_mask_trains_as_if_the_tokens_were_not_in_the_loss(
    tiny_model, scored, train_on, make_rollout
):
    module, batch = scored
    start = torch.cat([w.flatten() for _, w in module.policy.named_weights()])
    shift(batch, {2: 0.9, 12: -3.0})
    guard = LogprobSpikeGuard(0.5, Mask())
    masked, _ = weights_after(tiny_model, train_on, batch, guard)
    without = batch.clone()
    without["tokens", "loss_mask"][[2, 12]] = False
    wanted, _ = weights_after(tiny_model, train_on, without)
    assert torch.allclose(masked, wanted, atol=1e-7)
    # Nothing left: no step, not even one by momentum.
    for action in (Mask(), SkipUpdate()):
        weights, row = weights_after(tiny_model, train_on, batch, LogprobGapGuard(-1.0, action))
        assert torch.equal(weights, start)
        assert "policy/grad_norm" not in row


def test_a_correction_lasts_one_iteration(tiny_model, scored, train_on):
    _, batch = scored
    off = batch.clone()
    shift(off, {2: 0.9})
    module = PolicyModule(str(tiny_model), optimizer=adamw(0.0))
    rows = Rows()
    first = LogprobGapGuard(0.05, Correct())
    second = LogprobSpikeGuard(0.5, Correct(TokenMIS()))  # two at once: the later one wins
    train_on(module, [off, batch.clone(), off.clone()], callbacks=[first, second, rows])
    assert ["correction/weight_max" in row for row in rows.rows] == [True, False, True]
    assert module.objective.correction is None


def test_patience_counts_iterations_in_a_row(tiny_model, scored, train_on, caplog):
    _, batch = scored
    off = batch.clone()
    shift(off, {2: 0.9})
    module = PolicyModule(str(tiny_model), optimizer=adamw(0.0))
    rows = Rows()
    guard = LogprobSpikeGuard(0.5, SkipUpdate(), patience=2)
    order = [off, batch, off, off, off, batch, off]
    with caplog.at_level(logging.WARNING, "lightning_rl"):
        train_on(module, [b.clone() for b in order], callbacks=[guard, rows])
    column = {k: [row[f"guard/logprob_spike{k}"] for row in rows.rows] for k in ("", "_acted")}
    assert column[""] == [1, 0, 1, 1, 1, 0, 1]
    assert column["_acted"] == [0, 0, 0, 1, 1, 0, 0]
    assert ["policy/loss" in row for row in rows.rows] == [True, True, True, False, False, True,
                                                           True]  # fmt: skip
    (message,) = (r.getMessage() for r in caplog.records if "LogprobSpikeGuard" in r.getMessage())
    assert message.startswith(
        "LogprobSpikeGuard at iteration 4: the largest logprob gap between engine and trainer "
        "(nats) is 0.9, bound=0.5; sync more often"
    )
    again = LogprobSpikeGuard(0.5, patience=2)
    again.load_state_dict(guard.state_dict())
    assert again.in_a_row == guard.in_a_row == {"": 1}


class Poison(PPOClip):
    """A loss that is NaN or infinite where the engine says -9."""

    value = math.nan

    def __call__(self, logprobs, tokens):
        loss, metrics = super().__call__(logprobs, tokens)
        bad = tokens["rollout_logprobs"] == -9.0
        return loss * torch.where(bad, self.value, 1.0), metrics


@pytest.mark.parametrize(("value", "clip"), [(math.nan, 1.0), (math.inf, None)])
@pytest.mark.parametrize("guards", [[], [NonFiniteGuard()]], ids=["by default", "guarded"])
def test_a_gradient_that_is_no_number_never_reaches_the_weights(
    tiny_model, scored, train_on, monkeypatch, caplog, value, clip, guards
):
    monkeypatch.setattr(Poison, "value", value)
    _, batch = scored
    bad = batch.clone()
    bad["tokens", "rollout_logprobs"][2] = -9.0
    rows = Rows()
    options = {"loss": Poison(), "max_grad_norm": clip, "optimizer": adamw(1e-2)}
    clean, ours = (PolicyModule(str(tiny_model), **grouped(**options)) for _ in range(2))
    train_on(clean, [batch.clone(), batch.clone()])
    batches = [batch.clone(), bad.clone(), batch.clone(), bad.clone()]
    with caplog.at_level(logging.WARNING, "lightning_rl"):
        train_on(ours, batches, callbacks=[*guards, rows])
    # Adam's moments and step count too are as if the bad batch had never been.
    for mine, other in zip(ours.parameters(), clean.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [row["policy/nonfinite_skipped"] for row in rows.rows] == [0, 1, 0, 1]
    messages = [r.getMessage() for r in caplog.records]
    [once] = [m for m in messages if m.startswith("the gradient is NaN or infinite")]
    assert "policy/nonfinite_skipped counts them" in once
    if guards:
        assert [row["guard/non_finite_value"] for row in rows.rows] == [0, 1, 0, 1]
        assert len([m for m in messages if m.startswith("NonFiniteGuard at iteration")]) == 2


def test_bounds_from_below_and_values_that_are_no_numbers():
    assert EffectiveSampleGuard(0.5).breaks(0.4)
    assert not EffectiveSampleGuard(0.5).breaks(0.5)
    assert EntropyGuard(0.1).breaks(0.05)
    assert not KLGuard(0.1).breaks(0.1)
    assert all(g.breaks(math.nan) for g in (KLGuard(), EntropyGuard(), LogprobGapGuard()))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="EntropyGuard knows its value only after the update, so "
                       "action=SkipUpdate would be too late; use Warn or StopRun"):  # fmt: skip
        EntropyGuard(action=SkipUpdate())
    with pytest.raises(ConfigError, match="EffectiveSampleGuard checks a batch as a whole"):
        EffectiveSampleGuard(action=Mask())
    with pytest.raises(ConfigError, match="patience=0 must be >= 1"):
        LogprobGapGuard(patience=0)


def test_two_guards_of_a_class_keep_their_states_apart():
    keys = {
        guard.state_key
        for guard in (
            LogprobGapGuard(0.1), LogprobGapGuard(0.2, SkipUpdate()),
            MetricGuard("policy/grad_norm", 1.0), MetricGuard("policy/lr", 1.0),
        )
    }  # fmt: skip
    assert len(keys) == 4


# ---------------------------------------------------------------- whole runs


def fit(tiny_model, tmp_path, *callbacks, ckpt_path=None, iterations=4, **data):
    module = grpo(tiny_model)
    rows = Rows()
    trainer = trainer_of(
        tmp_path, [WeightSync(), *callbacks, rows], logger=CSVLogger(tmp_path, "csv"),
        enable_checkpointing=any(isinstance(c, IterationCheckpoint) for c in callbacks),
    )  # fmt: skip
    data = {"groups_per_iteration": 2, "group_size": 4, "iterations_per_epoch": iterations} | data
    trainer.fit(module, data_module(**data), ckpt_path=ckpt_path)
    return module, rows.rows


def test_a_guard_stops_a_run_after_saving_it(tiny_model, tmp_path):
    guard, report = MetricFloorGuard("reward/mean", 2.0, StopRun(), patience=2), RunReport()
    with pytest.raises(GuardError) as stopped:
        fit(tiny_model, tmp_path, guard, report, IterationCheckpoint(10))
    message = str(stopped.value)
    assert message.startswith("MetricFloorGuard at iteration 2: reward/mean is ")
    assert message.endswith("version_0/checkpoints/iteration_2.ckpt")
    assert stopped.value.status == 1
    # The row in which it happened was written before.
    assert [row["iteration"] for row in report.history] == [0, 1, 2]
    assert report.history[-1]["guard/reward_mean_acted"] == 1.0
    # The count is in the checkpoint: the run goes on for no more than an iteration.
    with pytest.raises(GuardError, match="at iteration 3"):
        fit(tiny_model, tmp_path, MetricFloorGuard("reward/mean", 2.0, StopRun(), patience=2),
            IterationCheckpoint(10), ckpt_path=stopped.value.checkpoint)  # fmt: skip


def test_a_stop_before_the_update_leaves_the_update_out(tiny_model, tmp_path):
    module = grpo(tiny_model)
    trainer = trainer_of(tmp_path, [WeightSync(), StalenessGuard(-1, StopRun())])
    with pytest.raises(GuardError, match=r"bound=-1; .*no checkpoint was saved; add Iteration"):
        trainer.fit(module, data_module(groups_per_iteration=2, group_size=4))
    untouched = grpo(tiny_model)
    untouched.configure_model()
    for ours, theirs in zip(module.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_alarm_and_a_metric_that_nobody_records(tiny_model, tmp_path, caplog):
    class Alarm(RLCallback):
        """Trips in every iteration from the second on."""

        def on_collect_end(self, trainer, pl_module, rollouts) -> None:
            on = float(pl_module.iteration > 0)
            pl_module.record({"alarm/length": on})

    guards = [MetricGuard("alarm/length", 0, patience=2), MetricGuard("policy/no_such", 1.0)]
    with caplog.at_level(logging.WARNING, "lightning_rl"):
        _, rows = fit(tiny_model, tmp_path, Alarm(), *guards)
    assert [row["guard/alarm_length_value"] for row in rows[1:]] == [0, 1, 1, 1]
    assert [row["guard/alarm_length_acted"] for row in rows[1:]] == [0, 0, 1, 1]
    assert "MetricGuard had nothing to check: no 'policy/no_such' was recorded" in caplog.text


def test_warn_is_the_default_of_all():
    guards = (LogprobGapGuard(), EffectiveSampleGuard(), StalenessGuard(), ZeroAdvantageGuard(),
              KLGuard(), EntropyGuard(), NonFiniteGuard())  # fmt: skip
    assert {type(guard.action) for guard in guards} == {Warn}


class Decides(RLCallback):
    """Returns what it is given."""

    def __init__(self, decision) -> None:
        self.decision = decision

    def on_update_start(self, trainer, pl_module, batch):
        return self.decision(batch)


@pytest.mark.parametrize(
    "decision",
    [
        lambda batch: Decision(skip=True),
        lambda batch: Decision(mask=batch["tokens", "loss_mask"]),  # nothing is left
    ],
    ids=["skip", "mask"],
)
def test_any_callback_may_decide(tiny_model, scored, train_on, decision):
    module, batch = scored
    start = torch.cat([w.flatten() for _, w in module.policy.named_weights()])
    module = PolicyModule(str(tiny_model), optimizer=adamw(1e-2))
    train_on(module, [batch.clone()], callbacks=[Decides(decision)])
    assert module.iteration == 1
    assert torch.equal(torch.cat([w.flatten() for _, w in module.policy.named_weights()]), start)


def test_a_batch_guard_is_configured_by_bound_action_and_patience():
    """The defaults are attributes of a guard's class, for one of a user's own, too."""

    class Own(ZeroAdvantageGuard):
        name, what = "own", "a number"

    for guard in (LogprobGapGuard, LogprobSpikeGuard, EffectiveSampleGuard, StalenessGuard, Own):
        parameters = signature(guard).parameters
        assert list(parameters) == ["bound", "action", "patience"]
        for name, parameter in parameters.items():
            assert parameter.default == getattr(guard, name) == getattr(guard(), name)
    assert Own(0.5).state_key != Own().state_key
