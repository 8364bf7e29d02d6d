"""``compile: true`` changes what a step costs, and nothing else.

Slow: the compiler takes half a minute for each module.
"""

import pytest
import torch
from torch import nn

from lightning_rl.algos.kl import K3Penalty
from lightning_rl.extend import Policy
from lightning_rl.models import heads
from lightning_rl.models.attention import packed as attention, varlen
from lightning_rl.models.heads import token_logprobs
from lightning_rl.models.logit_map import LogitMap
from lightning_rl.module import PolicyModule
from tests.support.mixtures import saved_mixture
from tests.support.traced_kernel import traced_varlen

pytestmark = pytest.mark.slow  # compiling takes minutes


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_compiled_module_trains_the_same_whatever_the_micro_batch(
    tiny_model, train_on, random_batch, recomputes
):
    """The micro-batches have several sizes; scoring without gradient and a reference are included.

    Compiled layers run again in backward, too.
    """
    weights = []
    for compiled in (False, True):
        module = PolicyModule(
            str(tiny_model),
            kl=K3Penalty(0.1),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            compile=compiled,
            update={"minibatches": 2},
            loading={"gradient_checkpointing": compiled and recomputes},
        )
        train_on(module, [random_batch(1, groups=3), random_batch(2, groups=8)])
        weights.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
        names = {name for name, _ in module.policy.named_weights()}
        assert not any("_orig_mod" in name for name in names)
    assert float((weights[1] - weights[0]).norm() / weights[0].norm()) < 1e-5


def test_a_compiled_mixture_trains_the_same(tmp_path, train_on, random_batch):
    """The compiler does not warn that it gave up."""
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


def test_layers_whose_attention_is_fused_are_compiled_whole(tiny_model, random_batch, monkeypatch):
    """A layer compiles without a graph break, as on a GPU, and two micro-batches' graphs serve
    any."""
    monkeypatch.setattr(attention, "fused_dtype", lambda lm, device: lm.dtype)
    for module in (attention, varlen):
        monkeypatch.setattr(module, "fused_kernel", lambda: traced_varlen)
    found, counters = [], torch._dynamo.utils.counters
    for compiled in (False, True):
        policy = Policy(str(tiny_model), compile_layers=compiled).double()
        counters.clear()
        graphs = []
        for seed in range(3):
            micro_batch = random_batch(seed, groups=2 + seed)
            with torch.no_grad():
                found.append(policy(micro_batch).logprobs)
            scores = policy(micro_batch)
            (scores.logprobs.sum() + scores.entropy.sum()).backward()
            graphs[:] = [*graphs[-1:], counters["stats"]["unique_graphs"]]
        found.append(torch.cat([p.grad.flatten() for p in policy.lm.parameters()]))
    assert not counters["graph_break"]
    assert graphs[0] == graphs[1] > 0
    for plain, fast in zip(found[:4], found[4:], strict=True):  # norms are taken in float32
        assert float((fast - plain).norm() / plain.norm()) < 1e-5


def test_compiled_passes_over_logits_are_the_same_in_any_chunk(monkeypatch):
    """Seven tokens in chunks of two and three, then others, for which nothing is compiled."""
    monkeypatch.setattr(heads, "chunk_elements", lambda device: 3 * 50)
    torch.manual_seed(0)
    linear = nn.Linear(8, 50, dtype=torch.double)
    capped, graphs = LogitMap(scale=0.5, cap=2.0), []
    torch._dynamo.utils.counters.clear()
    for count in (7, 4, 16, 60):
        hidden = torch.randn(count, 8, dtype=torch.double, requires_grad=True)
        targets, temperature = torch.randint(50, (count,)), torch.rand(count).double() + 0.5
        for *weights, logit_map in ((1.0, 0.0, None), (1.0, 1.0, capped), (0.0, 1.0, None)):
            found = []
            for compiled in (False, True):
                settings = {"compiled": compiled, "logit_map": logit_map}
                outputs = token_logprobs(hidden, linear, targets, temperature, **settings)
                loss = sum(w * x.square().sum() for w, x in zip(weights, outputs, strict=True) if w)
                inputs = (hidden, linear.weight, linear.bias)
                found.append((*outputs, *torch.autograd.grad(loss, inputs)))
                with torch.no_grad():  # as an update's other passes score
                    scores = token_logprobs(hidden, linear, targets, temperature, **settings)
                torch.testing.assert_close(scores, outputs, rtol=0, atol=0)
            for plain, fast in zip(*found, strict=True):
                torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == 4 * graphs[:1]
