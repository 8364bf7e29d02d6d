"""OfflineRows: the training rows of a fixed data set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.data.prompts import PromptDataset
from lightning_rl.rollout import Prompt


class OfflineRows(Sequence[Any]):
    """The result of ``make``, unless None, for each prompt that is short enough, in file order.

    All rows are made and checked at once, and kept in memory, except those with pictures, which are
    made again for every batch, since the pictures of all rows may not fit into memory.

    Args:
        prompts: the prompts; already loaded.
        make: makes a row from a prompt.
    """

    def __init__(self, prompts: PromptDataset, make: Callable[[Prompt], Any]) -> None:
        self._prompts, self._make = prompts, make
        self._rows: list[Any] = []
        for index, prompt in prompts.numbered():
            if (made := make(prompt)) is not None:
                self._rows.append(made if index is None or not prompt.pictures else _Again(index))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        row = self._rows[place]
        return self._make(self._prompts[row.index]) if isinstance(row, _Again) else row


@dataclass(frozen=True, slots=True)
class _Again:
    """A row that is read again whenever it is needed."""

    index: int
