"""Stacked experts: weights under the names that they have in a model's files, one for each expert.

transformers keeps the experts of a layer as one tensor (E, ...), for grouped products; its files,
and the loaders of other engines, name each expert's matrices. Both ends of a push use these names.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
)

Named = tuple[str, Tensor]
_OF_EXPERTS = {"gate", "router", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names of layers that peft takes for the experts' or their router's, wherever they are."""


class FileNames:
    """The names of a model's weights in its files, as far as its experts are stacked.

    Of a model without stacked experts, or stacked in another way than one behind the other (with
    their matrices joined along the outputs), all names stay as they are.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        mapping: list[Any] = get_model_conversion_mapping(lm, add_legacy=False)
        stacks = [part for part in mapping if isinstance(part, WeightConverter) and _stacks(part)]
        self.stacked = bool(stacks)

        self._parts = {part.target_patterns[0]: part.source_patterns for part in stacks}
        renamed = (WeightRenaming,) if stacks else ()
        self._renamings = [
            part.reverse_transform()
            for part in reversed(mapping)
            if isinstance(part, renamed) and not isinstance(part, PrefixChange)
        ]

    def each(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Pass weights on, each stack as views of its experts' matrices."""
        for name, weight in weights:
            yield from self.parts(name, weight)

    def parts(self, name: str, weight: Tensor) -> Iterator[Named]:
        """Yield a weight under its name in files; of a stack, views of its experts' matrices."""
        for part, view in self._views(name, weight):
            for renaming in self._renamings:
                part, _ = renaming.rename_source_key(part)
            yield part, view

    def _views(self, name: str, weight: Tensor) -> Iterator[Named]:
        stack = next((end for end in self._parts if name.endswith(end)), None)
        if stack is None:
            yield name, weight
            return
        patterns = self._parts[stack]
        for number, expert in enumerate(weight.unbind(0)):
            for pattern, view in zip(patterns, expert.chunk(len(patterns)), strict=True):
                yield name.removesuffix(stack) + pattern.replace("*", str(number)), view


def _stacks(converter: WeightConverter) -> bool:
    """Return True if it stacks experts, and does nothing else but join matrices of one expert."""
    stack, *join = converter.operations
    joined = [isinstance(one, Concatenate) and one.dim == 1 for one in join]
    return isinstance(stack, MergeModulelist) and stack.dim == 0 and joined in ([], [True])


def all_linear(lm: PreTrainedModel) -> str | list[str]:
    """Return peft's ``target_modules`` for all linear layers.

    Experts of a mixture are left out, and ``out_proj`` of state-space models (Mamba), whose
    kernels for GPUs read its weight themselves, and would not see an adapter.
    """
    skipped = _OF_EXPERTS if FileNames(lm).stacked else set()
    if any(hasattr(m, "conv1d") and hasattr(m, "D") for m in lm.modules()):
        skipped = skipped | {"out_proj"}
    if not skipped:
        return "all-linear"
    heads = (lm.get_output_embeddings(), getattr(lm, "score", None))
    linear = (n for n, m in lm.named_modules() if isinstance(m, nn.Linear) and m not in heads)
    return sorted({name.rpartition(".")[2] for name in linear} - skipped)
