"""``compile: true`` changes what a step costs, and nothing else."""

import pytest
import torch

from lightning_rl.algos.kl import K3Penalty
from lightning_rl.module import PolicyModule
from tests.support.mixtures import saved_mixture

pytestmark = pytest.mark.slow  # compiling takes minutes


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_compiled_module_trains_the_same_whatever_the_pack(
    tiny_model, train_on, random_batch, recomputes
):
    """Packs of several sizes, scoring without gradient and a reference included.

    Also where compiled layers run again in backward.
    """
    weights = []
    for compiled in (False, True):
        module = PolicyModule(
            str(tiny_model),
            kl=K3Penalty(0.1),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            minibatches=2,
            compile=compiled,
            gradient_checkpointing=compiled and recomputes,
        )
        train_on(module, [random_batch(1, groups=3), random_batch(2, groups=8)])
        weights.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
        names = {name for name, _ in module.policy.named_weights()}
        assert not any("_orig_mod" in name for name in names)
    assert float((weights[1] - weights[0]).norm() / weights[0].norm()) < 1e-5


def test_a_compiled_mixture_trains_the_same(tmp_path, train_on, random_batch):
    """Without a warning that the compiler gave up."""
    weights = []
    for compiled in (False, True):
        module = PolicyModule(
            str(saved_mixture("qwen3_moe", tmp_path)),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
            compile=compiled,
        )
        torch._dynamo.utils.counters.clear()
        train_on(module, [random_batch(1, groups=3)])
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert not any("inductor" in reason for reason in breaks)
        weights.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    module.policy.save_pretrained(tmp_path / "export")
    assert "experts_implementation" not in (tmp_path / "export" / "config.json").read_text()
    assert float((weights[1] - weights[0]).norm() / weights[0].norm()) < 1e-4
