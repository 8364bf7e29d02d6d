"""Digests of what vLLM holds, against what it was sent: in this process, quantized, in servers.

Slow: every format of weights has a vLLM of its own, and the first servers start here.
"""

import random

import pytest
import torch

from benchmarks.ledger.faults import FAULTS, Torn, TornTransport
from lightning_rl.engines import VLLMAdapters
from lightning_rl.errors import WrongWeightsError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.sync.base import compare, push
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights
from tests.support.engine_checks import train_adapters
from tests.support.shared_engines import SIZES

pytestmark = [pytest.mark.timeout(500)]

FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp32 head": {"dtype": "bfloat16", "cast_lm_head_to_fp32": True},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
}


class Link:
    """A policy, pushed to an engine by a transport that may tear; by default to all of it."""

    def __init__(self, model, engine, transport=None, **options):
        self.policy, self.engine = Policy(str(model), **options), engine
        self.transport = transport or TornTransport()
        self.transport.connect(engine)
        self.sent, self.version, self.old = SentWeights(), 0, {}

    def move(self):
        self.old = {name: weight.clone() for name, weight in self.policy.named_weights()}
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        for parameter in self.policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.mul_(1 + 0.02 * noise).add_(1e-3)

    def push(self):
        return push(self.transport, self.engine, self.policy, self.version, self.sent)

    def require_caught(self, match=""):
        with pytest.raises(WrongWeightsError, match=match):
            self.push()
        assert self.engine.version == -1


@pytest.fixture(
    scope="module",
    params=[
        name if name == "float32" else pytest.param(name, marks=pytest.mark.slow)
        for name in FORMATS
    ],
)
def local(request, tiny_model, vllm_in):
    return Link(tiny_model, vllm_in(**FORMATS[request.param]))


@pytest.fixture
def link(local):
    local.transport.tear = None
    local.move()
    assert local.push() == len(dict(local.policy.named_weights()))
    local.move()
    return local


@pytest.mark.parametrize("name", FAULTS)
def test_a_stale_or_torn_push_is_found(link, name):
    torn = Torn(link.old, getattr(torch, link.engine.dtype), random.Random(name))
    link.transport.tear = lambda arriving: FAULTS[name](torn, arriving)
    link.require_caught(f"version {link.version}, {type(link.engine).__name__} holds another")


def test_slices_of_fused_weights_are_told_apart(link):
    name = "model.layers.1.self_attn.v_proj.weight"
    link.transport.tear = lambda arriving: arriving.update({name: link.old[name]})
    link.require_caught(rf"'{name}' than was sent: .* that of version {link.version - 1}\.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is packed on GPUs")
def test_a_head_that_is_not_packed_anew_is_found(link, monkeypatch):
    """Its weight is new, and what it computes with is old: the logits are those of before."""
    [head] = link.engine._llm.apply_model(lambda model: model.lm_head)
    monkeypatch.setattr(head.quant_method, "process_weights_after_loading", lambda layer: None)
    link.require_caught(r"'lm_head\.weight' .* and, packed, ")


def test_an_older_version_is_found_when_it_wakes(link):
    link.push()
    link.engine.load_weights(iter(link.old.items()), link.version)
    with pytest.raises(WrongWeightsError, match=f"that of version {link.version - 1}"):
        compare(link.transport, link.engine, link.sent)
    link.push()
    assert compare(link.transport, link.engine, link.sent) == len(link.sent.digests)


def test_a_weight_that_is_overwritten_later_is_found(link):
    link.push()
    [norm] = link.engine._llm.apply_model(lambda model: model.model.norm.weight)
    norm.data[0] += 0.5
    with pytest.raises(WrongWeightsError, match=r"'model\.norm\.weight'"):
        compare(link.transport, link.engine, link.sent)


def test_quantized_numbers_that_change_are_found(link):
    link.push()

    def spoil(model):
        layer = model.model.layers[0].mlp.down_proj
        weight = layer.weight
        if weight.numel():  # else it is packed
            weight.data.view(torch.uint8)[3, 5] ^= 1
        return weight.numel()

    [found] = link.engine._llm.apply_model(spoil)
    if not found:
        pytest.skip("a packed weight has no bytes to change")
    with pytest.raises(WrongWeightsError, match=r"and changed since it was converted|and, packed"):
        compare(link.transport, link.engine, link.sent)


# -------------------------------------------------------------------- adapters


def test_an_older_adapter_of_one_role_is_found(tiny_model, skeleton, monkeypatch):
    engine = VLLMAdapters(max_lora_rank=10, dtype="float32", **SIZES)
    engine.serve({"a": "first", "b": "second"})
    engine.start(skeleton)
    try:
        loras = {
            "first": LoRA(rank=8, alpha=16.0),
            "second": LoRA(rank=3, alpha=6.0, target_modules=["v_proj", "gate_proj", "down_proj"]),
        }
        links = {
            name: Link(tiny_model, engine.of_policy(name), MemoryTransport(), lora=lora)
            for name, lora in loras.items()
        }

        def send(name, version):
            train_adapters(links[name].policy, seed=version)
            links[name].version = version
            return links[name].push()

        factors = {n: len(dict(link.policy.named_adapter_weights())) for n, link in links.items()}
        base = len(dict(links["first"].policy.named_base_weights()))
        assert factors["first"] == 2 * 7 * 2
        assert send("first", 1) == base + factors["first"]
        assert send("second", 2) == factors["second"] == 2 * 3 * 2
        assert send("second", 3) == factors["second"]
        rpc = engine._llm.collective_rpc

        def forgets(method, **arguments):
            named = getattr(method, "__name__", method)
            return [None] if named.endswith("set_adapter") else rpc(method, **arguments)

        monkeypatch.setattr(engine._llm, "collective_rpc", forgets)
        with pytest.raises(WrongWeightsError, match=r"for 'second' .*lora_A' .* of version 3"):
            send("second", 4)
        monkeypatch.undo()
        assert send("second", 5) == factors["second"]
    finally:
        engine.close()


# -------------------------------------------------------------------- servers


def test_a_replica_that_alone_is_stale_is_named(servers, tiny_model, monkeypatch):
    link = Link(tiny_model, servers)
    weights = len(dict(link.policy.named_weights()))
    for _ in range(2):
        link.move()
        assert link.push() == 2 * weights
    stale = servers.replicas[1]
    transfer = stale.transfer

    async def drops(step, timeout_s, **arguments):
        if step == "update_weights":
            if arguments["update_info"]["bucket"] is not None:
                return {}
            arguments["update_info"]["complete"] = False
        return await transfer(step, timeout_s, **arguments)

    monkeypatch.setattr(stale, "transfer", drops)
    link.move()
    link.require_caught(f"{stale.name} holds another .* that of version {link.version - 1}")
    monkeypatch.undo()
    for name in ("one_number_off", "key_and_value_swapped", "torn_bucket"):
        link.move()
        torn = Torn(link.old, torch.float32, random.Random(name))
        link.transport.tear = lambda arriving, torn=torn, name=name: FAULTS[name](torn, arriving)
        link.require_caught(r"http://127\.0\.0\.1:\d+ holds another")
    link.transport.tear = None
    assert link.push() == 2 * weights
    link.transport.close()


@pytest.mark.parametrize(
    "transport", [MemoryTransport, pytest.param(CollectiveTransport, marks=pytest.mark.slow)]
)
def test_adapters_that_servers_merge_are_compared(servers, tiny_model, transport):
    lora = LoRA(rank=4, alpha=8.0)
    link = Link(tiny_model, servers, transport(adapters_only=True), lora=lora)
    base = len(dict(link.policy.named_base_weights()))
    for version in (1, 2):
        train_adapters(link.policy, seed=version)
        link.version = version
        assert link.push() == 2 * (base + 2 * 7 * 2)
    sent = dict(link.sent.digests)
    name = next(name for name in sent if name.endswith("lora_B"))
    link.sent.digests[name] = sent[name.replace("lora_B", "lora_A")]
    with pytest.raises(WrongWeightsError, match=f"another '{name}'"):
        compare(link.transport, servers, link.sent)
    link.transport.close()
