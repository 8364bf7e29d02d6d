"""Results of tools as the content of a message: texts, and pictures that the model sees."""

import json
from collections.abc import Mapping
from typing import Any

from PIL.Image import Image

from lightning_rl.rollout import Picture
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.loading import load_picture
from lightning_rl.vision.messages import is_picture, pictures_of


def as_content(result: Any, limits: PictureLimits) -> str | list[Any]:
    """Return a result as text or JSON; with pictures, as content parts that hold a ``Picture``.

    A PIL image is a picture, also within a list of texts, images and content parts.

    Raises:
        PictureError: if a picture cannot be loaded, or exceeds a limit.
    """
    parts = result if isinstance(result, list) else [result]
    if not any(isinstance(part, Picture | Image) or is_picture(part) for part in parts):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return [_part(part, limits) for part in parts]


def _part(part: Any, limits: PictureLimits) -> Mapping[str, Any]:
    if isinstance(part, Picture | Image):
        return {"type": "image", "image": load_picture(part, limits)}
    if is_picture(part):
        _, [picture] = pictures_of([{"content": [part]}], limits)
        return {"type": "image", "image": picture}
    if isinstance(part, Mapping) and part.get("type") == "text":
        return part
    text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
    return {"type": "text", "text": text}
