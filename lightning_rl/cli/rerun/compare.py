"""A rollout or an iteration done again, and where it first differs from what was recorded."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

import torch

from lightning_rl.cli.rerun.rebuild import Remade, remade
from lightning_rl.cli.rerun.run import KeptWeights, RecordedRun
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import DataError
from lightning_rl.models.policy import save_skeleton
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rollout import SAMPLED_BY, Rollout
from lightning_rl.rollouts.log import Outcome, first_difference
from lightning_rl.run.loop import run_async

SHOWN = ("policy/loss", "policy/grad_norm", "policy/entropy", "value/loss")


@dataclass(frozen=True)
class IterationRerun:
    """Outcomes of iteration ``again.version - 1``, as ``recorded`` and ``again``.

    It was trained again from ``kept``. ``diverged_at`` is the first version whose weights have
    other checksums than recorded, and ``checkpoint_differs`` the first entry that differs from the
    checkpoint kept after it ("" if none does, None if there is no such checkpoint).
    """

    kept: KeptWeights
    recorded: Outcome
    again: Outcome
    diverged_at: int | None
    checkpoint: KeptWeights | None
    checkpoint_differs: str | None

    @property
    def equal(self) -> bool:
        """Compare loss, gradient norm, every other metric of the update, and all weights."""
        same = all(self.recorded.metrics.get(k) == v for k, v in self.again.metrics.items())
        return same and self.diverged_at is None and not self.checkpoint_differs

    def lines(self) -> list[str]:
        """Tell a person."""
        iteration = self.recorded.version - 1
        lines = [f"iteration {iteration}, from {self.kept.lead_to(iteration)}"]
        metrics = self.again.metrics
        for name in (n for n in SHOWN if n in metrics):
            was, now = self.recorded.metrics.get(name, float("nan")), metrics[name]
            lines.append(
                f"  {name:<18} recorded {was!r:<24} again {now!r:<24} {_verdict(was, now)}"
            )
        others = [n for n in metrics if n not in SHOWN]
        differ = [n for n in others if self.recorded.metrics.get(n) != metrics[n]]
        verdict = "equal" if not differ else f"{len(differ)} differ, first {differ[0]}"
        lines.append(f"  {len(others)} more metrics    {verdict}")
        lines.append(f"  {len(self.again.weights)} weight tensors  {self._weights()}")
        if self.checkpoint is not None:
            same = not self.checkpoint_differs
            verdict = "equal" if same else f"{self.checkpoint_differs} differs"
            lines.append(f"  {self.checkpoint}  weights and optimizer: {verdict}")
        lines.append("equal" if self.equal else "different")
        return lines

    def _weights(self) -> str:
        if self.diverged_at is None:
            return "equal"
        if self.diverged_at == self.kept.version:
            return f"differ at the start already: {self.kept} changed since the run"
        name = first_difference(self.recorded.weights, self.again.weights)
        return f"differ since version {self.diverged_at}, now first in {name}"


def rerun_iteration(run: RecordedRun, iteration: int, since: int | None = None) -> IterationRerun:
    """Train iteration ``iteration`` on its recorded rollouts, from the nearest weights kept before.

    Args:
        run: what to do again.
        iteration: as recorded with its rollouts: 0 is the first.
        since: start from the kept weights of this version; None: the nearest.

    Raises:
        ConfigError: if the run's configuration does not work here.
        DataError: if not enough was kept.
    """
    recorded = run.log.outcomes()
    if iteration + 1 not in recorded:
        last = max(recorded, default=0) - 1
        held = f"iterations up to {last}" if last >= 0 else "none"
        raise DataError(
            f"{run.path} did not record what came of iteration {iteration} (recorded: {held})"
        )
    with remade(run, iteration + 1, iteration, since) as made:
        checkpoint = next((k for k in run.kept if k.version == iteration + 1), None)
        if not made.trainer.is_global_zero:  # which gathers what is sharded
            checkpoint = None
        return IterationRerun(
            made.kept,
            recorded[iteration + 1],
            made.outcomes[iteration + 1],
            made.diverged_at(recorded),
            checkpoint,
            None if checkpoint is None else _compared(checkpoint.load(), made),
        )


def _compared(checkpoint: dict[str, Any], made: Remade) -> str:
    """The first entry that is not equal, bit by bit; "" if all are."""
    state = made.state
    for name, weight in checkpoint["state_dict"].items():
        if name not in state or not torch.equal(weight, state[name].cpu()):
            return str(name)
    for kept, optimizer in zip(checkpoint["optimizer_states"], made.optimizers, strict=True):
        for parameter, values in kept["state"].items():
            for name, value in values.items():
                now = optimizer["state"][parameter][name]
                if not torch.equal(torch.as_tensor(value), torch.as_tensor(now).cpu()):
                    return f"{name} of the optimizer's parameter {parameter}"
    return ""


def _verdict(was: float, now: float) -> str:
    return "equal" if was == now else f"differs by {abs(was - now):.2g}"


# ---------------------------------------------------------------------------- rollouts


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
