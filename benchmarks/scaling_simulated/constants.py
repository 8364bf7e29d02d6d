"""Every constant of the simulation of large runs, with its unit and where it comes from.

``assumed`` is said where no source was at hand; the checks of `checks` show how far off the
whole is. Bandwidths are one way.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

H100_SHEET = "NVIDIA H100 SXM5 80 GB, data sheet"
BENCHMARK = "verl, checkpoint_engine/README.md: 4 x 8 H100, ConnectX-7 of 400 Gb/s"


def known(value: float, unit: str, source: str) -> Any:
    """A constant's value, and what is known about it."""
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Constants:
    """A cluster of nodes of eight H100, its software, and how a run uses it."""

    # ------------------------------------------------------------ devices and links
    node: int = known(8, "GPUs", "DGX H100")
    memory: float = known(80e9, "B", H100_SHEET)
    memory_share: float = known(0.9, "share", "vLLM's default gpu_memory_utilization")
    hbm: float = known(3.35e12, "B/s", H100_SHEET)
    hbm_share: float = known(0.7, "share", "assumed: of the peak, reached by decoding")
    flops: float = known(989e12, "FLOP/s", f"{H100_SHEET}: bfloat16, dense")
    nvlink: float = known(450e9, "B/s", f"{H100_SHEET}: 900 GB/s, both ways together")
    network: float = known(50e9, "B/s", f"{BENCHMARK}; a card per GPU")
    link_share: float = known(0.8, "share", "assumed: of a link's peak, as nccl-tests reaches")
    pcie: float = known(64e9, "B/s", "PCIe 5.0 x16")
    pcie_share: float = known(0.85, "share", "assumed: from page-locked memory")
    pageable: float = known(8e9, "B/s", "assumed: between a GPU and memory that is not locked")
    ethernet: float = known(12.5e9, "B/s", "100 Gb/s, from rank 0 to engines")
    disk_write: float = known(2e9, "B/s", "assumed: one writer on a parallel file system")
    disk_read: float = known(5e9, "B/s", "assumed: one node")
    disk_total: float = known(40e9, "B/s", "assumed: all nodes together")

    # ------------------------------------------------------------ shares and overheads of computing
    mfu: float = known(0.38, "share", "dense, Llama 3 (Dubey et al. 2024, table 4: 38-43%)")
    mfu_experts: float = known(0.2, "share", "assumed: half of a dense model's")
    prefill_share: float = known(0.5, "share", "assumed: of the peak, reading a text anew")
    decode_share: float = known(0.5, "share", "assumed: of the peak, products of a decoding step")
    decode_step: float = known(2e-3, "s", "assumed: scheduling and launching a step of vLLM")
    decode_request: float = known(
        2e-5, "s", "gpu-check-h200, recipe: 0.088 s for 11 steps of 256 requests, less decode_step"
    )
    decode_reduce: float = known(1e-5, "s", "assumed: an all-reduce of a step within a node")

    # ------------------------------------------------------------ communication and syncs
    launch: float = known(2e-5, "s", "assumed: starting a collective, nccl-tests of a few bytes")
    hop: float = known(2e-6, "s", "assumed: passing on to the next rank of a ring, on average")
    stage_tensor: float = known(2e-5, "s", "fill_buffers, 20,000 small tensors, one core: 9-20 us")
    load_tensor: float = known(1e-4, "s", "assumed; at most 7e-4 by docs/sync.md: 147 in 0.1 s")
    call: float = known(5e-3, "s", "assumed: one request to a server and its answer")
    push: float = known(0.1, "s", "docs/sync.md: 0.8 M parameters to a vLLM server, 0.1-0.2 s")

    # ------------------------------------------------------------ bytes
    engine_bytes: int = known(2, "B/weight", "bfloat16")
    master_bytes: int = known(4, "B/weight", "bf16-mixed: float32, also when gathered for a push")
    state_bytes: int = known(16, "B/weight", "float32: weights, gradients, two of Adam's")
    bucket: int = known(256 * 2**20, "B", "CollectiveTransport's default")

    # ------------------------------------------------------------ the run
    groups: int = known(64, "prompts", "verl, v1_async_trainer.md: train_batch_size")
    group_size: int = known(8, "rollouts", "the same: its tokens per step and rollout")
    prompt: int = known(256, "tokens", "chosen")
    pack: int = known(32_768, "tokens", "chosen: max_tokens_per_pack")
    lora_rank: int = known(32, "rank", "chosen: on all layers that a LoRA adapts")
    trained_share: float = known(0.25, "share", "chosen: modules that changed_only finds changed")
    mean_32k: float = known(12_720, "tokens", "verl, v1_async_trainer.md: mean, limit of 32,768")

    def link(self, ranks: int) -> float:
        """What each rank of a ring of so many sends per second; across nodes all cards are used."""
        return self.link_share * (self.nvlink if ranks <= self.node else self.rails)

    @property
    def rails(self) -> float:
        """The cards of a node together, or NVLink where that is slower."""
        return min(self.nvlink, self.node * self.network)


H100 = Constants()
H20 = replace(H100, hbm=4.0e12, flops=148e12, memory=96e9)
"""NVIDIA H20, data sheet: its links are an H100's."""


def table_of(constants: Constants) -> dict[str, dict[str, Any]]:
    """Value, unit and source by name."""
    return {
        one.name: {"value": getattr(constants, one.name), **one.metadata}
        for one in fields(constants)
    }


@dataclass(frozen=True)
class Model:
    """Shape of a Qwen model; ``experts`` 0: dense, ``width`` is an expert's or the MLP's.

    Qwen2.5's biases, 0.01% of its weights, are left out.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    experts: int = 0
    active_experts: int = 0
    tied: bool = False
    head_size: int = 128
    vocabulary: int = 151_936
    norms: int = 4  # a layer's: with those of queries and keys

    @property
    def attention(self) -> int:
        """Weights of a layer's attention."""
        return self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)

    @property
    def expert(self) -> int:
        """Weights of an expert, or of the MLP."""
        return 3 * self.hidden * self.width

    @property
    def parameters(self) -> int:
        norms = 2 * self.hidden + (2 * self.head_size if self.norms == 4 else 0)
        router = self.hidden * self.experts
        layer = self.attention + max(1, self.experts) * self.expert + router + norms
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def active(self) -> int:
        """Weights that multiply a token: the head counts, the embedding does not."""
        router = self.hidden * self.experts
        layer = self.attention + max(1, self.active_experts) * self.expert + router
        return self.layers * layer + self.vocabulary * self.hidden

    @property
    def tensors(self) -> int:
        """Weights with names of their own in files: each expert has three."""
        return self.layers * (4 + self.norms + (self.experts > 0) + 3 * max(1, self.experts)) + 3

    @property
    def gathers(self) -> int:
        """Tensors of the trainer, which keeps a layer's experts in two."""
        return self.layers * (4 + self.norms + 3) + 3  # router, two stacks; or an MLP's three

    @property
    def adapted(self) -> int:
        """Weights that a LoRA adapts: attention's and the MLP's, but no experts (``LoRA``)."""
        return self.layers * (self.attention + (0 if self.experts else self.expert))

    @property
    def adapted_tensors(self) -> int:
        return self.layers * (4 if self.experts else 7)

    def adapters(self, rank: int) -> int:
        """Weights of a LoRA: of each matrix the sum of its two sizes, times the rank."""
        heads = self.head_size * (self.heads + self.kv_heads)
        sizes = 4 * self.hidden + 2 * heads
        sizes += 0 if self.experts else 3 * (self.hidden + self.width)
        return self.layers * rank * sizes


MODELS = {
    model.name: model
    for model in (
        Model("0.6B", 1024, 28, 16, 8, 3072, tied=True),
        Model("8B", 4096, 36, 32, 8, 12_288),
        Model("32B", 5120, 64, 64, 8, 25_600),
        Model("30B-A3B", 2048, 48, 32, 4, 768, experts=128, active_experts=8),
        Model("235B-A22B", 4096, 94, 64, 4, 1536, experts=128, active_experts=8),
    )
}
"""Qwen3, config.json of each."""

OTHERS = {
    model.name: model
    for model in (
        Model("0.5B", 896, 24, 14, 2, 4864, tied=True, head_size=64, norms=2),
        Model("7B", 3584, 28, 28, 4, 18_944, vocabulary=152_064, norms=2),
        Model("2.5-32B", 5120, 64, 40, 8, 27_648, vocabulary=152_064, norms=2),
        Model("72B", 8192, 80, 64, 8, 29_568, vocabulary=152_064, norms=2),
    )
}
"""Qwen2.5, which others measured."""
