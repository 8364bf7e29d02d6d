"""Test what an agent's exception is: the fault of one rollout, or the end of the run."""

import asyncio
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.support.simulate import SimulatedEngine
from lightning_rl.agents.base import SingleTurn, append_written, end
from lightning_rl.collect.collector import SyncCollector
from lightning_rl.collect.pipeline import run_agent
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.engines.sampling import Completion
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.rollout import RolloutStatus


class Raises(SingleTurn):
    def __init__(self, how) -> None:
        self.how = how

    async def run(self, rollout, engine, sampling):
        return await self.how(rollout, engine, sampling)


def outcome(how, make_rollout, engine=None):
    rollout = make_rollout([3, 4], [], status=RolloutStatus.INIT, finish_reason=None, reward=None)
    engine = engine or SimulatedEngine(lambda prompt, seed: 3)
    asyncio.run(run_agent(Raises(how), rollout, engine, Sampling(max_tokens=4)))
    return rollout


async def hides_the_engines_error(rollout, engine, sampling):
    try:
        raise EngineError("device lost")
    except EngineError:
        raise ValueError("no move") from None


async def in_a_group(rollout, engine, sampling):
    async def one():
        raise EngineError("device lost")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(one())


async def runs_out_of_its_time(rollout, engine, sampling):
    async with asyncio.timeout(0):  # which cancels what the engine does
        await engine.generate([3], sampling, 0)


async def hides_it_and_raises_it_again(rollout, engine, sampling):
    try:
        raise ValueError("no move")
    except ValueError as first:
        try:
            raise KeyError("board") from first
        except KeyError as second:
            raise first from second


async def misconfigured(rollout, engine, sampling):
    raise ConfigError("no such tool")


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_a_logprob_that_is_not_finite_costs_the_rollout(logprob, make_rollout):
    async def writes(rollout, engine, sampling):
        append_written(rollout, Completion([3, 4], [-0.5, logprob], "stop", [0, 0]))
        end(rollout, "stop")

    rollout = outcome(writes, make_rollout)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error.startswith(f"the engine's logprob of token 1 is {logprob}, so its numbers")


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (hides_the_engines_error, EngineError),
        (in_a_group, EngineError),
        (misconfigured, ConfigError),
    ],
)
def test_what_is_not_the_rollouts_fault_ends_the_run(how, kind, make_rollout):
    with pytest.raises(kind):
        outcome(how, make_rollout)


def test_whatever_the_engine_raises_ends_the_run(make_rollout):
    class Odd(TransformersEngine):
        async def generate(self, token_ids, sampling, seed):
            raise RuntimeError("a library below broke")

    with pytest.raises(RuntimeError, match="a library below broke"):
        outcome(SingleTurn().run, make_rollout, Odd(device="cpu"))


async def exits(rollout, engine, sampling):
    raise SystemExit(3)


async def ends_the_process(rollout, engine, sampling):
    os._exit(0)


async def sets_an_alarm(rollout, engine, sampling):
    try:
        signal.alarm(1)  # nobody would handle it, so it would end the run
    finally:
        rollout.error = "tidied up"


async def in_another_task(rollout, engine, sampling):
    try:
        await asyncio.ensure_future(sets_an_alarm(rollout, engine, sampling))
    except BaseException as error:
        raise ValueError("no move") from error


async def cancels_itself(rollout, engine, sampling):
    task = asyncio.ensure_future(asyncio.sleep(1))
    task.cancel()
    await task


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (exits, "SystemExit: 3"),
        (ends_the_process, "EndsProcess: os._exit(0)"),
        (cancels_itself, "CancelledError"),
        (runs_out_of_its_time, "TimeoutError"),
        (hides_it_and_raises_it_again, "ValueError: no move"),
    ],
)
def test_what_would_end_the_loop_or_go_unnoticed_fails_the_rollout(how, name, make_rollout):
    rollout = outcome(how, make_rollout)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == f"agent Raises: {name} (prompt 'p')"


@pytest.mark.parametrize("how", [sets_an_alarm, in_another_task])
def test_an_agent_that_uses_signals_is_told_what_to_do(how, make_rollout):
    """Agents run in the loop's thread; here in another than the main one."""
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(outcome, how, make_rollout).result()
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == (
        "agent Raises: signal.alarm works in the main thread only, but agents run in another "
        "thread; bound the awaited call by asyncio.timeout, or do the work in a process, by "
        "subprocess.run(..., timeout=...) (prompt 'p')"
    )


def test_one_of_a_checkpoint_is_tried_again_from_the_beginning(make_rollout):
    failed = make_rollout([3], [4, 5], group_id="g", completion="45", reward=None)
    failed.fail("agent Breaks: ValueError: no (prompt 'p')")
    collector = SyncCollector()
    collector.load_state_dict({"groups": [[failed.to_dict()]]})
    [[again]] = collector.state_dict()["groups"]
    assert (again["status"], again["error"], again["completion"]) == ("init", None, "")
    [row] = again["rows"]
    assert row["token_ids"] == row["logprobs"] == row["versions"] == []


def test_cancelling_from_outside_is_no_fault(make_rollout):
    async def cancel():
        async def waits(*_):
            await asyncio.sleep(60)

        rollout = make_rollout([3], [], status=RolloutStatus.INIT, finish_reason=None)
        engine = SimulatedEngine(lambda prompt, seed: 3)
        task = asyncio.create_task(run_agent(Raises(waits), rollout, engine, Sampling()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return rollout.status

    assert asyncio.run(cancel()) is RolloutStatus.INIT
