"""Import what the programs that ``benchmarks.support.forked`` starts need."""

import gc
from importlib import import_module

from lightning_rl.config.names import load_all

MODULES = (
    "benchmarks.kill.killer",
    "gymnasium",
    "lightning_rl.cli",
    "matplotlib.pyplot",
    "tensorboard.compat.proto.event_pb2",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
)

load_all()
for module in MODULES:
    import_module(module)
gc.freeze()  # for all their lives
