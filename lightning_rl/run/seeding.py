"""One seed for a run, and the state of the random generators that code outside of it may use."""

import os
import random
import secrets
from typing import Any

import numpy as np
import torch

from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.run.dist import gather, rank

LARGEST_SEED = 2**32 - 1
"""Of ``seed_everything``; numpy takes no larger one."""


def run_seed(seed: int | None) -> int:
    """``seed`` if given, else what Lightning's ``seed_everything`` was called with, else 0.

    Raises:
        ConfigError: for a negative one.
    """
    require_at_least(0, seed=seed)
    return seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def drawn_seed() -> int:
    """A seed for ``seed_everything: true``; all ranks that Lightning starts get the first's.

    Raises:
        ConfigError: on one of several processes that something else started.
    """
    if not any(name in os.environ for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")):
        return secrets.randbelow(LARGEST_SEED + 1)
    if "PL_GLOBAL_SEED" not in os.environ:
        raise ConfigError(
            "seed_everything=true on processes that torchrun or SLURM started: each would draw a "
            "seed of its own; set it to a number"
        )
    return int(os.environ["PL_GLOBAL_SEED"])


def derived_seed(seed: int, *places: int) -> int:
    """A seed in [0, 2^64) for one place of a run, such as its iteration and epoch.

    Stateless, so that a resumed run draws the same. (seed x 1,000,003 + place) x 1,000,003 + ...
    modulo 2^64, which is what torch's generators take: odd factors, so no two iterations of a run
    share one, however large ``seed`` is.
    """
    for place in places:
        seed = seed * 1_000_003 + place
    return seed % 2**64


def derived_generator(seed: int, *places: int) -> torch.Generator:
    """A generator on the CPU that begins with :func:`derived_seed`."""
    return torch.Generator().manual_seed(derived_seed(seed, *places))


def permutation(count: int, seed: int, *places: int) -> torch.Tensor:
    """An order of ``count`` things for one place of a run, such as its pass over them."""
    return torch.randperm(count, generator=derived_generator(seed, *places))


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
