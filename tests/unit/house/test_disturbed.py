"""The disturbance moves what orders and kernels round, and nothing else; margins are reported."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import tests.disturbed as disturbance
import tests.disturbed.__main__ as command
from tests.disturbed import ROOT, VARIABLE
from tests.disturbed.__main__ import ROUNDS, possible
from tests.disturbed.kernels import disturbed
from tests.disturbed.margins import margin_of

pytestmark = pytest.mark.skipif(VARIABLE in os.environ, reason="all is disturbed already")


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


ROUNDED = {
    "product": lambda: numbers(5, 64) @ numbers(64, 7),
    "in float64": lambda: numbers(5, 64).double() @ numbers(64, 7).double(),
    "linear": lambda: F.linear(numbers(5, 64), numbers(7, 64), numbers(7)),
    "batched": lambda: numbers(3, 5, 64) @ numbers(3, 64, 7),
    "sum": lambda: numbers(500, 64).sum(-1),
    "mean": lambda: numbers(500, 64).mean(-1),
    "norm": lambda: numbers(500, 64).norm(dim=-1),
    "softmax": lambda: numbers(500, 64).softmax(-1),
    "log_softmax": lambda: numbers(500, 64).log_softmax(-1),
    "logsumexp": lambda: numbers(500, 64).logsumexp(-1),
    "cumsum": lambda: numbers(5, 64).cumsum(-1),
    "index_add": lambda: torch.zeros(2, 9).index_add(0, torch.arange(64) % 2, numbers(64, 9)),
    "attention": lambda: F.scaled_dot_product_attention(*(numbers(1, 2, 99, 8),) * 3),
    "exp": lambda: numbers(5_000).exp(),
    "log": lambda: numbers(5_000).abs().log(),
    "product and sum": lambda: torch.addcmul(numbers(5_000), numbers(5_000).sin(), numbers(5_000)),
    "power of a number": lambda: 1.7 ** numbers(5_000),
    "silu": lambda: F.silu(numbers(5_000)),
    "gelu": lambda: F.gelu(numbers(5_000)),
    "products of all": lambda: torch.stack([row.prod() for row in numbers(200, 64)]),
    "a gradient": lambda: torch.func.grad(lambda x: F.logsigmoid(x).sum())(numbers(5_000)),
    "in place": lambda: numbers(5_000).sigmoid_(),
    "drawn": lambda: numbers(5_000),
}
EXACT = {
    "elementwise": lambda: (torch.arange(1.0, 99) / 99).square().sqrt() * 0.7,
    "products of one term": lambda: torch.eye(64) @ (torch.arange(64.0) / 99)[:, None],
    "sums of two": lambda: (torch.arange(10.0) / 99).reshape(5, 2).sum(-1),
    "sums of two and zeros": lambda: (torch.eye(9)[:7] / 99 + torch.eye(9)[2:] / 7).sum(-1),
    "counts": lambda: (torch.arange(64) % 3 > 0).float().reshape(4, 16).sum(-1),
    "a share of rewards": lambda: torch.tensor([1.0, 0.0, 0.25]).mean(),
    "softmax of one": lambda: torch.ones(5, 1).softmax(-1),
    "sums of each row's own": lambda: torch.zeros(9).index_add(
        0, torch.arange(9), torch.arange(9.0) / 99
    ),
    "integers": lambda: torch.arange(9).sum(),
    "what is masked": lambda: torch.baddbmm(
        torch.full((1, 5, 5), -torch.inf), torch.ones(1, 5, 64) / 7, torch.ones(1, 64, 5) / 9
    ),
    "exp of zero": lambda: torch.zeros(9).exp(),
    "the least float": lambda: torch.full((3, 3), torch.finfo().min).sum(-1) / 3,
    "nan": lambda: torch.full((3, 3), torch.nan).sum(-1),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_the_same_computation_has_the_same_bits(name):
    plain = ROUNDED[name]()
    with disturbed(1):
        first, again = ROUNDED[name](), ROUNDED[name]()
    with disturbed(2):
        other = ROUNDED[name]()
    assert torch.equal(first, again)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, other)
    assert torch.equal(ROUNDED[name](), plain)
    exact = F.mse_loss(first.double(), plain.double()).sqrt() / plain.double().norm()
    assert exact < 1e-5  # an error of the disturbance's own would be far larger


@pytest.mark.parametrize("name", EXACT)
def test_what_no_order_rounds_is_left_alone(name):
    plain = EXACT[name]()
    for seed in range(5):
        with disturbed(seed):
            torch.testing.assert_close(EXACT[name](), plain, rtol=0, atol=0, equal_nan=True)


SPREAD = json.loads(disturbance.SPREAD.read_text())


@pytest.mark.parametrize("cancelling", [False, True])
def test_products_move_by_samples_of_the_measured_spread(cancelling):
    """The unit is epsilon times the sum of absolute terms, whatever cancels."""
    left, right = numbers(300, 64), numbers(64, 300)
    if cancelling:
        left = torch.cat([left[:, :32], left[:, :32]], 1)
        right = torch.cat([right[:32], -right[:32] * 1.001])
    unit = (left.abs() @ right.abs()) * torch.finfo().eps
    plain = left @ right
    with disturbed(1):
        moved = ((left @ right - plain).abs() / unit).double().flatten()
    expected = dict(zip(disturbance.LEVELS, SPREAD["product of 64"], strict=True))
    for level in (0.9, 0.95, 0.99):
        # The sum is rounded to a number of its own size once more.
        assert moved.quantile(level) == pytest.approx(expected[level], rel=0.1, abs=0.3)
    assert moved.max() < expected[1.0] + 1


def test_a_masked_element_neither_moves_nor_keeps_others_from_it():
    x = numbers(500, 64)
    x[:, 5] = -torch.inf
    plain = x.log_softmax(-1)
    with disturbed(1):
        moved = x.log_softmax(-1)
    assert not torch.equal(moved, plain)
    unit = plain[plain.isfinite()].abs().max() * torch.finfo().eps * SPREAD["log_softmax"][-1]
    torch.testing.assert_close(moved, plain, rtol=0, atol=2 * float(unit))


def test_second_moments_stay_positive():
    """Adam takes their square root; a unit of the largest one would make the others negative."""
    gradient = numbers(5_000) * torch.logspace(-9, 0, 5_000)
    with disturbed(1):
        moments = torch.zeros(5_000).addcmul_(gradient, gradient, value=0.001)
    assert (moments >= 0).all()


def test_functions_move_by_units_in_the_last_place():
    x = numbers(50_000)
    plain = x.exp()
    with disturbed(1):
        apart = (x.exp().view(torch.int32) - plain.view(torch.int32)).abs()
    assert 1 <= apart.max() <= 2
    share = sum(level > 0.25 for level in SPREAD["exp"]) / len(SPREAD["exp"])
    assert 0 < (apart > 0).double().mean() < share


def test_another_shape_rounds_otherwise():
    with disturbed(1):
        whole = numbers(6, 64) @ numbers(64, 9)
        half = numbers(6, 64)[:3] @ numbers(64, 9)
    assert not torch.equal(whole[:3], half)
    unit = float((numbers(6, 64).abs() @ numbers(64, 9).abs()).max()) * torch.finfo().eps
    torch.testing.assert_close(whole[:3], half, rtol=0, atol=2 * unit * SPREAD["product of 64"][-1])


def test_gradients_and_16_bits_too():
    weight = numbers(64, 7).requires_grad_()
    left, right = numbers(300, 64).bfloat16(), numbers(64, 300).bfloat16()

    def gradient():
        loss = (left[:5].float() @ weight).logsumexp(-1).sum()
        return torch.autograd.grad(loss, weight)[0]

    plain, short = gradient(), left @ right
    with disturbed(1):
        assert not torch.equal(gradient(), plain)
        again = left @ right
    apart = (again.view(torch.int16).int() - short.view(torch.int16).int()).abs()
    # A unit of numbers below a power of two is half of one above.
    assert 0 < apart.max() <= 2
    assert (again != short).double().mean() < 0.1


def test_exponentials_may_be_drawn_from_another_stream():
    def drawn():
        generator = torch.Generator().manual_seed(0)
        return torch.empty(10_000).exponential_(2.0, generator=generator), torch.rand(
            1, generator=generator
        )

    plain, _ = drawn()
    with disturbed(1, draws="draws"):
        (first, then), (again, _) = drawn(), drawn()
    assert torch.equal(first, again)
    assert (first != plain).double().mean() > 0.99
    assert first.mean() == pytest.approx(0.5, abs=0.05)  # ten standard errors
    torch.manual_seed(0)
    assert not torch.equal(then, torch.rand(1))  # one number was taken from the generator


PROGRAM = """
import torch
x = torch.arange(640.0).reshape(10, 64).sin()
print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
print((x @ x.T).double().std().item())
"""


def test_the_processes_of_a_round_are_disturbed_and_capped():
    found = set()
    for round in possible(ROUNDS):
        command = [sys.executable, "-c", PROGRAM]
        said = subprocess.check_output(command, env=round.environment(), cwd=ROOT, text=True)
        capability, threads, product = said.split()
        assert capability.lower() == (round.cap or capability.lower())
        assert int(threads) == round.threads
        found.add(product)
    assert len(found) == len(possible(ROUNDS))


def test_rounds_that_a_cpu_cannot_do_are_left_out(monkeypatch):
    for capability, caps in (
        ("AVX512", [None, "default", "avx2"]),
        ("AVX2", [None, "default", "avx2"]),
        ("DEFAULT", [None, "default"]),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert [round.cap for round in possible(ROUNDS)] == caps


@pytest.mark.parametrize(
    ("rounds", "margin"),
    [
        ([(1e-6, 1e-5), (2e-6, 1e-5)], 5),  # an error that rounding makes up
        ([(1e-5, 1e-6), (1e-5, 2e-6)], 5),  # the other way round: a fault beyond a bound
        ([(8.0e-3, 1e-2), (8.1e-3, 1e-2)], 19),  # an error that is mostly something else's
        ([(0.5, 0.7), (0.51, 0.68)], 17 / 3),  # two results in order
        ([(0.5, 0.6), (0.5, 0.6)], math.inf),
    ],
)
def test_margins_by_hand(rounds, margin):
    assert margin_of(rounds) == pytest.approx(margin)


PLANTED = """
import pytest
import torch

x = torch.arange(640.0).reshape(10, 64).sin()
exact = x.double() @ x.double().T
error = float((x @ x.T - exact).abs().max())

def test_bounds():
    assert 0 < error < {tight}
    assert error < 1.0
    assert ((x @ x.T - exact).abs() < {tight}).all()
    assert (x @ x.T).flatten().tolist() == pytest.approx(exact.flatten().tolist(), abs={tight})
    torch.testing.assert_close(x @ x.T, exact.float(), rtol=0, atol={tight})
    assert torch.allclose(x @ x.T, exact.float(), rtol=0, atol={tight})
    assert len(x) < 11
"""


def test_a_tight_bound_is_reported(tmp_path, monkeypatch, capfd):
    # The largest error is about a unit of epsilon times 64, and differs from round to round.
    (tmp_path / "test_planted.py").write_text(PLANTED.format(tight=2e-5))
    monkeypatch.setattr(command, "ROUNDS", tuple(map(command.Round, range(1, 5))))
    assert command.main([str(tmp_path / "test_planted.py"), "-n", "0"]) == 1
    lines = capfd.readouterr().out.rpartition("the smallest margins:")[2].strip().splitlines()
    reported = {
        int(line.split("test_planted.py:")[1].split(":")[0].split()[0]): line for line in lines
    }
    assert sorted(reported) == [10, 11, 12, 13, 14, 15]
    for number, line in reported.items():
        assert (float(line.split()[0]) < 4) == (number != 11), line
