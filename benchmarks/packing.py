"""Measure what packing without padding, and prompts computed once, save of a training step.

    OMP_NUM_THREADS=1 python -m benchmarks.packing [--save]

A step (forward, backward, clipping, AdamW) of the quickstart's model in float32 on random tokens:

- `heavy`: 32 prompts of 16 tokens x 8 completions of heavy-tailed length (log-normal around 32, at
  most 512). Padded to the longest of each micro-batch of 32 through the Hugging Face model, in the
  order they come in and sorted by length, against micro-batches.
- `long_prompts`: 4 prompts of 512 tokens x 8 completions of 32 on average, micro-batches that
  compute each prompt once against micro-batches that compute it for every completion.

All compute the same gradient, which is checked. Steps alternate; seconds are medians of CPU time.
The last line is JSON: ratios of CPU seconds, other / ours.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.support.results import parser_of, report
from benchmarks.support.task import LR, OUT
from lightning_rl.data.batch import select, token_rows
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.splitting import split_micro_batches
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt, Rollout, Row
from recipes.sort_digits.prepare import prepare

MODEL = OUT / "model"
MICRO_BATCH = 32
MAX_TOKENS_PER_MICRO_BATCH = 16384
GROUP_SIZE = 8
TOLERANCE = 1e-5


def make_batch(groups: int, prompt_length: int, longest: int) -> TensorDict:
    """Micro-batch rollouts of random tokens, with an advantage for each token."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 13, (count,), generator=generator).tolist()

    rollouts = []
    for group in range(groups):
        prompt = Prompt(str(group), "", draw(prompt_length))
        spread = torch.randn(GROUP_SIZE, generator=generator).exp() * 32
        for i, length in enumerate(spread.long().clamp(1, longest).tolist()):
            rollouts.append(
                Rollout(
                    prompt, str(group), i, seed=0,
                    rows=[Row(prompt.token_ids, draw(length), [True] * length, [0.0] * length,
                              [0] * length)],
                )
            )  # fmt: skip
    batch = pack_rollouts(rollouts)
    mask = batch["tokens", "loss_mask"]
    weights = torch.randn(len(rollouts), generator=generator)[token_rows(batch)] * mask
    batch["tokens", "loss_weights"] = weights / mask.sum()
    return batch


def packed_backward(policy: Policy, batch: TensorDict) -> None:
    """Compute the gradient as the library does: by token-budget micro-batches."""
    for rows in split_micro_batches(batch, MAX_TOKENS_PER_MICRO_BATCH):
        micro_batch = select(batch, rows)
        scores = policy(micro_batch)
        loss = policy_gradient(scores.logprobs, micro_batch["tokens", "loss_weights"][scores.live])
        loss.backward()


def padded_backward(lm: PreTrainedModel, batch: TensorDict, by_length: bool) -> None:
    """Compute it as usual: by padded micro-batches through the Hugging Face model."""
    lengths = batch["rollouts", "length"]
    ids, weights = (
        batch["tokens", x].split(lengths.tolist()) for x in ("input_ids", "loss_weights")
    )
    order = lengths.argsort(descending=True) if by_length else torch.arange(len(lengths))
    for rows in order.split(MICRO_BATCH):
        padded_ids, padded_weights = (
            pad_sequence([rowwise[i] for i in rows.tolist()], batch_first=True)
            for rowwise in (ids, weights)
        )
        mask = torch.arange(padded_ids.shape[1]) < lengths[rows, None]
        # Logits of completions only, as TRL computes them.
        keep = padded_ids.shape[1] - int(batch["rollouts", "prompt_length"][rows].min()) + 1
        logits = lm(
            padded_ids, attention_mask=mask.long(), use_cache=False, logits_to_keep=keep
        ).logits[:, :-1]
        targets = padded_ids[:, 1 - keep :, None]
        logprobs = logits.log_softmax(-1).gather(-1, targets).squeeze(-1)
        policy_gradient(logprobs, padded_weights[:, 1 - keep :]).backward()


def policy_gradient(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Return the loss; weights are advantages over token counts, 0 where there is no loss."""
    return -((logprobs - logprobs.detach()).exp() * weights).sum()


class Side:
    """A model with its optimizer, and one way to compute its gradient."""

    def __init__(self, model: nn.Module, backward: Callable[[], None]) -> None:
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, weight_decay=0.0, fused=True)
        self.backward = backward
        self.seconds: list[float] = []

    def gradient(self) -> list[Tensor]:
        self.optimizer.zero_grad()
        self.backward()
        return [p.grad.clone() for p in self.parameters if p.grad is not None]

    def step(self) -> None:
        begin = time.process_time()
        self.optimizer.zero_grad()
        self.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.seconds.append(time.process_time() - begin)


def compare(sides: dict[str, Side], steps: int) -> dict[str, float]:
    """Return median CPU seconds, ratios to the first side, and the largest gradient difference."""
    first = next(iter(sides))
    gradients = {name: side.gradient() for name, side in sides.items()}
    difference = max(
        float((a - b).abs().max())
        for name in sides
        for a, b in zip(gradients[first], gradients[name], strict=True)
    )
    if difference > TOLERANCE:
        raise RuntimeError(f"gradients of {list(sides)} differ by {difference:.2g} > {TOLERANCE}")
    for step in range(steps):
        for name in list(sides)[:: 1 if step % 2 else -1]:
            sides[name].step()
    seconds = {name: statistics.median(side.seconds) for name, side in sides.items()}
    return {f"{name}_cpu_s": s for name, s in seconds.items()} | {
        f"{name}_ratio": s / seconds[first] for name, s in seconds.items() if name != first
    } | {"grad_max_abs_diff": difference}  # fmt: skip


def heavy(steps: int) -> dict[str, float]:
    batch = make_batch(groups=32, prompt_length=16, longest=512)
    policy = Policy(str(MODEL))
    sides = {"ours": Side(policy, partial(packed_backward, policy, batch))}
    for name, by_length in (("padded", False), ("padded_sorted", True)):
        lm = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        sides[name] = Side(lm, partial(padded_backward, lm, batch, by_length))
    length = batch["rollouts", "length"]
    slots = sum(int(part.max()) * len(part) for part in length.split(MICRO_BATCH))
    return compare(sides, steps) | {"tokens": int(length.sum()), "padded_slots": slots}


def long_prompts(steps: int) -> dict[str, float]:
    shared = make_batch(groups=4, prompt_length=512, longest=128)
    unshared = shared.clone()
    rollouts = unshared["rollouts"]
    rollouts["prefix"] = torch.arange(len(rollouts))  # as if every prompt were another
    sides = {}
    for name, batch in (("ours", shared), ("unshared", unshared)):
        policy = Policy(str(MODEL))
        sides[name] = Side(policy, partial(packed_backward, policy, batch))
    return compare(sides, steps) | {"tokens": len(shared["tokens"])}


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prepare(OUT)
    result: dict[str, Any] = {
        "heavy": heavy(arguments.steps),
        "long_prompts": long_prompts(arguments.steps),
    }
    for task, row in result.items():
        print(f"\n{task}: {row['tokens']} tokens, CPU s per step, and in proportion to ours")
        for key, ratio in row.items():
            if key.endswith("_cpu_s"):
                name = key.removesuffix("_cpu_s")
                print(f"  {name:<14}{ratio:8.3f}{row.get(name + '_ratio', 1.0):8.2f}")
    report("packing", result, arguments.save)


if __name__ == "__main__":
    main()
