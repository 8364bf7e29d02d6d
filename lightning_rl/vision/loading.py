"""Loads pictures from any source, and checks them before decoding."""

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from PIL import Image, ImageOps

from lightning_rl.config.schema import one_line
from lightning_rl.errors import PictureError, kind_of_path
from lightning_rl.rollout import Picture
from lightning_rl.vision.fetching import fetched, shown_url, too_many_bytes
from lightning_rl.vision.limits import OWN, PictureAccess, PictureLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Supported file formats. Every further decoder would be exposed to strangers' bytes."""
_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_FAULTS = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
"""Errors that Pillow raises for files that are no pictures, or broken ones."""


def load_picture(
    source: Any,
    limits: PictureLimits,
    base: str | os.PathLike[str] | None = None,
    access: PictureAccess = OWN,
    take: Callable[[str], bytes] | None = None,
) -> Picture:
    """Return the picture that a source names or holds, after decoding it once as a check.

    Args:
        source: a path, a ``file://``, ``http(s)://`` or ``data:`` URL, a file's bytes, an item of
            an Image column of 🤗 datasets (``{"bytes": ..., "path": ...}``), or a PIL image, which
            becomes a PNG file.
        limits: limits of the picture.
        base: the folder of relative paths; None: the working directory.
        access: what the source may name.
        take: returns the file at a URL; None: it is downloaded now.

    Raises:
        PictureError: names the source, what is wrong with it, and the fix.
    """
    if isinstance(source, Picture):
        return source
    if isinstance(source, Mapping) and {"bytes", "path"} & set(source):
        inner = source.get("bytes")
        if inner is None and source.get("path"):
            return load_picture(source["path"], limits, base, access, take)
        if isinstance(inner, bytes):
            name = source.get("path")
            return _checked(inner, one_line(name, 120) if name else _size_of(inner), limits)
    if isinstance(source, Image.Image):
        name = f"an image of {source.width}×{source.height} pixels"
        _require_pixels(name, source.size, limits)
        return _checked(_as_png(source), name, limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return _checked(bytes(source), _size_of(source), limits)
    if isinstance(source, str | os.PathLike):
        return _named(os.fspath(source), limits, base, access, take)
    raise PictureError(
        f"{one_line(repr(source), 80)} is not a picture; expected a path, a URL, a file's bytes "
        'or {"bytes": ..., "path": ...}'
    )


def decode(picture: Picture) -> Image.Image:
    """Decode a picture to RGB, in the record's ``(width, height)``.

    It is rotated as EXIF says; transparency becomes white, and an animation its first frame.

    Raises:
        PictureError: if the file is broken.
    """
    return _decoded(picture.data, f"picture {picture.digest[:12]}")


def data_url(picture: Picture) -> str:
    """Return the picture's file as a ``data:`` URL, which :func:`load_picture` reads back."""
    kind = next((k for begin, k in _KINDS.items() if picture.data.startswith(begin)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(picture.data).decode()}"


def is_url(source: Any) -> bool:
    """Tell whether a source is an http(s) URL."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def _named(
    source: str,
    limits: PictureLimits,
    base: str | os.PathLike[str] | None,
    access: PictureAccess,
    take: Callable[[str], bytes] | None,
) -> Picture:
    scheme = source.partition(":")[0].lower()
    if scheme == "data":
        name = f"{one_line(source.partition(',')[0], 60)},… ({len(source):,} characters)"
        return _checked(_of_data_url(source, name, limits), name, limits)
    if scheme in ("http", "https"):
        sent = (
            fetched(source, limits, access) if take is None or not is_url(source) else take(source)
        )
        return _checked(sent, shown_url(source), limits)
    if not access.files:
        raise PictureError(
            f"{one_line(source, 120)!r} is neither an http(s) URL nor a data: URI, and files "
            "cannot be named here; send the picture itself as a data: URI"
        )
    if scheme == "file":
        source = url2pathname(urlsplit(source).path)
    elif "://" in source:
        raise PictureError(
            f"{one_line(source, 120)!r}: {scheme}:// is not supported; download the picture and "
            "name its file, or use an http(s) URL"
        )
    path = Path(base or "", source)
    return _checked(_read(path, limits), one_line(path, 200), limits)


def _of_data_url(source: str, name: str, limits: PictureLimits) -> bytes:
    head, comma, body = source.partition(",")
    if not comma:
        raise PictureError(f"{name} has no comma; expected data:image/png;base64,...")
    if not head.lower().rstrip().endswith(";base64"):
        return unquote_to_bytes(body)
    return from_base64(body, name, limits)


def from_base64(text: str, name: str, limits: PictureLimits) -> bytes:
    """Decode base64 text, which may have line breaks and lack its padding.

    Raises:
        PictureError: if it is not base64, or too long.
    """
    if len(text) > 2 * limits.max_bytes:  # 4/3 and line breaks; more is not worth copying
        raise too_many_bytes(name, f"some {len(text) * 3 // 4:,}", limits)
    compact = "".join(unquote_to_bytes(text).decode("latin-1").split()).rstrip("=")
    try:
        return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"{name} is not base64 ({error}); encode the file anew") from error


def _read(path: Path, limits: PictureLimits) -> bytes:
    try:
        if kind := kind_of_path(path):
            raise PictureError(f"{one_line(path, 200)} is {kind}, not a picture; name a file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limits.max_bytes:
                raise too_many_bytes(one_line(path, 200), f"{size:,}", limits)
            return file.read(limits.max_bytes + 1)
    except FileNotFoundError as error:
        raise PictureError(
            f"{one_line(path, 200)} does not exist; correct the path, which is relative to the "
            "file that names it"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PictureError(f"{one_line(path, 200)} cannot be read: {one_line(error)}") from error


def _checked(data: bytes, name: str, limits: PictureLimits) -> Picture:
    """Return the record of a file's bytes, after checking its header and then decoding it."""
    if len(data) > limits.max_bytes:
        raise too_many_bytes(name, f"{len(data):,}", limits)
    _require_pixels(name, _opened(data, name).size, limits)
    width, height = _decoded(data, name).size
    return Picture(hashlib.sha256(data).hexdigest(), width, height, data)


def _require_pixels(name: str, size: tuple[int, int], limits: PictureLimits) -> None:
    width, height = size
    if width * height > limits.max_pixels:
        raise PictureError(
            f"{name} has {width}×{height} = {width * height:,} pixels, more than "
            f"max_pixels={limits.max_pixels:,}; shrink the picture, or raise it"
        )
    if width * height == 0:
        raise PictureError(f"{name} has {width}×{height} pixels; replace the picture")


def _opened(data: bytes, name: str) -> Image.Image:
    """Open an image file, reading only its header."""
    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(f"{name} is too large for Pillow: {one_line(error)}") from error
    except _FAULTS as error:
        begin = "is empty" if not data else f"begins with {data[:8]!r}"
        raise PictureError(
            f"{name} is not a PNG, JPEG, WebP or GIF file: it {begin}; convert or replace it"
        ) from error


def _decoded(data: bytes, name: str) -> Image.Image:
    image = _opened(data, name)
    try:
        return _as_seen(image)
    except _FAULTS as error:
        raise PictureError(
            f"{name} cannot be decoded: {one_line(error) or type(error).__name__}; it may be cut "
            "short: replace the file"
        ) from error


def _as_seen(image: Image.Image) -> Image.Image:
    """Convert an image to RGB, rotated as EXIF says, on a white background."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow would clip all above 255
        image = image.point(lambda grey: grey / 256).convert("L")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        white = Image.new("RGBA", seen.size, "white")
        white.alpha_composite(seen)
        image = white
    return image.convert("RGB")


def _as_png(image: Image.Image) -> bytes:
    file = BytesIO()
    try:
        _as_seen(image).save(file, "PNG")
    except _FAULTS as error:  # one that was opened, and not read yet
        raise PictureError(f"a PIL image cannot be decoded: {one_line(error)}") from error
    return file.getvalue()


def _size_of(data: Any) -> str:
    return f"a picture of {len(data):,} bytes"
