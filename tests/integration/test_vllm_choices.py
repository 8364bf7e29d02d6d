"""Test vLLM's own code with our arguments on faked GPUs: cards, and their memory.

That an engine really gets there is for a machine with GPUs.
"""

import pytest
import vllm.engine.arg_utils as arguments
import vllm.envs as envs
import vllm.platforms.interface as interface
from vllm import EngineArgs
from vllm.usage.usage_lib import UsageContext


class Cards(interface.Platform):
    """Cards of 80 GB each, seen through CUDA_VISIBLE_DEVICES."""

    _enum = interface.PlatformEnum.CUDA
    device_name, device_type = "cuda", "cuda"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 80 * 2**30

    @classmethod
    def get_device_name(cls, device_id=0):
        return "NVIDIA H100 80GB HBM3"


@pytest.fixture
def cards(monkeypatch):
    envs.disable_envs_cache()  # which an engine of another test has left
    monkeypatch.setattr(arguments, "current_platform", Cards())
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)


@pytest.mark.parametrize(("visible", "physical"), [(None, 1), ("4,6", 6)])
def test_the_device_that_it_is_told_is_the_one_of_that_number_here(
    skeleton, cards, monkeypatch, visible, physical
):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assigned = EngineArgs(model=str(skeleton), device_ids=[1])._resolve_device_ids()
    assert assigned == [physical]
    # The worker does this with that, and with its local rank of 0.
    interface.set_assigned_physical_gpu_ids(assigned)
    assert Cards.logical_device_id_to_visible_device_id(0) == 1


def test_a_step_of_its_own_llm_takes_more_tokens_than_an_engine_s(cards):
    tokens, _ = EngineArgs.get_batch_defaults(world_size=1)
    assert tokens[UsageContext.LLM_CLASS] == 16384
    assert UsageContext.ENGINE_CONTEXT not in tokens  # then it is 2,048
