"""Test what an audit calls equal, equal within rounding, and different."""

from pathlib import Path

import pytest

from lightning_rl.cli.audit.repetition import IterationVerdict
from lightning_rl.cli.rerun.compare import CLOSE, IterationRerun
from lightning_rl.cli.rerun.run import KeptWeights
from lightning_rl.data.rollouts.log import Outcome

ELSEWHERE = ["kernels: AVX512, here AVX2"]


def verdict(loss: float, weights: str, elsewhere: list[str]) -> IterationVerdict:
    """Return the verdict on an iteration recorded with loss 2, KL NaN, and weights "a"."""
    rerun = IterationRerun(
        kept=KeptWeights(2, Path("iteration_2.ckpt")),
        recorded=Outcome(3, {"w": "a"}, {"policy/loss": 2.0, "policy/kl": float("nan")}),
        again=Outcome(3, {"w": weights}, {"policy/loss": loss, "policy/kl": float("nan")}),
        diverged_at=None if weights == "a" else 3,
        checkpoint=None,
        checkpoint_differs=None,
        environment={},
    )
    return IterationVerdict(rerun, elsewhere)


@pytest.mark.parametrize(
    ("loss", "weights", "elsewhere", "good", "told"),
    [
        (2.0, "a", [], True, "equal, 1 weight tensors bit for bit"),
        (2.0, "a", ELSEWHERE, True, "equal, 1 weight tensors bit for bit"),
        (2.0, "b", [], False, "DIFFERENT, weights since version 3, now first in w"),
        (2.0, "b", ELSEWHERE, True, f"equal within rounding of another machine ({ELSEWHERE[0]})"),
        (2.0 * (1 + CLOSE / 2), "b", ELSEWHERE, True, "equal within rounding of another machine ("),
        (
            2.0 * (1 + CLOSE * 2),
            "b",
            ELSEWHERE,
            False,
            "DIFFERENT, weights since version 3, now first in w; policy/loss was 2, is 2.004",
        ),
        (float("nan"), "b", ELSEWHERE, False, "DIFFERENT, weights since version 3"),
    ],
)
def test_a_verdict_depends_on_where_it_was_trained_first(loss, weights, elsewhere, good, told):
    found = verdict(loss, weights, elsewhere)
    assert found.good is good
    assert found.line().startswith(f"iteration 3, from checkpoint iteration_2.ckpt: {told}")
