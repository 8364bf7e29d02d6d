"""Scores of things that are only compared with each other."""

from collections.abc import Sequence


def beats(place: float, other: float) -> float:
    """Return 1 for the better, i.e. lower, place of two, 0 for the worse, and 0.5 for a tie."""
    return 0.5 * ((place < other) + (place <= other))


def share_beaten(places: Sequence[float]) -> list[float]:
    """Return for each place the share of the others that it beats, ties counting half.

    In ranks: (n - rank) / (n - 1), where equal places share the mean of their ranks 1 to n. A
    place without others gets 0.5, as if all were tied.
    """
    others = len(places) - 1
    if others < 1:
        return [0.5] * len(places)
    # Each also meets itself, as a tie.
    return [(sum(beats(place, other) for other in places) - 0.5) / others for place in places]
