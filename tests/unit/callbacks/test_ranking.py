"""Test which of the saved checkpoints is best."""

from lightning_rl.callbacks.ranking import ranked


def test_of_equals_the_newest_is_the_better():
    best = []
    for name, value in (("a", 0.5), ("b", 0.5), ("c", 0.25), ("d", None), ("e", float("nan"))):
        best = ranked(best, value, name, 2, "max")
    assert best == [(0.5, "b"), (0.5, "a")]
    assert ranked(best, 0.5, "f", 2, "max") == [(0.5, "f"), (0.5, "b")]
    assert ranked(best, 0.5, "f", 1, "min") == [(0.5, "f")]
    assert ranked(best, 0.25, "b", 2, "max") == [(0.5, "a"), (0.25, "b")]
