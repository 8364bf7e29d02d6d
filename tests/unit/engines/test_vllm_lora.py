"""Test workers that cannot keep a LoRA apart."""

from types import SimpleNamespace as Namespace

import pytest

from lightning_rl.engines.vllm.lora import keep_apart
from lightning_rl.errors import WeightSyncError


def test_a_worker_without_adapters_and_one_that_is_too_old_are_refused():
    with pytest.raises(WeightSyncError, match="start it with --enable-lora"):
        keep_apart(Namespace(model_runner=Namespace()))
    with pytest.raises(WeightSyncError, match=r"vLLM >= 0\.28, or set"):
        keep_apart(Namespace(model_runner=Namespace(lora_manager=object())))
