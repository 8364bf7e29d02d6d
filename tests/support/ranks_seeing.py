"""Processes share micro-batches with pictures, and compare numbers and gradients with one's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.parallel.layouts import begin
from benchmarks.parallel.ranks import compare_micro_batches, policy_of
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models.heads import SeparateValueHead, SharedValueHead
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading
from lightning_rl.models.recompute import Recompute
from lightning_rl.rollout import Picture, Placed, Prompt, Rollout, Row
from lightning_rl.vision.training import Vision
from tests.support.tiny_vision import picture

TRAINED = Vision(train_tower=True, train_projector=True)
WAYS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": {"vision": TRAINED, "value_head": SharedValueHead()},
    "separate": {"vision": TRAINED, "value_head": SeparateValueHead()},
    "recomputed": {
        "vision": TRAINED,
        "loading": Loading(gradient_checkpointing=Recompute(every=2, inputs="host")),
    },
    "lora": {"vision": TRAINED, "lora": LoRA(rank=2)},
}


def rollout(policy: Policy, pictures: list[Picture], written: list[int], number: int) -> Rollout:
    """Make a text that begins with pictures; the last is read after the first written token."""
    assert policy.reader is not None
    mark = policy.reader.family.placeholder
    ids, places = policy.reader.expand([40, *[mark] * len(pictures), 41], pictures)
    prompt = Prompt(str(number), "", ids, pictures=pictures, places=places)
    row = Row.of(prompt)
    row.append_written(written[:1], [0.0], [0])
    if pictures:
        shown, at = policy.reader.expand([42, mark], pictures[-1:])
        row.append_given(shown, [Placed(at[0], pictures[-1])])
    rest = written[1:]
    row.append_written(rest, [0.0] * len(rest), [0] * len(rest))
    return Rollout(prompt, str(number), 0, seed=0, rows=[row], reward=0.0)


def micro_batches(policy: Policy, sees: tuple[bool, ...]) -> list[TensorDict]:
    """Make a micro-batch for each rank, with pictures or without; they share one."""
    made = []
    for rank, some in enumerate(sees):
        one, wide, common = picture(rank, 32, 48), picture(10 + rank, 64, 32), picture(20)
        shown = [[common], [one, wide], [common, one]] if some else [[], [], []]
        written = [[50, 51, 52], [53, 54], [55, 56, 57, 58]]
        batch = pack_rollouts(
            [rollout(policy, p, w, n) for n, (p, w) in enumerate(zip(shown, written, strict=True))]
        )
        made.append(policy.with_sight(batch))
    return made


@contextmanager
def rounding_nothing() -> Iterator[None]:
    """Compute in float64 meanwhile what transformers computes in float32.

    Else a gradient that comes from two processes is the sum of two that towers have rounded.
    """
    single, cast = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = single, cast


def see_together(model: str, way: str, sees: tuple[bool, ...]) -> dict[str, float]:
    """Return the differences for a policy; ``sees`` tells which ranks have pictures."""
    begin()
    policy = policy_of(model, **WAYS[way])
    with rounding_nothing():
        return compare_micro_batches(policy, "sequence", micro_batches(policy, sees))
