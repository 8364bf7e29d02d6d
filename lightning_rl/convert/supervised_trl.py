"""TRL's trainers that learn from fixed rows: SFT, DPO, KTO and reward models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_rl.config.names import public
from lightning_rl.convert import learning_trl as learning
from lightning_rl.convert.conversion import (
    Conversion,
    Given,
    ParameterRow,
    sections,
)
from lightning_rl.convert.data_trl import put_rows
from lightning_rl.convert.shared_trl import (
    TRL,
    defaults_of_bases,
    ending,
    put_adapters,
    put_model,
    put_trainer,
    strategy,
)

SECTIONS = sections("trl_supervised")
_SHARED = [
    *("model_name_or_path", "dtype", "model_revision", "attn_implementation", "use_peft"),
    *(name for name in TRL if name.startswith(("lora_", "use_", "load_in_", "bnb_", "dataset"))),
    *(name for name in TRL if name.startswith(("dataloader_", "adam_", "torch_compile_", "hub_"))),
    *(name for name in TRL if name.startswith(("lr_", "warmup_", "save_", "logging_", "ddp_"))),
    *("optim", "optim_args", "weight_decay", "max_grad_norm", "average_tokens_across_devices"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "auto_find_batch_size", "seed"),
    *("torch_empty_cache_steps", "output_dir", "data_seed", "bf16", "fp16", "tf32", "deepspeed"),
    *("fsdp", "fsdp_config", "accelerator_config", "report_to", "run_name", "disable_tqdm"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "push_to_hub"),
    "resume_from_checkpoint",
]
_GRPO_ALONE = (
    *("use_vllm", "use_adaptive_entropy", "use_bias_correction_kl", "use_uld_loss"),
    *("use_transformers_continuous_batching", "use_transformers_paged"),
)
"""Names of a GRPOConfig that begin as shared ones do."""


@dataclass(frozen=True)
class Supervised:
    """Converts the configuration of one trainer; each learns by a module and a data module of ours.

    Args:
        config: the name of TRL's configuration.
        module: our module.
        data: our data module.
        carried: our path for each of its options that keeps its number.
    """

    config: str
    module: str
    data: str
    carried: Mapping[str, str]

    @property
    def rows(self) -> dict[str, ParameterRow]:
        """The table of its options, by name."""
        shared = {name: TRL[name] for name in _SHARED if name not in _GRPO_ALONE}
        ours = [*SECTIONS["Every trainer of rows"], *SECTIONS[self.config]]
        return shared | {row.theirs: row for row in ours}

    def convert(self, values: Mapping[str, Any], devices: int, heldout: str | None) -> Conversion:
        """Convert values by name; ``heldout`` is a file or folder of held-out rows.

        Raises:
            ConfigError: if a value is of the wrong kind, or refused.
        """
        values = dict(values)
        if isinstance(kinds := values.get("loss_type"), list) and len(kinds) == 1:
            values["loss_type"] = kinds[0]  # as DPO's is written
        given = Given(values, self.rows, defaults_of_bases())
        result = Conversion(
            {
                "model": {"class_path": self.module, "init_args": {}},
                "data": {"class_path": self.data, "init_args": {}},
            }
        )
        put_model(given, result)
        self.put_adapters(given, result)
        if "loss_type" in self.rows:
            result.choose(given, "loss_type")
        for theirs, ours in self.carried.items():
            if given[theirs] is not None:
                result.put(ours, given[theirs])
        written = result.config["model"]["init_args"].items()
        numbers = {n: v for n, v in written if n == "model" or isinstance(v, int | float)}
        public(self.module)(**numbers)  # which judges what is said of its loss
        put_rows(given, result, heldout)
        _batches(given, result)
        learning.put_optimizer(given, result, _length(given, result))
        put_trainer(given, result, devices)
        _validation(given, result)
        result.put("trainer.callbacks", ending(given, result, 1))
        result.leave_rest(given)
        return result

    def put_adapters(self, given: Given, result: Conversion) -> None:
        """Set the LoRA, if one is trained."""
        put_adapters(given, result)


class SFT(Supervised):
    """SFTTrainer, which has no adapters here."""

    def put_adapters(self, given: Given, result: Conversion) -> None:
        if given.look("use_peft"):
            result.leave(
                given,
                "use_peft",
                "SFTModule trains all weights: learning_rate may be too high for them",
            )


_LENGTH = {"max_length": "data.max_length"}
_WEIGHTS = {name: f"model.{name}" for name in ("beta", "desirable_weight", "undesirable_weight")}
_SMOOTHED = {"beta": "model.beta", "label_smoothing": "model.smoothing"}
_CENTRED = {"center_rewards_coefficient": "model.centering"}
SUPERVISED: dict[str, Supervised] = {
    "sft": SFT(
        "SFTConfig", "SFTModule", "SFTDataModule", _LENGTH | {"max_seq_length": "data.max_length"}
    ),
    "dpo": Supervised("DPOConfig", "DPOModule", "PairDataModule", _SMOOTHED | _LENGTH),
    "kto": Supervised("KTOConfig", "KTOModule", "KTODataModule", _WEIGHTS | _LENGTH),
    "reward": Supervised(
        "RewardConfig", "RewardModelModule", "RewardPairDataModule", _CENTRED | _LENGTH
    ),
}
"""TRL's trainers of rows, by their names."""


def _batches(given: Given, result: Conversion) -> None:
    result.put("data.batch_size", given["per_device_train_batch_size"])
    if given["data_seed"] is not None:
        result.put("data.seed", given["data_seed"])
    result.put("trainer.accumulate_grad_batches", given["gradient_accumulation_steps"])
    if given["max_grad_norm"]:
        result.put("trainer.gradient_clip_val", given["max_grad_norm"])


def _length(given: Given, result: Conversion) -> int | None:
    """Set the length of the run; return its optimizer steps, if the file has them."""
    if (steps := given["max_steps"]) > 0:
        result.put("trainer.max_steps", steps)
        return int(steps)
    epochs = given["num_train_epochs"]
    result.put("trainer.max_epochs", math.ceil(epochs))
    if epochs != int(epochs):
        result.leave(given, "num_train_epochs", "epochs are whole; set trainer.max_steps")
    return None


def _validation(given: Given, result: Conversion) -> None:
    """Set after how many batches the held-out rows are read; Lightning's default is each epoch."""
    if strategy(given, "eval_strategy") != "steps":
        return
    every = given["eval_steps"] or given.look("logging_steps")
    if every < 1:
        result.leave(given, "eval_steps", "a share of all steps; they are read after each epoch")
        return
    batches = int(every) * given.look("gradient_accumulation_steps")
    result.put("trainer.val_check_interval", batches)
    result.put("trainer.check_val_every_n_epoch", None)
