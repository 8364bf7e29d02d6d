"""What is known of vLLM's insides, and what keeps it from changing the process around it."""

import os
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rl.errors import WeightSyncError


def weight_shapes(model_dir: Path) -> dict[str, torch.Size]:
    """Shapes of the model's weights under their Hugging Face names."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    return {name: weight.shape for name, weight in lm.state_dict().items()}


def reload_weights(worker: Any, items: list[tuple[str, Tensor]]) -> None:
    """Runs in vLLM's worker: load through the model's own loader, and check that it took all."""
    model = worker.get_model()
    load, loaded = model.load_weights, set[str]()
    # vLLM only warns of missing weights, so listen to what the model's loader says it loaded.

    def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded.update(load(weights))
        return loaded

    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=iter(items))
    except Exception as error:  # each kind of layer has its own way to fail
        raise WeightSyncError(
            f"vLLM does not take these weights: {last_line(error)}; is the engine's model the "
            "trainer's?"
        ) from error
    finally:
        del model.load_weights
    missing = sorted({name for name, _ in model.named_parameters()} - loaded)
    if missing:
        raise WeightSyncError(
            f"the push left {len(missing)} of the engine's weights as they were, first "
            f"{missing[0]!r}; is the engine's model the trainer's?"
        )


def skip_rank_compilation() -> None:
    """Replace one function that vLLM compiles for 2-10 s on first use; same result, eager."""
    import vllm.v1.sample.sampler as sampler

    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)


@contextmanager
def contained() -> Iterator[None]:
    """Undo what importing and starting vLLM does to the process around it."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_threads, threads, hook = torch.set_num_threads, torch.get_num_threads(), sys.excepthook
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            sys.excepthook = hook
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])


def last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else repr(error)
