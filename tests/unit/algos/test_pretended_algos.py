"""Every advantage, loss and correction on a pretended device: the CPU's numbers, and no others."""

import inspect
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.correction import Correction
from lightning_rl.algos.kl import EntropyBonus, KLPenalty
from lightning_rl.algos.losses import PolicyLoss, PPOClip, ValueLoss
from lightning_rl.algos.objective import Aggregation, Objective, loss_tokens
from lightning_rl.config import names
from lightning_rl.data.batch import select
from lightning_rl.data.episodes import call_numbers
from lightning_rl.data.splitting import split_minibatches
from lightning_rl.learn.left_out import has_zero_advantage, without
from lightning_rl.models.policy import Scores
from tests.support.pretended import DEVICE

OPTIONS: dict[str, dict[str, Any]] = {"TokenSum": {"max_tokens": 8}}
KINDS = (Advantage, Aggregation, Correction, EntropyBonus, KLPenalty, PolicyLoss, ValueLoss)


def parts(*kinds: type) -> list[Any]:
    """One of every public class of these kinds, as it is by default."""
    public = (names.public(name) for name in names.MODULE_OF)
    classes = [
        c
        for c in public
        if inspect.isclass(c) and issubclass(c, kinds) and not inspect.isabstract(c)
    ]
    return [pytest.param(c(**OPTIONS.get(c.__name__, {})), id=c.__name__) for c in classes]


@pytest.fixture(scope="module")
def batch(random_batch) -> TensorDict:
    """With all that an advantage or a loss reads."""
    made = random_batch(5)
    tokens, generator = made["tokens"], torch.Generator().manual_seed(0)
    names = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "token_rewards")
    for name in names:
        noise = 0.3 * torch.randn(len(tokens), generator=generator)
        tokens[name] = (noise - (1 if "logprobs" in name else 0)) * tokens["loss_mask"]
    made["rollouts", "expert"][3] = True
    made["rollouts", "baseline"] = torch.rand(len(made["rollouts"]), generator=generator)
    call = tokens["call"] = call_numbers(made)
    tokens["call_reward"] = torch.zeros(len(tokens))
    tokens["state"] = torch.where(call < 0, -1, call % 2)
    return made


def scores(batch: TensorDict) -> Scores:
    """Of an imaginary policy, as leaves."""
    live = batch["tokens", "loss_mask"].nonzero().squeeze(1)
    logprobs, values = (
        (batch["tokens", name][live] + 0.1).requires_grad_() for name in ("ref_logprobs", "values")
    )
    return Scores(live, logprobs, (-logprobs.detach()).requires_grad_(), values)


def require_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.device == DEVICE, name
        assert torch.equal(value.cpu(), theirs[name]), name


def test_no_part_is_left_out():
    names = {part.id for part in parts(*KINDS)}
    assert {"GAE", "PassAtK", "GSPO", "SFTMix", "SequenceMIS", "K2Penalty", "PromptMean"} <= names
    assert len(names) > 30


@pytest.mark.parametrize("advantage", parts(Advantage))
def test_an_advantage(advantage, batch):
    states = [advantage.state_dict()] if hasattr(advantage, "state_dict") else []
    ours = advantage(batch.to(DEVICE))["tokens"]
    for state in states:
        advantage.load_state_dict(state)
    theirs = advantage(batch.clone())["tokens"]
    require_same(dict(ours.items()), dict(theirs.items()))


@pytest.mark.parametrize("aggregation", parts(Aggregation))
def test_an_aggregation(aggregation, batch):
    require_same({"": aggregation(batch.to(DEVICE))}, {"": aggregation(batch)})


def objectives() -> list[Any]:
    loss = PPOClip()
    made = {
        PolicyLoss: lambda part: Objective(part),
        Correction: lambda part: Objective(loss, correction=part),
        KLPenalty: lambda part: Objective(loss, kl=part),
        EntropyBonus: lambda part: Objective(loss, entropy=part),
        ValueLoss: lambda part: Objective(loss, value_loss=part),
    }
    return [
        pytest.param(make(part.values[0]), id=part.id)
        for kind, make in made.items()
        for part in parts(kind)
    ]


@pytest.mark.parametrize("objective", objectives())
def test_an_objective(objective, batch):
    """Loss, metrics and gradients of each loss, correction, KL, bonus and critic's loss."""

    def learned(pack: TensorDict) -> dict[str, Tensor]:
        policy = scores(pack)
        loss, metrics = objective(policy, loss_tokens(pack, policy), 0)
        leaves = [policy.logprobs, policy.entropy, policy.values]
        found = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
        return metrics | {"loss": loss} | dict(zip("lev", found, strict=True))

    require_same(learned(batch.to(DEVICE)), learned(batch))


def test_what_is_selected(batch):
    """Minibatches and packs on the device are those on the CPU."""
    both = (batch.to(DEVICE), batch)
    for cut in (
        lambda given: select(given, torch.tensor([5, 2, 7], device=given["tokens"].device)),
        lambda given: without(given, has_zero_advantage(given)),
        lambda given: select(
            given, split_minibatches(given, 2, torch.Generator().manual_seed(0))[1]
        ),
    ):
        ours, theirs = (cut(given) for given in both)
        for kind in ("tokens", "rollouts"):
            require_same(dict(ours[kind].items()), dict(theirs[kind].items()))
