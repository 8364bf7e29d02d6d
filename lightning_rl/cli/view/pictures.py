"""Pictures in the viewer's page: thumbnails in the page itself, and where rollouts read them."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from lightning_rl.data.rollouts.pictures import PictureFolder
from lightning_rl.data.rollouts.token_texts import end_of_run, marks_of
from lightning_rl.errors import DataError, PictureError

Record = dict[str, Any]
SIDE = 256
"""Largest side in pixels; larger pictures are scaled down."""
MOST_BYTES = 2**15
"""Larger files are re-encoded as JPEG."""


def thumbnails(rollouts: Sequence[Record], folder: PictureFolder) -> dict[str, str]:
    """Return ``data:`` URLs, by digest, of the pictures that exist.

    Raises:
        DataError: if a picture is a link to outside its folder.
    """
    result = {}
    for digest in _digests(rollouts):
        file = folder.file_of(digest)
        if file is None:
            continue
        if not file.resolve().is_relative_to(folder.path.resolve()):  # of an untrusted run, perhaps
            raise DataError(f"{file} is a link to a file outside its folder; remove it")
        with suppress(PictureError):  # damaged: its place says that it is missing
            result[digest] = _small(file)
    return result


def places_of(row: Record) -> list[Record]:
    """Return for each picture of a row where it begins, its tokens, its digest, and a label."""
    ids = [*row["prompt_ids"], *row["token_ids"]]
    marks = marks_of(row)
    following = [*(at for at, _ in marks[1:]), len(ids)]
    return [
        {
            "at": at,
            "tokens": end_of_run(ids, at, stop) - at,
            "digest": picture["digest"],
            "label": mark[1:-1],
        }
        for (at, mark), stop, picture in zip(
            marks, following, row.get("pictures") or (), strict=False
        )
        if 0 <= at < len(ids)
    ]


def _digests(rollouts: Sequence[Record]) -> Iterator[str]:
    rows = (row for record in rollouts for row in record["rows"])
    pictures = (picture for row in rows for picture in row.get("pictures") or ())
    yield from dict.fromkeys(str(picture["digest"]) for picture in pictures)


def _small(file: Path) -> str:
    # Here, since a run without pictures needs no decoder.
    from lightning_rl.vision.limits import PictureLimits
    from lightning_rl.vision.loading import decode, load_picture

    picture = load_picture(file, PictureLimits())
    if max(picture.width, picture.height) <= SIDE and len(picture.data) <= MOST_BYTES:
        return _url(file.suffix, picture.data)
    image = decode(picture)
    image.thumbnail((SIDE, SIDE))
    written = BytesIO()
    image.save(written, "JPEG", quality=85)
    return _url(".jpg", written.getvalue())


def _url(suffix: str, data: bytes) -> str:
    kind = {".jpg": "jpeg"}.get(suffix, suffix[1:])
    return f"data:image/{kind};base64,{b64encode(data).decode()}"
