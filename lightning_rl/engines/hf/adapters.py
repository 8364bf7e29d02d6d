"""TransformersAdapters: transformers with one base and a LoRA for each of several policies."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.adapters import AdapterEngine, _PolicyView
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.rollout import Placed


@configurable
class TransformersAdapters(AdapterEngine, TransformersEngine):
    """Samples for several LoRA policies on one base with a single Hugging Face model.

    Requests of all policies are sampled in the same batches. A push contains the adapters of one
    policy and affects no other; the first push also contains the base. With a single policy it is a
    :class:`TransformersEngine`, whose settings it has.
    """

    async def look(
        self, pictures: Sequence[Placed], token_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        """Generate with the policy that plays the unnamed role."""
        if self.policies:
            return await self.of_role("").look(pictures, token_ids, sampling, seed)
        return await super().look(pictures, token_ids, sampling, seed)

    def load_adapters(
        self, view: _PolicyView, weights: Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        self._load(view, weights, version)

    def adapter_digests(self, view: _PolicyView, names: Sequence[str]) -> dict[str, str]:
        return self._digests_of(self._adapters.held(view), names)
