"""Initialise bodies from supervised training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl.envs.networks.bodies import Body
from lightning_rl.errors import ConfigError

PREFIX = "agent.body."
"""Prefix of a body's weights in a checkpoint of ``SoloModule``."""
LAYERS = "body_layers"
"""Key of such a checkpoint that lists the body's layers."""


def layers_of(body: Body) -> list[str]:
    """Return the class names of all its modules; weights alone do not show activations."""
    return [type(module).__name__ for module in body.modules()]


def take_body(body: Body, path: Path) -> None:
    """Initialise a body from a checkpoint of ``SoloModule``.

    Raises:
        ConfigError: if there is none, or it holds another body; names the difference.
    """
    checkpoint = _read(path)
    weights = checkpoint.get("state_dict") or {}
    own = {n.removeprefix(PREFIX): w for n, w in weights.items() if n.startswith(PREFIX)}
    if not own:
        raise ConfigError(f"pretrained: {str(path)!r} contains no body; train one with SoloModule")
    theirs, ours = checkpoint.get(LAYERS), layers_of(body)
    other = _difference(own, body.state_dict())
    if not other and theirs not in (None, ours):
        other = f"it consists of {', '.join(theirs)}, but this one of {', '.join(ours)}"
    if other:
        name = theirs[0] if theirs else "another body"
        raise ConfigError(
            f"pretrained: {str(path)!r} holds {name} that differs from {type(body).__name__} as "
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
            f"pretrained: {str(path)!r} is not a checkpoint of SoloModule: {error}"
        ) from error
    return checkpoint


def _difference(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> str:
    """Describe the first weight that is missing, extra or of another shape; "" if none is."""
    for name, weight in ours.items():
        if name not in theirs:
            return f"it has no {name}"
        if theirs[name].shape != weight.shape:
            return f"its {name} is {tuple(theirs[name].shape)}, not {tuple(weight.shape)}"
    return next((f"it also has {name}" for name in theirs if name not in ours), "")
