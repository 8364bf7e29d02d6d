"""Reward models: a score for completions, learned from pairs of a better and a worse one."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.config.arguments import configurable
from lightning_rl.data.chats import is_chat, row_options
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.data.supervised import conversation, not_completed
from lightning_rl.errors import ConfigError, DataError, require_finite
from lightning_rl.learn.base import save_primitive_hparams
from lightning_rl.learn.dpo import PairDataModule
from lightning_rl.learn.supervised import Pairs, SupervisedModule
from lightning_rl.models.lora import LoRA, as_lora
from lightning_rl.models.parallel.strategy import refuse_mesh
from lightning_rl.models.pretrained import Loading, model_of
from lightning_rl.models.recompute import as_recompute
from lightning_rl.models.reward_model import RewardModel, padded, padding_of, scored_text
from lightning_rl.rollout import Prompt


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centering: float = 0.0
) -> Tensor:
    """Return the loss per pair (P,): -log sigmoid(r_c - r_r - margin) + c (r_c + r_r)².

    The first term is the Bradley-Terry likelihood (Ouyang et al. 2022, eq. 1), with the margin by
    which the chosen completion is better (Touvron et al. 2023, Llama 2, eq. 2). It leaves the level
    of rewards open; the second term, with c = ``centering``, holds their mean near 0 (Eisenstein et
    al. 2023, "Helping or herding?"). TRL's ``RewardTrainer`` computes the same.
    """
    assert chosen.shape == rejected.shape and chosen.ndim == 1
    gap = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(gap) + centering * (chosen + rejected) ** 2


@configurable(model=model_of, lora=as_lora)
class RewardModelModule(SupervisedModule):
    """Trains a reward model: a causal LM whose head is one number per text (Bradley-Terry).

    It uses automatic optimisation, so gradient clipping and accumulation are the Trainer's. What
    ``HFExport`` writes is a model of ``AutoModelForSequenceClassification`` with one label, for
    ``ModelReward``, vLLM and TRL, and for ``SeparateValueHead`` to begin a critic with.

    Recorded are the loss, the share of pairs in which the chosen completion has the higher reward,
    the mean difference of rewards, and ``length_bias``: the share of pairs in which the longer text
    has the higher reward, minus the share in which the longer one was chosen.

    Args:
        model: directory or hub name of a causal LM, or of a reward model to go on with.
        centering: weight of the squared sum of a pair's rewards, which holds their mean near 0
            (TRL's ``center_rewards_coefficient``, where 0.01 is usual).
        optimizer: called with the parameters.
        lr_scheduler: called with the optimizer; stepped once per optimizer step.
        lora: train only adapters, and the head; None: train all weights.
        loading: how the model is loaded. A reward model has its weights from files, and no LM head:
            without ``random_init`` and ``cast_lm_head_to_fp32``.

    Raises:
        ConfigError: for values out of range.
    """

    prefix = "rm"

    def __init__(
        self,
        model: str,
        centering: float = 0.0,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        lora: LoRA | None = None,
        loading: Loading = Loading(),
    ) -> None:
        super().__init__(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            loading=loading,
            lora=lora,
        )
        require_finite(centering=centering)
        if centering < 0:
            raise ConfigError(f"RewardModelModule(centering={centering}) must be >= 0")
        if loading.random_init or loading.cast_lm_head_to_fp32:
            raise ConfigError(
                f"RewardModelModule({loading}): a reward model has its weights from files, and no "
                "LM head; leave out random_init and cast_lm_head_to_fp32"
            )
        save_primitive_hparams(self)
        self.centering = centering

    def configure_model(self) -> None:
        """Load the model, once."""
        refuse_mesh(self)
        if self.policy is None:
            model: Any = RewardModel(str(self.model), self.loading, new_head=True, lora=self.lora)
            if (recompute := as_recompute(self.loading.gradient_checkpointing)) is not None:
                recompute.apply(model.lm)
            self.policy = model.train()  # or nothing is recomputed

    def weight(self, batch: TensorDict) -> Tensor:
        return torch.tensor(float(len(self._margins(batch))))

    def sums(self, batch: TensorDict) -> Pairs:
        """Return the sums over a batch of pairs: chosen texts first, then rejected ones."""
        margins = self._margins(batch)
        chosen, rejected = self.loaded_policy(batch).chunk(2)
        longer, shorter = batch["attention_mask"].sum(1).chunk(2)
        length_gap, gap = (longer - shorter).sign(), (chosen - rejected).detach()
        summed = {
            "loss": bradley_terry(chosen, rejected, margins, self.centering),
            "accuracy": (gap > 0).to(gap.dtype),
            "gap": gap,
            "reward": (chosen + rejected) / 2,
            "length_bias": length_gap * (gap.sign() - 1) / 2,
        }
        return {name: (values.sum(), len(margins)) for name, values in summed.items()}

    @staticmethod
    def _margins(batch: TensorDict) -> Tensor:
        if not isinstance(batch, TensorDict) or batch.get("margin", None) is None:
            raise ConfigError(
                f"RewardModelModule trains on pairs, but got a batch of type "
                f"{type(batch).__name__}; use RewardPairDataModule"
            )
        margins: Tensor = batch["margin"]
        return margins


@configurable(train=prompts_of, val=prompts_of)
class RewardPairDataModule(PairDataModule):
    """Batches of pairs for ``RewardModelModule``, from rows as ``PairDataModule`` reads them.

    A completion is text, the messages that end a chat, or token ids of the same tokenizer. A chat
    is written by the chat template, as a whole; a text is followed by the end token.

    Args:
        train: the training pairs.
        val: held-out pairs; None: no validation.
        margin_column: name of the column with the number by which it is better; None: 0.
        max_length: pairs with a longer text are left out, which is said once; None: texts longer
            than the model's positions are refused.
        options: further arguments of ``PairDataModule``, except ``trained_roles``.
    """

    works_with = RewardModelModule

    def __init__(
        self,
        train: AnyPrompts,
        val: AnyPrompts | None = None,
        margin_column: str | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(train, val, max_length=max_length, trained_roles=None, **options)
        self.margin_column = margin_column

    def row(self, prompt: Prompt) -> Any:
        """Return the tokens of both texts, the better one first, and the margin; None if one is
        too long.
        """
        margin = 0.0 if self.margin_column is None else prompt.columns.get(self.margin_column)
        if not isinstance(margin, int | float):
            raise DataError(
                f"row {prompt.id}: {self.margin_column!r} must be a number, got {margin!r:.80}"
            )
        columns = (self.completion_column, self.rejected_column)
        texts = [self._text(prompt, column) for column in columns]
        if all(self._limit.fits(prompt, len(text)) for text in texts):
            return texts, float(margin)
        self._limit.leave_out(prompt)
        return None

    def _text(self, prompt: Prompt, column: str) -> list[int]:
        said: Any = prompt.columns.get(column)
        if isinstance(said, list) and said and isinstance(said[0], int):
            said = self._tokenizer.decode(said, skip_special_tokens=True)
        chat = not isinstance(prompt.prompt, str)
        if not (isinstance(said, str) or (chat and is_chat(said))):
            raise not_completed(prompt, column, said)
        if not chat:
            return scored_text(self._tokenizer, prompt.prompt, said)
        follows = conversation(prompt, said)[len(prompt.prompt) :]
        options = row_options(prompt.columns)
        return scored_text(self._tokenizer, prompt.prompt, follows, options=options)

    def collate(self, rows: list[Any]) -> TensorDict:  # type: ignore[override]
        """Return a padded batch: all chosen texts, then all rejected ones, and the margins."""
        texts = [pair[place] for place in (0, 1) for pair, _ in rows]
        margin = torch.tensor([margin for _, margin in rows])
        return TensorDict(padded(texts, padding_of(self._tokenizer)) | {"margin": margin}, [])
