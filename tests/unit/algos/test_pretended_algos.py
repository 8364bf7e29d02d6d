"""Every advantage, loss and correction on a pretended device: the CPU's numbers, and no others."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.objective import Aggregation, loss_tokens
from lightning_rl.data.batch import select
from lightning_rl.data.splitting import split_minibatches
from lightning_rl.learn.skipped import has_zero_advantage, without
from tests.support.algorithms import KINDS, imagined, objectives, parts_of, with_all_columns
from tests.support.pretended import DEVICE


def parts(*kinds: type) -> list[Any]:
    return [pytest.param(part, id=name) for name, part in parts_of(*kinds).items()]


@pytest.fixture(scope="module")
def batch(random_batch) -> TensorDict:
    return with_all_columns(random_batch(5))


def require_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.device == DEVICE, name
        torch.testing.assert_close(
            value.cpu(), theirs[name], rtol=0, atol=0, equal_nan=True, msg=name
        )


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


@pytest.mark.parametrize("objective", objectives().values(), ids=objectives())
def test_an_objective(objective, batch):
    """The objective has each loss, correction, KL, bonus and critic's loss."""

    def learned(micro_batch: TensorDict) -> dict[str, Tensor]:
        policy = imagined(micro_batch)
        loss, metrics = objective(policy, loss_tokens(micro_batch, policy), 0)
        leaves = [policy.logprobs, policy.entropy, policy.values]
        found = torch.autograd.grad(loss.sum(), leaves, materialize_grads=True)
        return metrics | {"loss": loss} | dict(zip("lev", found, strict=True))

    require_same(learned(batch.to(DEVICE)), learned(batch))


def test_what_is_selected(batch):
    """Minibatches and micro-batches on the device are those on the CPU."""
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
