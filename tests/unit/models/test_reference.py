"""References: what they score, when they change, and that lending them leaves the policy alone."""

import shutil

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.algos.advantages import GAE
from lightning_rl.algos.kl import K1Penalty, K3Penalty
from lightning_rl.errors import ConfigError
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.models.reference import BaseReference, FrozenReference, PeriodicReference
from lightning_rl.module import PolicyModule


def module_of(tiny_model, **options) -> PolicyModule:
    options = {"kl": K3Penalty(0.1), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | options
    return PolicyModule(str(tiny_model), **options)


def ref_logprobs(module, batch):
    return module.learner.compute_ref_logprobs(batch)["tokens", "ref_logprobs"].clone()


def logprobs(policy, batch):
    return policy.score(batch, "scored", 100_000)["tokens", "scored"].clone()


class Watch(Callback):
    """The reference's logprobs of one batch after every iteration, and the policy's."""

    def __init__(self, batch) -> None:
        self.batch = batch
        self.reference: list[torch.Tensor] = []
        self.policy: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.reference.append(ref_logprobs(pl_module, self.batch))
        self.policy.append(logprobs(pl_module.policy, self.batch))


def test_a_frozen_copy_stays(tiny_model, train_on, random_batch):
    module, watch = module_of(tiny_model, reference=FrozenReference()), Watch(random_batch(9))
    start = logprobs(Policy(str(tiny_model)), random_batch(9))
    train_on(module, [random_batch(s) for s in (1, 2, 3)], callbacks=[watch])
    for reference, policy in zip(watch.reference, watch.policy, strict=True):
        assert torch.equal(reference, start)
        assert not torch.allclose(policy, start, atol=1e-4)
    assert not any(p.requires_grad for p in module.reference.parameters())


def test_a_frozen_copy_has_no_critic(tiny_model, random_batch):
    module = module_of(tiny_model, advantage=GAE(), critic=SharedValueHead())
    module.configure_model()
    assert module.reference.policy.value_head is None
    assert isinstance(module.policy.value_head, SharedValueHead)


@pytest.fixture(scope="module")
def other_model(tiny_model, tmp_path_factory):
    """Make the same architecture with other weights."""
    directory = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(directory)
    return directory


def test_another_checkpoint_as_reference(tiny_model, other_model, random_batch):
    module = module_of(tiny_model, reference=FrozenReference(str(other_model)))
    module.configure_model()
    expected = logprobs(Policy(str(other_model)), random_batch(9))
    assert torch.equal(ref_logprobs(module, random_batch(9)), expected)
    assert not torch.allclose(expected, logprobs(module.policy, random_batch(9)), atol=1e-2)


def test_a_reference_that_reads_tokens_otherwise_is_refused(tiny_model, other_model, tmp_path):
    shutil.copytree(other_model, tmp_path / "swapped")
    written = tmp_path / "swapped" / "tokenizer.json"
    text = written.read_text()
    assert '"3": 6' in text
    written.write_text(text.replace('"3": 6', '"4": 6').replace('"4": 7', '"3": 7'))
    module = module_of(tiny_model, reference=FrozenReference(str(tmp_path / "swapped")))
    with pytest.raises(
        ConfigError, match=r"another tokenizer .*: token 6 is '4' there and '3' here"
    ):
        module.configure_model()


def test_a_periodic_reference_is_renewed_after_every_second_iteration(
    tiny_model, train_on, random_batch
):
    module, watch = module_of(tiny_model, reference=PeriodicReference(2)), Watch(random_batch(9))
    start = logprobs(Policy(str(tiny_model)), random_batch(9))
    train_on(module, [random_batch(s) for s in (1, 2, 3, 4, 5)], callbacks=[watch])
    after = watch.policy
    for reference, expected in zip(
        watch.reference, (start, after[1], after[1], after[3], after[3]), strict=True
    ):
        assert torch.equal(reference, expected)
    assert not any(p.requires_grad for p in module.reference.parameters())


@pytest.mark.parametrize("every", [0, -1])
def test_an_impossible_period_is_refused(every):
    with pytest.raises(ConfigError, match=rf"every_n_iterations={every}\) must be >= 1"):
        PeriodicReference(every)


# ---------------------------------------------------------------- the base of a LoRA


def test_the_base_is_the_policy_as_it_started(tiny_model, train_on, random_batch):
    start = logprobs(Policy(str(tiny_model)), random_batch(9))
    module = module_of(tiny_model, lora=LoRA(rank=4), reference=BaseReference())
    watch = Watch(random_batch(9))
    train_on(module, [random_batch(s) for s in (1, 2, 3)], callbacks=[watch])
    for reference in watch.reference:
        torch.testing.assert_close(reference, start, rtol=0, atol=1e-6)
    assert not torch.allclose(watch.policy[-1], start, atol=1e-3)
    assert not list(module.reference.parameters())  # it costs no memory


def test_a_frozen_copy_of_a_lora_is_its_base_too(tiny_model, train_on, random_batch):
    module = module_of(tiny_model, lora=LoRA(rank=4), reference=FrozenReference())
    train_on(module, [random_batch(1), random_batch(2)])
    start = logprobs(Policy(str(tiny_model)), random_batch(9))
    torch.testing.assert_close(ref_logprobs(module, random_batch(9)), start, rtol=0, atol=1e-6)


def adapted(module):
    """Make adapters that do something, and a critic that predicts something."""
    module.configure_model()
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    if module.policy.value_head is not None:
        torch.nn.init.constant_(module.policy.value_head.linear.weight, 0.1)
    return module


def test_lending_switches_the_adapters_on_again_also_after_an_error(tiny_model, random_batch):
    module = adapted(module_of(tiny_model, lora=LoRA(rank=4), reference=BaseReference()))
    before = logprobs(module.policy, random_batch(9))
    base = ref_logprobs(module, random_batch(9))
    assert not torch.allclose(base, before, atol=1e-2)
    assert torch.equal(logprobs(module.policy, random_batch(9)), before)
    with pytest.raises(ZeroDivisionError), module.reference.scoring(module.policy):
        raise ZeroDivisionError
    assert torch.equal(logprobs(module.policy, random_batch(9)), before)


def test_the_base_does_not_replace_the_critics_values(tiny_model, random_batch):
    head = SharedValueHead()
    module = adapted(
        module_of(
            tiny_model,
            lora=LoRA(rank=4),
            reference=BaseReference(),
            advantage=GAE(),
            critic=head,
            kl_reward=K1Penalty(0.1),
        )
    )
    learner = module.learner
    batch = learner.compute_values(learner.compute_old_logprobs(random_batch(9)))
    values = batch["tokens", "values"].clone()
    assert values.any()
    batch = module.learner.compute_ref_logprobs(batch)
    assert torch.equal(batch["tokens", "values"], values)
    assert module.policy.value_head is head


def test_a_base_reference_needs_a_lora(tiny_model):
    with pytest.raises(ConfigError, match="BaseReference needs a LoRA policy; set lora"):
        module_of(tiny_model, reference=BaseReference()).configure_model()
