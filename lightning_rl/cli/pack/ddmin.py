"""Delta debugging: the fewest of some items that still show a symptom."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def ddmin(items: Sequence[T], shows: Callable[[list[T]], bool]) -> list[T]:
    """Return some of the items, in order, none of which can be left out alone.

    This is ``ddmin`` of Zeller and Hildebrandt 2002, "Simplifying and Isolating Failure-Inducing
    Input", figure 5: parts of half the items are tried, then what is left without each part, then
    parts of half the size. A single culprit among n items takes about 2 log2(n) trials; the worst
    case is n^2 + 3n.

    Args:
        items: all of them show the symptom together, which is not tried.
        shows: whether some of them, at least one, show it.
    """
    kept, count = list(items), 2
    while len(kept) > 1:
        parts = [kept[len(kept) * k // count : len(kept) * (k + 1) // count] for k in range(count)]
        rests = [[one for other in parts if other is not part for one in other] for part in parts]
        smaller = next((some for some in parts if shows(some)), None)
        if smaller is not None:
            kept, count = smaller, 2
            continue
        if count > 2:  # of two parts each is the other's rest
            smaller = next((some for some in rests if shows(some)), None)
        if smaller is not None:
            kept, count = smaller, count - 1
        elif count < len(kept):
            count = min(2 * count, len(kept))
        else:
            break
    return kept
