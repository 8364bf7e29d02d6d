"""Test the planned memory of recomputed layers, against every allocation of a backward pass."""

import pytest
import torch
from torch.nn import Parameter

from benchmarks.recompute import NARROW, SETTINGS, measure, micro_batch_of
from lightning_rl import LoRA, Recompute
from lightning_rl.cli.check.advice import Advice
from lightning_rl.cli.check.memory import training_memory
from lightning_rl.cli.check.placement import Placement
from lightning_rl.learn.optimizer_state import state_bytes, step_bytes
from lightning_rl.models.policy import Policy
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.tiers import follows_memory, slow
from tests.support.tiny_models import save_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("narrow")
    save_random_model(directory, make_tokenizer(), **NARROW)
    return str(directory)


@pytest.fixture(scope="module")
def micro_batch():
    return micro_batch_of(200)


FIRST, *BETWEEN, LAST = SETTINGS


@follows_memory
@pytest.mark.parametrize("setting", [FIRST, LAST, *map(slow, BETWEEN)])
def test_what_is_kept_is_planned(model, micro_batch, setting):
    found = measure(model, SETTINGS[setting], micro_batch)
    # 2 %, and one for what a kernel takes for itself on another CPU.
    assert found["planned"] == pytest.approx(found["measured"], rel=0.03)


def test_inputs_in_host_memory_are_planned_there(model, micro_batch):
    device, host = (
        training_memory(
            Policy(model, loading={"gradient_checkpointing": kind}), [], torch.optim.AdamW,
            micro_batch, Placement(sequence=2),
        )
        for kind in (True, Recompute(inputs="host"))
    )  # fmt: skip
    one = (8 * 199 + 2 * 2) * 32 * 4 // 2  # bytes of a layer's input, of each of two ranks
    assert host.host == {"layers' inputs": 6 * one}
    assert device.host == {}
    # Two of six are on the device: the one that is computed with, and the next.
    assert device.total - host.total == 4 * one


def test_the_next_to_switch_on_is_advised(model, micro_batch):
    """First what costs little, then what takes more devices; nothing twice."""

    def advice(recompute, optimizer=torch.optim.AdamW, **options) -> Advice:
        policy = Policy(
            model, loading={"gradient_checkpointing": recompute}, lora=options.pop("lora", None)
        )
        return training_memory(policy, [], optimizer, micro_batch, Placement(**options)).advice

    def begins(recompute) -> str:
        return advice(recompute).activations.partition(",")[0].partition(";")[0]

    assert advice(False).activations.startswith(
        "lower update.max_tokens_per_micro_batch, or set loading.gradient_ch"
    )
    # One layer's turn takes more than six inputs of a model that is so shallow.
    assert begins(True) == "set loading.gradient_checkpointing.mlp_tokens: 4096"
    hosted = "set loading.gradient_checkpointing: {inputs: host}"
    assert begins(Recompute(mlp_tokens=20)) == hosted
    assert (
        begins(Recompute(mlp_tokens=20, inputs="host")) == "lower update.max_tokens_per_micro_batch"
    )
    assert advice(True).state.startswith("train with lora, or set optimizer: bitsandbytes.optim.Ad")
    assert advice(True, torch.optim.SGD, lora=LoRA(rank=2)).state.startswith("share the weights")
    assert advice(True, shards=2).state == (
        "train with lora, or more devices, or ShardedStrategy's cpu_offload: true"
    )


def test_what_an_optimizer_has_while_it_steps():
    def adamw(**options):
        return lambda parameters: torch.optim.AdamW(parameters, **options)

    assert step_bytes(adamw(), [10, 30], 4, together=False) == 2 * 4 * 30
    assert step_bytes(adamw(), [10, 30], 4, together=True) == 4 * 40
    assert step_bytes(adamw(foreach=True), [10, 30], 2, together=False) == 2 * 40
    assert step_bytes(adamw(fused=True), [10, 30], 4, together=True) == 0


def test_the_state_of_an_optimizer_is_its_own():
    small, large = torch.Size([10]), torch.Size([5000, 64])
    assert state_bytes(torch.optim.AdamW, [small, large], torch.float32) == (
        "AdamW", 8 * (10 + 5000 * 64),
    )  # fmt: skip
    assert state_bytes(torch.optim.AdamW, [large], torch.bfloat16)[1] == 4 * 5000 * 64
    assert state_bytes(torch.optim.SGD, [small], torch.float32) == ("SGD", 0)
    # One number for each row and one for each column.
    factored = state_bytes(torch.optim.Adafactor, [large], torch.float32)
    assert factored == ("Adafactor", 4 * (5000 + 64))


def test_eight_bits_are_counted_as_bitsandbytes_keeps_them():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    make = bitsandbytes.optim.AdamW8bit
    shapes = [torch.Size([4095]), torch.Size([4096]), torch.Size([9000, 100])]
    # Two bytes an element and a float32 of each 256, twice; below 4,096 two float32.
    blocks = [-(-numel // 256) for numel in (4096, 900_000)]
    expected = 8 * 4095 + 2 * (4096 + 900_000) + 8 * sum(blocks)
    name, found = state_bytes(make, shapes, torch.float32)
    assert name == "AdamW8bit"
    assert found == pytest.approx(expected, rel=1e-4)
    parameters = [Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(
        value.nbytes
        for parameter in parameters
        for name, value in optimizer.state[parameter].items()
        if name in ("state1", "state2", "absmax1", "absmax2")
    )
    assert found == pytest.approx(kept, rel=1e-4)
