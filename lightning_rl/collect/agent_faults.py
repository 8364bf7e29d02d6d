"""What an agent raises: the fault of one rollout, or the end of the run."""

import asyncio
from collections.abc import Iterator
from traceback import walk_tb

from lightning_rl.agents.base import Agent
from lightning_rl.engines.base import Engine, Sampling
from lightning_rl.errors import ConfigError, EngineError, RunInterrupted
from lightning_rl.rollout import Rollout

_ENDS_THE_RUN = (EngineError, ConfigError, RunInterrupted)


async def run_agent(agent: Agent, rollout: Rollout, engine: Engine, sampling: Sampling) -> None:
    """Let the agent fill a rollout; one whose agent raises is FAILED, with that reason.

    Raises:
        EngineError: if the engine fails, also if the agent raises an error of its own because of
            that; and whatever else the engine raises.
        ConfigError: if a setting cannot be.
        RunInterrupted: if the agent raises KeyboardInterrupt.
    """
    try:
        await agent.run(rollout, engine, sampling)
    except asyncio.CancelledError as error:
        if _is_cancelled_from_outside():
            raise
        _blame(agent, rollout, error)
    except KeyboardInterrupt as error:  # it would end the loop's thread, and hang who waits for it
        raise RunInterrupted(f"{type(agent).__name__} raised KeyboardInterrupt", 130) from error
    except (Exception, BaseExceptionGroup, SystemExit) as error:  # a user's code may raise anything
        for cause in _causes(error):
            if isinstance(cause, _ENDS_THE_RUN) or _comes_from(engine, cause):
                raise cause  # noqa: B904  what the agent made of it says less
        _blame(agent, rollout, error)


def _blame(agent: Agent, rollout: Rollout, error: BaseException) -> None:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    rollout.fail(f"agent {type(agent).__name__}: {what} (prompt {rollout.prompt.id!r})")


def _is_cancelled_from_outside() -> bool:
    """Else the agent itself has cancelled what it then awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _comes_from(engine: Engine, error: BaseException) -> bool:
    """Whether the engine's ``generate`` raised it, of whatever class it is."""
    if isinstance(error, asyncio.CancelledError):  # which goes through it, from the agent's timeout
        return False
    code = getattr(engine.generate, "__code__", None)
    return any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, those of its group, and what each was raised from."""
    seen, left = set[int](), [error]
    while left:
        error = left.pop(0)
        if id(error) in seen:  # one that was raised again may come from itself
            continue
        seen.add(id(error))
        yield error
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        left += [e for e in (*inner, error.__cause__, error.__context__) if e is not None]
