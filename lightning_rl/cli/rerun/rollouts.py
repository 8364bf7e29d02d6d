"""Repeats a rollout, and reports where it first differs from the recorded one."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, takewhile, zip_longest
from math import fsum
from pathlib import Path
from typing import Any

from lightning_rl.agents.branching import forked
from lightning_rl.cli.rerun.rebuild import Remade, remade_for_one
from lightning_rl.cli.rerun.run import KeptWeights, RecordedRun
from lightning_rl.config.lightning_flags import compute_dtype
from lightning_rl.data.packing import pack_rollouts, packed_rows
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import DataError
from lightning_rl.learn.compatibility import configure_engine
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rollout import Rollout, Row
from lightning_rl.run.loop.background import run_async


@dataclass(frozen=True)
class RolloutRerun:
    """A recorded rollout, and the result of repeating it with the weights of ``version``.

    ``again`` has new tokens (if ``generated``), or the recorded tokens with the trainer's logprobs.
    ``weights_differ``: the weights were rebuilt, but are not equal bit by bit.
    """

    recorded: Rollout
    again: Rollout
    version: int
    kept: KeptWeights
    weights_differ: bool
    generated: bool
    decode: Callable[[list[int]], Any]

    @property
    def first_difference(self) -> int | None:
        """The index of the first token that differs, or that only one of them has; None if equal.

        With several rows, tokens are counted row after row; if a row's prompt or role differs, all
        of its tokens count as different.
        """
        index = 0
        for was, now in zip_longest(_rows(self.recorded), _rows(self.again)):
            if was is None or now is None:
                return index
            if (was.prompt_ids, was.role) != (now.prompt_ids, now.role):
                return index
            same = common(was.token_ids, now.token_ids)
            index += same
            if not same == len(was.token_ids) == len(now.token_ids):
                return index
        return None

    @property
    def gap(self) -> float:
        """The largest difference of logprobs in nats, over the tokens of ``version`` up to that
        index.
        """
        end = self.first_difference
        versions, was, now = (
            column[:end]
            for column in (
                self.recorded.versions,
                self.recorded.logprobs,
                self.again.logprobs,
            )
        )
        gaps = (abs(a - b) for a, b, v in zip(was, now, versions, strict=True) if v == self.version)
        return max(gaps, default=0.0)

    @property
    def equal(self) -> bool:
        """True if all tokens are equal. Logprobs depend on the rest of the batch."""
        return self.first_difference is None

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        exact = ", NOT as recorded: checksums differ" if self.weights_differ else ""
        rows = f" in {len(_rows(self.recorded))} rows" if len(self.recorded.rows) > 1 else ""
        lines = [
            f"rollout {self.recorded.id}: {self.recorded.length} tokens{rows}, seed "
            f"{self.recorded.seed}",
            f"weights of version {self.version}: {self.kept.lead_to(self.version)}{exact}",
        ]
        if not self.generated:
            return [*lines, *self._scored()]
        index, count = self.first_difference, self.recorded.length
        if index is None:
            equal = f"equal: {count} of {count} tokens, logprobs within {self.gap:.2g} nats"
            return [*lines, equal]
        was, now = self._token(self.recorded, index), self._token(self.again, index)
        return [*lines, f"different from token {index} on: recorded {was}, again {now}"]

    def _scored(self) -> Iterator[str]:
        yield (
            f"scored: the tokens have logprob {_total(self.again):.4f} together, "
            f"{_total(self.recorded):.4f} when they were sampled"
        )
        own = self.recorded.versions.count(self.version)
        if own:
            yield f"{own} tokens are of this version: logprobs within {self.gap:.2g} nats"

    def _token(self, rollout: Rollout, place: int) -> str:
        if place >= rollout.length:
            return f"the end ({rollout.finish_reason})"
        token, logprob = rollout.token_ids[place], rollout.logprobs[place]
        return f"{token} {self.decode([token])!r} (logprob {logprob:.4f})"


def _rows(rollout: Rollout) -> list[Row]:
    return [row for _, row in packed_rows([rollout])]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading elements that are equal."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _total(rollout: Rollout) -> float:
    """Return the sum of logprobs over the tokens that are trained on, in nats."""
    pairs = zip(rollout.logprobs, rollout.loss_mask, strict=True)
    return fsum(logprob for logprob, mine in pairs if mine)


def rerun_rollout(
    run: RecordedRun, rollout_id: str, version: int | None = None
) -> Iterator[RolloutRerun]:
    """Generate a rollout again with the weights that wrote it.

    If several versions wrote it, because weights changed during its generation, it is scored
    instead: once with the weights of each.

    Args:
        run: the recorded run.
        rollout_id: the id of the recorded rollout.
        version: score it with the weights of this version, whoever wrote it; None: of its own.

    Raises:
        ConfigError: if the run's configuration does not work here.
        DataError: if there is no such rollout, or the run kept too little.
        EngineError: if the engine fails.
    """
    recorded = run.rollout(rollout_id)
    wrote = sorted(set(recorded.written_versions()))
    if recorded.demonstration or not wrote:
        raise DataError(
            f"rollout {rollout_id!r} was not generated by an engine, so it cannot be rerun"
        )
    for used in wrote if version is None else [version]:
        with remade_for_one(run, used) as made:
            if made is None:  # it has helped to train
                continue
            generated = version is None and len(wrote) == 1
            again = (_generate if generated else _score)(made, recorded)
            differ = made.diverged_at(run.log.outcomes()) is not None
            yield RolloutRerun(
                recorded, again, used, made.kept, differ, generated, decoder_of(made)
            )


def decoder_of(made: Remade) -> Callable[[list[int]], Any]:
    """Return the function that decodes tokens to text."""
    decode: Callable[[list[int]], Any]
    decode = load_tokenizer(made.policy.model, made.policy.loading).decode
    return decode


def data_with_engine(made: Remade) -> RLDataModule:
    """Return the run's data module.

    Raises:
        DataError: if it has no engine.
    """
    data = made.datamodule
    if not isinstance(data, RLDataModule):
        raise DataError(
            f"{type(data).__name__} has no engine; use --version N to score the rollout"
        )
    return data


def _generate(made: Remade, recorded: Rollout) -> Rollout:
    """Let the run's agent and engine generate the rollout again, on its own."""
    data = data_with_engine(made)
    with pushed_engine(made, data):
        return written_again(made, data, recorded)


def written_again(made: Remade, data: RLDataModule, recorded: Rollout) -> Rollout:
    """Generate the rollout with the run's agent and engine, which already holds the weights."""
    again = Rollout(
        recorded.prompt,
        recorded.group_id,
        recorded.sample_index,
        recorded.seed,
        recorded.sampling,
    )
    if recorded.fork is not None:  # what it shares was written by what it branched off from
        again = replace(forked(recorded, recorded.fork.calls, 0), fork=recorded.fork)
    task = data.task_of(recorded.prompt)
    task.agent.configure(data.load_tokenizer(made.module))
    return run_async(task.agent.run(again, data.engine, task.sampling.of(again.sampling)))


@contextmanager
def pushed_engine(made: Remade, data: RLDataModule) -> Iterator[None]:
    """Provide the run's engine with the module's weights."""
    module = made.policy
    with tempfile.TemporaryDirectory(prefix="lightning_rl_") as directory:
        save_skeleton(module.model, directory, module.loading)
        data.engine.trust_remote_code = module.loading.trust_remote_code
        try:
            configure_engine(data.engine, made.module, compute_dtype(made.trainer))
            data.engine.start(Path(directory))
            made.transport.connect(data.engine)
            made.transport.push(made.transport.weights_of(module.loaded_policy), module.iteration)
            yield
        finally:
            made.transport.close()
            data.engine.close()


def _score(made: Remade, recorded: Rollout) -> Rollout:
    """Return the recorded tokens with the policy's logprobs."""
    policy = made.policy.loaded_policy
    whole = replace(recorded, fork=None)  # what a branch shares is scored too
    batch = pack_rollouts([whole]).to(policy.lm.device)
    with made.trainer.precision_plugin.forward_context():
        batch = policy.score(batch, "again", made.policy.learner.max_tokens_per_micro_batch)
    values = iter(batch["tokens", "again"].tolist())
    scored = []
    for row in recorded.rows:
        # What has no tokens is not in the batch.
        own = list(islice(values, row.length)) if row.token_ids else []
        scored.append(replace(row, logprobs=own[len(row.prompt_ids) :]))
    return replace(recorded, rows=scored)
