"""Test the memory that training and its engine take of a GPU, calculated by hand."""

import pytest
import torch

from lightning_rl import NF4, Int8, LoRA
from lightning_rl.cli.check.batches import largest_rollouts, widest
from lightning_rl.cli.check.command import own_options
from lightning_rl.cli.check.gpu_memory import CardPlan
from lightning_rl.cli.check.memory import MemoryPlan, bytes_of_all_keys, training_memory
from lightning_rl.cli.check.placement import Placement
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines import TransformersEngine
from lightning_rl.engines.vllm.local import VLLMLocal
from lightning_rl.errors import ConfigError
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy
from lightning_rl.models.quantized_layers import weights_in
from lightning_rl.rollout import Prompt, SamplingDistribution
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.mixtures import saved_mixture
from tests.support.tiny_models import save_random_model

GIB = 2**30
# The tiny model, tied: an embedding of 16 x 64 and a norm of 64 outside of its two layers; in each
# the projections q, k, v, o, three of an MLP, the biases of q, k, v, and two norms.
OUTSIDE = 16 * 64 + 64
MATRICES = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 64
LAYER = MATRICES + 64 + 32 + 32 + 2 * 64
WHOLE = OUTSIDE + 2 * LAYER


@pytest.fixture(scope="module")
def micro_batch():
    prompts = [Prompt(str(n), "", [3 + n, 2]) for n in range(2)]
    return pack_rollouts(largest_rollouts(prompts, 2, 4, 20))


def plan(policy: Policy, micro_batch, others=(), **placement) -> MemoryPlan:
    return training_memory(policy, others, torch.optim.AdamW, micro_batch, Placement(**placement))


def test_sharing_divides_what_is_trained_and_gathers_in_the_runs_precision(tiny_model, micro_batch):
    policy = Policy(str(tiny_model))
    for precision, width in (("32-true", 4), ("bf16-mixed", 2)):
        parts = plan(policy, micro_batch, [policy], precision=precision, shards=4).parts
        assert parts["weights"] == parts["gradients"] == parts["other models"] == WHOLE
        assert parts["optimizer (AdamW)"] == 2 * WHOLE
        # The peak of so few tokens is at the head's logits: outside weights and the last message.
        assert parts["gathered"] == width * (OUTSIDE + LAYER)
        assert "copies of weights" not in parts


def test_ranks_that_share_queries_keep_keys_of_all_tokens(tiny_model):
    """Two pairs of ranks have 400 queries each of a rollout of 1 and 800 tokens, on two heads.

    The first has the first 200 and the last, which see 201 and 801 keys, and the prompt's 1. The
    last token, which is not computed, is planned, too.
    """
    policy = Policy(str(tiny_model))
    micro_batch = pack_rollouts(largest_rollouts([Prompt("0", "", [2])], 1, 1, 801))
    keys = 2 * 32 * (201 + 801 + 1 - 802 // 2)

    def more(ranks: int) -> float:
        return bytes_of_all_keys(policy, micro_batch, ranks, 2)

    assert more(1) == more(2) == 0  # of two ranks, each has a head
    assert more(4) == 2 * 2 * keys
    policy = Policy(
        str(tiny_model), loading={"gradient_checkpointing": True}
    )  # of one layer at a time
    assert more(4) == 2 * keys


def test_ranks_that_share_matrices_have_a_part_of_them_and_all_norms(tmp_path, micro_batch):
    """All but the norms of a tiny model with two heads of keys is halved, then sharded in two."""
    sizes = {"vocab_size": 16, "num_key_value_heads": 2}
    save_random_model(tmp_path, make_tokenizer(), **sizes)
    policy = Policy(str(tmp_path))
    norms, biases = 5 * 64, 2 * 3 * 64
    matrices = 16 * 64 + 2 * 7 * 64 * 64
    part = norms + (matrices + biases) // 2
    parts = plan(policy, micro_batch, [policy], shards=2, tensor=2).parts
    assert parts["weights"] == parts["gradients"] == parts["other models"] == 4 * part // 2
    assert parts["optimizer (AdamW)"] == 8 * part // 2
    outside = 16 * 64 // 2 + 64
    layer = (part - outside) // 2
    assert parts["gathered"] == 4 * (outside + layer)
    assert parts["whole gradients"] == 4 * outside  # of the head and the last norm
    # These are alike on both: the states between layers, and half of the rest.
    kept = f"activations of {forward_tokens(micro_batch)} tokens"
    whole = plan(policy, micro_batch).parts[kept]
    assert whole / 2 < parts[kept] < whole
    known = training_memory(
        policy, [], torch.optim.AdamW, micro_batch, Placement(tensor=2),
        {policy.lm.get_input_embeddings().weight},
    )  # fmt: skip
    assert known.parts["weights"] == 4 * (part - 16 * 64 // 2)
    assert policy.tensor is None  # as it was


def test_experts_that_ranks_have_together_are_gathered_in_part(tmp_path, micro_batch):
    """Each layer has eight experts of three 32 x 64 matrices; two heads of 32, one of keys."""
    policy = Policy(str(saved_mixture("qwen3_moe", tmp_path)))
    experts, outside = 8 * 3 * 32 * 64, 2 * 16 * 64 + 64
    attention = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 2 * 32
    layer = attention + 2 * 64 + 8 * 64  # two norms, and a router
    alone, parts = (
        plan(policy, micro_batch, shards=4).parts,
        plan(policy, micro_batch, shards=4, expert=2).parts,
    )
    whole = outside + 2 * (layer + experts)
    # Whoever has which: of what is kept it is a quarter.
    assert parts["weights"] == parts["gradients"] == alone["weights"] == whole
    # A layer computes: its weights, and the message that they came in, of experts a half of each.
    assert alone["gathered"] == 4 * (outside + 2 * (layer + experts))
    assert parts["gathered"] == 4 * (outside + layer + 2 * experts // 2)
    # The states that come and go are there beside what would be kept without.
    [kept] = [name for name in parts if name.startswith("activations")]
    assert alone[kept] < parts[kept] < 1.5 * alone[kept]
    with pytest.raises(ConfigError, match="expert=3 does not divide the 8 experts"):
        plan(policy, micro_batch, expert=3)


def test_what_is_offloaded_is_in_host_memory(tiny_model, micro_batch):
    offloaded = plan(Policy(str(tiny_model)), micro_batch, shards=2, cpu_offload=True)
    assert offloaded.host == {
        "weights": 2 * WHOLE, "other models": 0, "gradients": 2 * WHOLE,
        "optimizer (AdamW)": 4 * WHOLE,
    }  # fmt: skip
    assert not set(offloaded.host) & set(offloaded.parts)
    assert any(line.startswith("weights, in host memory") for line in offloaded.lines())


def test_autocast_keeps_weights_twice_and_half_the_activations(tiny_model, micro_batch):
    policy = Policy(str(tiny_model))
    full, mixed = (plan(policy, micro_batch, precision=p).parts for p in ("32-true", "bf16-mixed"))
    assert mixed["weights"] == full["weights"] == 4 * WHOLE
    # All matrices in the layers have a copy of 2 bytes; and the head has its gradient.
    assert mixed["copies of weights"] == 2 * 2 * MATRICES + 4 * 16 * 64
    activations = f"activations of {forward_tokens(micro_batch)} tokens"
    assert 0.3 * full[activations] < mixed[activations] < 0.9 * full[activations]


@pytest.mark.parametrize("masters", [True, False])
def test_weights_in_bfloat16_and_their_masters(tiny_model, micro_batch, masters):
    policy = Policy(str(tiny_model))
    full, half = (
        plan(policy, micro_batch, precision=p, masters=masters).parts
        for p in ("32-true", "bf16-true")
    )
    assert half["weights"] == half["gradients"] == 2 * WHOLE
    assert half.get("master weights") == (4 * WHOLE if masters else None)
    assert full["optimizer (AdamW)"] == 8 * WHOLE  # of what it steps: copies, or the weights
    assert half["optimizer (AdamW)"] == (8 if masters else 4) * WHOLE
    assert half["copies of weights"] == 2 * 16 * 64  # the head's gradient
    activations = f"activations of {forward_tokens(micro_batch)} tokens"
    assert 0.3 * full[activations] < half[activations] < 0.9 * full[activations]
    assert policy.lm.dtype == torch.float32  # as it was


@pytest.mark.parametrize(
    ("form", "packed"),
    [
        # Half a byte per weight, one per block of 64, and per layer two float32 of all its scales.
        (NF4(), MATRICES // 2 + MATRICES // 64 + 7 * 8),
        # A byte per weight, and a float32 per output: 64 of q and o, 32 of k and v, 64 of the MLP.
        (Int8(), MATRICES + 4 * (64 + 32 + 32 + 64 + 3 * 64)),
    ],
)
def test_a_packed_base_takes_its_bytes_and_room_for_a_layer(tiny_model, micro_batch, form, packed):
    policy = Policy(str(tiny_model), lora=LoRA(rank=4, quantization=form))
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    for precision, width in (("32-true", 4), ("bf16-mixed", 4), ("bf16-true", 2)):
        parts = plan(policy, micro_batch, precision=precision).parts
        assert parts["weights"] == 2 * packed + width * (WHOLE - 2 * MATRICES + trained)
        assert parts["gradients"] == width * trained
    # An engine holds them all.
    assert sum(weights_in(policy.lm).values()) == WHOLE + trained
    # Autograd keeps autocast's copies of a plain one, but where no gradient comes through.
    plain = plan(
        Policy(str(tiny_model), lora=LoRA(rank=4)), micro_batch, precision="bf16-mixed"
    ).parts
    mixed = plan(policy, micro_batch, precision="bf16-mixed").parts
    assert plain["copies of weights"] - mixed.get("copies of weights", 0) > 2 * MATRICES
    shared = plan(policy, micro_batch, shards=2).parts
    layer = packed + 4 * (LAYER - MATRICES + trained // 2)
    assert shared["gathered"] == 4 * OUTSIDE + layer


def test_checkpointing_keeps_layers_inputs_and_one_layer(tiny_model, micro_batch):
    activations = f"activations of {forward_tokens(micro_batch)} tokens"
    kept = plan(Policy(str(tiny_model)), micro_batch).parts[activations]
    policy = Policy(str(tiny_model), loading={"gradient_checkpointing": True})
    # Two layers keep at least their inputs, and half of what both keep.
    inputs = 2 * forward_tokens(micro_batch) * 64 * 4
    assert inputs + kept // 2 <= plan(policy, micro_batch).parts[activations] < kept
    assert all(layer.gradient_checkpointing for layer in policy.lm.model.layers)


def test_chunks_of_logits_are_those_of_the_planned_device(tmp_path, micro_batch, monkeypatch):
    """Logits and their exponentials, of so large and frozen a vocabulary most of what is there."""
    from lightning_rl.models import heads

    save_random_model(tmp_path, make_tokenizer(), vocab_size=1 << 14)
    policy = Policy(str(tmp_path), lora=LoRA(rank=4))
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 1 << 21)
    monkeypatch.setattr(heads, "CUDA_CHUNK_ELEMENTS", 1 << 22)
    found = plan(policy, micro_batch)
    assert found.moment == "the head computes logits"
    assert found.parts["logits"] == 2 * 4 * 80 * (1 << 14)  # half of the tokens: 128 would fit
    # A larger chunk takes all 2 x 4 x 20 tokens.
    found = plan(policy, micro_batch, device=torch.device("cuda"))
    assert found.parts["logits"] == 2 * 4 * 160 * (1 << 14)


def test_an_entropy_bonus_takes_a_second_chunk_in_the_backward_pass(
    tmp_path, micro_batch, monkeypatch
):
    """The chunk lies beside the head's gradient, which is not there in the forward pass."""
    from lightning_rl.models import heads

    save_random_model(tmp_path, make_tokenizer(), vocab_size=1 << 14)
    policy = Policy(str(tmp_path))
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 1 << 21)
    found = training_memory(policy, [], torch.optim.AdamW, micro_batch, bonus=True, passes=1)
    assert found.moment == "the head's backward pass"
    assert found.parts["logits"] == 2 * 4 * 160 * (1 << 13)  # half of the vocabulary
    assert training_memory(policy, [], torch.optim.AdamW, micro_batch, passes=1).total < found.total


def test_what_sampling_does_to_logits_takes_memory(tmp_path, monkeypatch):
    """Sorted for top-p: logits, their order in 8 bytes each, and what is made of them."""
    from lightning_rl.models import heads

    save_random_model(tmp_path, make_tokenizer(), vocab_size=1 << 14)
    policy = Policy(str(tmp_path))
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 1 << 21)
    prompts = [Prompt(str(n), "", [3 + n, 2]) for n in range(2)]
    asked = widest([SamplingDistribution(temperature=0.7), SamplingDistribution(top_p=0.9)])
    assert asked == SamplingDistribution(temperature=0.7, top_p=0.9)
    micro_batch = pack_rollouts(largest_rollouts(prompts, 2, 4, 20, asked))
    assert plan(policy, micro_batch).parts["logits"] >= (4 + 4 + 8) * (1 << 21)


def test_gradients_of_earlier_passes_are_there_in_full(tiny_model, micro_batch):
    """The first pass has the head's alone: an embedding, which it is tied to, and a norm."""
    policy = Policy(str(tiny_model))
    first = training_memory(policy, [], torch.optim.AdamW, micro_batch, passes=1)
    later = training_memory(policy, [], torch.optim.AdamW, micro_batch, passes=2)
    assert later.parts["gradients"] == later.stays["gradients"] == first.stays["gradients"]
    assert later.stays["gradients"] == 4 * WHOLE
    assert first.parts["gradients"] <= 4 * OUTSIDE


TRAINING = MemoryPlan({"weights": 6 * GIB, "optimizer (AdamW)": 12 * GIB, "activations": 22 * GIB})


@pytest.mark.parametrize(
    ("plan", "missing", "said"),
    [
        (CardPlan(80 * GIB, TRAINING, 32 * GIB, 32 * GIB), -8 * GIB,
         "40.00 GiB training + 32.00 GiB engine: fits, 8.00 GiB to spare"),
        (CardPlan(80 * GIB, TRAINING, 32 * GIB, 32 * GIB, push_buffers=9 * GIB), GIB,
         "+ 9.00 GiB buffers of a push: DOES NOT FIT, 1.00 GiB too much; lower the engine's gpu"),
        (CardPlan(24 * GIB, TRAINING), 16 * GIB,
         "too much; lower update.max_tokens_per_micro_batch, or"),
        (CardPlan(8 * GIB, MemoryPlan({"weights": 9 * GIB})), GIB, "too much; train with lora, or"),
        (CardPlan(8 * GIB, MemoryPlan({"weights": GIB, "other models, of rewards": 9 * GIB})),
         2 * GIB, "too much; serve the models of rewards (ServedTeacher, ServedReward), or"),
        # Asleep while 40 are trained in; awake beside 6 of weights and 12 of the optimizer.
        (CardPlan(60 * GIB, TRAINING, 0, 32 * GIB, sleeps=True), -10 * GIB,
         "40.00 GiB training + 32.00 GiB engine in turn: fits, 10.00 GiB to spare"),
        (CardPlan(60 * GIB, TRAINING, 32 * GIB, 32 * GIB), 12 * GIB, "let it sleep during updates"),
        # 6 of weights are there when vLLM asks for its 90%, of which it will use a part.
        (CardPlan(60 * GIB, TRAINING, 10 * GIB, 54 * GIB + 1), 1, "too much"),
    ],
)  # fmt: skip
def test_a_verdict_names_what_to_make_smaller(plan, missing, said):
    assert plan.missing == missing
    [line] = plan.lines()
    assert said in line


def test_what_engines_take_of_a_gpu():
    billion = 10**9
    assert VLLMLocal().memory_here(billion, 80 * GIB) == (32 * GIB, 32 * GIB)  # 0.4 of it
    cache = VLLMLocal(dtype="bfloat16", kv_cache_gb=4, gpu_memory_utilization=0.25)
    assert cache.memory_here(billion, 80 * GIB) == (2 * billion + 4 * GIB, 20 * GIB)
    assert VLLMLocal(sleep_level=1).memory_here(billion, 80 * GIB) == (0, 32 * GIB)
    assert TransformersEngine().memory_here(billion, 80 * GIB) == (4 * billion, 4 * billion)

    class Elsewhere(TransformersEngine):
        serves_all_ranks = True

    assert Elsewhere().memory_here(billion, 80 * GIB) == (0, 0)


def test_the_options_of_the_command_itself_are_taken_from_those_of_fit():
    own, rest = own_options(["--config", "a.yaml", "--data.seed", "-1", "--trainer.callbacks+=X"])
    assert (own.gpu_memory_gb, own.gpus, own.rewards) == (None, None, False)
    assert rest == ["--config", "a.yaml", "--data.seed", "-1", "--trainer.callbacks+=X"]
    own, rest = own_options(["--gpu_memory_gb", "24.5", "--rewards", "--x", "1", "--gpus=8"])
    assert (own.gpu_memory_gb, own.gpus, own.rewards) == (24.5, 8, True)
    assert rest == ["--x", "1"]
    for wrong in (["--gpu_memory_gb"], ["--gpu_memory_gb", "H100"], ["--gpu_memory_gb=-1"]):
        with pytest.raises(ConfigError, match="must be a number > 0, the memory of one GPU"):
            own_options(wrong)
    for wrong in (["--gpus"], ["--gpus", "some"], ["--gpus=0"], ["--gpus=-8"], ["--gpus=1.5"]):
        with pytest.raises(ConfigError, match="must be a whole number >= 1"):
            own_options(wrong)
    with pytest.raises(ConfigError, match="--no_rollout and --rewards exclude each other"):
        own_options(["--rewards", "--no_rollout"])
