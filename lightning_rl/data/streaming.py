"""Prompts of a dataset that is streamed, and never held as a whole."""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.data.encoding import PromptEncoder
from lightning_rl.data.hub import RowStream, open_stream
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.row_order import RowOrder
from lightning_rl.data.shaping import ShapedRows
from lightning_rl.data.sources import pictures_beside
from lightning_rl.data.tables import ListTable
from lightning_rl.errors import DataError, require_at_least
from lightning_rl.rollout import Prompt
from lightning_rl.vision.limits import PictureAccess


@configurable
class HFStreamingPrompts(PromptDataset):
    """A dataset of the 🤗 hub, or a folder of files, streamed block by block.

    Nothing is downloaded ahead or stored on disk. With ``shuffle`` the rows of a block are drawn in
    a random order; blocks follow each other as in the data. A checkpoint holds where the block
    begins, so a resumed run continues with the same prompts.

    Args:
        path: the dataset's name on the hub, or a folder or file.
        name: the name of the dataset's configuration (its subset).
        split: the name of the split.
        revision: a branch, tag or commit of the hub; None: the newest.
        buffer_size: number of rows per block.
        options: further arguments of ``PromptDataset``.

    Raises:
        ConfigError: if a value is out of range.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        buffer_size: int = 1000,
        **options: Any,
    ) -> None:
        require_at_least(1, buffer_size=buffer_size)
        super().__init__(**options)
        self.path = path
        self.name = name
        self.split = split
        self.revision = revision
        self.buffer_size = buffer_size
        self._stream: RowStream | None = None
        self._begin: Any = None  # the state of the stream before the block
        self._before = 0  # rows of this pass that came before the block
        self._read = 0  # and those of the block, before any is left out

    def __repr__(self) -> str:
        return f"HFStreamingPrompts({self.path!r}, split={self.split!r})"

    def pictures_from(self) -> tuple[Path | None, PictureAccess]:
        return pictures_beside(self.path)

    def read(self) -> Iterable[tuple[str, Any]]:
        rows = enumerate(open_stream(self.path, self.name, self.split, self.revision).rows())
        return ((f"{self.path}: row {number}", row) for number, row in rows)

    def load(
        self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, Any] | None = None
    ) -> None:
        """Open the stream, and read its first block."""
        self._encoder = PromptEncoder(tokenizer, chat_options)
        if self._stream is None:
            self._open()
        self._check_first()

    def longest(self) -> int | None:
        return self.max_prompt_tokens

    def _open(self) -> None:
        self._stream = open_stream(self.path, self.name, self.split, self.revision)
        self.fingerprint = f"{self!r} {self._stream.version}"
        self._read_block(0)

    def _read_block(self, before: int) -> None:
        assert self._stream is not None
        self._begin = self._stream.state
        found = self._stream.block(self.buffer_size)
        rows = ((f"{self.path}: row {n}", row) for n, row in enumerate(found, before))
        self._before, self._read = before, len(found)
        self._shaped = ShapedRows(ListTable(rows), self._shaping, self.filter)
        self._begin_order()

    def _begin_order(self, cursor: int = 0) -> None:
        seed = self.seed if self.shuffle else None
        self._order.begin(len(self), seed, self._before, cursor=cursor)

    def _number(self, index: int) -> int:
        return self._before + self._loaded().place(index)

    def _next_index(self) -> int:
        first = self._order.epoch
        while self._order.ended:
            if self._read:
                self._read_block(self._before + self._read)
            elif self._order.epoch <= first + 1:
                self._order.epoch += 1
                self._stream_from(None, 0)
            else:
                raise DataError(
                    f"{self!r} holds no rows, or filter keeps none; check path, split and filter"
                )
        return self._order.next()

    def _stream_from(self, state: Any, before: int) -> None:
        assert self._stream is not None
        self._stream.seek(state)
        self._read_block(before)

    def numbered(self) -> Iterator[tuple[int | None, Prompt]]:
        """Yield the rows that are short enough, from a fresh stream."""
        fresh = copy(self)
        fresh.shuffle, fresh._order = False, RowOrder()
        fresh._open()
        while True:
            index = fresh._next_index()
            if fresh._order.epoch:
                return
            prompt = fresh._fitting(index, fresh._upcoming())
            if prompt is not None:
                yield None, prompt

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"stream": self._begin, "before": self._before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded()
        self._order.epoch = state["epoch"]
        self._stream_from(state.get("stream"), state.get("before", 0))
        super().load_state_dict(state)
