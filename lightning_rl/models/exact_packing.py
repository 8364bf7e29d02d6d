"""Whether a model's architecture is computed exactly where rollouts are packed."""

from collections.abc import Callable

import torch
from PIL import Image
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Prompt, Rollout, Row
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.loading import load_picture
from lightning_rl.vision.reader import PictureReader, attention

MAX_GAP = 1e-3  # nats; rounding reaches 1e-5, a token that sees too much or too little 1e-1
OTHER_MODEL = "use another model, such as Qwen, Llama, Mistral, Gemma 3 or GPT-2"


@torch.no_grad()
def require_exact_packing(
    lm: PreTrainedModel,
    score: Callable[[TensorDict], Tensor],
    reader: PictureReader | None = None,
) -> None:
    """Compare ``score`` (logprobs (M,) of a pack) with the model's own forward, rollout by rollout.

    Some architectures mix tokens outside of attention (state spaces, convolutions), or compute more
    between body and output head than packed scoring knows of. A few tokens show it; where a
    ``reader`` is given, with pictures among them.

    Raises:
        ConfigError: if packed scoring fails, or is not exact.
    """
    if any(parameter.is_meta for parameter in lm.parameters()):
        return  # a sharded strategy fills it in later
    name = type(lm).__name__
    # Token ids high enough to miss the padding token, whose embedding may be zero.
    rollouts = [
        _rollout([7, 4, 6], [5, 3, 4, 6]),
        _rollout([7, 4, 6], [3, 7]),
        _rollout([4, 6], [5, 7, 3]),
    ]
    if reader is not None:
        rollouts += _with_pictures(reader)
    try:
        packed = score(pack_rollouts(rollouts).to(lm.device))
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{name} cannot score packed rollouts ({error}); {OTHER_MODEL}"
        ) from error
    implementation = lm.config._attn_implementation
    lm.set_attn_implementation(attention(lm.config, "eager"))
    try:
        alone = torch.cat([_score_alone(lm, rollout, reader) for rollout in rollouts])
    finally:
        lm.set_attn_implementation(attention(lm.config, implementation))
    gap = float((packed - alone).abs().nan_to_num(torch.inf).max())
    if gap > MAX_GAP:
        raise ConfigError(
            f"{name} scores packed rollouts {gap:.3g} nats (bound {MAX_GAP:g}) away from the same "
            f"rollouts alone: packing is not exact for this architecture; {OTHER_MODEL}"
        )


def _rollout(prompt_ids: list[int], token_ids: list[int]) -> Rollout:
    count, prompt = len(token_ids), Prompt("parity", "", prompt_ids)
    row = Row(prompt_ids, token_ids, [True] * count, [0.0] * count, [0] * count)
    return Rollout(prompt, "", 0, 0, rows=[row])


def _with_pictures(reader: PictureReader) -> list[Rollout]:
    """Two that share a picture in their prompts, which one sees a second time, from the side."""
    images = [Image.linear_gradient("L").resize((64, 48)).convert("RGB")]
    images.append(images[0].rotate(90, expand=True))
    first, second = (load_picture(image, PictureLimits()) for image in images)
    mark = reader.family.placeholder
    a, b, c, d = [token for token in range(3, 8) if token != mark][:4]
    rollouts = []
    for token_ids, pictures in (([b, c], [first]), ([b, mark, c, d, b], [first, second])):
        ids, places = reader.expand([a, mark, b, *token_ids], pictures)
        cut = 2 + reader.prepare(first).count
        rollout = _rollout(ids[:cut], ids[cut:])
        rollout.rows[0].pictures, rollout.rows[0].places = pictures, places
        rollouts.append(rollout)
    return rollouts


def _score_alone(
    lm: PreTrainedModel, rollout: Rollout, reader: PictureReader | None = None
) -> Tensor:
    row = rollout.rows[0]
    ids = torch.tensor(row.prompt_ids + row.token_ids, device=lm.device)
    start = len(row.prompt_ids)
    shown = {}
    if reader is not None and row.pictures:
        prepared = [reader.prepare(picture) for picture in row.pictures]
        own = reader.family.own_inputs(prepared, ids[None])
        shown = {name: value.to(lm.device) for name, value in own.items()}
    logits = lm(input_ids=ids[None], use_cache=False, **shown).logits[0, start - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[start:, None]).squeeze(-1)
