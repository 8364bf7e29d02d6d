"""PictureReader: what a model's tokenizer lacks to read pictures."""

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
from lightning_rl.vision.begins import begun_once
from lightning_rl.vision.families import Family, Prepared
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.llava import Llava
from lightning_rl.vision.loading import decode, load_picture
from lightning_rl.vision.qwen import Qwen3VL, Qwen25VL
from lightning_rl.vision.seen import SeenText

FAMILIES: tuple[type[Family], ...] = (Qwen25VL, Qwen3VL, Llava)
KEPT_BYTES = 1 << 30
"""Most bytes of prepared pictures that are kept: those read last."""


def family_of(config: PretrainedConfig) -> type[Family] | None:
    """The family that reads pictures for a model of this configuration; None: none does."""
    return next((family for family in FAMILIES if family.reads(config)), None)


def attention(config: PretrainedConfig, name: str) -> str | dict[str, str]:
    """``attn_implementation`` that computes a model's text by this, and its tower by SDPA."""
    if family_of(config) is None:
        return name
    return {"": name, "text_config": name, "vision_config": "sdpa"}


def supported() -> str:
    """The architectures that can read pictures, for messages."""
    return ", ".join(family.architecture for family in FAMILIES)


class PictureReader:
    """Turns pictures into what a model reads; each is prepared once while it is in use.

    Any thread may ask. Copies are the same object, for it holds no weights; in another process it
    begins anew.
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
        """Whether a picture is the same placeholders, positions and pixels to both."""
        if other is None or type(self.family) is not type(other.family):
            return False
        return self.family.preparation() == other.family.preparation()

    def require_alike(self, lm: PreTrainedModel, what: str) -> None:
        """Refuse another model that could not take the pictures that are prepared here.

        Raises:
            ConfigError: naming ``what`` it is.
        """
        own, kind = self.family, family_of(lm.config)
        if kind is not type(own) or (
            kind(lm.config, own.processor).preparation() != own.preparation()
        ):
            raise ConfigError(
                f"{what} is a {type(lm).__name__}, which does not read pictures as the policy's "
                f"{own.architecture} does; take one of the same family and picture sizes"
            )

    def prepare(self, picture: Picture) -> Prepared:
        """A picture as the model reads it.

        Raises:
            PictureError: if the model's processor cannot take it.
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
                f"{picture.height} pixels: {error}; leave it out, or give another"
            ) from error

    @cached_property
    def blank(self) -> Prepared:
        """A small white picture."""
        return self.prepare(load_picture(Image.new("RGB", (32, 32), "white"), PictureLimits()))

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], list[int]]:
        """Token ids with as many placeholders as each picture takes, and where they begin.

        Args:
            token_ids: with one placeholder for each picture.
            pictures: in their order.

        Raises:
            PictureError: if there are more placeholders than pictures, or the reverse.
        """
        token, ids, places = self.family.placeholder, list[int](), list[int]()
        marks = sum(one == token for one in token_ids)
        if marks != len(pictures):
            raise PictureError(
                f"{len(pictures)} pictures are given, and the text has {marks} placeholders (token "
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

    def seen(self, token_ids: Sequence[int], placed: Sequence[Placed]) -> SeenText:
        """Where the pictures of a text stand, and the positions of its tokens.

        Raises:
            PictureError: if a picture's placeholders are not where it is to be.
        """
        prepared = [self.prepare(picture) for _, picture in placed]
        family = self.family
        with torch.device("cpu"):
            return SeenText(token_ids, placed, prepared, family.placeholder, family.axes)


def load_reader(
    model: str, config: PretrainedConfig, of_files: Mapping[str, Any]
) -> PictureReader | None:
    """The reader of a model's pictures; None if it reads none.

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
            "model, and have transformers 5.19 or newer, or torchvision"
        ) from error
    return PictureReader(family(config, processor))


def reader_of(tokenizer: PreTrainedTokenizerBase) -> PictureReader | None:
    """What reads the pictures of a tokenizer's model; None: nothing does."""
    reader: PictureReader | None = getattr(tokenizer, "picture_reader", None)
    return reader


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, pictures: Sequence[Picture], special: bool
) -> tuple[list[int], list[int]]:
    """The tokens of a text, in which each picture has a placeholder, and where pictures begin.

    Prompts, agents and servers all make tokens of pictures by it.

    Args:
        tokenizer: of the model (``load_tokenizer``).
        text: as a chat template renders it.
        pictures: in their order.
        special: add the tokenizer's special tokens, as far as the text does not begin with them.

    Raises:
        PictureError: if the model reads no pictures, or not as many as the text has places for.
    """
    token_ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    token_ids = begun_once(tokenizer, token_ids) if special else token_ids
    reader = reader_of(tokenizer)
    if reader is not None:
        return reader.expand(token_ids, pictures)
    if pictures:
        raise PictureError(
            f"there are pictures, but the model reads none; use one of {supported()}"
        )
    return token_ids, []
