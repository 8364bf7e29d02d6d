"""Inputs of a language model, instead of token ids, where tokens see pictures."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.run.processes.dist import world_size
from lightning_rl.vision.batch import NAME, pictures_in, position_names
from lightning_rl.vision.families import Family, Features, Prepared
from lightning_rl.vision.reader import PictureReader


def picture_inputs(
    family: Family,
    features: Callable[[PreTrainedModel, Sequence[Prepared]], Features],
    lm: PreTrainedModel,
    input_ids: Tensor,
    picture: Tensor,
    part: Tensor,
    prepared: Callable[[int], Prepared],
    blank: Prepared | None = None,
) -> dict[str, Any]:
    """Return the language model's arguments for N lines of T tokens, some of which see pictures.

    The tower runs once on each picture that any token sees: a picture that many rows share is
    computed once, and its gradient is the sum of theirs.

    Args:
        family: the model's family.
        features: runs the tower on pictures.
        lm: the model.
        input_ids: (N, T).
        picture: (N, T) on the CPU, the number of the picture that a token sees; -1 for text.
        part: (N, T) on the CPU, the number of the token among the picture's placeholders.
        prepared: returns the picture with a number.
        blank: a picture for the tower to run on, without effect, if no token sees any; None: the
            tower does not run.
    """
    embedded = lm.get_input_embeddings()(input_ids)
    at = (picture >= 0).nonzero(as_tuple=True)
    numbers, place = picture[at].unique(return_inverse=True)
    shown = [prepared(number) for number in numbers.tolist()]
    if not shown and blank is not None:
        embedded = _untouched(embedded, family, lm, blank)
    if not shown:
        return {"inputs_embeds": embedded}
    counts = torch.tensor([one.count for one in shown], device="cpu")
    index = (counts.cumsum(0) - counts)[place] + part[at]
    rows, columns, index = (one.to(embedded.device, non_blocking=True) for one in (*at, index))
    return family.inputs(embedded, (rows, columns), index, features(lm, shown))


def _untouched(embedded: Tensor, family: Family, lm: PreTrainedModel, blank: Prepared) -> Tensor:
    """Return the embeddings unchanged; backward gives the tower's parameters zero gradients."""
    features = family.features(lm, [blank])
    total = torch.stack([part.sum() for part in (features.first, *features.deeper)]).sum()
    return embedded + (0.0 * total).to(embedded.dtype)


def scored_states(
    reader: PictureReader, lm: PreTrainedModel, micro_batch: TensorDict, layout: Any
) -> Any:
    """Return the body's last hidden states (S, D) of a micro-batch, with or without pictures.

    ``layout`` has the S ``tokens`` of the micro-batch to compute, and is passed to the attention.
    With several ranks, each runs the tower once per micro-batch even without pictures, because the
    ranks gather its weights, or average its gradient, together.
    """
    tokens, family = micro_batch["tokens"], reader.family
    if "picture" in tokens:
        picture, part = (tokens[name][layout.tokens][None].cpu() for name in ("picture", "part"))
        positions = torch.stack([tokens[name][layout.tokens] for name in position_names(reader)])
        all_pictures = pictures_in(micro_batch[NAME])
    else:
        picture = torch.full((1, len(layout.tokens)), -1, device="cpu")
        part, positions = picture, layout.position_ids.expand(family.axes, -1)
        all_pictures = []
    inputs = picture_inputs(
        family,
        family.features,
        lm,
        layout.input_ids[None],
        picture,
        part,
        lambda number: reader.prepare(all_pictures[number]),
        reader.blank if world_size() > 1 else None,
    )
    output = family.language_model(lm)(
        **inputs,
        position_ids=as_position_ids(positions[:, None]),
        use_cache=False,
        layout=layout,
    )
    return output.last_hidden_state[0]


def as_position_ids(positions: Tensor) -> Tensor:
    """Return positions (axes, N, T) as models expect them: (N, T) if there is one axis."""
    return positions[0] if len(positions) == 1 else positions
