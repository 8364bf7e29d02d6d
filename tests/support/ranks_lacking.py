"""Metrics of two ranks, one of which lacks what another has: a teacher, experts, or any token."""

from collections.abc import Callable

import torch.distributed as dist
from tensordict import TensorDict

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.objective import loss_tokens
from lightning_rl.run.processes.dist import rank
from lightning_rl.run.token_metrics import TokenMetrics
from tests.support.algorithms import imagined, objectives, parts_of, with_all_columns


def _teacher(batch: TensorDict) -> None:
    for name in ("teacher_logprobs", "teacher_ids", "teacher_top"):
        del batch["tokens", name]


def _likeliest(batch: TensorDict) -> None:
    for name in ("teacher_ids", "teacher_top"):
        del batch["tokens", name]


def _experts(batch: TensorDict) -> None:
    batch["rollouts", "demonstration"][:] = False


def _samples(batch: TensorDict) -> None:
    batch["rollouts", "demonstration"][:] = True


def _tokens(batch: TensorDict) -> None:
    batch["tokens", "loss_mask"][:] = False
    batch["tokens", "call"][:] = -1


LACKING: dict[str, Callable[[TensorDict], None]] = {
    "nothing": lambda batch: None, "teacher": _teacher, "likeliest": _likeliest,
    "experts": _experts, "samples": _samples, "tokens": _tokens,
}  # fmt: skip


def given_to(place: int, batch: TensorDict, lacks: str) -> TensorDict:
    """Return the batch with all columns; to rank 1 without what it lacks."""
    batch = with_all_columns(batch.clone())
    if place == 1:
        LACKING[lacks](batch)
    return batch


def objective_metrics(
    batches: list[TensorDict], lacks: str, places: list[int]
) -> dict[str, dict[str, float]]:
    """Return the metrics of each objective over the batches of these ranks."""
    found = {}
    for name, objective in objectives().items():
        metrics = TokenMetrics()
        for place in places:
            batch = given_to(place, batches[place], lacks)
            scores = imagined(batch)
            metrics.add(objective(scores, loss_tokens(batch, scores), 0)[1])
        found[name] = metrics.compute()
    return found


def metrics_by_two(batches: list[TensorDict], lacks: str) -> dict[str, dict[str, float]]:
    """Return the same, each rank with its own batch, after every advantage."""
    dist.init_process_group("gloo")
    for advantage in parts_of(Advantage).values():
        advantage(given_to(rank(), batches[rank()], lacks))
    return objective_metrics(batches, lacks, [rank()])
