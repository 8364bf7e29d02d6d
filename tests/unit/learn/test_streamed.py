"""Test streamed updates: the same as unstreamed ones, or refused, or given up."""

import pytest
import torch

from lightning_rl.algos.advantages import GAE
from lightning_rl.algos.baselines import (
    OPMD,
    RLOO,
    DrGRPO,
    MaxRL,
    PassAtK,
    ReinforcePlusPlus,
    ReMax,
    RunningBaseline,
)
from lightning_rl.algos.correction import SequenceTIS, TokenTIS
from lightning_rl.algos.experts import OldRouting
from lightning_rl.algos.kl import EntropyBonus, K1Penalty, K3Penalty
from lightning_rl.algos.losses import CISPO, GSPO, SAPO, PPOClip, Reinforce
from lightning_rl.algos.objective import (
    Aggregation,
    Decision,
    PromptMean,
    SequenceMean,
    TokenSum,
)
from lightning_rl.algos.trust_regions import DPPO, GMPO, OffPolicyMask
from lightning_rl.algos.turns import GiGPO, RewardToGo, TurnGAE
from lightning_rl.callbacks import IterationCheckpoint, RLCallback
from lightning_rl.collect.collector import RewardSpread, SyncCollector
from lightning_rl.collect.replay_buffer import ReplayBuffer
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.learn.own_loop import OwnLoop
from lightning_rl.learn.streamed import Stream
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.calling import batch_reward
from lightning_rl.rollout import SamplingDistribution
from tests.support.doubles import EXACT, doubled
from tests.support.grouped import grouped
from tests.support.lots import LotEngine
from tests.support.mixtures import saved_mixture
from tests.support.small_run import Rows, data_module, grpo, trainer_of
from tests.support.three_calls import cut_in_two
from tests.support.tolerances import rounding

GROUPS, GROUP_SIZE = 5, 4


@pytest.fixture
def in_double(in_double, monkeypatch):
    """Stream groups in float64, too, as the batches of these tests are."""
    monkeypatch.setattr(
        "lightning_rl.learn.streamed.pack_rollouts",
        lambda *given: doubled(pack_rollouts(*given)),
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def module_of(tiny_model, **options) -> PolicyModule:
    module = PolicyModule(str(tiny_model), **grouped(**({"optimizer": sgd, "seed": 3} | options)))
    OwnLoop(module).module.double()
    return module


def groups_of(rollouts) -> list:
    return [rollouts[i : i + GROUP_SIZE] for i in range(0, len(rollouts), GROUP_SIZE)]


def stream(module, groups, chunks, batch_groups=None) -> None:
    """Let the module work ahead on groups, as they come; the last may never come."""
    overlap = module.learner.overlap = Stream(lambda: module.learner)
    overlap.begin(len(groups))
    for chunk in chunks:
        overlap.add([(place, groups[place]) for place in chunk])
    overlap.finish([r for group in batch_groups or groups for r in group if r.graded])


def differences(ours: PolicyModule, theirs: PolicyModule) -> float:
    pairs = zip(ours.policy.named_parameters(), theirs.policy.parameters(), strict=True)
    return max(
        float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-30))
        for (_, a), b in pairs
    )


class Cubed(Aggregation):
    """One that says nothing of groups."""

    def weights(self, minibatch):
        return minibatch["tokens", "loss_mask"].float() ** 3


ALGORITHMS = {
    "grpo": {},
    "dr_grpo": {"advantage": DrGRPO(), "aggregation": TokenSum(9)},
    "rloo": {"advantage": RLOO(), "loss": Reinforce()},
    "max_rl": {"advantage": MaxRL(), "aggregation": SequenceMean()},
    "pass_at_k": {"advantage": PassAtK(2), "aggregation": PromptMean()},
    "remax": {"advantage": ReMax(), "kl_reward": K1Penalty(0.1)},
    "opmd": {"advantage": OPMD(), "loss": CISPO()},
    "gspo": {"loss": GSPO(), "aggregation": SequenceMean()},
    "sapo": {"loss": SAPO()},
    "gmpo": {"loss": GMPO(), "aggregation": SequenceMean()},
    "dppo": {"loss": OffPolicyMask(DPPO())},
    "corrected": {"correction": TokenTIS(), "minibatches": 2},
    "corrected_sequences": {"correction": SequenceTIS(), "ppo_epochs": 2},
    "kl_and_entropy": {"kl": K3Penalty(0.1), "entropy": EntropyBonus(0.01)},
    "kl_reward": {"kl_reward": K1Penalty(0.1), "minibatches": 2},
    "engine_logprobs": {"use_rollout_logprobs": True},
    "masked": {"mask_truncated": True},
    "critic": {"advantage": GAE(whiten=False), "critic": SharedValueHead()},
    "critics_own": {
        "advantage": GAE(whiten=False),
        "critic": SeparateValueHead(),
        "minibatches": 2,
        "ppo_epochs": 2,
    },
    "clipped_often": {"loss": PPOClip(0.01, 0.01), "ppo_epochs": 3, "minibatches": 2},
}


def fitted_both_ways(tiny_model, rollouts, streaming, **options):
    """Fit one iteration streamed by ``streaming(module, groups)``, and not; return both."""
    modules = []
    for stream_first in (True, False):
        torch.manual_seed(0)  # of a critic's first weights
        module = module_of(tiny_model, max_tokens_per_micro_batch=60, **options)
        batch = doubled(pack_rollouts([r for r in rollouts if r.graded], rollouts))
        if stream_first:
            streaming(module, groups_of(rollouts))
        modules.append((module.learner.step(batch), module))
    return modules


def in_chunks(module, groups):
    stream(module, groups, [[3, 1], [0], [4, 2]])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_is_the_same_streamed_or_not(tiny_model, random_rollouts, in_double, name):
    rollouts = random_rollouts(1, groups=GROUPS, group_size=GROUP_SIZE)
    for rollout in rollouts[::5]:
        rollout.finish_reason = "length"
    if name == "remax":
        for rollout in rollouts[::GROUP_SIZE]:
            rollout.trained, rollout.sampling = False, SamplingDistribution(temperature=0.0)
        rollouts = [r for group in groups_of(rollouts) for r in ReMax().finish(group)]

    (measured, ours), (expected, theirs) = fitted_both_ways(
        tiny_model, rollouts, in_chunks, **ALGORITHMS[name]
    )
    assert differences(ours, theirs) <= EXACT
    assert measured.pop("policy/streamed_share") > 0
    assert measured.keys() == expected.keys()
    for key, value in expected.items():  # sums of float32 numbers
        assert measured[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "pass_at_k", "corrected", "gspo"])
def test_rollouts_of_several_rows_are_streamed_too(tiny_model, random_rollouts, in_double, name):
    rollouts = random_rollouts(1, groups=GROUPS, group_size=GROUP_SIZE)
    rollouts = [cut_in_two(r) if n % 3 else r for n, r in enumerate(rollouts)]

    (measured, ours), (_, theirs) = fitted_both_ways(
        tiny_model, rollouts, in_chunks, **ALGORITHMS[name]
    )
    assert differences(ours, theirs) <= EXACT
    assert measured["policy/streamed_share"] > 0


TURNS = {
    "gae": {"advantage": GAE(whiten=False), "critic": SharedValueHead()},
    "turn_gae": {"advantage": TurnGAE(whiten=False), "critic": SharedValueHead()},
    "reward_to_go": {"advantage": RewardToGo(0.9), "minibatches": 2},
    "gigpo": {"advantage": GiGPO(), "kl_reward": K1Penalty(0.1)},
}


@pytest.mark.parametrize("name", TURNS)
def test_turns_have_the_same_credit_streamed_or_not(tiny_model, random_rollouts, in_double, name):
    rollouts = random_rollouts(6, groups=GROUPS, group_size=GROUP_SIZE)
    for rollout in rollouts:
        rollout.calls = rollout.model_calls()
        for number, call in enumerate(rollout.calls):
            call.reward, call.state = number / 8, f"state {number % 2}"

    (measured, ours), (_, theirs) = fitted_both_ways(tiny_model, rollouts, in_chunks, **TURNS[name])
    assert differences(ours, theirs) <= EXACT
    assert measured["policy/streamed_share"] > 0


def test_scores_are_not_computed_twice(tiny_model, random_rollouts, in_double, monkeypatch):
    rollouts = random_rollouts(2, groups=GROUPS, group_size=GROUP_SIZE)
    scored = []
    module = module_of(tiny_model, minibatches=2, kl=K3Penalty(0.1))
    score = type(module.policy).score

    def counting(policy, batch, name, max_tokens, rows=None, *more):
        scored.append((name, len(batch["rollouts"]) if rows is None else len(rows)))
        return score(policy, batch, name, max_tokens, rows, *more)

    monkeypatch.setattr(type(module.policy), "score", counting)
    groups = groups_of(rollouts)
    stream(module, groups, [[0, 1], [2, 3]])
    assert scored == [("old_logprobs", 8), ("ref_logprobs", 8)] * 2
    scored.clear()
    module.learner.step(doubled(pack_rollouts(rollouts)))
    assert scored == [("old_logprobs", GROUP_SIZE), ("ref_logprobs", GROUP_SIZE)]


def test_a_rollout_that_fails_is_left_out(tiny_model, random_rollouts, in_double):
    rollouts = random_rollouts(3, groups=GROUPS, group_size=GROUP_SIZE)
    for failed in (*rollouts[:4], rollouts[9]):  # a whole group, and one of another
        failed.fail("no grade")

    def all_at_once(module, groups):
        stream(module, groups, [range(GROUPS)])

    (measured, ours), (_, theirs) = fitted_both_ways(tiny_model, rollouts, all_at_once)
    assert measured["policy/streamed_share"] > 0
    assert differences(ours, theirs) <= EXACT


def changed_reward(module, groups):
    stream(module, groups, [range(GROUPS)])
    groups[2][0].reward += 1.0


def other_group(module, groups):
    others = [[*groups[0][:-1]], *groups[1:]]
    stream(module, groups, [range(GROUPS)], batch_groups=others)


def other_order(module, groups):
    stream(module, groups, [range(GROUPS)], batch_groups=[groups[1], groups[0], *groups[2:]])


def never_told(module, groups):
    module.learner.overlap = Stream(lambda: module.learner)
    module.learner.overlap.begin(GROUPS)
    module.learner.overlap.add(list(enumerate(groups)))


def no_memory(module, groups):
    def fail(*arguments, **options):
        raise RuntimeError("not enough memory: you tried to allocate 9 bytes")

    learner = module.learner
    whole, learner.backward_micro_batch = learner.backward_micro_batch, fail
    stream(module, groups, [[0, 1], [2]])
    learner.backward_micro_batch = whole


@pytest.mark.parametrize(
    "streaming", [changed_reward, other_group, other_order, never_told, no_memory]
)
def test_what_differs_from_the_batch_is_given_up(tiny_model, random_rollouts, in_double, streaming):
    rollouts = random_rollouts(4, groups=GROUPS, group_size=GROUP_SIZE)
    torch.manual_seed(0)
    ours, theirs = module_of(tiny_model), module_of(tiny_model)
    streaming(ours, groups_of(rollouts))
    batch = doubled(pack_rollouts(rollouts))
    measured = ours.learner.step(batch.clone())
    theirs.learner.step(batch)
    assert "policy/streamed_share" not in measured
    assert differences(ours, theirs) <= EXACT


def test_groups_of_later_minibatches_leave_no_gradient(tiny_model, random_rollouts, in_double):
    rollouts = random_rollouts(5, groups=GROUPS, group_size=GROUP_SIZE)
    module = module_of(tiny_model, minibatches=GROUPS)
    overlap = module.learner.overlap = Stream(lambda: module.learner)
    overlap.begin(GROUPS)
    [first] = overlap.first
    groups = groups_of(rollouts)
    overlap.add([(place, groups[place]) for place in range(GROUPS) if place != first])
    assert not overlap.metrics
    assert all(p.grad is None for p in module.policy.parameters())


REFUSED = {
    "GAE": {"advantage": GAE(), "critic": SharedValueHead()},
    "TurnGAE": {"advantage": TurnGAE(), "critic": SharedValueHead()},
    "ReinforcePlusPlus": {"advantage": ReinforcePlusPlus()},
    "RunningBaseline": {"advantage": RunningBaseline()},
    "Cubed": {"aggregation": Cubed()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_look_at_the_whole_batch_is_refused_by_name(tiny_model, tmp_path, name):
    module = grpo(tiny_model, **REFUSED[name])
    data = data_module(collector=StreamedCollector())
    with pytest.raises(ConfigError, match=rf"StreamedCollector .*{name}.* may need the whole"):
        trainer_of(tmp_path).fit(module, data)


def spread(prompts, completions, **columns):
    return [float(len(c)) for c in completions]


@pytest.mark.parametrize(
    ("options", "minibatches", "reason"),
    [
        ({"buffer": ReplayBuffer("buffer.jsonl", 8)}, 1, "data.buffer mixes other groups"),
        ({"rewards": [batch_reward(spread)]}, 1, "the reward spread needs the whole batch"),
        ({"selection": [RewardSpread()]}, 2, "which groups are in the first of several"),
    ],
)
def test_a_batch_that_is_more_than_its_groups_is_refused(
    tiny_model, tmp_path, options, minibatches, reason
):
    module = grpo(tiny_model, minibatches=minibatches)
    data = data_module(collector=StreamedCollector(), **options)
    with pytest.raises(ConfigError, match=reason):
        trainer_of(tmp_path).fit(module, data)


class Watching(Rows):
    """Records rollouts and metrics of every iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts = []

    def on_collect_end(self, trainer, pl_module, rollouts):
        self.rollouts.append([(r.id, r.seed, r.token_ids, r.reward) for r in rollouts])


def run(tiny_model, tmp_path, collector, callbacks=(), **options):
    module = grpo(tiny_model, optimizer=sgd, **options)
    engine = LotEngine(device="cpu", max_batch_size=8)
    data = data_module(collector=collector, engine=engine, selection=[])
    watching = Watching()
    trainer = trainer_of(tmp_path, [watching, *callbacks], limit_train_batches=3)
    trainer.fit(module, data)
    return module, watching


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_run_is_the_same_streamed_or_not(tiny_model, tmp_path, minibatches):
    ours, watching = run(
        tiny_model, tmp_path, StreamedCollector(max_groups_in_flight=2), minibatches=minibatches
    )
    theirs, expected = run(tiny_model, tmp_path, SyncCollector(), minibatches=minibatches)
    assert watching.rollouts == expected.rollouts
    assert all(row["policy/streamed_share"] > 0 for row in watching.rows[1:])
    assert differences(ours, theirs) <= rounding(additions=1_500, magnitude=1.0)


class Masking(RLCallback):
    """Takes every third token out of the loss."""

    def on_update_start(self, trainer, pl_module, batch):
        return Decision(mask=torch.arange(len(batch["tokens"])) % 3 == 0)


def test_what_a_callback_decides_is_done(tiny_model, tmp_path):
    ours, watching = run(tiny_model, tmp_path, StreamedCollector(2), [Masking()])
    theirs, expected = run(tiny_model, tmp_path, SyncCollector(), [Masking()])
    assert watching.rollouts == expected.rollouts
    assert not any("policy/streamed_share" in row for row in watching.rows)
    assert differences(ours, theirs) <= rounding(additions=1_500, magnitude=1.0)


class Stops(Exception):
    """An error that a test raises on purpose."""


class Breaks(LotEngine):
    """Fails at its ``last`` request."""

    def __init__(self, last: int) -> None:
        super().__init__(device="cpu", max_batch_size=8)
        self.left = last

    async def generate(self, token_ids, sampling, seed):
        self.left -= 1
        if self.left < 0:
            raise EngineError("the engine broke")
        return await super().generate(token_ids, sampling, seed)


def test_a_run_that_broke_in_the_middle_of_a_stream_goes_on(tiny_model, tmp_path):
    whole, expected = run(tiny_model, tmp_path, StreamedCollector(2))
    saving = IterationCheckpoint(1, dirpath=str(tmp_path / "checkpoints"))
    module = grpo(tiny_model, optimizer=sgd)
    # 4 requests of the probe after each of two pushes, 48 of the first batch, half of the second.
    data = data_module(collector=StreamedCollector(2), engine=Breaks(4 + 48 + 4 + 24))
    with pytest.raises(EngineError, match="the engine broke"):
        trainer_of(tmp_path, [saving], limit_train_batches=3, enable_checkpointing=True).fit(
            module, data
        )
    assert module.iteration == 1
    resumed, watching = grpo(tiny_model, optimizer=sgd), Watching()
    data = data_module(
        collector=StreamedCollector(2), engine=LotEngine(device="cpu", max_batch_size=8)
    )
    [checkpoint] = tmp_path.glob("checkpoints/**/last.ckpt")
    trainer_of(tmp_path, [watching], limit_train_batches=3).fit(resumed, data, ckpt_path=checkpoint)
    assert resumed.iteration == 3
    assert watching.rollouts == expected.rollouts[1:]
    assert differences(resumed, whole) <= rounding(additions=1_500, magnitude=1.0)


def test_the_routing_of_streamed_scores_is_replayed(tmp_path, random_rollouts, in_double):
    """The result is the same as if the batch had been scored as a whole."""
    model = saved_mixture("qwen3_moe", tmp_path)
    rollouts = random_rollouts(2, groups=GROUPS, group_size=GROUP_SIZE)
    columns = []
    for streams in (False, True):
        module = module_of(model, minibatches=2, routing_replay=OldRouting())
        module.policy.lm.set_experts_implementation("eager")  # grouped products know no float64
        if streams:
            stream(module, groups_of(rollouts), [[0, 1], [2]])
        batch = module.learner.compute_all(doubled(pack_rollouts(rollouts)))
        columns.append(batch["tokens", "routed_experts"])
    assert (columns[0] >= 0).any()
    assert torch.equal(columns[0].sort(-1).values, columns[1].sort(-1).values)
