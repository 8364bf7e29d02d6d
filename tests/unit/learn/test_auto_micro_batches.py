"""Test micro-batches sized by memory, on a GPU that is made up: what it has free, and what a pass
takes."""

import pytest
import torch

from lightning_rl.errors import ConfigError
from lightning_rl.learn import auto_micro_batches
from lightning_rl.learn.auto_micro_batches import AutoMicroBatches, owed_bytes
from lightning_rl.models.memory import forward_tokens
from lightning_rl.module import PolicyModule
from tests.support.small_run import adamw

CPU = torch.device("cpu")
KB = 1_000


@pytest.fixture
def gpu(monkeypatch):
    """Fake a GPU; return the tokens of its micro-batches. A pass takes 300 KB, and 5 KB a token."""
    asked: list[int] = []

    def peak(compute, micro_batch, device):
        compute(micro_batch)
        asked.append(forward_tokens(micro_batch))
        return 300 * KB + 5 * KB * forward_tokens(micro_batch)

    monkeypatch.setattr(auto_micro_batches, "free_bytes", lambda device: 1_000 * KB)
    monkeypatch.setattr(auto_micro_batches, "peak_bytes", peak)
    monkeypatch.setattr(auto_micro_batches, "STEP", 8)
    monkeypatch.setattr(auto_micro_batches, "SAMPLE", 20)
    return asked


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def measured(batch, compute=lambda micro_batch: None, kind=sgd, sizes=(10,)):
    optimizer = kind([torch.nn.Parameter(torch.zeros(n)) for n in sizes])
    return AutoMicroBatches(kind).measure(batch, compute, optimizer, CPU)


def test_what_is_free_is_shared_out_to_tokens(gpu, random_batch, monkeypatch):
    batch = random_batch(1)
    # 0.85 of 1,000 KB, less 300: 550 KB are for 110 tokens, of which 104 are a multiple of 8.
    assert measured(batch) == 104
    small, large = gpu
    assert 20 <= small < large
    monkeypatch.setattr(auto_micro_batches, "MOST", 96)
    assert measured(batch) == 96
    monkeypatch.setattr(auto_micro_batches, "free_bytes", lambda device: 100 * KB)
    assert measured(batch) == 8  # the least, whatever there is


def test_the_state_that_an_optimizer_is_going_to_have_is_left_free(random_batch, gpu, monkeypatch):
    parameter = torch.nn.Parameter(torch.zeros(1_000, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    assert owed_bytes(optimizer, torch.optim.AdamW) == 8_000  # two numbers of each
    optimizer.state[parameter] = {"step": 1}
    assert owed_bytes(optimizer, torch.optim.AdamW) == 0
    assert owed_bytes(torch.optim.AdamW([torch.zeros(9)]), torch.optim.AdamW) == 0  # on the host
    monkeypatch.setattr(auto_micro_batches, "owed_bytes", lambda optimizer, make: 200 * KB)
    assert measured(random_batch(1)) == 64  # of (850 - 200 - 300) / 5 = 70


def test_the_rank_with_the_least_decides(gpu, random_batch, monkeypatch):
    batch = random_batch(1)
    other = torch.tensor(-48)
    monkeypatch.setattr(auto_micro_batches, "all_max", lambda least: torch.maximum(least, other))
    assert measured(batch) == 48
    # A rank without rollouts takes part, and asks for nothing.
    nothing = batch.clone()
    nothing["tokens"], nothing["rollouts"] = batch["tokens"][:0], batch["rollouts"][:0]
    assert measured(nothing) == 48
    monkeypatch.setattr(auto_micro_batches, "all_max", lambda least: least)
    assert measured(nothing) == auto_micro_batches.MOST


def test_too_little_memory_for_the_passes_themselves(gpu, random_batch):
    def out_of_memory(micro_batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def broken(micro_batch):
        raise RuntimeError("shapes do not match")

    assert measured(random_batch(1), out_of_memory) == 8
    with pytest.raises(RuntimeError, match="shapes do not match"):
        measured(random_batch(1), broken)


def test_nothing_is_measured_on_a_cpu(random_batch, tiny_model, train_on):
    module = PolicyModule(str(tiny_model), update={"max_tokens_per_micro_batch": "auto"})
    train_on(module, [random_batch(1)])
    assert module.learner.max_tokens_per_micro_batch == module.auto_micro_batches.tokens == 16_384
    assert (
        PolicyModule(str(tiny_model), update={"max_tokens_per_micro_batch": 7}).auto_micro_batches
        is None
    )
    with pytest.raises(ConfigError, match="max_tokens_per_micro_batch=0 must be >= 1"):
        PolicyModule(str(tiny_model), update={"max_tokens_per_micro_batch": 0})


def test_a_run_is_that_of_the_number_and_a_resumed_one_does_not_measure(
    gpu, tiny_model, train_on, random_batch, tmp_path, monkeypatch
):
    """Old logprobs are scored before the update, and in the same micro-batches as it is made in."""
    batches = [random_batch(1, groups=6), random_batch(2, groups=6)]
    monkeypatch.setattr(auto_micro_batches, "free_bytes", lambda device: 500 * KB)

    def trained(budget, epochs=2, ckpt_path=None):
        update = {"ppo_epochs": 2, "seed": 7, "max_tokens_per_micro_batch": budget}
        module = PolicyModule(str(tiny_model), optimizer=adamw(1e-2), update=update)
        trainer = train_on(module, [b.clone() for b in batches], ckpt_path, max_epochs=epochs)
        trainer.save_checkpoint(tmp_path / f"{budget}-{epochs}.ckpt")
        return module, {name: w.clone() for name, w in module.state_dict().items()}

    _, wanted = trained(24)  # 0.85 x 500 KB - 300 KB for 25 tokens
    module, whole = trained("auto")
    assert (module.learner.max_tokens_per_micro_batch, len(gpu)) == (24, 2)  # measured once
    trained("auto", epochs=1)
    monkeypatch.setattr(
        auto_micro_batches, "free_bytes", lambda device: pytest.fail("measured again")
    )
    module, resumed = trained("auto", ckpt_path=tmp_path / "auto-1.ckpt")
    assert module.learner.max_tokens_per_micro_batch == 24
    for name, weight in wanted.items():
        assert torch.equal(whole[name], weight), name
        assert torch.equal(resumed[name], weight), name
