"""One seed for a run, and the state of the random generators that code outside of it may use."""

import os
import random
from typing import Any

import numpy as np
import torch

from lightning_rl.dist import gather, rank


def run_seed(seed: int | None) -> int:
    """``seed`` if given, else what Lightning's ``seed_everything`` was called with, else 0."""
    return seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def gather_random_states() -> list[dict[str, Any]]:
    """The states of torch, numpy, Python and CUDA generators of every rank; primitives, tensors."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    mine: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": numpy_state | {"state": _plain(numpy_state["state"])},
    }
    return gather(mine)


def restore_random_states(states: list[dict[str, Any]]) -> None:
    """Inverse of :func:`gather_random_states`; ranks that were not there before keep theirs."""
    if rank() >= len(states):
        return
    state = states[rank()]
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(state["numpy"] | {"state": state["numpy"]["state"] | {"key": key}})  # noqa: NPY002
    if torch.cuda.is_initialized() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"key": state["key"].tolist()}
