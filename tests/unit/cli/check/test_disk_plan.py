"""Test when a disk is full, calculated by hand."""

import pytest

from lightning_rl.cli.check.disk import DiskPlan, Kept

CHECKPOINTS = Kept("checkpoints", 100, every=10, count=3)
ROLLOUTS = Kept("recorded rollouts", 1, every=1, count=None)


@pytest.mark.parametrize(
    ("free", "full_at"),
    [
        (1000, None),
        (440, None),  # three checkpoints, one export at the end, and 100 iterations of rollouts
        (439, 100),
        (335, 36),  # 300 and 36
        (329, 30),  # at the third checkpoint, which is written before the first goes
        (99, 10),
        (0, 1),
    ],
)
def test_the_iteration_without_room_is_the_first_that_needs_more(free, full_at):
    plan = DiskPlan([CHECKPOINTS, Kept("exports", 40, every=100, count=1), ROLLOUTS], 100, free)
    assert plan.full_at == full_at
    assert any("WARNING" in line for line in plan.lines()) == (full_at is not None)


def test_a_run_without_an_end_fills_a_disk_with_what_it_keeps_for_good():
    assert DiskPlan([CHECKPOINTS, ROLLOUTS], None, 10_000).full_at == 9_701
    assert DiskPlan([CHECKPOINTS], None, 300).full_at is None
    assert list(DiskPlan([], None, 0).lines()) == []
