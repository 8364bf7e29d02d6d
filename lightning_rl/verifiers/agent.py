"""VerifiersAgent: plays verifiers environments, each hosted in separate processes."""

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rollout import Rollout
from lightning_rl.serving.agent import SessionAgent
from lightning_rl.serving.results import Ending
from lightning_rl.serving.session import Session
from lightning_rl.verifiers.hosting import Hosting
from lightning_rl.verifiers.worker import WorkerDied, WorkerError
from lightning_rl.verifiers.workers import close_workers, workers_of


@configurable
class VerifiersAgent(SessionAgent):
    """Plays tasks of :class:`VerifiersPrompts` in their environment, for verifiers from 0.4 on.

    The environment runs in workers under its own Python, so that its dependencies cannot conflict
    with the trainer's, and asks for completions over HTTP on this machine. What its calls read and
    wrote is recorded token by token.

    Its weighted rewards sum to the ``environment_reward``; each reward and every metric is logged
    under its name, and so is ``turns``. If several seats play, each asks for the model named after
    its seat: seats are roles with their own rewards (``role_rewards``), the rollout's reward is the
    mean over the seats that train, and what other seats wrote has no loss.

    A seat for which neither it nor the environment chooses a harness is played by a chat with the
    environment's tools, inside the worker on this machine; ``options`` may choose another, by
    verifiers' own names: ``{agent: {harness: {id: bash}, runtime: {type: docker}}}``.

    If the environment reports an episode as failed, its rollout is FAILED with the reason. When a
    worker dies, another replaces it and replays its episodes with the same completions; an episode
    that ends a second worker too is FAILED.

    Args:
        environment: the taskset's id, as in ``vf-eval my-wordle``: the name of an installed
            package.
        python: the interpreter it is installed for, or the directory of its virtual environment.
        options: the environment's configuration, as in verifiers' ``[env]`` block.
        env: environment variables to set for it.
        pass_env: names of variables to pass on from the trainer's environment, such as a judge's
            key; of the others it gets only those that name paths.
        workers: processes that share the rollouts; one hosts hundreds at a time.
        max_seconds: maximum wall time of one rollout, in seconds; it then ends as ``max_seconds``,
            with reward 0. None: no limit.
        session_options: further arguments of ``SessionAgent``.

    Raises:
        ConfigError: for values out of range, or an environment that cannot be hosted.
    """

    def __init__(
        self,
        environment: str,
        python: str,
        options: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        pass_env: list[str] | None = None,
        workers: int = 1,
        max_seconds: float | None = 600.0,
        **session_options: Any,
    ) -> None:
        require_at_least(1, workers=workers)
        super().__init__(None, max_seconds=max_seconds, **session_options)
        self.hosting = Hosting(environment, python, options or {}, env or {}, tuple(pass_env or ()))
        self.workers = workers

    @property
    def name(self) -> str:
        return f"environment {self.hosting.environment!r}"

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.hosting.check()
        super().configure(tokenizer)

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        workers = workers_of(self.hosting, self.workers)
        seats = await workers.seats()
        self.roles = seats if len(seats) > 1 else []
        ending = await self.attempt(rollout, engine, sampling)
        if ending.kind == "killed":  # perhaps by another episode: play where nothing else is played
            alone = partial(self._play, workers.ask_alone)
            ending = await self.attempt(rollout, engine, sampling, alone)
        self.conclude(rollout, ending)
        return rollout

    async def play(self, rollout: Rollout, session: Session) -> Ending:
        return await self._play(workers_of(self.hosting, self.workers).ask, rollout, session)

    async def _play(
        self, ask: Callable[..., Awaitable[dict[str, Any]]], rollout: Rollout, session: Session
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
            return Ending("killed", f"killed its worker twice: {death}")
        except WorkerError as error:
            return Ending("exit", str(error))
        try:
            traces = answer["traces"]
            untrained = {t["seat"] for t in traces if not t["trainable"]} & {*self.roles}
            said = _result(traces, self.roles)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            return Ending("result", f"reported an invalid result of its episode: {error!r:.200}")
        return Ending("done", said=said, untrained=untrained)

    def close(self) -> None:
        """Stop the workers and the endpoint; they start again when needed."""
        close_workers(self.hosting)
        super().close()


def _result(traces: list[dict[str, Any]], roles: list[str]) -> dict[str, Any]:
    """Return the rewards and numbers of an episode, averaged over several traces of one seat."""
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
