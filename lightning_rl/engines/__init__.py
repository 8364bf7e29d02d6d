"""Generation engines: token ids in, token ids with their logprobs and weight versions out."""

from importlib.util import find_spec

from lightning_rl.engines.base import Engine
from lightning_rl.engines.hf.adapters import TransformersAdapters
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.replicas.ray import RayEngine
from lightning_rl.engines.replicas.server import VLLMServer
from lightning_rl.engines.sampling import Completion, Sampling, StructuredOutputs, request_seed
from lightning_rl.engines.vllm.adapters import VLLMAdapters
from lightning_rl.engines.vllm.local import VLLMLocal

__all__ = [
    "Completion",
    "Engine",
    "RayEngine",
    "Sampling",
    "StructuredOutputs",
    "TransformersAdapters",
    "TransformersEngine",
    "VLLMAdapters",
    "VLLMLocal",
    "VLLMServer",
    "default_engine",
    "request_seed",
]


def default_engine() -> Engine:
    """Return vLLM in this process, or plain transformers if vLLM is not installed."""
    return VLLMLocal() if find_spec("vllm") is not None else TransformersEngine()
