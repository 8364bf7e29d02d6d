"""Direct preference optimisation, with pairs from a file or from graded rollouts."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import token_rows
from lightning_rl.data.implied_prompts import ImpliedPrompts
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.errors import ConfigError, require_finite
from lightning_rl.learn.base import save_primitive_hparams
from lightning_rl.learn.sft import SFTDataModule
from lightning_rl.learn.supervised import Pairs, SupervisedModule
from lightning_rl.models.lora import LoRA, as_lora
from lightning_rl.models.policy import Scores
from lightning_rl.models.pretrained import Loading, model_of
from lightning_rl.models.reference import FrozenReference, Reference
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.vision.training import Vision


def dpo(policy_margin: Tensor, ref_margin: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """Return the loss per pair (P,): -log sigmoid(beta (m - m_ref)) (Rafailov et al. 2023, eq. 7).

    A margin (P,) is log p(chosen) - log p(rejected), summed over tokens. ``smoothing`` is the
    probability that a label is wrong (conservative DPO, Mitchell 2023), by which both cases are
    weighted.
    """
    assert policy_margin.shape == ref_margin.shape and policy_margin.ndim == 1
    logits = beta * (policy_margin - ref_margin)
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


@configurable(model=model_of, lora=as_lora)
class ComparedModule(SupervisedModule):
    """Learns from fixed completions, compared with a reference policy: the part of DPO and KTO.

    Args:
        model: directory or hub name of the causal LM.
        beta: strength of the regularisation towards the reference.
        reference: the reference policy; None: a frozen copy of the initial model.
        optimizer: called with the trained parameters.
        lr_scheduler: called with the optimizer; stepped once per optimizer step.
        lora: train only adapters; None: train all weights.
        loading: how the model is loaded: its own code, ``gradient_checkpointing`` and others.
        vision: which parts of an image-text model's vision are trained; None: none.

    Raises:
        ConfigError: for a ``beta`` that is not positive.
    """

    def __init__(
        self,
        model: str,
        beta: float = 0.1,
        reference: Reference | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=5e-7, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        lora: LoRA | None = None,
        loading: Loading = Loading(),
        vision: Vision | None = None,
    ) -> None:
        super().__init__(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            loading=loading,
            lora=lora,
            vision=vision,
        )
        require_finite(beta=beta)
        if beta <= 0:
            raise ConfigError(f"{type(self).__name__}(beta={beta}) must be > 0")
        save_primitive_hparams(self)
        self.beta = beta
        self.reference: Reference | None = None
        self._reference = (reference,)  # a tuple hides it from nn.Module until it is configured

    def configure_model(self) -> None:
        """Load the model and its reference, once."""
        super().configure_model()
        if self.reference is None:
            self.reference = self._reference[0] or FrozenReference()
            self.reference.configure(self.loaded_policy)

    def reference_logprobs(self, batch: TensorDict) -> Tensor:
        """Return log p_ref of each completion, (R,)."""
        assert self.reference is not None  # it comes with the policy
        with torch.no_grad(), self.reference.scoring(self.loaded_policy) as reference:
            return completion_logprobs(reference(batch), batch)


def completion_logprobs(scores: Scores, batch: TensorDict) -> Tensor:
    """Return the sum of the logprobs of each row's loss tokens, (R,)."""
    row = token_rows(batch)[scores.live]
    return scores.logprobs.new_zeros(len(batch["rollouts"])).index_add(0, row, scores.logprobs)


@configurable(model=model_of)
class DPOModule(ComparedModule):
    """Raises the probability of a pair's chosen completion over the rejected one, by DPO.

    It uses automatic optimisation, so gradient clipping and accumulation are the Trainer's. The two
    completions of a pair share their prompt's forward pass.

    Args:
        smoothing: probability that a label is wrong, in [0, 0.5).

    Raises:
        ConfigError: for values out of range.
    """

    prefix = "dpo"

    def __init__(
        self, model: str, beta: float = 0.1, smoothing: float = 0.0, **options: Any
    ) -> None:
        super().__init__(model, beta, **options)
        require_finite(smoothing=smoothing)
        if not 0 <= smoothing < 0.5:
            raise ConfigError(f"DPOModule(smoothing={smoothing}) must be in [0, 0.5)")
        self.smoothing = smoothing

    def weight(self, batch: TensorDict) -> Tensor:
        self.require_packed(batch)
        return torch.tensor(len(batch["rollouts"]) / 2)

    def sums(self, batch: TensorDict) -> Pairs:
        """Return the sums over a batch of pairs: rows 2i are chosen, 2i + 1 rejected."""
        self.require_packed(batch)
        ref_margin = _margins(self.reference_logprobs(batch))
        margin = _margins(completion_logprobs(self.loaded_policy(batch), batch))
        losses, gap = dpo(margin, ref_margin, self.beta, self.smoothing), margin - ref_margin
        summed = {"loss": losses, "accuracy": (gap > 0).to(gap.dtype), "margin": gap}
        return {name: (values.sum(), len(margin)) for name, values in summed.items()}


def _margins(logprobs: Tensor) -> Tensor:
    """Return log p(chosen) - log p(rejected) of each pair, shape (P,)."""
    chosen, rejected = logprobs.view(-1, 2).unbind(1)
    return chosen - rejected


@configurable(train=prompts_of, val=prompts_of)
class PairDataModule(SFTDataModule):
    """Makes packed batches of pairs from rows with a prompt, a chosen and a rejected completion.

    Args:
        train: the training pairs; completions are text, messages or token ids. Without a prompt it
            is what both completions begin with.
        val: held-out pairs; None: no validation.
        chosen_column: name of the column with the better completion.
        rejected_column: name of the column with the worse completion.
        options: further arguments of ``SFTDataModule``, except ``messages_column``.
    """

    works_with: ClassVar[type[SupervisedModule]] = DPOModule

    def __init__(
        self,
        train: AnyPrompts,
        val: AnyPrompts | None = None,
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        **options: Any,
    ) -> None:
        super().__init__(train, val, chosen_column, messages_column="", **options)
        self.rejected_column = rejected_column

    def row(self, prompt: Prompt) -> Any:
        """Return a pair of rollouts, the better one first; None if one is too long."""
        columns = (self.completion_column, self.rejected_column)
        pair = [self.imitated(prompt, column) for column in columns]
        return None if None in pair else pair

    def implied(self) -> ImpliedPrompts:
        return ImpliedPrompts((self.completion_column, self.rejected_column))

    @staticmethod
    def collate(rows: list[Any]) -> TensorDict:
        return pack_rollouts([rollout for pair in rows for rollout in pair])


@configurable
class RolloutPairs(PromptDataset):
    """Pairs from graded rollouts, as written by ``lightning-rl rollout``.

    Each group yields its best and its worst rollout as a pair. Completions are the recorded tokens,
    so nothing is tokenised again. Rollouts with several rows are left out, since they are not a
    single completion.

    Args:
        path: the rollout file: ``.jsonl``, ``.parquet`` or ``.sqlite``.
        min_gap: the best reward must exceed the worst by more than this.
    """

    def __init__(self, path: str, min_gap: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.path = path
        self.min_gap = min_gap

    def __repr__(self) -> str:
        return f"RolloutPairs({self.path!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        for group in open_rollouts(self.path).groups():
            graded = [r for r in group if r.reward is not None and r.token_ids and len(r.rows) == 1]
            best = max(graded, key=_reward, default=None)
            worst = min(graded, key=_reward, default=None)
            if best and worst and _reward(best) - _reward(worst) > self.min_gap:
                pair = {"chosen": best.token_ids, "rejected": worst.token_ids}
                where = f"{self.path}, group {best.group_id!r}"
                yield where, {self.prompt_column: best.prompt.asked, **pair}


def _reward(rollout: Rollout) -> float:
    return rollout.reward or 0.0
