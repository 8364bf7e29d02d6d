"""Test a server whose model is shared by two processes, with real vLLM and gloo between them."""

import pytest
import torch

from lightning_rl.engines import Sampling, TransformersEngine, VLLMServer
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import PROMPTS, connected, generate, same_draws, scaled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="shares CPUs"),
    pytest.mark.timeout(240),  # a hang is a failure
]


@pytest.fixture(scope="module")
def engine(skeleton):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # both are on one NUMA node
        engine = VLLMServer(tensor_parallel_size=2, max_model_len=128, kv_cache_gb=0.05)
        engine.start(skeleton)
    yield engine
    engine.close()


@pytest.mark.parametrize("transport", [MemoryTransport, CollectiveTransport])
def test_two_halves_of_a_model_write_what_the_whole_does(skeleton, weights, engine, transport):
    assert [replica.workers for replica in engine.replicas] == [2]
    whole = TransformersEngine(device="cpu")
    whole.start(skeleton)
    greedy = Sampling(max_tokens=20, temperature=0)
    with connected(transport(), engine) as pushing:
        for version, factor in enumerate((1.0, 0.8)):
            pushed = scaled(weights, factor)
            pushing.push(pushed.items(), version)
            whole.load_weights(pushed.items(), version)
            ours, theirs = (generate(e, PROMPTS, greedy) for e in (engine, whole))
            assert same_draws(ours, theirs)
            assert all(set(completion.versions) == {version} for completion in ours)
