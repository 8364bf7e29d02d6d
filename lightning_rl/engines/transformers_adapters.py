"""Plain transformers with one base and a LoRA for each of several policies."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.adapters import AdapterEngine, layers_of, require_adapters
from lightning_rl.engines.base import Engine
from lightning_rl.engines.decoding import Decoder
from lightning_rl.engines.kept_texts import KeptTexts
from lightning_rl.engines.requests import DecodeRequest
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.engines.transformers import TransformersEngine
from lightning_rl.errors import EngineError, WeightSyncError
from lightning_rl.run.digest import digests


@configurable
class TransformersAdapters(AdapterEngine, TransformersEngine):
    """Samples for several LoRA policies on one base with one Hugging Face model.

    Requests of all policies are sampled side by side. A push brings the adapters of one policy and
    touches no other's; the base comes with the first. With a single policy it is
    :class:`TransformersEngine`, whose settings are its own.
    """

    def __init__(self, **shared: Any) -> None:
        super().__init__(**shared)
        self._adapters = _Adapters()

    def start(self, model_dir: Path) -> None:
        self.require_one_base(model_dir)
        super().start(model_dir)

    def close(self) -> None:
        super().close()
        self.forget_policies()
        self._adapters = _Adapters()

    async def generate_as(
        self, policy: str, token_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        return await self._write(self.policies[policy], token_ids, sampling, seed)

    def _decoder(self, lm: PreTrainedModel) -> Decoder:
        if not self.policies:
            return super()._decoder(lm)
        return _AdaptedDecoder(lm, self._ends, self._kept, self._adapters)

    def load_adapters(
        self, policy: str, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        if self._lm is None:
            raise EngineError("TransformersAdapters is not running; call start() first")
        view = self.policies[policy]
        with self._exclusive:
            view.version = -1
            self._forget_texts()
            adapters, base = self.divided(weights)
            shapes = {name: weight.shape for name, weight in self._lm.state_dict().items()}
            require_adapters(adapters, shapes, "TransformersAdapters")
            if base is not None:
                self._take(self._lm, base)
                self.has_base = True
            self._adapters.put(self._lm, view, adapters)
            view.version = version

    def adapter_digests(self, policy: str, names: Sequence[str]) -> dict[str, str]:
        dtype, held = getattr(torch, self.dtype), self._adapters.held(self.policies[policy])
        return digests((name, held[name].to(dtype)) for name in names if name in held)


Owners = tuple[tuple[int, int], ...]
"""Whose the columns of a layer are, in order: numbers of writers, and how many each has."""


class _Adapters:
    """The adapters of a model's linear layers, and who writes the lines of the batch."""

    def __init__(self) -> None:
        self._layers: dict[str, _Layer] = {}
        self._numbers: dict[Engine, int] = {}
        self._lines: list[int] = []
        self._masks: dict[Owners, Tensor] = {}

    def put(self, lm: PreTrainedModel, writer: Engine, adapters: dict[str, Tensor]) -> None:
        """Copy a writer's adapters, in the place of those that it had.

        Raises:
            WeightSyncError: naming a layer that is not linear; then all stay as they were.
        """
        names, number = layers_of(adapters), self._numbers.setdefault(writer, len(self._numbers))
        for name in names:
            module = lm.get_submodule(name)
            if not isinstance(module, nn.Linear):
                raise WeightSyncError(
                    f"TransformersAdapters cannot adapt {name!r}, a {type(module).__name__}; leave "
                    "it out of lora.target_modules, or use PolicyEngines, which merges adapters"
                )
        for name, layer in self._layers.items():
            if name not in names:
                layer.put(number, None)
        for name in names:
            if name not in self._layers:
                self._layers[name] = _Layer(self, lm.get_submodule(name))
            factors = adapters[f"{name}.lora_A"], adapters[f"{name}.lora_B"]
            self._layers[name].put(number, factors)

    def held(self, writer: Engine) -> dict[str, Tensor]:
        """The factors that a writer's lines are computed with, by the names of a push."""
        number = self._numbers.get(writer, -1)
        found = {}
        for name, layer in self._layers.items():
            if (factors := layer.factors_of(number)) is not None:
                found[f"{name}.lora_A"], found[f"{name}.lora_B"] = factors
        return found

    def begin(self, writers: Iterable[Engine]) -> None:
        """A batch of N lines begins; who writes them."""
        lines = [self._numbers[writer] for writer in writers]
        if lines != self._lines:
            self._lines = lines
            self._masks.clear()

    def mask(self, owners: Owners, like: Tensor) -> Tensor:
        """(N, 1, K): which of K columns are those of the line's writer."""
        if owners not in self._masks:
            columns = [number for number, count in owners for _ in range(count)]
            own = torch.tensor(self._lines)[:, None, None] == torch.tensor(columns)
            self._masks[owners] = own.to(like)
        return self._masks[owners]


class _Layer:
    """The adapters of one linear layer: its output is ``y + ((x A^T) * mask) B^T``.

    A (K, in) and B (out, K) are those of all writers, one after the other.
    """

    def __init__(self, adapters: _Adapters, linear: nn.Linear) -> None:
        self._adapters = adapters
        self._weight = linear.weight
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}
        linear.register_forward_hook(self._add)

    def put(self, writer: int, factors: tuple[Tensor, Tensor] | None) -> None:
        """Copy a writer's factors; None: it has none here."""
        if factors is None:
            self._factors.pop(writer, None)
        else:
            a, b = (factor.to(self._weight, copy=True) for factor in factors)
            self._factors[writer] = a, b  # in its place, so that the others' sums stay the same
        self._owners = tuple((number, len(a)) for number, (a, _) in self._factors.items())
        if self._factors:
            self._a = torch.cat([a for a, _ in self._factors.values()])
            self._b = torch.cat([b for _, b in self._factors.values()], dim=1)

    def factors_of(self, writer: int) -> tuple[Tensor, Tensor] | None:
        """Those of a writer among all that stand here; None: it has none."""
        start = 0
        for number, count in self._owners:
            if number == writer:
                return self._a[start : start + count], self._b[:, start : start + count]
            start += count
        return None

    def _add(self, linear: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if self._owners:
            chosen = F.linear(inputs[0], self._a) * self._adapters.mask(self._owners, output)
            output.flatten(0, -2).addmm_(chosen.flatten(0, -2), self._b.T)


class _AdaptedDecoder(Decoder):
    """Tells the adapters whose lines a batch has."""

    def __init__(
        self,
        lm: PreTrainedModel,
        ends: Sequence[int],
        kept: KeptTexts | None,
        adapters: _Adapters,
    ) -> None:
        super().__init__(lm, ends, kept)
        self._adapters = adapters

    def compute(self, rows: Sequence[DecodeRequest], **inputs: Any) -> Any:
        self._adapters.begin(row.writer for row in rows)
        return super().compute(rows, **inputs)
