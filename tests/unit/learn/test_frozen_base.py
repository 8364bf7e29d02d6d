"""A LoRA's checkpoint: adapters and what else is trained, and the same model once it is loaded."""

from hashlib import blake2b

import pytest
import torch
from torch import nn

from lightning_rl.errors import ConfigError
from lightning_rl.learn.frozen_base import leave_out_base, put_back_base
from lightning_rl.models.lora import LoRA
from lightning_rl.models.policy import Policy
from lightning_rl.models.reference import PeriodicReference
from tests.support.small_run import grpo


class Holder(nn.Module):
    """Holds two policies in a module, as those of roles."""

    def __init__(self, *policies):
        super().__init__()
        self.held = nn.ModuleList(policies)


def saved(module):
    checkpoint = {"state_dict": dict(module.state_dict())}
    leave_out_base(module, checkpoint)
    return checkpoint


def of_all(digests):
    """Return the single digest that earlier checkpoints have in place of one for each weight."""
    return blake2b(repr(sorted(digests.items())).encode(), digest_size=16).hexdigest()


def changed(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter)
    return policy


@pytest.mark.parametrize(
    "lora", [LoRA(rank=2), LoRA(rank=2, options={"modules_to_save": ["norm"]})]
)
def test_what_is_trained_is_kept_and_the_rest_is_the_models(tiny_model, lora):
    module = Holder(changed(Policy(str(tiny_model), lora=lora)), Policy(str(tiny_model)))
    whole = {name: weight.clone() for name, weight in module.state_dict().items()}
    checkpoint = saved(module)
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    assert {n for n in checkpoint["state_dict"] if n.startswith("held.0.")} == {
        name for name in trained if name.startswith("held.0.")
    }
    assert {n for n in whole if n.startswith("held.1.")} <= checkpoint["state_dict"].keys()

    other = Holder(Policy(str(tiny_model), lora=lora), Policy(str(tiny_model)))
    put_back_base(other, checkpoint)
    other.load_state_dict(checkpoint["state_dict"])
    for name, weight in other.state_dict().items():
        assert torch.equal(weight, whole[name]), name
    # Computing in bfloat16 changes nothing of what the model is.
    put_back_base(other.to(torch.bfloat16), saved(module))


def test_what_is_told_of_a_checkpoint_is_what_it_holds(tiny_model):
    module = grpo(tiny_model, lora=LoRA(rank=2))
    module.configure_model()
    next(p for name, p in module.named_parameters() if "lora_A" in name).requires_grad_(False)
    told = sum(parameter.nbytes for parameter in module.checkpointed_parameters())
    assert told == sum(weight.nbytes for weight in saved(module)["state_dict"].values())


@pytest.mark.parametrize("form", [dict, of_all])
def test_another_base_is_refused(tiny_model, form):
    checkpoint = saved(module := Holder(Policy(str(tiny_model), lora=LoRA(rank=2))))
    checkpoint["frozen_base"] = form(checkpoint["frozen_base"])
    put_back_base(module, dict(checkpoint))
    with torch.no_grad():
        module.held[0].lm.get_input_embeddings().weight[3, 0] += 0.5
    with pytest.raises(ConfigError, match="has other weights than those that"):
        put_back_base(module, checkpoint)


def test_what_no_file_has_is_kept(tiny_model):
    """A random model, and a reference that is renewed."""
    policy = Policy(str(tiny_model), lora=LoRA(rank=2))
    reference = PeriodicReference(every_n_iterations=1)
    reference.configure(policy)
    random = Policy(str(tiny_model), lora=LoRA(rank=2), loading={"random_init": True})
    for module in (Holder(reference), Holder(random)):
        checkpoint = saved(module)
        assert checkpoint.keys() == {"state_dict"}
        assert checkpoint["state_dict"].keys() == module.state_dict().keys()
