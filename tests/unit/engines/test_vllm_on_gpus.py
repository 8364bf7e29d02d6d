"""VLLMLocal beside a trainer on GPUs, with both of them faked: devices, arguments, side effects.

What is faked is ``torch.cuda`` (each thread's current device, all generators) and vLLM's engine.
tests/integration/test_vllm_engine.py has a real engine on CPUs.
"""

import os
import sys
import threading
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lightning_rl.collect.checks import check_sleep
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.engines import RayEngine, Sampling, VLLMLocal, VLLMServer
from lightning_rl.engines.base import logprob_tolerance
from lightning_rl.engines.vllm import (
    local as vllm_local,
    process as vllm_process,
    settings as vllm_settings,
)
from lightning_rl.engines.vllm.process import contained
from lightning_rl.engines.vllm.settings import EngineSettings
from lightning_rl.engines.vllm.start import captured_sizes
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.schedule import FixedSchedule


class FakeCUDA:
    """Fakes two GPUs. As in CUDA, each thread begins on the first one."""

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
def cuda(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
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

    def sleep(self, level):
        self._note(f"sleep {level}")

    def wake_up(self, tags):
        self._note(f"wake {' and '.join(tags)}")

    def add_request(self, request_id, prompt, params, lora_request, priority):
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

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    contexts = SimpleNamespace(ENGINE_CONTEXT="engine", LLM_CLASS="llm")
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    monkeypatch.setattr(FakeLLM, "vllm_config", config, raising=False)
    for name, content in {
        "vllm": {"EngineArgs": dict, "envs": SimpleNamespace(VLLM_CACHE_ROOT="cache")},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.transformers": {},
        "vllm.model_executor.models.transformers.base": {
            "Base": SimpleNamespace(_decorate_cls_for_torch_compile=None)
        },
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
    monkeypatch.setenv("VLLM_CACHE_ROOT", "cache")
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


def test_what_is_compiled_for_one_gpu_is_not_found_by_another(cuda, vllm, tmp_path):
    roots = []
    for rank in (0, 1, 1):
        cuda.set_device(rank)
        engine = VLLMLocal(dtype="bfloat16")
        engine.start(tmp_path)
        engine.close()
        roots.append(os.environ["VLLM_CACHE_ROOT"])
        sys.modules["vllm"].envs.VLLM_CACHE_ROOT = roots[-1]  # it reads the variable
    assert roots == ["cache", "cache/device_1", "cache/device_1"]


@pytest.mark.parametrize("lightning_s", [True, False])
def test_vllms_own_process_group_is_left_before_the_process_ends(
    cuda, vllm, tmp_path, monkeypatch, lightning_s
):
    """Lightning's is not, for it ends that itself."""
    registered = []
    monkeypatch.setattr(vllm_process.atexit, "register", registered.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: lightning_s)
    engine = VLLMLocal(dtype="bfloat16")
    engine.start(tmp_path)
    engine.close()
    assert registered == ([] if lightning_s else [vllm_process._destroy_group])


@pytest.mark.parametrize("make", [VLLMLocal, VLLMServer, RayEngine])
def test_beside_a_trainer_in_float32_it_computes_in_bfloat16_and_says_so(cuda, caplog, make):
    vllm_settings._warn_of_bfloat16.cache_clear()
    engine = make()
    engine.configure_dtype("float32")
    assert engine.dtype == "bfloat16"
    assert engine.settings.environment() == {}
    engine.configure_dtype("float32")
    (told,) = caplog.messages
    assert "engine.dtype: float32 to be exact" in told


def test_a_dtype_that_was_chosen_stays_and_float32_is_not_tf32(cuda, caplog):
    exact = VLLMLocal(dtype="float32")
    exact.configure_dtype("float32")
    assert exact.dtype == "float32"
    assert exact.settings.environment() == {"TRITON_F32_DEFAULT": "ieee"}
    # Those that run already compute in what they were started with.
    theirs = VLLMServer(urls=["http://10.0.0.7:8000"])
    theirs.configure_dtype("float32")
    assert theirs.dtype == "float32"
    assert caplog.messages == []


def test_without_a_gpu_the_engine_computes_as_the_trainer_does(caplog):
    engine = VLLMLocal()
    engine.configure_dtype("float32")
    assert engine.dtype == "float32"
    assert caplog.messages == []


def test_the_head_follows_the_trainer_s_unless_it_was_told(cuda, tmp_path):
    def overrides(engine):
        return engine.settings.arguments(tmp_path).get("hf_overrides")

    for chosen, trainer, expected in (
        (None, True, {"head_dtype": "float32"}),
        (None, False, None),
        (True, False, {"head_dtype": "float32"}),
        (False, True, None),
    ):
        engine = VLLMLocal(dtype="bfloat16", cast_lm_head_to_fp32=chosen)
        engine.configure_head(trainer)
        assert overrides(engine) == expected
    whole = VLLMLocal(dtype="float32", cast_lm_head_to_fp32=True)  # it is in float32 anyway
    assert overrides(whole) is None
    beside = VLLMLocal(
        dtype="bfloat16", cast_lm_head_to_fp32=True, options={"hf_overrides": {"rope_theta": 1e6}}
    )
    assert overrides(beside) == {"head_dtype": "float32", "rope_theta": 1e6}


def test_quantized_weights_are_asked_for_and_bound_the_gap_more_widely(cuda, tmp_path):
    engine = VLLMLocal(dtype="bfloat16", quantization="fp8")
    assert engine.settings.arguments(tmp_path)["quantization"] == "fp8"
    assert (engine.dtype, engine.precision) == ("bfloat16", "fp8")
    exact, mixed, coarse = (logprob_tolerance(p, "float32") for p in ("float32", "bfloat16", "fp8"))
    assert exact < mixed < coarse


@pytest.fixture
def not_yet(monkeypatch):
    """Neither vLLM nor a GPU is in use, and no variable is set."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "")  # put back afterwards
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def test_batch_invariance_is_switched_on_before_vllm_is_imported(cuda, vllm, not_yet, tmp_path):
    VLLMLocal()
    assert "VLLM_BATCH_INVARIANT" not in os.environ
    VLLMLocal(batch_invariant=True)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    VLLMLocal(batch_invariant=True)  # a second one finds it on


@pytest.mark.parametrize("used", ["vLLM is imported", "the GPU is in use"])
def test_batch_invariance_that_comes_too_late_is_refused(cuda, not_yet, monkeypatch, used):
    if used == "vLLM is imported":
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        sys.modules["vllm"].__spec__ = ModuleSpec("vllm", None)
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=f"{used} already; .*VLLM_BATCH_INVARIANT=1"):
        VLLMLocal(batch_invariant=True)
    # A server is another process, so it is in time.
    assert VLLMServer(batch_invariant=True).settings.environment()["VLLM_BATCH_INVARIANT"] == "1"


def test_batch_invariance_that_takes_the_trainer_s_gradients_is_refused(
    cuda, vllm, monkeypatch, tmp_path
):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    engine = VLLMLocal(dtype="bfloat16", batch_invariant=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"capability 8\.6 .* use VLLMServer"):
        engine.start(tmp_path)
    assert vllm.started == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    engine.start(tmp_path)
    engine.close()


def calls(llm):
    return [call for call, _ in llm.called_on]


@pytest.mark.parametrize("level", [1, 2])
def test_the_engine_sleeps_and_is_woken_part_by_part(cuda, vllm, tmp_path, level):
    cuda.set_device(1)
    engine = VLLMLocal(dtype="bfloat16", sleep_level=level)
    engine.start(tmp_path)
    (llm,) = vllm.started
    assert llm.arguments["enable_sleep_mode"] is True
    engine.load_weights([], 0)
    engine.sleep()
    engine.sleep()  # it does already
    assert engine.version == (0 if level == 1 else -1)
    engine.load_weights([], 1)
    run_async(engine.generate([3], Sampling(max_tokens=1), 0))
    run_async(engine.generate([3], Sampling(max_tokens=1), 0))
    assert calls(llm) == [
        "push", f"sleep {level}", "wake weights", "push", "wake kv_cache", "step", "step",
    ]  # fmt: skip
    assert {device for _, device in llm.called_on} == {1}
    assert cuda.emptied_on == [1, 1]  # what torch keeps of an update stands in the way
    engine.close()


def test_asked_for_tokens_an_engine_wakes_unless_it_has_lost_its_weights(cuda, vllm, tmp_path):
    for level, woken in ((1, ["wake weights and kv_cache", "step"]), (2, [])):
        engine = VLLMLocal(dtype="bfloat16", sleep_level=level)
        engine.start(tmp_path)
        engine.load_weights([], 0)
        engine.sleep()
        if level == 1:
            run_async(engine.generate([3], Sampling(max_tokens=1), 0))
        else:
            with pytest.raises(EngineError, match="holds no trained weights"):
                run_async(engine.generate([3], Sampling(max_tokens=1), 0))
        assert calls(vllm.started[-1])[2:] == woken
        engine.close()


def test_without_a_level_nothing_sleeps(cuda, vllm, tmp_path):
    engine = VLLMLocal(dtype="bfloat16")
    engine.start(tmp_path)
    engine.sleep()
    (llm,) = vllm.started
    assert "enable_sleep_mode" not in llm.arguments
    assert calls(llm) == []
    engine.close()


def test_an_engine_sleeps_only_where_nothing_is_asked_of_it_meanwhile():
    check_sleep(1, FixedSchedule(2), SyncCollector())
    check_sleep(2, FixedSchedule(1), SyncCollector())
    check_sleep(None, FixedSchedule(2), AsyncCollector())
    with pytest.raises(ConfigError, match="AsyncCollector generates during that time; use"):
        check_sleep(1, FixedSchedule(), AsyncCollector())
    with pytest.raises(ConfigError, match="does not push them in each; use sleep_level: 1"):
        check_sleep(2, FixedSchedule(2), SyncCollector())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"sleep_level": 1},
            "sleep_level=1 is not supported on CPUs, where vLLM cannot free memory",
        ),
        ({"batch_invariant": True}, "batch_invariant=true is not supported on CPUs"),
        (
            {"options": {"speculative_config": {"method": "ngram"}}},
            "options.speculative_config is not supported on CPUs",
        ),
        (
            {"quantization": "fp8"},
            "quantization='fp8' is not supported on CPUs.* use fp8_per_channel",
        ),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_by_name(tmp_path, given, told):
    with pytest.raises(ConfigError, match=told):
        VLLMLocal(**given).start(tmp_path)


@pytest.mark.parametrize(
    ("make", "given", "told"),
    [
        (VLLMLocal, {"sleep_level": 3}, "sleep_level=3 must be 1, 2 or null"),
        (
            VLLMLocal,
            {"options": {"tensor_parallel_size": 2}},
            "only the device of its training process; use VLLMServer or RayEngine",
        ),
        (VLLMServer, {"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be >= 1"),
        (
            VLLMServer,
            {"tensor_parallel_size": 2, "devices": ["0"]},
            "'0' has fewer devices than tensor_parallel_size=2",
        ),
    ],
)
def test_impossible_settings_are_refused(make, given, told):
    with pytest.raises(ConfigError, match=told):
        make(**given)


def test_on_gpus_vllm_keeps_its_graphs_and_its_own_layout(cuda, tmp_path):
    on_gpu = settings().arguments(tmp_path)
    assert not on_gpu.keys() & {"enforce_eager", "block_size", "hf_overrides", "device_ids"}


def test_graphs_are_captured_for_few_sizes_unless_an_option_says_which(cuda, tmp_path):
    on_gpu = settings(max_num_seqs=20).arguments(tmp_path)
    assert on_gpu["compilation_config"] == {
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 20, 24, 32, 40]
    }
    sizes = captured_sizes(256)
    assert (len(sizes), sizes[-1]) == (23, 512)
    # All requests that there can be at once fit into one, and no step grows by more than a quarter.
    assert {100, 256, 300} < {*captured_sizes(100), *sizes, *captured_sizes(300)}
    assert all(above <= 1.25 * below for below, above in pairwise(sizes[6:]))
    for option in ({"enforce_eager": True}, {"compilation_config": {"mode": 0}}):
        chosen = settings(options=option).arguments(tmp_path)
        assert chosen.get("compilation_config") == option.get("compilation_config")
