"""Chats with pictures, in every form that clients and data sets use."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning_rl.config.schema import one_line
from lightning_rl.errors import PictureError
from lightning_rl.rollout import Message, Picture, Prompt
from lightning_rl.vision.limits import OWN, PictureAccess, PictureLimits
from lightning_rl.vision.loading import data_url, from_base64, is_url, load_picture

IMAGE_KINDS = ("image", "image_url", "input_image")
"""Types of content parts that hold a picture."""
TEXT_KINDS = ("text", "input_text", "output_text")
"""Types of content parts that hold text."""
_HELD_AS = ("image", "url", "path")
"""Keys under which 🤗 chats give a picture's source."""


def pictures_of(
    messages: Sequence[Message],
    limits: PictureLimits,
    base: str | os.PathLike[str] | None = None,
    access: PictureAccess = OWN,
    take: Callable[[str], bytes] | None = None,
) -> tuple[list[Message], list[Picture]]:
    """Return the chat in the form that chat templates expect, and its pictures in order.

    Pictures become ``{"type": "image"}``, texts ``{"type": "text", "text": ...}``; other parts,
    messages whose content is a string, and ``messages`` itself do not change.

    Args:
        messages: may have content parts of OpenAI's API (``image_url``, ``input_image``),
            Anthropic's (``image`` with a ``source``), or 🤗 chats (``image`` with ``image``,
            ``url``, ``path`` or ``base64``).
        limits: limits of each picture, and of their number.
        base: as for :func:`load_picture`.
        access: as for :func:`load_picture`.
        take: as for :func:`load_picture`.

    Raises:
        PictureError: if a picture cannot be loaded or exceeds a limit, or there are too many.
    """
    require_few(sum(_count(message) for message in messages), limits)
    pictures: list[Picture] = []

    def read(part: Any) -> Any:
        if is_picture(part):
            pictures.append(load_picture(_source_of(part, limits), limits, base, access, take))
            return {"type": "image"}
        if isinstance(part, Mapping) and part.get("type") in TEXT_KINDS:
            return {"type": "text", "text": part.get("text")}
        return part

    return _changed(messages, read), pictures


def with_sources(messages: Sequence[Message], sources: Sequence[Any]) -> list[Message]:
    """Return the chat with separately given pictures, e.g. of a column ``images``, inserted.

    They fill the content parts ``{"type": "image"}`` without a source, in order; in a chat without
    such parts, the pictures precede the text of the user's first message.

    Raises:
        PictureError: if there are more places than pictures, or the reverse.
    """
    expected = sum(_is_place(part) for message in messages for part in _parts(message))
    if not expected and sources:
        first = next((n for n, m in enumerate(messages) if m.get("role") == "user"), 0)
        opened = [{"type": "image"}] * len(sources)
        changed = [dict(message) for message in messages]
        text = changed[first].get("content")
        rest = text if isinstance(text, list) else [{"type": "text", "text": text}]
        changed[first]["content"] = [*opened, *rest]
        return with_sources(changed, sources)
    if expected != len(sources):
        raise PictureError(
            f"{len(sources)} pictures are given, but the chat has {expected} places "
            '{"type": "image"}; give one picture for each place'
        )
    left = iter(sources)
    return _changed(
        messages, lambda part: {"type": "image", "image": next(left)} if _is_place(part) else part
    )


def urls_in(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the URLs of pictures that have to be downloaded, in order."""
    for part in (part for message in messages for part in _parts(message) if is_picture(part)):
        given = (_address_of(part), *(part.get(name) for name in _HELD_AS))
        yield from (source for source in given if is_url(source))


def as_sent(prompt: Prompt) -> list[Message]:
    """Return a prompt as a chat that any client can send, with pictures inside in OpenAI's form."""
    if isinstance(prompt.prompt, str):
        return [{"role": "user", "content": prompt.prompt}]
    left = iter(prompt.pictures)

    def sent(part: Any) -> Any:
        shown = is_picture(part)
        return {"type": "image_url", "image_url": {"url": data_url(next(left))}} if shown else part

    return _changed(prompt.asked, sent)


def has_pictures(messages: Sequence[Message]) -> bool:
    """Tell whether any content part is a picture."""
    return any(map(_count, messages))


def is_picture(part: Any) -> bool:
    """Tell whether a content part is a picture, with or without its source."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS


def require_few(count: int, limits: PictureLimits) -> None:
    """Check the number of a prompt's pictures.

    Raises:
        PictureError: if there are too many.
    """
    if count > limits.max_per_prompt:
        raise PictureError(
            f"{count} pictures are more than max_per_prompt={limits.max_per_prompt}; leave some "
            "out, or raise it"
        )


def _changed(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Return the chat with every content part changed; ``messages`` itself is not."""
    return [
        {**message, "content": [change(part) for part in parts]}
        if (parts := _parts(message))
        else message
        for message in messages
    ]


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _count(message: Message) -> int:
    return sum(map(is_picture, _parts(message)))


def _is_place(part: Any) -> bool:
    """Tell whether a part is a picture without a source; tables fill missing fields with None."""
    return is_picture(part) and all(part[key] is None for key in part if key != "type")


def _source_of(part: Mapping[str, Any], limits: PictureLimits) -> Any:
    """Return a content part's source, for :func:`load_picture`."""
    if (address := _address_of(part)) is not None:
        return address
    source = part.get("source")
    held = source if isinstance(source, Mapping) and source.get("type") == "base64" else {}
    if isinstance(held.get("data"), str):
        return from_base64(held["data"], "source.data", limits)
    if isinstance(part.get("base64"), str):
        return from_base64(part["base64"], "base64", limits)
    for name in _HELD_AS:
        if part.get(name) is not None:
            return part[name]
    shown = {key: one_line(value, 30) for key, value in part.items()}
    raise PictureError(
        f"a content part {one_line(shown, 120)} names no picture; expected image_url, a source of "
        f"type url or base64, or one of {', '.join(_HELD_AS)}, base64"
    )


def _address_of(part: Mapping[str, Any]) -> str | None:
    """Return the URL by which OpenAI's and Anthropic's parts name a picture, if any."""
    held = part.get("image_url")  # an object for chats, a text for responses
    held = held.get("url") if isinstance(held, Mapping) else held
    if isinstance(held, str):
        return held
    source = part.get("source")
    if isinstance(source, Mapping) and source.get("type") == "url":
        return source["url"] if isinstance(source.get("url"), str) else None
    return None
