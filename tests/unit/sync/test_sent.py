"""Test what was sent and what is held, tensor by tensor, with a real engine in this process."""

import logging
import random
from dataclasses import replace

import pytest
import torch

from benchmarks.ledger.faults import FAULTS, Torn, TornTransport
from lightning_rl.engines import TransformersEngine
from lightning_rl.engines.hf.adapters import TransformersAdapters
from lightning_rl.engines.push import HeldDigests
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import EngineError, WeightSyncError, WrongWeightsError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.run.clock import StageClock
from lightning_rl.run.digest import digest
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.adapters import Merger
from lightning_rl.sync.base import compare, push
from lightning_rl.sync.checkpoint import CheckpointTransport
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights
from tests.support.tiny_models import chatml_tokenizer, save_random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Make a model with an output head of its own, in which one matrix is a square."""
    directory = tmp_path_factory.mktemp("untied")
    save_random_model(directory, chatml_tokenizer(), vocab_size=288, tie_word_embeddings=False)
    return directory


@pytest.fixture(scope="module")
def skeleton_of_model(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("skeleton")
    save_skeleton(str(model), directory)
    return directory


def started(skeleton, dtype="float32", cls=TransformersEngine, **roles):
    engine = cls(dtype=dtype, device="cpu")
    if roles:
        engine.serve(roles)
    engine.start(skeleton)
    return engine


def move(policy, seed):
    """Move to other weights; return those before."""
    before = {name: weight.clone() for name, weight in policy.named_weights()}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.mul_(1 + 0.02 * noise).add_(1e-3)
    return before


def wired(engine, transport):
    transport.connect(engine)
    return transport


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_stale_or_torn_push_is_found(model, skeleton_of_model, name, dtype):
    engine, policy, sent = started(skeleton_of_model, dtype), Policy(str(model)), SentWeights()
    transport = wired(engine, TornTransport())
    assert push(transport, engine, policy, 1, sent) == len(dict(policy.named_weights()))
    draw = random.Random(name)
    for version in range(2, 4):
        torn = Torn(move(policy, version), getattr(torch, dtype), draw)
        transport.tear = lambda arriving, torn=torn: FAULTS[name](torn, arriving)
        with pytest.raises(WrongWeightsError, match=f"push of version {version}, Transformers"):
            push(transport, engine, policy, version, sent)
        assert engine.version == -1  # nothing is generated with it
        with pytest.raises(EngineError, match="holds no trained weights"):
            run_async(engine.generate([3], Sampling(max_tokens=1), 0))
    transport.tear = None
    push(transport, engine, policy, 4, sent)
    assert engine.version == 4


def test_the_error_tells_what_is_held_instead(model, skeleton_of_model):
    engine, policy, sent = started(skeleton_of_model), Policy(str(model)), SentWeights()
    transport = wired(engine, TornTransport())
    push(transport, engine, policy, 4, sent)
    name = "model.layers.1.self_attn.k_proj.weight"
    value = name.replace("k_proj", "v_proj")
    old = move(policy, 5)
    transport.tear = lambda arriving: arriving.update({name: old[name]})
    held, new = digest(old[name]), digest(dict(policy.named_weights())[name])
    with pytest.raises(
        WrongWeightsError,
        match=rf"another '{name}' than was sent: digest {held}, not {new}, is that of version 4",
    ):
        push(transport, engine, policy, 5, sent)
    transport.tear = lambda arriving: arriving.update({name: arriving[value]})
    with pytest.raises(WrongWeightsError, match=rf", is that of '{value}'\. No token"):
        push(transport, engine, policy, 5, sent)
    transport.tear = lambda arriving: arriving.update(
        {n: torch.zeros_like(w) for n, w in arriving.items()}
    )
    with pytest.raises(WrongWeightsError, match=r"and \d+ others than .*, matches no weight sent"):
        push(transport, engine, policy, 5, sent)


def test_weights_that_change_between_pushes_are_found_too(model, skeleton_of_model):
    engine, policy, sent = started(skeleton_of_model), Policy(str(model)), SentWeights()
    transport = wired(engine, MemoryTransport())
    old = move(policy, 1)
    push(transport, engine, policy, 1, sent)
    assert compare(transport, engine, sent) == len(sent.digests)
    engine.load_weights(iter(old.items()), 1)  # as one that wakes with what it had
    with pytest.raises(WrongWeightsError):
        compare(transport, engine, sent)


def test_a_files_weights_are_compared_with_the_trainers(model, skeleton_of_model, tmp_path):
    class Stale(CheckpointTransport):
        """Always returns the first file that there was."""

        @staticmethod
        def fetch(bucket):
            first = min(tmp_path.glob("*.safetensors"))
            version = int(first.stem.split("-")[1])
            return CheckpointTransport.fetch(bucket | {"path": str(first), "version": version})

    engine, policy, sent = started(skeleton_of_model, "bfloat16"), Policy(str(model)), SentWeights()
    transport = wired(engine, Stale(str(tmp_path)))
    push(transport, engine, policy, 1, sent)
    move(policy, 2)
    with pytest.raises(WrongWeightsError, match="that of version 1"):
        push(transport, engine, policy, 2, sent)


@pytest.mark.parametrize("cls", [MemoryTransport, CheckpointTransport])
def test_adapters_that_are_merged_on_the_way(model, skeleton_of_model, tmp_path, cls):
    """The base, which comes once, and the adapters are told apart in what the engine holds."""
    where = [] if cls is MemoryTransport else [str(tmp_path)]
    engine, sent = started(skeleton_of_model, "bfloat16"), SentWeights()
    policy = Policy(str(model), lora=LoRA(rank=4, alpha=8.0))
    transport = wired(engine, cls(*where, adapters_only=True))
    for version in range(1, 4):
        move(policy, version)
        count = push(transport, engine, policy, version, sent)
    assert count == len(dict(policy.named_base_weights())) + len(
        dict(policy.named_adapter_weights())
    )
    old = dict(policy.named_weights())  # merged
    move(policy, 4)
    push(transport, engine, policy, 4, sent)
    engine.load_weights(iter(old.items()), 4)
    with pytest.raises(WrongWeightsError, match=r"another 'model\.layers\.0\.self_attn"):
        compare(transport, engine, sent)


def test_a_worker_that_merges_answers_with_base_and_adapters():
    b, a, weight = torch.ones(2, 1), torch.tensor([[1.0, 2.0]]), torch.eye(2)
    merger = Merger(torch.device("cpu"))
    merger.begin()
    adapters = {"q.x.lora_A": a, "q.x.lora_B": b}
    push = adapters | {"q.x.weight": weight, "n.x.weight": weight}
    assert not dict(merger.take(adapters.items(), with_base=True))
    base = [(name, tensor) for name, tensor in push.items() if name not in adapters]
    loaded = dict(merger.take(base, with_base=True))
    merger.finish()
    held = {name: digest(tensor) for name, tensor in loaded.items()}
    seen = merger.seen_apart(held, torch.float32)
    assert seen == {name: digest(tensor) for name, tensor in push.items()}
    stale = held | {"q.x.weight": digest(weight)}  # adapters were not merged
    assert merger.seen_apart(stale, torch.float32)["q.x.weight"] == digest(weight)
    half = held | {"q.x.weight": digest(weight + 0.5 * b @ a)}
    assert merger.seen_apart(half, torch.float32)["q.x.weight"] == half["q.x.weight"]


def test_each_policys_adapters_are_compared_with_its_own(model, skeleton_of_model, monkeypatch):
    engine = started(skeleton_of_model, cls=TransformersAdapters, x="first", y="second")
    policies = {n: Policy(str(model), lora=LoRA(rank=4, alpha=8.0)) for n in ("first", "second")}
    links = {n: (wired(engine.of_policy(n), MemoryTransport()), SentWeights()) for n in policies}

    def send(name, version):
        transport, sent = links[name]
        move(policies[name], version)
        return push(transport, engine.of_policy(name), policies[name], version, sent)

    factors = len(dict(policies["first"].named_adapter_weights()))
    base = len(dict(policies["first"].named_base_weights()))
    assert (send("first", 1), send("second", 2), send("first", 3)) == (
        factors + base,
        factors,
        factors + base,
    )
    monkeypatch.setattr(engine._adapters, "put", lambda *_: None)
    with pytest.raises(WrongWeightsError, match=r"for 'second' holds another .*lora_A'"):
        send("second", 4)
    assert (engine.of_policy("second").version, engine.of_policy("first").version) == (-1, 3)


# -------------------------------------------------------------------- by hand


class Says(TransformersEngine):
    """Answers what it is told to."""

    said: tuple[HeldDigests, ...] = ()

    def held_digests(self, names):
        return list(self.said)


def passed(weights, sent, version):
    """Pass all weights of a push, which the record notes."""
    sent.begin(Says(dtype="bfloat16", device="cpu"), version)
    for name, weight in weights:
        sent.note(name, weight)
    sent.end()
    return sent


def noted(weights):
    return passed(weights.items(), SentWeights(), 7)


def test_what_cannot_be_read_is_counted_and_said_once(caplog):
    weights = {name: torch.randn(3) for name in "abc"}
    sent = noted(weights)
    held = {name: digest(weight.bfloat16()) for name, weight in weights.items()}
    whole = HeldDigests("one", held)
    part = HeldDigests("two", {"a": held["a"]}, {"b": "it is packed", "c": "it is packed"})
    with caplog.at_level(logging.WARNING):
        assert sent.require_held(lambda names: [whole, part]) == 4
        assert sent.require_held(lambda names: [whole, part]) == 4
        assert sent.require_held(lambda names: []) == 0
    assert [record.message for record in caplog.records] == [
        "digests do not compare 2 tensors in the engine: it is packed",
        "digests do not compare 3 tensors in the engine: this engine cannot say what it holds",
    ]
    with pytest.raises(WrongWeightsError, match="version 7, two holds another 'a'"):
        sent.require_held(lambda names: [whole, replace(part, digests={"a": held["b"]})])


def test_a_push_that_breaks_off_leaves_the_digests_as_they_were():
    sent = noted({"a": torch.ones(2)})
    before = dict(sent.digests)

    def breaking():
        yield "a", torch.zeros(2)
        raise WeightSyncError("it broke off")

    with pytest.raises(WeightSyncError, match="it broke off"):
        passed(breaking(), sent, 8)
    assert (sent.digests, sent.version) == (before, 7)
    passed([("a", torch.zeros(2))], sent, 9)  # nothing is left of it
    assert (sent.digests, sent.version) == ({"a": digest(torch.zeros(2).bfloat16())}, 9)


def test_digests_are_a_stage_of_their_own(model, skeleton_of_model):
    clock = StageClock()
    engine, policy, sent = started(skeleton_of_model), Policy(str(model)), SentWeights(clock)
    with clock("sync"):
        push(wired(engine, MemoryTransport()), engine, policy, 1, sent)
    seconds = clock.take()
    assert seconds["digests"] > 0
    assert seconds["sync"] > 0
