"""The calls of a recorded rollout, each generated again by itself, without its agent."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_rl.agents.base import completion_of
from lightning_rl.agents.rows import Captured, captured
from lightning_rl.cli.rerun.rebuild import Remade, remade
from lightning_rl.cli.rerun.rollouts import common, data_with_engine, pushed_engine
from lightning_rl.cli.rerun.run import KeptWeights, RecordedRun
from lightning_rl.engines.sampling import Completion
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout
from lightning_rl.run.loop import run_async


@dataclass(frozen=True)
class CallsRerun:
    """Calls of a recorded rollout that ``version`` alone wrote, each generated again by itself.

    ``again`` holds what was recorded of each and what came out now, by its number.
    """

    recorded: Rollout
    version: int
    kept: KeptWeights
    weights_differ: bool
    again: dict[int, tuple[Captured, Completion]]

    @property
    def equal(self) -> bool:
        """Compare tokens. Logprobs depend on what else was in the batch."""
        return all(was.completion.token_ids == now.token_ids for was, now in self.again.values())

    def lines(self) -> list[str]:
        """Tell a person."""
        exact = ", NOT as recorded: checksums differ" if self.weights_differ else ""
        lead = self.kept.lead_to(self.version)
        lines = [f"weights of version {self.version}: {lead}{exact}"]
        for number, (was, now) in self.again.items():
            count = len(was.completion.token_ids)
            same = common(was.completion.token_ids, now.token_ids)
            verdict = "equal" if same == count else f"different from token {same} on"
            lines.append(f"call {number + 1}, seed {was.call.seed}: {count} tokens, {verdict}")
        return lines


def rerun_calls(run: RecordedRun, rollout_id: str) -> Iterator[CallsRerun]:
    """Generate each call of a rollout again, alone, from its prompt, its seed and its weights.

    That needs no agent, so it is also for programs that cannot be run again. Calls under way while
    weights changed, and those that were held to a form, are left out.

    Args:
        run: what to do again.
        rollout_id: as recorded.

    Raises:
        ConfigError: if the run's configuration does not work here.
        DataError: if there is no such rollout, or none of its calls can be generated again.
        EngineError: if the engine fails.
    """
    recorded = run.rollout(rollout_id)
    by_version: defaultdict[int, dict[int, Captured]] = defaultdict(dict)
    for number, call in enumerate(recorded.calls):
        one = captured(recorded, call)
        versions = set(one.completion.versions)
        if len(versions) == 1 and call.scorable:
            by_version[versions.pop()][number] = one
    if not by_version:
        raise DataError(
            f"rollout {rollout_id!r} has {len(recorded.calls)} recorded calls, of which none was "
            "written by a single version and in free form; leave --calls out"
        )
    for version, calls in sorted(by_version.items()):
        with remade(run, version, version) as made:
            if not made.trainer.is_global_zero:  # it has helped to train
                continue
            answers = _answers(made, recorded, list(calls.values()))
            differ = made.diverged_at(run.log.outcomes()) is not None
            again = {n: (one, now) for (n, one), now in zip(calls.items(), answers, strict=True)}
            yield CallsRerun(recorded, version, made.kept, differ, again)


def _answers(made: Remade, recorded: Rollout, calls: list[Captured]) -> list[Completion]:
    data = data_with_engine(made)

    async def ask(one: Captured) -> Completion:
        count = len(one.completion.token_ids)
        sampled = one.sampling or recorded.sampling
        sampled = replace(sampled, min_tokens=min(sampled.min_tokens, count))
        # As many tokens as it wrote: what had ended it need not be known.
        free = replace(data.sampling, max_tokens=count, stop=[], structured_outputs=None)
        sampling = free.of(sampled)
        engine = data.engine.of_role(one.role)
        return await completion_of(engine, one.prompt_ids, one.pictures, sampling, one.call.seed)

    async def ask_all() -> list[Completion]:
        return list(await asyncio.gather(*map(ask, calls)))

    with pushed_engine(made, data):
        return run_async(ask_all())
