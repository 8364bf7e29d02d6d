"""ParameterSummary: how large the model is, and how much of it is trained, in one line."""

from typing import Any

from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class ParameterSummary(ModelSummary):
    """Lightning's summary without its table, whose layers say nothing here and whose FLOPs are 0.

    A ``fit`` puts it in the place of Lightning's own, where that stands as the Trainer made it.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        total, trained = map(get_human_readable_count, (total_parameters, trainable_parameters))
        rank_zero_info(f"{total} parameters, {trained} of them trained; {model_size:.3g} MB")
