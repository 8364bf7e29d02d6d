"""Follow the most bytes that torch allocates on the CPU at one time, in an update or a call."""

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.pytorch import Callback
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


class FollowAllocations(Callback):
    """Follows allocations; ``peak`` is the most at one time since the first batch began."""

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def on_train_batch_start(self, *_: object) -> None:
        gc.collect()
        self.profiler.start()

    def on_train_batch_end(self, *_: object) -> None:
        self.profiler.stop()

    @property
    def peak(self) -> int:
        return peak_of(self.profiler)


def peak_while(call: Callable[[], Any]) -> int:
    """Return the most bytes that a call has allocated at one time, its result included."""
    gc.collect()  # garbage that is freed meanwhile would be taken off
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    del kept
    return peak_of(profiler)


def peak_of(profiler: profile) -> int:
    """Return the most bytes allocated at one time, beside what there was when it started.

    Threads that the profiler does not know, such as gloo's, free memory unheard: what is allocated
    at its address takes its place.
    """
    tree = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    there: dict[int, int] = {}
    used = peak = 0
    for event in sorted(_allocations(tree), key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            used += size - there.get(address, 0)
            there[address] = size
        else:
            used += size
            there.pop(address, None)
        peak = max(peak, used)
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)
