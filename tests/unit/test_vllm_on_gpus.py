"""VLLMLocal beside a trainer on GPUs, with both of them faked: devices, arguments, side effects.

What is faked is ``torch.cuda`` (each thread's current device, all generators) and vLLM's engine.
With a real engine on CPUs: tests/integration/test_vllm_engine.py.
"""

import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightning_rl.collect.loop import run_async
from lightning_rl.engines import Sampling, VLLMLocal, vllm_local, vllm_process
from lightning_rl.engines.vllm_process import contained
from lightning_rl.engines.vllm_settings import EngineSettings


class FakeCUDA:
    """Two GPUs. As in CUDA, each thread begins on the first one."""

    def __init__(self):
        self._thread = threading.local()
        self.generators = [torch.tensor([10]), torch.tensor([11])]
        self.emptied_on = []

    def current_device(self):
        return getattr(self._thread, "device", 0)

    def set_device(self, device):
        self._thread.device = device

    def device(self, device):
        fake = self

        class On:
            def __enter__(self):
                self.before = fake.current_device()
                fake.set_device(device)

            def __exit__(self, *error):
                fake.set_device(self.before)

        return On()

    def get_rng_state_all(self):
        return [state.clone() for state in self.generators]

    def set_rng_state_all(self, states):
        self.generators = states


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCUDA()
    for name in (
        "current_device",
        "set_device",
        "device",
        "get_rng_state_all",
        "set_rng_state_all",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: fake.emptied_on.append(fake.current_device())
    )
    return fake


class FakeLLM:
    """Notes on which device it is called, and behaves to its process as vLLM does."""

    def __init__(self, cuda, arguments, context):
        self.cuda, self.arguments, self.context = cuda, arguments, context
        self.called_on = []
        self.output_processor = SimpleNamespace(request_states={}, external_req_ids={})
        self.engine_core = SimpleNamespace(
            _finalizer=SimpleNamespace(detach=lambda: None),
            engine_core=SimpleNamespace(
                structured_output_manager=SimpleNamespace(clear_backend=lambda: None),
                model_executor=SimpleNamespace(shutdown=lambda: self._note("shutdown")),
                scheduler=SimpleNamespace(shutdown=lambda: None),
            ),
        )
        cuda.set_device(arguments.get("device_ids", [0])[0])
        cuda.generators = [torch.tensor([0]), torch.tensor([0])]
        torch.set_float32_matmul_precision("highest")

    def _note(self, call):
        self.called_on.append((call, self.cuda.current_device()))

    def collective_rpc(self, method, args=()):
        if args:
            self._note("push")
        return []

    def reset_prefix_cache(self, **_):
        return True

    def add_request(self, request_id, prompt, params, priority):
        self.output_processor.request_states[request_id] = SimpleNamespace()
        return request_id

    def step(self):
        self._note("step")
        done, self.output_processor.request_states = self.output_processor.request_states, {}
        completion = SimpleNamespace(token_ids=[1], logprobs=[-0.5], finish_reason="stop")
        return [
            SimpleNamespace(finished=True, request_id=name, outputs=[completion]) for name in done
        ]


@pytest.fixture
def vllm(cuda, monkeypatch):
    """Stands for vLLM; the engines that were started are in ``vllm.started``."""
    started = []

    def from_engine_args(arguments, context):
        started.append(FakeLLM(cuda, arguments, context))
        return started[-1]

    contexts = SimpleNamespace(ENGINE_CONTEXT="engine", LLM_CLASS="llm")
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    monkeypatch.setattr(FakeLLM, "vllm_config", config, raising=False)
    for name, content in {
        "vllm": {"EngineArgs": dict},
        "vllm.usage": {},
        "vllm.usage.usage_lib": {"UsageContext": contexts},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.llm_engine": {
            "LLMEngine": SimpleNamespace(from_engine_args=from_engine_args)
        },
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # by which VLLMLocal sees that there is one
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    # Collecting all that the tests before have left takes a second each time.
    monkeypatch.setattr(vllm_process.gc, "collect", lambda: 0)
    monkeypatch.setattr(vllm_local, "weight_shapes", lambda *_: {})
    monkeypatch.setattr(vllm_local, "sampling_params", lambda *_: None)
    return SimpleNamespace(started=started)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_s_engine_is_on_the_rank_s_gpu_in_every_thread(cuda, vllm, tmp_path, rank):
    cuda.set_device(rank)  # as Lightning does in each process
    engine = VLLMLocal(dtype="bfloat16")
    engine.start(tmp_path)
    (llm,) = vllm.started
    assert llm.arguments.get("device_ids", [0]) == [rank]
    assert cuda.current_device() == rank
    cuda.set_device(1 - rank)  # where another thread may be
    engine.load_weights([], 0)
    # Requests are computed in the event loop's thread, which begins on the first GPU.
    assert run_async(engine.generate([3], Sampling(max_tokens=1), 0)).token_ids == [1]
    engine.close()
    assert llm.called_on == [("push", rank), ("step", rank), ("shutdown", rank)]
    assert cuda.emptied_on == [rank]
    assert cuda.current_device() == 1 - rank


def test_a_step_takes_as_many_tokens_as_vllms_own_llm_chooses(cuda, vllm, tmp_path):
    engine = VLLMLocal(dtype="bfloat16")
    engine.start(tmp_path)
    (llm,) = vllm.started
    assert llm.context == "llm"
    assert "max_num_batched_tokens" not in llm.arguments  # the context decides
    engine.close()


def test_neither_randomness_nor_precision_of_the_trainer_change(cuda, vllm, tmp_path):
    cuda.set_device(1)
    generators = cuda.get_rng_state_all()
    torch.set_float32_matmul_precision("high")
    try:
        VLLMLocal(dtype="bfloat16").start(tmp_path)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert cuda.generators == generators


def test_the_newer_way_to_set_precision_is_kept_too():
    matmul, reduction = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with contained(None):
            torch.set_float32_matmul_precision("highest")
            setattr(matmul, reduction, (False, False))
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
        assert getattr(matmul, reduction)
        assert getattr(matmul, f"{reduction}_split_k")
    finally:
        matmul.fp32_precision = before


def settings(**changed):
    values = {
        "dtype": "bfloat16",
        "max_model_len": 64,
        "kv_cache_gb": None,
        "gpu_memory_utilization": 0.4,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "options": {},
    }
    return EngineSettings(**(values | changed))


def test_a_given_cache_leaves_vllm_the_share_that_it_may_take(cuda, tmp_path):
    """vLLM wants 0.92 of the card free where it is told no share, whatever the cache takes."""
    chosen = settings(kv_cache_gb=2.0).arguments(tmp_path)
    assert chosen["gpu_memory_utilization"] == 0.4
    assert chosen["kv_cache_memory_bytes"] == 2 * 2**30
    assert "kv_cache_memory_bytes" not in settings().arguments(tmp_path)
    assert settings().arguments(tmp_path)["gpu_memory_utilization"] == 0.4


def test_on_gpus_vllm_keeps_its_graphs_and_its_own_layout(cuda, tmp_path):
    on_gpu = settings().arguments(tmp_path)
    assert not on_gpu.keys() & {"enforce_eager", "block_size", "hf_overrides", "device_ids"}
