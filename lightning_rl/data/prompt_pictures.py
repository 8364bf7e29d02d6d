"""Pictures of prompts: which columns of a table hold them, and which belong to a row."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from os import PathLike
from typing import Any

from lightning_rl.rollout import Message, Picture
from lightning_rl.vision.downloads import Downloads
from lightning_rl.vision.limits import PictureAccess, PictureLimits
from lightning_rl.vision.loading import is_url, load_picture
from lightning_rl.vision.messages import (
    has_pictures,
    pictures_of,
    require_few,
    urls_in,
    with_sources,
)


def as_stored(features: Any) -> Any:
    """Return 🤗 datasets features that keep pictures encoded; None if there are none.

    A decoded picture is a hundred times as large, and a broken one would fail the whole row.
    """
    import datasets

    found = False

    def changed(feature: Any) -> Any:
        nonlocal found
        if isinstance(feature, Mapping):
            return {name: changed(inner) for name, inner in feature.items()}
        if isinstance(feature, datasets.LargeList):
            return datasets.LargeList(changed(feature.feature))
        if isinstance(feature, datasets.List):
            return datasets.List(changed(feature.feature), length=feature.length)
        if isinstance(feature, datasets.Image):
            found = True
            return datasets.Image(mode=feature.mode, decode=False)
        return feature

    stored = datasets.Features(changed(features)) if features else None
    return stored if found else None


class PictureSource:
    """Reads the pictures of rows when they are drawn.

    Args:
        column: column of pictures in addition to the prompt's.
        limits: bounds of the pictures.
        place: returns the folder of relative paths, None for the working directory, and what a row
            may name.
    """

    def __init__(
        self,
        column: str | None,
        limits: PictureLimits,
        place: Callable[[], tuple[str | PathLike[str] | None, PictureAccess]],
    ) -> None:
        self.column = column
        self._limits = limits
        self._place = place

    def of(
        self,
        prompt: str | list[Message],
        columns: dict[str, Any],
        later: Iterable[tuple[str | list[Message], Mapping[str, Any]]] = (),
    ) -> tuple[str | list[Message], list[Picture]]:
        """Return a prompt in the form for templates, and its pictures; removes their column.

        If pictures are downloaded, downloads for upcoming rows are started meanwhile.

        Args:
            prompt: the row's prompt.
            columns: the row's other columns.
            later: both for the rows that are probably drawn next.

        Raises:
            PictureError: if one is unavailable or out of bounds.
        """
        if urls := list(self._urls(prompt, columns)):
            self._downloads.want(urls, (url for row in later for url in self._urls(*row)))
        sources = _listed(None if self.column is None else columns.pop(self.column, None))
        if isinstance(prompt, str):
            require_few(len(sources), self._limits)
            if not sources:
                return prompt, []
            given = self._given
            return prompt, [load_picture(source, *given) for source in sources]
        if sources:
            require_few(len(sources), self._limits)
            prompt = with_sources(prompt, sources)
        if not has_pictures(prompt):
            return prompt, []
        return pictures_of(prompt, *self._given)

    @property
    def _given(
        self,
    ) -> tuple[PictureLimits, str | PathLike[str] | None, PictureAccess, Callable[[str], bytes]]:
        return self._limits, *self._placed, self._downloads.take

    @cached_property
    def _placed(self) -> tuple[str | PathLike[str] | None, PictureAccess]:
        return self._place()

    @cached_property
    def _downloads(self) -> Downloads:
        return Downloads(self._limits, self._placed[1])

    def _urls(self, prompt: str | list[Message], columns: Mapping[str, Any]) -> Iterator[str]:
        beside = _listed(None if self.column is None else columns.get(self.column))
        yield from filter(is_url, beside[: self._limits.max_per_prompt])
        if not isinstance(prompt, str):
            yield from islice(urls_in(prompt), self._limits.max_per_prompt)


def _listed(given: Any) -> Sequence[Any]:
    """Return what a column holds, several pictures, one or none, as a list."""
    if given is None:
        return []
    return given if isinstance(given, list | tuple) else [given]
