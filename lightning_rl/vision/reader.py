"""PictureReader: reads pictures for a model, beside its tokenizer."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_rl.errors import ConfigError, PictureError
from lightning_rl.rollout import Picture, Placed
from lightning_rl.vision.families import Family, Prepared
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.llava import Llava
from lightning_rl.vision.loading import decode, load_picture
from lightning_rl.vision.pictured_text import PicturedText
from lightning_rl.vision.qwen import Qwen3VL, Qwen25VL

FAMILIES: tuple[type[Family], ...] = (Qwen25VL, Qwen3VL, Llava)
KEPT_BYTES = 1 << 30
"""Maximum bytes of prepared pictures in the cache, least recently used out first."""


def family_of(config: PretrainedConfig) -> type[Family] | None:
    """Return the family that reads pictures for a model of this configuration, if any."""
    return next((family for family in FAMILIES if family.reads(config)), None)


def attention(config: PretrainedConfig, name: str) -> str | dict[str, str]:
    """Return ``attn_implementation``: ``name`` for a model's text, and SDPA for its tower."""
    if family_of(config) is None:
        return name
    return {"": name, "text_config": name, "vision_config": "sdpa"}


def supported() -> str:
    """Return the architectures that can read pictures, for messages."""
    return ", ".join(family.architecture for family in FAMILIES)


class PictureReader:
    """Prepares pictures for a model; recently used ones are cached.

    It is thread-safe. Copies are the same object, because it holds no weights; in another process
    it starts with an empty cache.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._kept: OrderedDict[str, Prepared] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __deepcopy__(self, memo: Any) -> "PictureReader":
        return self

    def __reduce__(self) -> Any:
        return PictureReader, (self.family,)

    def reads_as(self, other: "PictureReader | None") -> bool:
        """Tell whether both readers give a picture the same placeholders, positions and pixels."""
        if other is None or type(self.family) is not type(other.family):
            return False
        return self.family.preparation() == other.family.preparation()

    def require_alike(self, lm: PreTrainedModel, what: str) -> None:
        """Refuse another model that could not use the pictures prepared here.

        Raises:
            ConfigError: if it could not; ``what`` names the model.
        """
        own, kind = self.family, family_of(lm.config)
        if kind is not type(own) or (
            kind(lm.config, own.processor).preparation() != own.preparation()
        ):
            raise ConfigError(
                f"{what} is a {type(lm).__name__}, which does not read pictures as the policy's "
                f"{own.architecture} does; use one of the same family and picture sizes"
            )

    def prepare(self, picture: Picture) -> Prepared:
        """Return a picture as the model reads it.

        Raises:
            PictureError: if the model's processor refuses it.
        """
        with self._lock:
            if picture.digest in self._kept:
                self._kept.move_to_end(picture.digest)
                return self._kept[picture.digest]
        made = self._prepare(picture)
        with self._lock:
            if picture.digest not in self._kept:
                self._kept[picture.digest] = made
                self._bytes += made.pixels.nbytes
            while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].pixels.nbytes
        return made

    def _prepare(self, picture: Picture) -> Prepared:
        image = decode(picture)
        try:
            with torch.device("cpu"):
                return self.family.prepare(image)
        except ValueError as error:  # such as Qwen's of a picture 200 times as wide as high
            raise PictureError(
                f"the model's processor refuses picture {picture.digest[:12]} of {picture.width}x"
                f"{picture.height} pixels: {error}; leave it out, or replace it"
            ) from error

    @cached_property
    def blank(self) -> Prepared:
        """A small white picture."""
        return self.prepare(load_picture(Image.new("RGB", (32, 32), "white"), PictureLimits()))

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], list[int]]:
        """Expand each picture's placeholder; return the token ids, and where each picture begins.

        Args:
            token_ids: have one placeholder for each picture.
            pictures: the pictures, in order.

        Raises:
            PictureError: if there are more placeholders than pictures, or the reverse.
        """
        token, ids, places = self.family.placeholder, list[int](), list[int]()
        marks = sum(one == token for one in token_ids)
        if marks != len(pictures):
            raise PictureError(
                f"{len(pictures)} pictures are given, but the text has {marks} placeholders (token "
                f"{token}) for them; write none in a text, and use a chat template that has one "
                'for each {"type": "image"}'
            )
        left = iter(pictures)
        for one in token_ids:
            if one == token:
                places.append(len(ids))
                ids += [token] * self.prepare(next(left)).count
            else:
                ids.append(one)
        return ids, places

    def seen(self, token_ids: Sequence[int], placed: Sequence[Placed]) -> PicturedText:
        """Return what each token of a text sees, and the tokens' positions.

        Raises:
            PictureError: if a picture's placeholders are not in its place.
        """
        prepared = [self.prepare(picture) for _, picture in placed]
        family = self.family
        with torch.device("cpu"):
            return PicturedText(token_ids, placed, prepared, family.placeholder, family.axes)


def load_reader(
    model: str, config: PretrainedConfig, of_files: Mapping[str, Any]
) -> PictureReader | None:
    """Return the reader of a model's pictures; None if the model reads none.

    Raises:
        ConfigError: if its image processor cannot be loaded.
    """
    family = family_of(config)
    if family is None:
        return None
    try:
        processor = AutoImageProcessor.from_pretrained(model, backend="pil", **of_files)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"model={model!r} reads pictures, but its image processor cannot be loaded "
            f"({str(error).strip().splitlines()[0]}); save preprocessor_config.json beside the "
            "model, and install transformers 5.19 or newer, or torchvision"
        ) from error
    return PictureReader(family(config, processor))


def reader_of(tokenizer: PreTrainedTokenizerBase) -> PictureReader | None:
    """Return the picture reader of a tokenizer's model; None if the model reads no pictures."""
    reader: PictureReader | None = getattr(tokenizer, "picture_reader", None)
    return reader


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, pictures: Sequence[Picture], special: bool
) -> tuple[list[int], list[int]]:
    """Return the tokens of a text with placeholders for pictures, and where each picture begins.

    Prompts, agents and servers all encode pictures by this function.

    Args:
        tokenizer: the model's (``load_tokenizer``).
        text: as a chat template renders it.
        pictures: the pictures, in order.
        special: add the tokenizer's special tokens, unless the text already begins with them.

    Raises:
        PictureError: if the model reads no pictures, or their number differs from the text's
            placeholders.
    """
    token_ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    token_ids = begun_once(tokenizer, token_ids) if special else token_ids
    reader = reader_of(tokenizer)
    if reader is not None:
        return reader.expand(token_ids, pictures)
    if pictures:
        raise PictureError(
            f"pictures are given, but the model reads none; use one of {supported()}"
        )
    return token_ids, []


def begun_once(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[int]:
    """Remove repeated beginning-of-sequence tokens: a text may hold the one the tokenizer adds."""
    begin = 0
    while token_ids[begin : begin + 2] == [tokenizer.bos_token_id] * 2:
        begin += 1
    return token_ids[begin:]


def begin_fault(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str | None:
    """Describe the fault if a prompt has no beginning-of-sequence token, or several; else None.

    If the tokenizer does not put one before texts, the model needs none.
    """
    begin, token = tokenizer.bos_token_id, tokenizer.bos_token
    if begin is None or tokenizer("")["input_ids"][:1] != [begin]:
        return None
    count = token_ids.count(begin)
    if count == 0:
        return (
            f"does not begin with {token!r}, which the tokenizer puts before other texts; if the "
            "model was trained with it, write {{ bos_token }} at the start of "
            "tokenizer.chat_template"
        )
    if count == 1 or begin == tokenizer.eos_token_id:
        return None
    return (
        f"holds {token!r} {count} times; remove it from the messages, or give the rendered text as "
        "the prompt"
    )
