"""Bodies that begin with what supervised training has made of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl.envs.networks.bodies import Body
from lightning_rl.errors import ConfigError

PREFIX = "agent.body."
"""Of a body's weights in a checkpoint of ``SoloModule``."""
LAYERS = "body_layers"
"""Where such a checkpoint says of which layers the body is made."""


def layers_of(body: Body) -> list[str]:
    """Names of the classes of all that it is made of; weights alone tell of no activation."""
    return [type(module).__name__ for module in body.modules()]


def take_body(body: Body, path: Path) -> None:
    """Begin with the body of a checkpoint of ``SoloModule``.

    Raises:
        ConfigError: if there is none, or it is another body; naming what is different.
    """
    checkpoint = _read(path)
    weights = checkpoint.get("state_dict") or {}
    own = {n.removeprefix(PREFIX): w for n, w in weights.items() if n.startswith(PREFIX)}
    if not own:
        raise ConfigError(f"pretrained: {str(path)!r} holds no body; train one with SoloModule")
    theirs, ours = checkpoint.get(LAYERS), layers_of(body)
    other = _difference(own, body.state_dict())
    if not other and theirs not in (None, ours):
        other = f"it is made of {', '.join(theirs)}, and this one of {', '.join(ours)}"
    if other:
        name = theirs[0] if theirs else "another body"
        raise ConfigError(
            f"pretrained: {str(path)!r} holds {name} that is not {type(body).__name__} as it is "
            f"configured: {other}; train both with the same body on the same observations"
        )
    body.load_state_dict(own)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"pretrained: {str(path)!r} does not exist")
    try:
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # of zip files, of pickle, of what weights_only refuses
        raise ConfigError(
            f"pretrained: {str(path)!r} is no checkpoint of SoloModule: {error}"
        ) from error
    return checkpoint


def _difference(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> str:
    """The first weight that only one of them has, or that has another shape; "": none."""
    for name, weight in ours.items():
        if name not in theirs:
            return f"it has no {name}"
        if theirs[name].shape != weight.shape:
            return f"its {name} is {tuple(theirs[name].shape)}, not {tuple(weight.shape)}"
    return next((f"it has {name} besides" for name in theirs if name not in ours), "")
