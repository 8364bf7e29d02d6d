"""The small run itself: trained, killed, resumed, trained again, evaluated, exported and loaded."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.cli.children import last_words, start_command
from lightning_rl.cli.rehearse.findings import Kind, RunFinding
from lightning_rl.cli.rehearse.smaller import ITERATIONS
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.rollout import RolloutStatus
from lightning_rl.run.files.checkpoint_io import checkpoints_in
from lightning_rl.run.files.newest_run import newest_run
from lightning_rl.run.processes.child import Child, ending

STAGE_S = 900.0
"""Seconds after which a stage counts as hanging."""
_POLL_S = 0.1


class Stage(NamedTuple):
    """A command of a run's life; ``detail`` is added to its name where it succeeds."""

    name: str
    detail: str
    command: Sequence[str]


class Stages:
    """Runs the commands of a run's life, each in a process of its own.

    Args:
        config: the file of the small run.
        folder: where that run writes to, as ``run/version_0``.
        options: further options of each command, such as ``--trusted_only``.
        rollouts: whether it learns from rollouts, which can be trained on again.
        evaluates: whether there are held-out rows or prompts.
    """

    def __init__(
        self, config: Path, folder: Path, options: Sequence[str], rollouts: bool, evaluates: bool
    ) -> None:
        self._config = ["--config", str(config), *options]
        self._runs = folder / "run"
        self._options = list(options)
        self._rollouts, self._evaluates = rollouts, evaluates

    def findings(self) -> Iterator[RunFinding]:
        """Yield what each stage shows; a failure ends all that would need its result."""
        failed = self._fit_and_kill()
        if failed is not None:
            yield failed
            return
        yield _tried("training, with all callbacks, to the first checkpoint; then a kill -9")
        resume = ["fit", *self._config, "--ckpt_path=last"]
        detail = f" from that checkpoint, to iteration {ITERATIONS}"
        (resumed,) = _run(Stage("a resume", detail, resume))
        yield resumed
        if resumed.kind is Kind.FAILS:
            return
        run = newest_run(self._runs)
        assert run is not None  # a checkpoint was there
        checks: list[Stage] = []
        if self._rollouts:
            yield from _rollouts(run)
            again = ["rerun", str(run), "--iteration", str(ITERATIONS), *self._options]
            checks.append(Stage("an iteration trained again", ": equal bit for bit", again))
        if self._evaluates:
            last = str(checkpoints_in(run / "checkpoints")[0])
            evaluated = ["validate", *self._config, f"--ckpt_path={last}"]
            checks.append(Stage("an evaluation", " of the last checkpoint", evaluated))
        yield from _run(*checks)
        yield from _exports(run)

    def _fit_and_kill(self) -> RunFinding | None:
        """Train until there is a checkpoint, and kill all processes then."""
        child = start_command("fit", *self._config)
        try:
            end = time.monotonic() + STAGE_S
            while child.running and time.monotonic() < end:
                run = newest_run(self._runs)
                if run is not None and checkpoints_in(run / "checkpoints"):
                    return None
                child.ended_within(_POLL_S)
            return _failure("training", child)
        finally:
            child.kill()


def _run(*stages: Stage) -> Iterator[RunFinding]:
    """Run commands to their ends, side by side; yields what each shows."""
    end = time.monotonic() + STAGE_S
    with ExitStack() as started:
        children = [start_command(*stage.command) for stage in stages]
        for child in children:
            started.callback(child.kill)
        for stage, child in zip(stages, children, strict=True):
            child.ended_within(max(0.0, end - time.monotonic()))
            sound = child.status == 0
            yield _tried(stage.name + stage.detail) if sound else _failure(stage.name, child)


def _tried(text: str) -> RunFinding:
    return RunFinding(Kind.TRIED, "", text)


def _failure(what: str, child: Child) -> RunFinding:
    """Describe how a command failed, by its error message if it has one."""
    status = child.status
    how = f"did not end within {STAGE_S:g} s" if status is None else ending(status)
    return RunFinding(Kind.FAILS, "", f"{what} {how}{last_words(child)}")


def _rollouts(run: Path) -> Iterator[RunFinding]:
    """Yield what the rollouts of the small run show."""
    rollouts = [rollout for rollout in RerunLog(run).all_rollouts() if not rollout.demonstration]
    if errors := [rollout.error for rollout in rollouts if rollout.error is not None]:
        share = f"{len(errors)} of {len(rollouts)} rollouts failed, first"
        yield RunFinding(Kind.FAILS, "data", f"{share}: {errors[0]:.300}")
    done = [rollout for rollout in rollouts if rollout.status is RolloutStatus.COMPLETED]
    for reason in ("max_turns", "max_seconds"):
        if done and all(rollout.finish_reason == reason for rollout in done):
            yield RunFinding(
                Kind.WASTES,
                f"data.agent.{reason}",
                f"all {len(done)} rollouts were ended by it, none by the environment",
            )


def _exports(run: Path) -> Iterator[RunFinding]:
    """Load each exported model with transformers, and compute with it."""
    for config in sorted((run / "hf").rglob("config.json")):
        folder = config.parent
        try:
            lm = AutoModelForCausalLM.from_pretrained(folder)
            ids = AutoTokenizer.from_pretrained(folder)("1 + 1", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                finite = bool(torch.isfinite(lm(ids).logits).all())
        except Exception as error:  # whatever transformers raises
            text = f"the export cannot be loaded: {type(error).__name__}: {error!s:.300}"
            yield RunFinding(Kind.FAILS, "trainer.callbacks.HFExport", text)
            continue
        if finite:
            yield _tried("an export, loaded by transformers")
        else:
            yield RunFinding(Kind.FAILS, "trainer.callbacks.HFExport", "its logits are not finite")
