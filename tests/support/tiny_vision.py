"""Provide random image-text models of tiny shapes, and pictures for them."""

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    LlavaConfig,
    Qwen2_5_VLConfig,
    Qwen2Tokenizer,
    Qwen3VLConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lightning_rl.rollout import Picture
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.loading import decode, load_picture
from tests.support.tiny_models import byte_tokenizer
from tests.support.versions import need_transformers

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava", "llava_siglip")
VOCAB = 272
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def vision_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer of bytes, with the tokens that stand for pictures."""
    tokenizer = byte_tokenizer(*_SPECIAL, eos="<|im_end|>", template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    return tokenizer


def save_vision_model(directory: Path, family: str, **text: Any) -> Path:
    """Save two layers of 32 on a tower of two; 32 x 32 pixels are 4 tokens for Qwen's."""
    if find_spec("torchvision") is None:
        need_transformers("5.19", "pictures without torchvision")
    tokenizer = vision_tokenizer()
    config, processor = _MAKERS[family](tokenizer, text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForImageTextToText.from_config(config)
        # Where embeddings are small beside what pictures become, texts are all that differs.
        for name, weight in lm.named_parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(
                    weight, std=0.2 if "visual" in name or "vision" in name else 0.1
                )
    lm.save_pretrained(directory)
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def picture(seed: int = 0, width: int = 32, height: int = 32) -> Picture:
    """Return noise of a seed, as a PNG file."""
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    image = Image.fromarray(noise.to(torch.uint8).numpy())
    return load_picture(image, PictureLimits())


def _text(tokenizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    } | given


def _marks(tokenizer: Any) -> dict[str, int]:
    ids = tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    )
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return dict(zip(names, ids, strict=True))


def _qwen2_5_vl(tokenizer: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    text = _text(tokenizer, given) | {
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    }
    tower = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 32,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, tie_word_embeddings=False, **_marks(tokenizer)
    )
    return config, _qwen_processor(8)


def _qwen3_vl(tokenizer: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    text = _text(tokenizer, given) | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
            "rope_theta": 1e4,
        },
    }
    tower = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 32,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=text, vision_config=tower, tie_word_embeddings=False, **_marks(tokenizer)
    )
    return config, _qwen_processor(8)


def _qwen_processor(patch: int) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        size={"shortest_edge": (2 * patch) ** 2, "longest_edge": 64 * patch**2},
    )


def _llava(tokenizer: Any, given: dict[str, Any], **given_tower: Any) -> tuple[Any, Any]:
    text = _text(tokenizer, given) | {"model_type": "qwen2"}
    tower = {
        "model_type": "clip_vision_model",
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "patch_size": 8,
        "image_size": 24,
        "projection_dim": 16,
    }
    config = LlavaConfig(
        text_config=text,
        vision_config=tower | given_tower,
        image_token_id=_marks(tokenizer)["image_token_id"],
        tie_word_embeddings=False,
        vision_feature_select_strategy="full" if given_tower else "default",
    )
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}
    )
    return config, processor


_MAKERS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "llava": _llava,
    "llava_siglip": partial(_llava, model_type="siglip_vision_model"),
}


def png(color: str, width: int = 32, height: int = 32) -> bytes:
    """Return a PNG file of one colour."""
    file = BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def save_picture_rows(folder: Path) -> Path:
    """Write six questions about pictures of three sizes; the last one has no picture."""
    lines = []
    for seed, size in enumerate([(32, 32), (64, 32), (32, 48), (32, 32), (48, 48)]):
        decode(picture(seed, *size)).save(folder / f"{seed}.png")
        parts = [{"type": "image", "image": f"{seed}.png"}, {"type": "text", "text": "How many?"}]
        lines.append({"prompt": [{"role": "user", "content": parts}], "answer": str(seed)})
    lines.append({"prompt": [{"role": "user", "content": "How many?"}], "answer": "7"})
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def share_of_even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the share of tokens with even numbers, in [0, 1]."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
