"""Numbers as compact text in rollouts: ``form:...``, where the rest is base64 of their bytes."""

from base64 import b64decode, b64encode
from collections.abc import Callable

from lightning_rl.errors import DataError


def joined(form: str, data: bytes) -> str:
    """Encode bytes after the ``form`` that says how to read them."""
    return f"{form}:{b64encode(data).decode()}"


def split(text: str, what: str, stride: Callable[[str], int]) -> tuple[str, bytes]:
    """Return form and bytes; inverse of :func:`joined`.

    ``what`` names the numbers in messages; ``stride`` returns the bytes of a token in a form.

    Raises:
        DataError: if the text is not of this form.
    """
    form, _, coded = text.partition(":")
    try:
        size, data = stride(form), b64decode(coded, validate=True)
    except ValueError as error:
        raise DataError(f"{what} {text[:40]!r} are damaged ({error}); restore the file") from error
    if not size or len(data) % size:
        raise DataError(f"{what} {text[:40]!r} are damaged: a part of a token is missing")
    return form, data
