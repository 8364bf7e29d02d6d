"""What a configuration amounts to: the algebra of its batches, and the memory of training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl.data.packing import select, split_minibatches, split_packs
from lightning_rl.memory import forward_tokens
from lightning_rl.models.heads import chunk_elements
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus


@dataclass(frozen=True)
class BatchPlan:
    """From prompts to optimizer steps. Tokens and packs are the most that there can be.

    ``pack_tokens`` are the forward tokens of the largest pack, on each of ``ranks`` processes, and
    ``packs`` how many a minibatch is cut into there; a prompt that rollouts share counts once.
    """

    prompts: int
    groups: int  # per iteration, on all ranks
    group_size: int
    ranks: int
    tokens: int
    minibatches: int
    ppo_epochs: int
    packs: int
    pack_tokens: int
    iterations_per_epoch: int
    epochs: int | None

    @property
    def rollouts(self) -> int:
        """Per iteration, on all ranks."""
        return self.groups * self.group_size

    @property
    def steps(self) -> int:
        """Optimizer steps per iteration."""
        return self.ppo_epochs * self.minibatches

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run; None if ``max_epochs`` does not bound it."""
        return None if self.epochs is None else self.epochs * self.iterations_per_epoch * self.steps

    def lines(self) -> Iterator[str]:
        """For a person."""
        yield (
            f"{self.groups} prompts x group_size {self.group_size} = {self.rollouts} rollouts "
            f"per iteration, at most {self.tokens:,} tokens"
        )
        ranks = f"on each of {self.ranks} ranks " if self.ranks > 1 else ""
        size = ceil(self.groups / self.ranks / self.minibatches)
        yield (
            f"{ranks}{_count(self.minibatches, 'minibatch')} of {size} groups or fewer, in "
            f"{_count(self.packs, 'pack')} of {self.pack_tokens:,} tokens or fewer each"
        )
        yield (
            f"ppo_epochs {self.ppo_epochs} x minibatches {self.minibatches} = {self.steps} "
            f"optimizer steps per iteration, {self.steps * self.iterations_per_epoch} per epoch of "
            f"{self.iterations_per_epoch} iterations"
        )
        if self.epochs is not None and self.total_steps is not None:
            drawn = self.groups * self.iterations_per_epoch * self.epochs
            yield (
                f"max_epochs {self.epochs}: {self.total_steps} optimizer steps; {drawn:,} prompts "
                f"are drawn from {self.prompts:,} ({drawn / self.prompts:.2g} times each)"
            )


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def largest_rollouts(
    prompts: Sequence[Prompt], groups: int, group_size: int, max_tokens: int
) -> list[Rollout]:
    """Those of the ``groups`` longest prompts, with completions of ``max_tokens`` tokens."""
    longest = sorted(prompts, key=lambda p: len(p.token_ids), reverse=True)
    return [
        Rollout(
            prompt=longest[group % len(longest)],
            group_id=str(group),
            sample_index=sample,
            seed=0,
            temperature=1.0,
            # Any token will do: only lengths matter, and that prompts can be told apart.
            token_ids=longest[group % len(longest)].token_ids[-1:] * max_tokens,
            loss_mask=[True] * max_tokens,
            logprobs=[0.0] * max_tokens,
            versions=[0] * max_tokens,
            status=RolloutStatus.COMPLETED,
        )
        for group in range(groups)
        for sample in range(group_size)
    ]


def cut(batch: TensorDict, minibatches: int, max_tokens_per_pack: int) -> list[list[TensorDict]]:
    """The packs of each minibatch, as ``PolicyModule.update`` cuts them."""
    generator = torch.Generator().manual_seed(0)
    parts = [select(batch, rows) for rows in split_minibatches(batch, minibatches, generator)]
    return [
        [select(part, rows) for rows in split_packs(part, max_tokens_per_pack)] for part in parts
    ]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, at the moment of an update when most are in use."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Of the training process."""
        return sum(self.parts.values())

    def lines(self) -> Iterator[str]:
        """For a person."""
        for name, size in self.parts.items():
            yield f"{name:<30}{in_units(size):>11}"
        yield f"{'together':<30}{in_units(self.total):>11}"


def in_units(size: int) -> str:
    """Bytes for a person."""
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def training_memory(
    policy: Policy, others: Sequence[nn.Module], optimizer: torch.optim.Optimizer, pack: TensorDict
) -> MemoryPlan:
    """What an update keeps in memory, with ``pack`` the largest that it computes.

    - weights: the bytes of all parameters; ``others`` are further models, such as a reference.
    - gradients: as many bytes as the trained parameters.
    - optimizer: what one step leaves in its state, per trained element (AdamW: two tensors).
    - activations: what autograd keeps for the backward pass. Measured on one group of the pack and
      scaled by its tokens, for attention and everything else keep memory in proportion to them.
    - logits: two chunks of fp32 logits (:mod:`lightning_rl.models.heads` never holds more).
    - backward: the gradient of the largest parameter, before it is added to the others.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    head = policy.lm.get_output_embeddings().weight
    vocabulary = head.shape[0]
    chunk = min(chunk_elements(head.device), int(pack["tokens", "loss_mask"].sum()) * vocabulary)
    group = pack["rollouts", "group"]
    sample = select(pack, (group == group[0]).nonzero().squeeze(1))
    per_token = kept_for_backward(policy, sample) / forward_tokens(sample)
    return MemoryPlan(
        {
            "weights": _size(policy.parameters()),
            "other models": sum(_size(module.parameters()) for module in others),
            "gradients": _size(trained),
            f"optimizer ({type(optimizer).__name__})": _state_size(optimizer, trained),
            f"activations of {forward_tokens(pack):,} tokens": int(
                per_token * forward_tokens(pack)
            ),
            "logits": 2 * 4 * chunk,
            "backward": max(_size([p]) for p in trained),
        }
    )


def kept_for_backward(policy: Policy, pack: TensorDict) -> int:
    """Bytes that autograd keeps of a pack's forward pass; parameters are not counted."""
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:  # views share a storage, which counts once
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        scores = policy(pack)
    del scores  # not before: what is freed meanwhile could be counted again at its place
    return sum(kept.values())


def _size(parameters: "Sequence[nn.Parameter] | Iterator[nn.Parameter]") -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _state_size(optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter]) -> int:
    """Of one step's state, scaled from the optimizer's own single parameter."""
    [parameter] = optimizer.param_groups[0]["params"]
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter].values()
    per_element = sum(
        t.numel() * t.element_size()
        for t in state
        if isinstance(t, torch.Tensor) and t.numel() == parameter.numel()
    )
    return per_element * sum(p.numel() for p in trained) // parameter.numel()
