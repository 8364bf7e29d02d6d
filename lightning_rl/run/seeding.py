"""A run's seed, and the state of the random generators that code outside the library may use."""

import os
import random
import secrets
from typing import Any

import numpy as np
import torch

from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.run.processes.dist import gather, rank

LARGEST_SEED = 2**32 - 1
"""The largest seed of ``seed_everything`` and numpy."""


def run_seed(seed: int | None) -> int:
    """Return ``seed`` if given, else the seed of Lightning's ``seed_everything``, else 0.

    Raises:
        ConfigError: if it is negative.
    """
    require_at_least(0, seed=seed)
    return seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def drawn_seed() -> int:
    """Draw a seed for ``seed_everything: true``; ranks that Lightning starts get that of the first.

    Raises:
        ConfigError: if several processes were started by something else than Lightning.
    """
    if not any(name in os.environ for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")):
        return secrets.randbelow(LARGEST_SEED + 1)
    if "PL_GLOBAL_SEED" not in os.environ:
        raise ConfigError(
            "seed_everything=true on processes started by torchrun or SLURM: each would draw its "
            "own seed; set it to a number"
        )
    return int(os.environ["PL_GLOBAL_SEED"])


def derived_seed(seed: int, *places: int) -> int:
    """Return a seed in [0, 2^64) for one place in a run, such as its iteration and epoch.

    It is stateless, so that a resumed run draws the same. The value is (seed x 1,000,003 + place) x
    1,000,003 + ... modulo 2^64, the range of torch's generators: the factors are odd, so no two
    iterations of a run share a seed, however large ``seed`` is.
    """
    for part in places:
        seed = seed * 1_000_003 + part
    return seed % 2**64


def derived_generator(seed: int, *places: int) -> torch.Generator:
    """Return a CPU generator that is seeded with :func:`derived_seed`."""
    return torch.Generator().manual_seed(derived_seed(seed, *places))


def permutation(count: int, seed: int, *places: int) -> torch.Tensor:
    """Return a random order of ``count`` items for one place in a run, such as an epoch."""
    return torch.randperm(count, generator=derived_generator(seed, *places))


def random_state() -> dict[str, Any]:
    """Return the states of this process's torch, numpy, Python and CUDA generators, as primitives
    and tensors.
    """
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    own = numpy_state["state"]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": numpy_state | {"state": own | {"key": own["key"].tolist()}},
    }


def gather_random_states() -> list[dict[str, Any]]:
    """Return the :func:`random_state` of every rank."""
    return gather(random_state())


def restore_random_states(states: list[dict[str, Any]]) -> None:
    """Restore the :func:`random_state` of every rank; additional ranks keep theirs."""
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
