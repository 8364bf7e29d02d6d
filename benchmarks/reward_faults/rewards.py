"""Define rewards with faults, for ``benchmarks.reward_faults`` and the tests."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LINGERS = "86399"
"""Seconds that a left-behind process would sleep; what it is found by."""
Scores = list[float]


def raises() -> Scores:
    """an exception"""
    raise KeyError("answer")


def not_a_number() -> Scores:
    """NaN"""
    return [float("nan")]


def wrong_count() -> Scores:
    """three scores for one completion"""
    return [1.0, 1.0, 1.0]


def exits() -> Scores:
    """`sys.exit(0)`"""
    sys.exit(0)


def exits_at_once() -> Scores:
    """`os._exit(0)`"""
    os._exit(0)


def endless_loop() -> Scores:
    """an endless loop"""
    while True:
        pass


def stubborn_loop() -> Scores:
    """an endless loop that ignores SIGTERM and SIGINT"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        pass


def stopped() -> Scores:
    """stops itself (SIGSTOP)"""
    os.kill(os.getpid(), signal.SIGSTOP)
    return [1.0]


def segfault() -> Scores:
    """a segmentation fault"""
    ctypes.string_at(0)
    return [1.0]


def deep_recursion() -> Scores:
    """endless recursion"""
    return deep_recursion()


def stack_overflow() -> Scores:
    """endless recursion in C"""
    sys.setrecursionlimit(10**9)
    nested: list[object] = []
    for _ in range(2 * 10**5):
        nested = [nested]
    return [float(repr(nested) == "")]


def large_allocation() -> Scores:
    """allocates 10 GB"""
    return [float(len(bytearray(10**10)))]


def large_output() -> Scores:
    """prints 2 GB"""
    block = b"x" * 2**20
    for _ in range(2 * 1024):
        os.write(1, block)
    return [1.0]


def large_file() -> Scores:
    """writes 2 GB to a file"""
    block = b"x" * 2**20
    with open("large", "wb", buffering=0) as file:
        for _ in range(2 * 1024):
            file.write(block)
    return [1.0]


def lingering_child() -> Scores:
    """leaves a process behind, in a session of its own"""
    subprocess.Popen(["sleep", LINGERS], start_new_session=True)
    return [1.0]


def many_children() -> Scores:
    """forks 40 processes that fork again, and hangs"""
    for _ in range(40):
        if os.fork() == 0:
            os.setsid()
            os.fork()
            time.sleep(float(LINGERS))
    time.sleep(float(LINGERS))
    return [1.0]


def kills_parent() -> Scores:
    """kills its parent process (SIGKILL)"""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(float(LINGERS))
    return [1.0]


def floods_result() -> Scores:
    """writes 1 MB to every open file descriptor"""
    for descriptor in range(3, 64):
        if Path(f"/proc/self/fd/{descriptor}").exists():
            os.write(descriptor, b"x" * 2**20)
    return [1.0]


def damages_result() -> Scores:
    """writes a byte to every open file descriptor"""
    for descriptor in range(3, 64):
        if Path(f"/proc/self/fd/{descriptor}").exists():
            os.write(descriptor, b"x")
    return [1.0]


FAULTS: list[Callable[[], Scores]] = [
    raises,
    not_a_number,
    wrong_count,
    exits,
    exits_at_once,
    endless_loop,
    stubborn_loop,
    stopped,
    segfault,
    deep_recursion,
    stack_overflow,
    large_allocation,
    large_output,
    large_file,
    lingering_child,
    many_children,
    kills_parent,
    floods_result,
    damages_result,
]


_BY_NAME = {f.__name__: f for f in FAULTS}


def faulty(completions: list[str]) -> Scores:
    """Return 1, or the fault that the completion names."""
    return [
        score
        for completion in completions
        for score in (_BY_NAME[completion]() if completion in _BY_NAME else [1.0])
    ]
