"""A rollout generated once more, or scored, and where it first differs from the recorded one."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

from lightning_rl.cli.rerun.rebuild import Remade, remade
from lightning_rl.cli.rerun.run import KeptWeights, RecordedRun
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import DataError
from lightning_rl.models.policy import save_skeleton
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rollout import SAMPLED_BY, Rollout
from lightning_rl.run.loop import run_async


@dataclass(frozen=True)
class RolloutRerun:
    """A recorded rollout, and what the weights of ``version`` make of it.

    ``again`` has its own tokens (``generated``), or the recorded ones with the trainer's logprobs.
    ``weights_differ``: the weights could be made again, but not bit by bit.
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
        """The index of the first token that is another one, or that only one of them has."""
        was, now = self.recorded.token_ids, self.again.token_ids
        pairs = enumerate(zip(was, now, strict=False))
        shorter = min(len(was), len(now))
        return next((i for i, (a, b) in pairs if a != b), None if was == now else shorter)

    @property
    def gap(self) -> float:
        """The largest difference of logprobs in nats, over tokens of ``version`` up to there."""
        end = self.first_difference
        own = [v == self.version for v in self.recorded.versions[:end]]
        values = zip(self.recorded.logprobs[:end], self.again.logprobs[:end], own, strict=True)
        return max((abs(was - now) for was, now, counts in values if counts), default=0.0)

    @property
    def equal(self) -> bool:
        """Compare tokens. Logprobs depend on what else was in the batch."""
        return self.first_difference is None

    def lines(self) -> list[str]:
        """Tell a person."""
        exact = ", NOT as recorded: checksums differ" if self.weights_differ else ""
        lines = [
            f"rollout {self.recorded.id}: {len(self.recorded.token_ids)} tokens, seed "
            f"{self.recorded.seed}",
            f"weights of version {self.version}: {self.kept.lead_to(self.version)}{exact}",
        ]
        if not self.generated:
            return [*lines, *self._scored()]
        place, count = self.first_difference, len(self.recorded.token_ids)
        if place is None:
            equal = f"equal: {count} of {count} tokens, logprobs within {self.gap:.2g} nats"
            return [*lines, equal]
        was, now = self._token(self.recorded, place), self._token(self.again, place)
        return [*lines, f"different from token {place} on: recorded {was}, again {now}"]

    def _scored(self) -> Iterator[str]:
        yield (
            f"scored: the tokens have logprob {_total(self.again):.4f} together, "
            f"{_total(self.recorded):.4f} when they were sampled"
        )
        own = self.recorded.versions.count(self.version)
        if own:
            yield f"{own} tokens are of this version: logprobs within {self.gap:.2g} nats"

    def _token(self, rollout: Rollout, place: int) -> str:
        if place >= len(rollout.token_ids):
            return f"the end ({rollout.finish_reason})"
        token = rollout.token_ids[place]
        return f"{token} {self.decode([token])!r} (logprob {rollout.logprobs[place]:.4f})"


def _total(rollout: Rollout) -> float:
    """Sum over the tokens that the model wrote, in nats."""
    return fsum(p for p, mine in zip(rollout.logprobs, rollout.loss_mask, strict=True) if mine)


def rerun_rollout(
    run: RecordedRun, rollout_id: str, version: int | None = None
) -> Iterator[RolloutRerun]:
    """Generate a rollout again with the weights that wrote it.

    One that several versions wrote, while it was in flight, is scored instead: once with the
    weights of each.

    Args:
        run: what to do again.
        rollout_id: as recorded.
        version: score it with the weights of this version, whoever wrote it; None: of its own.

    Raises:
        ConfigError: if the run's configuration does not work here.
        DataError: if there is no such rollout, or not enough was kept.
        EngineError: if the engine fails.
    """
    recorded = run.rollout(rollout_id)
    marked = zip(recorded.versions, recorded.loss_mask, strict=True)
    wrote = sorted({v for v, mine in marked if mine})
    if recorded.expert or not wrote:
        raise DataError(f"rollout {rollout_id!r} was written by no engine: nothing to rerun")
    for used in wrote if version is None else [version]:
        with remade(run, used, used) as made:
            if not made.trainer.is_global_zero:  # it has helped to train
                continue
            generated = version is None and len(wrote) == 1
            again = (_generate if generated else _score)(made, recorded)
            differ = made.diverged_at(run.log.outcomes()) is not None
            tokenizer = load_tokenizer(made.module.model, made.module.loading)
            yield RolloutRerun(
                recorded, again, used, made.kept, differ, generated, tokenizer.decode
            )


def _generate(made: Remade, recorded: Rollout) -> Rollout:
    """Let the run's agent and engine write the rollout once more, alone."""
    data = made.datamodule
    if not isinstance(data, RLDataModule):
        raise DataError(
            f"{type(data).__name__} has no engine; use --version N to score the rollout"
        )
    sampled_by = {name: getattr(recorded, name) for name in SAMPLED_BY}
    again = Rollout(
        recorded.prompt,
        recorded.group_id,
        recorded.sample_index,
        recorded.seed,
        **sampled_by,
    )
    data.agent.configure(data.load_tokenizer(made.module))
    with _engine(made, data):
        return run_async(data.agent.run(again, data.engine, replace(data.sampling, **sampled_by)))


@contextmanager
def _engine(made: Remade, data: RLDataModule) -> Iterator[None]:
    """The run's engine with the module's weights."""
    module = made.module
    with tempfile.TemporaryDirectory(prefix="lightning_rl_") as directory:
        save_skeleton(module.model, directory, module.loading)
        data.engine.trust_remote_code = module.trust_remote_code
        try:
            data.engine.start(Path(directory))
            made.transport.connect(data.engine)
            made.transport.push(made.transport.weights_of(module.loaded_policy), module.iteration)
            yield
        finally:
            made.transport.close()
            data.engine.close()


def _score(made: Remade, recorded: Rollout) -> Rollout:
    """The recorded tokens with the logprobs that the policy gives them."""
    policy = made.module.loaded_policy
    batch = pack_rollouts([recorded]).to(policy.lm.device)
    with made.trainer.precision_plugin.forward_context():
        batch = policy.score(batch, "again", made.module.max_tokens_per_pack)
    values = batch["tokens", "again"].tolist()[len(recorded.prompt.token_ids) :]
    return replace(recorded, logprobs=values)
