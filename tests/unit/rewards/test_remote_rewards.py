"""Test Remote and retry: how many at once, how often, how long, and what becomes of a failure."""

import asyncio

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.remote import Remote
from lightning_rl.run.retry import retry


class Flaky:
    """Fails a number of times, then answers."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = error or ConnectionError("busy")
        self.calls = 0

    async def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "answer"


def test_retry_waits_twice_as_long_each_time_up_to_the_longest(waits):
    call = Flaky(5)
    assert asyncio.run(retry(call, retries=5, first_wait_s=1.0, longest_wait_s=6.0)) == "answer"
    assert call.calls == 6
    for waited, full in zip(waits, [1, 2, 4, 6, 6], strict=True):
        assert full / 2 <= waited <= full


def test_retry_gives_up_with_the_last_error(waits):
    call = Flaky(3)
    with pytest.raises(ConnectionError, match="busy"):
        asyncio.run(retry(call, retries=2))
    assert call.calls == 3
    assert len(waits) == 2


def test_retry_raises_at_once_what_no_retry_helps(waits):
    call = Flaky(1, PermissionError("bad key"))
    with pytest.raises(PermissionError):
        asyncio.run(retry(call, on=(ConnectionError,)))
    assert (call.calls, waits) == (1, [])


def test_retry_ends_an_attempt_that_takes_too_long():
    calls = []

    async def hangs_once():
        calls.append(1)
        if len(calls) == 1:
            await asyncio.Event().wait()
        return "answer"

    options = {"timeout_s": 0.01, "first_wait_s": 0.0}
    assert asyncio.run(retry(hangs_once, retries=1, **options)) == "answer"
    calls.clear()
    with pytest.raises(TimeoutError, match=r"no answer within timeout_s=0\.01"):
        asyncio.run(retry(hangs_once, retries=0, **options))


def test_retry_leaves_the_global_random_numbers_alone(waits):
    import random

    random.seed(3)
    asyncio.run(retry(Flaky(3)))
    drawn = random.random()
    random.seed(3)
    assert drawn == random.random()


def test_remote_grades_one_by_one_and_only_some_at_once():
    running = peak = 0

    async def judge(completions, n):
        nonlocal running, peak
        assert len(completions) == len(n) == 1
        running += 1
        peak = max(peak, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return [len(completions[0]) + n[0]]

    remote = Remote(judge, max_concurrency=2)
    for _ in range(2):  # each in an event loop of its own
        scores = asyncio.run(remote(completions=["a", "bb", "ccc", "", "e"], n=[10] * 5))
        assert scores == [11, 12, 13, 10, 11]
    assert peak == 2
    assert remote.__name__ == "judge"


def test_remote_fails_only_what_does_not_answer(waits):
    async def judge(completions):
        if completions == ["down"]:
            raise ConnectionError("refused")
        return [1.0, 1.0] if completions == ["two"] else [1.0]

    scores = asyncio.run(Remote(judge, retries=2)(completions=["a", "down", "two"]))
    line = judge.__code__.co_firstlineno + 2
    assert [getattr(score, "reason", score) for score in scores] == [
        1.0,
        f"ConnectionError: refused, at rewards/test_remote_rewards.py:{line} in judge "
        "(after 3 attempts)",
        "ValueError: returned 2 scores for 1 completion (after 3 attempts)",
    ]


def test_remote_refuses_impossible_settings():
    async def judge(completions):
        return [1.0]

    with pytest.raises(ConfigError, match="max_concurrency=0 must be >= 1"):
        Remote(judge, max_concurrency=0)
    with pytest.raises(ConfigError, match="retries=-1 must be >= 0"):
        Remote(judge, retries=-1)

    def plain(completions):
        return [1.0]

    with pytest.raises(ConfigError, match=r"plain is a plain one.*Isolated"):
        Remote(plain)
