"""Finds, when a model is loaded, the pass over micro-batches that is exact for its architecture."""

from collections.abc import Callable
from functools import partial

import torch
from PIL import Image
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rl.data.batch import token_rows
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention.packed import ATTENTION, build_layout
from lightning_rl.models.passes import OF_ANY_ATTENTION, PACKED, WITHOUT_CHOICE, BodyPass
from lightning_rl.rollout import Prompt, Rollout, Row
from lightning_rl.run.processes.dist import take_from_rank_zero
from lightning_rl.run.warnings import rank_zero_warn
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.loading import load_picture
from lightning_rl.vision.reader import PictureReader, attention

MAX_GAP = 1e-3  # nats; rounding reaches 1e-5, a token that sees too much or too little 1e-1
OTHER_MODEL = "use another model, such as Qwen, Llama, Mistral, Gemma 3 or GPT-2"

Own = Callable[[PreTrainedModel, Tensor, int, dict[str, Tensor]], Tensor]
"""Returns the outputs of a model's own forward for a text (1, T), from a token on."""


@torch.no_grad()
def exact_pass(
    lm: PreTrainedModel,
    score: Callable[[BodyPass, TensorDict], Tensor],
    own: Own,
    reader: PictureReader | None = None,
) -> BodyPass:
    """Prepare a model for the first pass that is exact: packed, or else unpacked; return it.

    The scores (M, ...) of a small micro-batch are compared with the model's ``own`` forward,
    rollout by rollout: some architectures mix tokens outside of attention (state spaces,
    convolutions), or compute something between body and output head that the policy does not. Small
    weights make such a gap small, too, so packed passes must not let scores depend on another
    rollout's tokens at all (:func:`_leaking`). With a ``reader`` the micro-batch has pictures,
    which only packed passes support.

    Raises:
        ConfigError: if no pass is exact.
    """
    if any(parameter.is_meta for parameter in lm.parameters()):
        return PACKED if reader is not None else _expected(lm)  # a strategy fills it in later
    # Token ids high enough to miss the padding token, whose embedding may be zero.
    rollouts = [
        _rollout([7, 4, 6], [5, 3, 4, 6]),
        _rollout([7, 4, 6], [3, 7]),
        _rollout([4, 6], [5, 7, 3]),
    ]
    if reader is not None:
        rollouts += _with_pictures(reader)
    passes = (PACKED,) if reader is not None else _passes(lm)
    if len(passes) > 1 or reader is not None:
        lm.set_attn_implementation(attention(lm.config, "eager"))
    alone = torch.cat([_alone(lm, own, rollout, reader) for rollout in rollouts])
    bound, faults = MAX_GAP * max(1.0, float(alone.std())), []
    for tried in passes:
        tried.prepare(lm)
        micro_batch = pack_rollouts(rollouts).to(lm.device)
        try:
            found = score(tried, micro_batch)
            leaks = tried.packed and _leaking(lm, partial(score, tried), micro_batch)
        except (AttributeError, KeyError, TypeError, ConfigError) as error:
            faults.append(str(error))
            continue
        gap = float((found - alone).abs().nan_to_num(torch.inf).max())
        if gap <= bound and not leaks:
            if not tried.packed:
                _warn(lm)
            return tried
        depend = "depend on other rollouts' tokens, and " if leaks else ""
        faults.append(f"its scores {depend}are {gap:.3g} away, bound {bound:g}")
    raise ConfigError(
        f"{type(lm).__name__} scores rollouts of a micro-batch differently from single ones, "
        f"packed or not ({'; '.join(dict.fromkeys(faults))}); {OTHER_MODEL}"
    )


@torch.enable_grad()
def _leaking(
    lm: PreTrainedModel, score: Callable[[TensorDict], Tensor], micro_batch: TensorDict
) -> bool:
    """Return True if scores of a rollout depend on another one's tokens.

    They do where their gradient by the other's embeddings is not exactly 0, however small the
    weights are: what attention masks has a gradient of 0, which no rounding changes.
    """
    layout, embedded = build_layout(micro_batch), []

    def note(_: nn.Module, __: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    rows = token_rows(micro_batch)
    # Rollouts with one prompt share its tokens in the micro-batch.
    prompt = micro_batch["rollouts", "prefix"][rows].where(_of_prompts(micro_batch), -1)
    for row in layout.rows.unique().tolist():
        embedded.clear()
        hook = lm.get_input_embeddings().register_forward_hook(note)
        try:
            # A pass for each, as layers that are recomputed can be differentiated once only.
            own = score(micro_batch)[layout.rows == row]
        finally:
            hook.remove()
        weights = torch.arange(own.numel(), device=own.device).sin().view_as(own)  # not all alike
        [slopes] = torch.autograd.grad((own * weights).sum(), embedded[:1])
        foreign = (rows != row) & (prompt != micro_batch["rollouts", "prefix"][row])
        if slopes.flatten(0, -2)[foreign[layout.tokens]].any():
            return True
    return False


def _of_prompts(micro_batch: TensorDict) -> Tensor:
    """Return flags (T,) of the tokens of prompts."""
    length, prompts = micro_batch["rollouts", "length"], micro_batch["rollouts", "prompt_length"]
    begin = (length.cumsum(0) - length)[token_rows(micro_batch)]
    places = torch.arange(len(begin), device=begin.device)
    return places - begin < prompts[token_rows(micro_batch)]


def own_logprobs(lm: PreTrainedModel, ids: Tensor, start: int, shown: dict[str, Tensor]) -> Tensor:
    """Return the logprobs of the tokens from ``start`` on, by the model's own forward."""
    logits = lm(input_ids=ids, use_cache=False, **shown).logits[0, start - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[0, start:, None]).squeeze(-1)


def own_states(body: PreTrainedModel, ids: Tensor, start: int, shown: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states that predict the tokens from ``start`` on."""
    states: Tensor = body(input_ids=ids, use_cache=False, **shown).last_hidden_state
    return states[0, start - 1 : -1]


def exact_pass_of_body(body: PreTrainedModel, reader: PictureReader | None) -> BodyPass:
    """Return the exact pass of a critic's body; packed if it reads pictures, like the policy's."""

    def states(body_pass: BodyPass, micro_batch: TensorDict) -> Tensor:
        layout = build_layout(micro_batch)
        return body_pass.states(body, layout)[layout.predictors]

    return PACKED if reader is not None else exact_pass(body, states, own_states)


def agreed(own: BodyPass) -> BodyPass:
    """Return rank 0's choice, as only rank 0 may have weights to test; all ranks call it."""
    known = (*OF_ANY_ATTENTION, WITHOUT_CHOICE)
    number = torch.tensor(known.index(own), device="cpu")
    take_from_rank_zero(number)
    return known[int(number)]


def _passes(lm: PreTrainedModel) -> tuple[BodyPass, ...]:
    """Return the passes that the model can be prepared for."""
    chooses = lm.config._attn_implementation == ATTENTION
    return OF_ANY_ATTENTION if chooses else (WITHOUT_CHOICE,)


def _expected(lm: PreTrainedModel) -> BodyPass:
    """Return the pass that a model without weights will need, judged by its layers."""
    first, *others = _passes(lm)
    carries = getattr(lm, "_is_stateful", False)
    if others and (carries or any(isinstance(part, nn.Conv1d) for part in lm.modules())):
        first = others[0]
    first.prepare(lm)
    return first


def _warn(lm: PreTrainedModel) -> None:
    rank_zero_warn(
        f"{type(lm).__name__} cannot compute packed rows, so it runs unpacked: each "
        "rollout in a line of its own, padded to the longest of its micro-batch. A prompt is "
        "computed for each of its rollouts, not once for a group, which takes long where prompts "
        "are long and groups large"
    )


def _rollout(prompt_ids: list[int], token_ids: list[int]) -> Rollout:
    count, prompt = len(token_ids), Prompt("parity", "", prompt_ids)
    row = Row(prompt_ids, token_ids, [True] * count, [0.0] * count, [0] * count)
    return Rollout(prompt, "", 0, 0, rows=[row])


def _with_pictures(reader: PictureReader) -> list[Rollout]:
    """Return two rollouts that share a picture in their prompts; one also sees it rotated."""
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


def _alone(lm: PreTrainedModel, own: Own, rollout: Rollout, reader: PictureReader | None) -> Tensor:
    row = rollout.rows[0]
    ids = torch.tensor(row.prompt_ids + row.token_ids, device=lm.device)
    shown = {}
    if reader is not None and row.pictures:
        prepared = [reader.prepare(picture) for picture in row.pictures]
        inputs = reader.family.own_inputs(prepared, ids[None])
        shown = {name: value.to(lm.device) for name, value in inputs.items()}
    return own(lm, ids[None], len(row.prompt_ids), shown)
