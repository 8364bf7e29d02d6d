"""``lightning-rl unpack --shrink``: a pack of the fewest rollouts and layers with the symptom."""

import io
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from lightning_rl.cli.pack.archive import write_archive
from lightning_rl.cli.pack.base import Base
from lightning_rl.cli.pack.ddmin import ddmin
from lightning_rl.cli.pack.layers import DecoderLayers
from lightning_rl.cli.pack.observation import Update, made_again, write_observed
from lightning_rl.cli.pack.run_directory import make_run
from lightning_rl.cli.pack.symptoms import Symptom
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.errors import DataError
from lightning_rl.rollout import Rollout

T = TypeVar("T")


@dataclass
class Shrinking:
    """Finds the fewest rollouts and layers that show a pack's symptom.

    Args:
        about: what ``pack.json`` says.
        parts: the pack's members.
        base: the weights that no pack needs to hold.
        trust: command-line options for building the run's parts.
        update: the pack's update, made again.
        symptom: what has to stay.
        say: called with a line for each phase.
    """

    about: dict[str, Any]
    parts: Path
    base: Base
    trust: Sequence[str]
    update: Update
    symptom: Symptom
    say: Callable[[str], None]
    trials: int = 0
    impossible: int = 0
    """Trials that raised an error."""

    def write(self, out: Path) -> None:
        """Leave out groups, then rollouts of the groups that are left, then layers; write the rest.

        Every trial makes the update again.

        Raises:
            DataError: if the smallest update does not show the symptom a second time.
            DiskError: if the pack cannot be written.
        """
        rollouts = RerunLog(self.parts).rollouts(self.about["iteration"])
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        with tempfile.TemporaryDirectory(prefix="lightning_rl_shrink_") as scratch:
            run, small = Path(scratch, "run"), Path(scratch, "small")
            make_run(self.about, self.parts, run)
            few = self._fewest(
                "groups", list(groups.values()), lambda some: self._shows(run, list(chain(*some)))
            )
            kept = self._fewest("rollouts", list(chain(*few)), lambda some: self._shows(run, some))
            said = f"{len(rollouts) - len(kept)} of {len(rollouts)} rollouts"
            layers = self._layers()
            if layers is None:
                shutil.copytree(self.parts, small)
            else:
                stay = self._fewest(
                    "layers", range(layers.count), lambda some: self._shows_in(layers, some, kept)
                )
                layers.write(small, stay)
                said += f" and {layers.count - len(stay)} of {layers.count} layers"
            said += f", without which the symptom stays: {self.symptom.text}"
            self._complete(small, kept, said)
            write_archive(small, out)

    def _fewest(self, what: str, items: Sequence[T], shows: Callable[[list[T]], bool]) -> list[T]:
        before, impossible = self.trials, self.impossible
        kept = ddmin(items, shows)
        said = f"{what}: {len(kept)} of {len(items)} stay, {self.trials - before} trials"
        failed = self.impossible - impossible
        self.say(f"{said}, of which {failed} could not be made" if failed else said)
        return kept

    def _shows(self, run: Path, rollouts: list[Rollout]) -> bool:
        """Return True if the update of these rollouts can be made, and shows the symptom."""
        self.trials += 1
        try:
            return self.symptom.shows(self._made(run, rollouts))
        except Exception:  # such as too few groups for a minibatch
            self.impossible += 1
            return False

    def _shows_in(
        self, layers: DecoderLayers, stay: Sequence[int], rollouts: list[Rollout]
    ) -> bool:
        """Return the same for some of the model's layers."""
        with tempfile.TemporaryDirectory(prefix="lightning_rl_shrink_") as scratch:
            parts, run = Path(scratch, "parts"), Path(scratch, "run")
            layers.write(parts, stay)
            make_run(self.about, parts, run)
            return self._shows(run, rollouts)

    def _made(self, run: Path, rollouts: list[Rollout]) -> Update:
        RerunLog(run).write_rollouts(self.about["iteration"], 0, rollouts)
        with redirect_stderr(io.StringIO()):  # the same lines each time
            return made_again(RecordedRun(run, self.trust), self.about["iteration"])

    def _layers(self) -> DecoderLayers | None:
        """Return the model's layers; None, saying why, if all have to stay."""
        try:
            if self.symptom.needs_layers:
                raise DataError("what the other machine would get with fewer is not known")
            return DecoderLayers(self.parts, self.update.observer.parameters)
        except DataError as error:
            self.say(f"layers: all stay, since {error}")
            return None

    def _complete(self, small: Path, kept: list[Rollout], left_out: str) -> None:
        """Add rollouts, results and observations to the other members of a smaller pack."""
        with tempfile.TemporaryDirectory(prefix="lightning_rl_shrink_") as scratch:
            make_run(self.about, small, Path(scratch, "run"))
            update = self._made(Path(scratch, "run"), kept)
        if not self.symptom.shows(update):
            raise DataError(
                "the smallest update does not show the symptom a second time, so this machine does "
                "not make equal updates; send the whole pack"
            )
        shutil.rmtree(small / "rerun")
        log = RerunLog(small)
        log.write_rollouts(self.about["iteration"], 0, kept)
        for outcome in (update.observer.before, update.rerun.again):
            log.write_outcome(outcome)
        without = {"left_out": [*self.about["left_out"], left_out]}
        about = self.about | without | {"bases": self.base.leave_out(small)}
        expected = self.symptom.expected(update)
        write_observed(about, small, expected, update.rerun.environment)
