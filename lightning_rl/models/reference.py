"""Reference policies: a frozen copy, a periodically renewed one, or a LoRA's base."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.models.lora import switch_adapters
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading, model_of
from lightning_rl.models.tokenizer import require_rows, require_same_tokens


class Reference(nn.Module, ABC):
    """Provides the policy that scores ``ref_logprobs``."""

    @abstractmethod
    def configure(self, policy: Policy) -> None:
        """Prepare the reference, given the initial policy."""

    @abstractmethod
    def scoring(self, policy: Policy) -> AbstractContextManager[Policy]:
        """Return a context that yields the reference policy."""

    def on_iteration_end(self, policy: Policy, iteration: int) -> None:
        """Called after each iteration, whose number counts from 1."""


@configurable(model=model_of)
class FrozenReference(Reference):
    """A copy of the initial policy, or another checkpoint; never changes.

    Args:
        model: directory or hub name of another model with the same tokenizer; None: the policy's
            own initial weights.
    """

    def __init__(self, model: str | None = None) -> None:
        super().__init__()
        self.model = model

    def configure(self, policy: Policy) -> None:
        if self.model is not None:
            loading = Loading(
                policy.loading.trust_remote_code,
                cast_lm_head_to_fp32=policy.loading.cast_lm_head_to_fp32,
            )
            require_same_tokens(self.model, policy.model, loading)
            self.policy = Policy(self.model, loading=loading)
            require_rows(self.model, self.policy.rows, policy.tokenizer)
            if policy.reader is not None and not policy.reader.reads_as(self.policy.reader):
                raise ConfigError(
                    f"reference model={self.model!r} does not read pictures as the policy's "
                    f"{policy.model!r} does; use one of the same family and image processor"
                )
        else:
            value_head, policy.value_head = policy.value_head, None  # not part of a reference
            self.policy = copy.deepcopy(policy)
            policy.value_head = value_head
        if policy.compiled:  # a copy is not, and would round otherwise than the policy
            self.policy.compile_layers()
        self.policy.requires_grad_(False)
        self.policy.replays = False  # it is compared with as it is

    @contextmanager
    def scoring(self, policy: Policy) -> Iterator[Policy]:
        yield self.policy


@configurable
class PeriodicReference(FrozenReference):
    """A frozen copy that is renewed from the policy every ``every_n_iterations`` iterations.

    Args:
        every_n_iterations: iterations between two renewals.

    Raises:
        ConfigError: if ``every_n_iterations`` is less than 1.
    """

    def __init__(self, every_n_iterations: int = 100) -> None:
        super().__init__()
        if every_n_iterations < 1:
            raise ConfigError(
                f"PeriodicReference(every_n_iterations={every_n_iterations}) must be >= 1"
            )
        self.every_n_iterations = every_n_iterations

    def on_iteration_end(self, policy: Policy, iteration: int) -> None:
        if iteration % self.every_n_iterations == 0:
            self.policy.lm.load_state_dict(policy.lm.state_dict())


class BaseReference(Reference):
    """The policy with its LoRA switched off: a reference that costs no memory.

    Raises:
        ConfigError: if the policy has no LoRA.
    """

    def configure(self, policy: Policy) -> None:
        if policy.lora is None:
            raise ConfigError("reference=BaseReference needs a LoRA policy; set lora")
        policy.lora.require_frozen_base()

    @contextmanager
    def scoring(self, policy: Policy) -> Iterator[Policy]:
        # Without its critic: the base's values must not replace the policy's own.
        value_head, policy.value_head = policy.value_head, None
        replays, policy.replays = policy.replays, False
        switch_adapters(policy.lm, on=False)
        try:
            yield policy
        finally:
            switch_adapters(policy.lm, on=True)
            policy.value_head, policy.replays = value_head, replays
