"""VerifiersAgent: the environment is one for verifiers, in processes of its own."""

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.templates import ToolParser
from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rollout import Rollout
from lightning_rl.serving.agent import SessionAgent
from lightning_rl.serving.limits import RequestLimits
from lightning_rl.serving.results import Ending
from lightning_rl.serving.session import Session
from lightning_rl.verifiers.hosting import Hosting
from lightning_rl.verifiers.worker import WorkerDied, WorkerError
from lightning_rl.verifiers.workers import close_workers, workers_of


@configurable
class VerifiersAgent(SessionAgent):
    """Plays tasks of :class:`VerifiersPrompts` in their environment, for verifiers from 0.4 on.

    The environment runs in workers under its own Python, so that its dependencies never meet those
    of the trainer, and asks for completions by HTTP on this machine. What its calls read and wrote
    is recorded token by token.

    Its rewards, each times its weight, add up to the ``environment_reward``; each alone and every
    metric is logged under its name, and so are ``turns``. Where several play, each asks for the
    model of its seat's name: seats are roles, with rewards of their own (``role_rewards``), the
    rollout's is the mean over those that train, and what other seats wrote has no loss.

    A seat without a harness of its own or the environment's plays by a chat with the environment's
    tools, inside of the worker, and at this machine; ``options`` may choose otherwise, by
    verifiers' own names: ``{agent: {harness: {id: bash}, runtime: {type: docker}}}``.

    An episode that the environment calls failed costs its rollout, which is FAILED with the reason.
    When a worker dies, another takes its place, and what it was playing is played again, given the
    same completions; what ends a second worker too is FAILED.

    Args:
        environment: the taskset's id, as in ``vf-eval my-wordle``: an installed package's name.
        python: the interpreter that it is installed for, or its virtual environment's directory.
        options: the environment's configuration, as in verifiers' ``[env]`` block.
        env: environment variables to set for it.
        pass_env: names of variables to pass on from the trainer's environment, such as a judge's
            key; of others it gets only those that say where things are.
        workers: processes that share the rollouts; one hosts hundreds at a time.
        parser: reads the model family's way to write tool calls.
        client_sampling: whether the environment may change what is sampled from.
        max_seconds: wall time of one rollout at most, in seconds; it then ends as ``max_seconds``,
            with the reward 0. None: no limit.
        limits: bounds of one request to the models; None: those of :class:`RequestLimits`.

    Raises:
        ConfigError: for values out of range, and if the environment cannot be hosted.
    """

    def __init__(
        self,
        environment: str,
        python: str,
        options: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        pass_env: list[str] | None = None,
        workers: int = 1,
        parser: ToolParser | None = None,
        client_sampling: bool = True,
        max_seconds: float | None = 600.0,
        limits: RequestLimits | None = None,
    ) -> None:
        require_at_least(1, workers=workers)
        super().__init__(None, parser, client_sampling, max_seconds, limits)
        self.hosting = Hosting(environment, python, options or {}, env or {}, tuple(pass_env or ()))
        self.workers = workers

    @property
    def name(self) -> str:
        return f"environment {self.hosting.environment!r}"

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.hosting.check()
        super().configure(tokenizer)

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        seats = await workers_of(self.hosting, self.workers).seats()
        self.roles = seats if len(seats) > 1 else []
        ending = await self.attempt(rollout, engine, sampling)
        if ending.kind == "killed":
            ending = await self.attempt(rollout, engine, sampling, self._play_alone)
        self.conclude(rollout, ending)
        return rollout

    async def play(self, rollout: Rollout, session: Session) -> Ending:
        return await self._ask(rollout, session, workers_of(self.hosting, self.workers).ask)

    async def _play_alone(self, rollout: Rollout, session: Session) -> Ending:
        """In a worker that plays nothing else: what it was in may have died of another."""
        return await self._ask(rollout, session, workers_of(self.hosting, self.workers).ask_alone)

    async def _ask(
        self, rollout: Rollout, session: Session, ask: Callable[..., Awaitable[dict[str, Any]]]
    ) -> Ending:
        task = rollout.prompt.columns.get("task")
        if task is None:
            raise ConfigError(
                "VerifiersAgent plays the tasks of VerifiersPrompts: set train_prompts"
            )
        order = {"run": task, "base_url": session.base_url, "api_key": session.api_key}
        try:
            answer = await ask(self.max_seconds, **order)
        except TimeoutError:
            return Ending("timeout")
        except WorkerDied as death:
            return Ending("killed", f"ended its worker twice: {death}")
        except WorkerError as error:
            return Ending("exit", str(error))
        try:
            traces = answer["traces"]
            untrained = {t["seat"] for t in traces if not t["trainable"]} & {*self.roles}
            said = _result(traces, self.roles)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            return Ending("result", f"told of its episode what cannot be: {error!r:.200}")
        return Ending("done", said=said, untrained=untrained)

    def close(self) -> None:
        """End the workers and the endpoint; they start again when needed."""
        close_workers(self.hosting)
        super().close()


def _result(traces: list[dict[str, Any]], roles: list[str]) -> dict[str, Any]:
    """The rewards and numbers of an episode; of several traces of one seat their mean."""
    numbers = defaultdict[str, list[float]](list)
    rewards = defaultdict[str, list[float]](list)
    for trace in traces:
        seat = f"{trace['seat']}/" if roles else ""
        for name, value in {
            "turns": trace["turns"],
            **trace["rewards"],
            **trace["metrics"],
        }.items():
            numbers[seat + name].append(value)
        rewards[trace["seat"]].append(trace["reward"])
    learning = [trace["reward"] for trace in traces if trace["trainable"]]
    return {
        "reward": _mean(learning or [trace["reward"] for trace in traces]),
        "role_rewards": {seat: _mean(paid) for seat, paid in rewards.items() if seat in roles},
        "metrics": {name: _mean(values) for name, values in numbers.items()},
    }


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
