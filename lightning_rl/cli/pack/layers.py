"""The decoder layers of the model in a pack, and the pack with some of them only."""

import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lightning_rl.cli.pack.base import weight_files
from lightning_rl.cli.pack.trees import read_tree, write_tree
from lightning_rl.cli.requested import models_in, nodes
from lightning_rl.config.yaml_text import parse_yaml
from lightning_rl.errors import DataError
from lightning_rl.run.files import strict_json

_NAMED = re.compile(r"((?:.*?\.)?layers\.)([0-9]+)(\..*)")
_PLACE = re.compile(r"models/[0-9]{1,3}")


class DecoderLayers:
    """The layers of the model that a pack trains.

    A reference that copies this model has the same layers; other models keep all of theirs.

    Args:
        parts: the pack's members.
        parameters: the names of each optimizer's parameters, in its order.

    Raises:
        DataError: saying why they cannot be told.
    """

    def __init__(self, parts: Path, parameters: list[list[str]]) -> None:
        self._parts, self._parameters = parts, parameters
        text = (parts / "config.yaml").read_text(encoding="utf-8")
        model = parse_yaml(text, "the pack's config.yaml")["model"]
        trained = {node["model"] for node in models_in(model) if "loading" in node}
        if len(trained) != 1:
            raise DataError(f"it trains {len(trained)} models")
        self.place = trained.pop()
        """The model's path in the pack."""
        references = [node["reference"] for _, node in nodes(model) if node.get("reference")]
        self._other_reference = any(models_in(references))
        file = parts / self.place / "config.json"
        if not _PLACE.fullmatch(self.place) or not file.is_file():
            raise DataError(f"{self.place:.100} is no model in the pack")
        count = _decoder_of(strict_json.loads(file.read_bytes())).get("num_hidden_layers")
        names = [name for of_one in parameters for name in of_one] + list(self._weights)
        found = {int(n[2]) for n in map(_NAMED.fullmatch, names) if n and not _sees(n[1])}
        if type(count) is not int or found != set(range(count)):
            raise DataError(
                f"the weights of {self.place} are of layers {sorted(found)}, but its config.json "
                f"has num_hidden_layers={count!r:.20}"
            )
        self._base = {} if self._checkpoint is None else self._checkpoint.get("frozen_base", {})
        if not isinstance(self._base, dict):  # an earlier checkpoint's
            raise DataError("its LoRA's checkpoint identifies the base by a digest of all layers")
        self.count = count

    def write(self, folder: Path, kept: Sequence[int]) -> None:
        """Write the pack's members, with these layers of the model only, to a new folder."""
        numbers = {old: new for new, old in enumerate(kept)}
        shutil.copytree(self._parts, folder, ignore=shutil.ignore_patterns("checkpoint.*"))
        if self._checkpoint is not None:
            write_tree(self._smaller(self._checkpoint, numbers), folder / "checkpoint")
        file = folder / self.place / "config.json"
        config = strict_json.loads(file.read_bytes())
        decoder = _decoder_of(config)
        for name, value in decoder.items():  # such as layer_types
            if isinstance(value, list) and "layer" in name and len(value) == self.count:
                decoder[name] = [value[layer] for layer in kept]
        decoder["num_hidden_layers"] = len(kept)
        file.write_text(strict_json.dumps(config, indent=1), encoding="utf-8")
        if self._weights:
            for old in (folder / self.place).glob("model*.safetensors*"):
                old.unlink()
            weights = self._renamed(self._weights, numbers)
            save_file(weights, folder / self.place / "model.safetensors", {"format": "pt"})

    @cached_property
    def _weights(self) -> dict[str, Any]:
        """The weights in the model's own files, by name; empty if a checkpoint has them all."""
        folder = self._parts / self.place
        if not list(folder.glob("model*.safetensors")):
            return {}
        try:
            return {n: w for file in weight_files(folder) for n, w in load_file(file).items()}
        except SafetensorError as error:
            raise DataError(f"{self.place}: its weights are damaged ({error})") from error

    @cached_property
    def _checkpoint(self) -> dict[str, Any] | None:
        there = (self._parts / "checkpoint.json").is_file()
        return read_tree(self._parts / "checkpoint") if there else None

    def _smaller(self, checkpoint: dict[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
        """Return a checkpoint without the weights and the optimizer's state of other layers."""
        optimizers = []
        for state, names in zip(checkpoint["optimizer_states"], self._parameters, strict=True):
            stay = [index for index, name in enumerate(names) if self._new_name(name, numbers)]
            new = {old: index for index, old in enumerate(stay)}
            groups = [
                group | {"params": [new[index] for index in group["params"] if index in new]}
                for group in state["param_groups"]
            ]
            of_kept = {new[index]: own for index, own in state["state"].items() if index in new}
            optimizers.append(state | {"state": of_kept, "param_groups": groups})
        weights = self._renamed(checkpoint["state_dict"], numbers)
        base = {"frozen_base": self._renamed(self._base, numbers)} if self._base else {}
        return checkpoint | base | {"state_dict": weights, "optimizer_states": optimizers}

    def _renamed(self, weights: Mapping[str, Any], numbers: Mapping[int, int]) -> dict[str, Any]:
        named = ((self._new_name(name, numbers), weight) for name, weight in weights.items())
        return {name: weight for name, weight in named if name is not None}

    def _new_name(self, name: str, numbers: Mapping[int, int]) -> str | None:
        """Return a weight's name among the layers that stay; None if its layer does not."""
        found = _NAMED.fullmatch(name)
        other = self._other_reference and name.startswith("reference.")
        if found is None or _sees(found[1]) or other:
            return name
        number = numbers.get(int(found[2]))
        return None if number is None else f"{found[1]}{number}{found[3]}"


def _decoder_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a model's configuration on its language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _sees(prefix: str) -> bool:
    """Return True for the layers of a vision tower, which are another stack."""
    return "vision" in prefix or "visual" in prefix
