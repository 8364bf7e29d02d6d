"""Require a machine on which wall seconds mean something: enough cores, and no other load."""

import os
import sys


def require_quiet(most: float) -> float:
    """Return the load of the last minute if nothing else runs; else exit with status 2."""
    load = os.getloadavg()[0]
    if load > most:
        refuse(
            f"the load of the last minute is {load:.2f}, more than {most:g}: what else runs would "
            "be measured too. Wait until it is over, or give --max-load for a trial"
        )
    return load


def take_cores(count: int) -> None:
    """Take so many cores for this process and those that it starts, or exit with status 2."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        refuse(f"{len(cores)} core(s) to run on, and {count} are needed")
    os.sched_setaffinity(0, cores[:count])


def refuse(why: str) -> None:
    """Refuse in one line."""
    print(f"refused: {why}", file=sys.stderr)
    sys.exit(2)
