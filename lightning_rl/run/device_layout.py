"""Ways to use one machine's cores: processes, threads of each, and which engine generates."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

CLOSE = 1.03
"""A layout must be faster than a simpler one by this factor: less is noise."""


@dataclass(frozen=True)
class DeviceLayout:
    """A way to use this machine: a name, and what the command line says for it.

    Args:
        name: for the table.
        flags: to add behind the others.
        environment: variables to set.
    """

    name: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)

    def command(self) -> str:
        """The command to type."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, "lightning-rl fit ...", *map(shlex.quote, self.flags)])


def layouts_of(
    cores: int, groups: int, strategy: str = "auto", streams: bool = False, plain: bool = False
) -> list[DeviceLayout]:
    """Those that make sense for so many cores and groups per iteration, the simplest first.

    Of the numbers of processes that share the groups evenly the smallest and the largest;
    ``streams``: also engine and trainer at the same time, each on half of the cores; ``plain``:
    also without vLLM, in one process and in most.
    """
    alone = () if strategy == "auto" else ("--trainer.strategy", "auto")
    shared = [n for n in range(2, cores + 1) if groups % n == 0]
    streamed = [_streamed(cores, groups, alone)] if streams and cores > 1 else []
    one = [_processes(1, threads, alone) for threads in sorted({1, cores})]
    several = [_processes(n, cores // n) for n in sorted({*shared[:1], *shared[-1:]})]
    without = [_plain(layout) for layout in (*one, *several[-1:])] if plain else []
    return [*one, *streamed, *several, *without]


def _streamed(cores: int, groups: int, flags: tuple[str, ...]) -> DeviceLayout:
    """Half of the groups at a time, so that some are complete early."""
    flags = ("--trainer.devices", "1", *flags, "--data.collector", "StreamedCollector")
    in_flight = ("--data.collector.max_groups_in_flight", str(max(1, groups // 2)))
    # Two threads in all are one for each; more are divided.
    threads = 1 if cores == 2 else cores
    return DeviceLayout(
        "1 process, streamed", (*flags, *in_flight), {"OMP_NUM_THREADS": str(threads)}
    )


def _plain(layout: DeviceLayout) -> DeviceLayout:
    flags = (*layout.flags, "--data.engine", "TransformersEngine")
    return DeviceLayout(f"{layout.name}, TransformersEngine", flags, layout.environment)


def _processes(count: int, threads: int, flags: tuple[str, ...] = ()) -> DeviceLayout:
    processes = "1 process" if count == 1 else f"{count} processes"
    each = "1 thread" if threads == 1 else f"{threads} threads"
    return DeviceLayout(
        f"{processes}, {each}{'' if count == 1 else ' each'}",
        ("--trainer.devices", str(count), *flags),
        {"OMP_NUM_THREADS": str(threads)},
    )


def fastest(seconds: Mapping[DeviceLayout, float]) -> DeviceLayout:
    """The first, and so the simplest, of those that are as fast as the fastest."""
    least = min(seconds.values())
    return next(layout for layout, taken in seconds.items() if taken <= least * CLOSE)
