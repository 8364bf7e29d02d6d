"""The base of a pack: a model that others can get, whose weights the pack does not hold."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_rl.cli.pack.archive import members_of
from lightning_rl.errors import DataError, first_line
from lightning_rl.run.digest import digest, digests

LeftOut = dict[str, dict[str, str]]
"""The digests of tensors that a pack leaves out, by member and name."""


class Base:
    """Weights that are found by their digests, whatever their names are.

    They are found in float32 too, in which a model in 16 bits may be trained.

    Args:
        model: a directory, or a name of the hub, perhaps with a revision after an ``@``; None:
            there are none.

    Raises:
        DataError: if there is no such model, or it has no safetensors, or they are damaged.
    """

    def __init__(self, model: str | None) -> None:
        self.model = model
        self._known: dict[str, tuple[Tensor, torch.dtype]] = {}
        try:
            for file in [] if model is None else weight_files(_folder_of(model)):
                for weight in load_file(file).values():
                    halves = weight.dtype in (torch.bfloat16, torch.float16)
                    for kind in {weight.dtype, torch.float32 if halves else weight.dtype}:
                        self._known[digest(weight.to(kind))] = weight, kind
        except (SafetensorError, OSError, HFValidationError) as error:
            raise DataError(
                f"--base {model}: its weights cannot be read ({first_line(error)}); name a "
                "directory, or a model of the hub as owner/name@revision"
            ) from error

    def leave_out(self, parts: Path) -> LeftOut:
        """Remove the base's weights from a pack's members, and return what is left out."""
        left_out = {}
        for member in filter(_has_weights, members_of(parts) if self._known else ()):
            tensors = load_file(parts / member)
            found = digests(tensors.items()).items()
            if known := {name: made for name, made in found if made in self._known}:
                rest = {name: tensor for name, tensor in tensors.items() if name not in known}
                _rewrite(parts / member, rest)
                left_out[member] = known
        return left_out

    def put_back(self, parts: Path, about: Mapping[str, Any]) -> None:
        """Add what was left out to a pack's members.

        Args:
            parts: the pack's members.
            about: what ``pack.json`` says.

        Raises:
            DataError: if a base is needed, not needed or another one, or the pack is damaged.
        """
        left_out: LeftOut = about["bases"]
        if self.model is None and left_out:
            raise DataError(
                f"the pack was written without the weights of {about.get('base')!r:.200}; name "
                "that model with --base"
            )
        if self.model is not None and not left_out:
            raise DataError(f"--base {self.model}: the pack has none of its weights; leave it out")
        for member in left_out:
            if member not in filter(_has_weights, members_of(parts)):
                raise DataError(f"the pack lacks its member {member!r:.100}; ask for it again")
            tensors = load_file(parts / member)
            for name, made in left_out[member].items():
                if made not in self._known:
                    raise DataError(
                        f"--base {self.model} is not the model that was packed: {name!r:.100} of "
                        f"{member} is none of its weights; name the same revision"
                    )
                weight, kind = self._known[made]
                tensors[name] = weight.to(kind, copy=True)
            _rewrite(parts / member, tensors)


def _rewrite(file: Path, tensors: dict[str, Tensor]) -> None:
    new = file.with_suffix(".new")  # as tensors may be mapped from the file itself
    save_file(tensors, new, {"format": "pt"})
    new.replace(file)


def weight_files(folder: Path) -> list[Path]:
    """Return a model's files of weights.

    Raises:
        DataError: if it has none of safetensors.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise DataError(
            f"{folder} has no model.safetensors, and a pack holds no pickles; save the model with "
            "save_pretrained, and name that folder"
        )
    return files


def _folder_of(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    name, _, revision = model.partition("@")
    return Path(
        snapshot_download(name, revision=revision or None, allow_patterns="model*.safetensors")
    )


def _has_weights(member: str) -> bool:
    return member.endswith(".safetensors") and member != "expected.safetensors"
