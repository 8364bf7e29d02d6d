"""Where a run leaves its files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer

from lightning_rl import dist

_known: WeakKeyDictionary[Trainer, Path] = WeakKeyDictionary()


def run_dir(trainer: Trainer) -> Path:
    """The first logger's directory (``trainer.log_dir``), or the root directory; created.

    On several ranks it is rank 0's. They all have to make the first call, since it asks rank 0
    (the data modules do, first thing in ``setup``); later calls may be made by any.
    """
    directory = _known.get(trainer)
    if directory is None:
        directory = Path(trainer.log_dir or trainer.default_root_dir)
        directory.mkdir(parents=True, exist_ok=True)
        if dist.world_size() == trainer.world_size:  # else the ranks cannot talk yet
            _known[trainer] = directory
    return directory


class RunLines:
    """A file of JSON lines in the run directory, as long as the run has got.

    What a killed run had written behind the checkpoint it is resumed from is taken back, for it is
    going to be written again.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bytes = 0
        self._resumed = False

    def begin(self, trainer: Trainer) -> None:
        """Call it in ``setup``, on every rank: a run that begins anew adds to what is there."""
        file = run_dir(trainer) / self._name
        self._bytes = file.stat().st_size if file.exists() else 0
        self._resumed = False

    def append(self, trainer: Trainer, records: Iterable[dict[str, Any]]) -> None:
        """Write records; values that JSON does not know become text."""
        lines = (json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in records)
        with (run_dir(trainer) / self._name).open("ab") as file:
            # In another directory than the checkpoint's run there is nothing to take back.
            if self._resumed and file.tell() > self._bytes:
                file.truncate(self._bytes)
            self._resumed = False
            file.write("".join(lines).encode())
            file.flush()
            self._bytes = file.tell()

    def state_dict(self) -> dict[str, Any]:
        """How long the file is, as primitives."""
        return {"bytes": self._bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken."""
        self._bytes, self._resumed = state["bytes"], True
