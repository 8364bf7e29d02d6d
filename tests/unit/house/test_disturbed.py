"""Other roundings: off by a unit where an order of adding counts, and by nothing elsewhere."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.disturbed import ROOT, VARIABLE
from tests.disturbed.__main__ import ROUNDS, possible
from tests.disturbed.kernels import BITS, disturbed

pytestmark = pytest.mark.skipif(VARIABLE in os.environ, reason="all is disturbed already")


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


ROUNDED = {
    "product": lambda: numbers(5, 64) @ numbers(64, 7),
    "in float64": lambda: numbers(5, 64).double() @ numbers(64, 7).double(),
    "linear": lambda: F.linear(numbers(5, 64), numbers(7, 64), numbers(7)),
    "batched": lambda: numbers(3, 5, 64) @ numbers(3, 64, 7),
    "sum": lambda: numbers(5, 64).sum(-1),
    "mean": lambda: numbers(5, 64).mean(-1),
    "norm": lambda: numbers(5, 64).norm(dim=-1),
    "variance": lambda: numbers(5, 64).var(-1),
    "softmax": lambda: numbers(5, 64).softmax(-1),
    "log_softmax": lambda: numbers(5, 64).log_softmax(-1),
    "cumsum": lambda: numbers(5, 64).cumsum(-1),
    "index_add": lambda: torch.zeros(2, 9).index_add(0, torch.arange(64) % 2, numbers(64, 9)),
    "attention": lambda: F.scaled_dot_product_attention(*(numbers(1, 2, 9, 8),) * 3),
}
EXACT = {
    "elementwise": lambda: numbers(5, 64).exp() * 0.7,
    "products of one term": lambda: numbers(5, 1) @ numbers(1, 7),
    "sums of two": lambda: numbers(5, 2).sum(-1),
    "counts": lambda: (numbers(5, 64) > 0).float().sum(-1),
    "a share of rewards": lambda: torch.tensor([1.0, 0.0, 0.25]).mean(),
    "softmax of one": lambda: numbers(5, 1).softmax(-1),
    "sums of each row's own": lambda: torch.zeros(9).index_add(0, torch.arange(9), numbers(9)),
    "integers": lambda: torch.arange(9).sum(),
    "what is masked": lambda: torch.baddbmm(
        torch.full((1, 5, 5), -torch.inf), numbers(1, 5, 64), numbers(1, 64, 5)
    ),
    "the least float": lambda: torch.full((3, 3), torch.finfo().min).sum(-1) / 3,
    "nan": lambda: torch.full((3, 3), torch.nan).sum(-1),
}


def units(one, other):
    """How many representable numbers apart, at most."""
    bits = BITS[one.element_size()]
    return int((one.view(bits).long() - other.view(bits).long()).abs().max())


@pytest.mark.parametrize("name", ROUNDED)
def test_what_an_order_rounds_is_off_by_a_unit_or_two(name):
    """A mean is a sum, divided: its unit may be two of the smaller number."""
    plain = ROUNDED[name]()
    with disturbed(1):
        first, again = ROUNDED[name](), ROUNDED[name]()
    with disturbed(2):
        other = ROUNDED[name]()
    assert 0 < units(first, plain) <= 2
    assert torch.equal(first, again)  # the same computation, the same bits
    assert not torch.equal(first, other)
    assert torch.equal(ROUNDED[name](), plain)


@pytest.mark.parametrize("name", EXACT)
def test_what_no_order_rounds_is_left_alone(name):
    plain = EXACT[name]()
    for seed in range(5):
        with disturbed(seed):
            torch.testing.assert_close(EXACT[name](), plain, rtol=0, atol=0, equal_nan=True)


def test_another_shape_rounds_otherwise():
    with disturbed(1):
        whole = numbers(6, 64) @ numbers(64, 9)
        half = numbers(6, 64)[:3] @ numbers(64, 9)
    assert not torch.equal(whole[:3], half)
    torch.testing.assert_close(whole[:3], half)


def test_gradients_and_16_bits_too():
    weight = numbers(64, 7).requires_grad_()

    def gradient():
        loss = (numbers(5, 64) @ weight).logsumexp(-1).sum()
        return torch.autograd.grad(loss, weight)[0]

    plain, short = gradient(), numbers(50, 64).bfloat16() @ numbers(64, 70).bfloat16()
    with disturbed(1):
        assert not torch.equal(gradient(), plain)
        again = numbers(50, 64).bfloat16() @ numbers(64, 70).bfloat16()
    assert units(again, short) == 1
    assert 0 < float((again != short).float().mean()) < 0.05


PROGRAM = """
import torch
x = torch.arange(640.0).reshape(10, 64).sin()
print(torch.backends.cpu.get_cpu_capability(), (x @ x.T).sum().double().item())
"""


def test_the_processes_of_a_round_are_disturbed_and_capped():
    found = set()
    for round in possible(ROUNDS):
        command = [sys.executable, "-c", PROGRAM]
        said = subprocess.check_output(command, env=round.environment(), cwd=ROOT, text=True)
        capability, product = said.split()
        assert capability.lower() == (round.cap or capability.lower())
        found.add(product)
    assert len(found) == len(possible(ROUNDS))


def test_rounds_that_a_cpu_cannot_do_are_left_out(monkeypatch):
    for capability, caps in (
        ("AVX512", [None, "avx2", "avx512"]),
        ("AVX2", [None, "avx2"]),
        ("DEFAULT", [None]),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert [round.cap for round in possible(ROUNDS)] == caps
