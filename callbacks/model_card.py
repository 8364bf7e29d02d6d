"""The card of an exported model: its base, its training, and its results."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCardData
from lightning.pytorch import Trainer

from lightning_rl.callbacks.report import (
    LABELS,
    RunReport,
    headline,
    installed_versions,
    plot_curves,
)
from lightning_rl.config.yaml_text import dump_yaml
from lightning_rl.data.rollouts.ledger import FILE, Ledger
from lightning_rl.learn.base import LanguageModule
from lightning_rl.run.files.rundir import run_dir
from lightning_rl.run.hooks import find_callbacks

_SECRET = re.compile(r"(^|_)(key|token|secret|password)s?$", re.IGNORECASE)
"""Matches keys whose values are secret."""
_LOGIN = re.compile(r"://[^/@\s]+@")
"""Matches a name and a password in a URL."""


@dataclass(frozen=True)
class ModelCard:
    """Files beside a model's weights: ``README.md``, ``curves.png`` and ``config.yaml``.

    Args:
        history: rows of metrics, one per iteration.
        base: the model that training began with.
        name: the run's name, for headings.
        configuration: the run's YAML, without secrets; empty if a script created the objects.
        adapters: the weights are only a LoRA's adapters.
        ledger: the last hash of the run's ledger; empty if it has none.
        sees: the model reads pictures.
        writes: the model generates; False: it is a reward model.
    """

    history: list[dict[str, float]]
    base: str
    name: str
    configuration: str
    adapters: bool
    ledger: str = ""
    sees: bool = False
    writes: bool = True

    @classmethod
    def of(cls, trainer: Trainer, module: LanguageModule, merge_adapters: bool) -> "ModelCard":
        """Return the card of a run in its present state; its figures are those of ``RunReport``."""
        reports = find_callbacks(trainer, RunReport)
        [policy, *_] = module.loaded_policies.values()
        directory = run_dir(trainer)
        config = directory / "config.yaml"
        return cls(
            [dict(row) for row in reports[0].history] if reports else [],
            policy.model,
            "/".join(directory.parts[-2:]),
            without_secrets(config.read_text(encoding="utf-8")) if config.is_file() else "",
            policy.lora is not None and not merge_adapters,
            Ledger(directory).head if (directory / FILE).is_file() else "",
            policy.reader is not None,
            policy.lm.can_generate(),
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The last row of metrics."""
        return self.history[-1] if self.history else {}

    def write(self, folder: Path) -> None:
        """Write the files."""
        if self.history:
            plot_curves(self.history, str(folder / "curves.png"), self.name)
        if self.configuration:
            (folder / "config.yaml").write_text(self.configuration, encoding="utf-8")
        curves = (folder / "curves.png").exists()
        (folder / "README.md").write_text(self.text(curves), encoding="utf-8")

    def text(self, curves: bool) -> str:
        """Return the card in Markdown, after the hub's metadata in YAML."""
        parts = [
            f"---\n{self._data().to_yaml()}\n---\n\n# {self.name}\n",
            f"Trained with reinforcement learning by lightning_rl, from `{self.base}`.\n",
            self._figures(),
            "![curves](curves.png)\n" if curves else "",
            f"## Use\n\n```python\n{self._use()}```\n",
            self._audit(),
            "## Versions\n\n" + "".join(f"- {n} {v}\n" for n, v in installed_versions().items()),
        ]
        if self.configuration:
            parts.append(f"## Configuration\n\n```yaml\n{self.configuration.strip()}\n```\n")
        return "\n".join(part for part in parts if part)

    def _data(self) -> Any:
        is_local = Path(self.base).exists()  # else a name that the hub knows
        task = "image-text-to-text" if self.sees else "text-generation"
        return ModelCardData(
            library_name="peft" if self.adapters else "transformers",
            pipeline_tag=task if self.writes else "text-classification",
            base_model=None if is_local else self.base,
            tags=["lightning_rl", "reinforcement-learning"],
        )

    def _figures(self) -> str:
        """Return a table of the run's main metrics, before and after."""
        lines = [f"After {self.history[-1]['iteration']:.0f} iterations:\n"] if self.history else []
        names = headline(self.history)
        if names:
            lines += ["| | before | after |", "|---|---|---|"]
        for name in names:
            values = [row[name] for row in self.history if name in row]
            lines.append(f"| {LABELS[name]} | {values[0]:.3g} | {values[-1]:.3g} |")
        return "\n".join(lines) + "\n" if lines else ""

    def _audit(self) -> str:
        """Describe how whoever has the run can verify this card."""
        return self.ledger and (
            "## Audit\n\nThe run's ledger contains this hash. In the run's folder:\n\n"
            f"```bash\nlightning-rl audit RUN --head {self.ledger}\n```\n"
        )

    def _use(self) -> str:
        model, reader, name = "AutoModelForCausalLM", "AutoTokenizer", "tokenizer"
        if self.sees:
            model, reader, name = "AutoModelForImageTextToText", "AutoProcessor", "processor"
        if not self.writes:
            model = "AutoModelForSequenceClassification"
        return (
            f"from transformers import {model}, {reader}\n\n"
            f'model = {model}.from_pretrained("path/to/this/folder")\n'
            f'{name} = {reader}.from_pretrained("path/to/this/folder")\n'
        )


def without_secrets(configuration: str) -> str:
    """Return a YAML configuration without secrets: values of secret keys, and logins in URLs."""
    return dump_yaml(_masked(yaml.safe_load(configuration)))


def _masked(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _masked(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner, key) for inner in value]
    if isinstance(value, str):
        return "***" if _SECRET.search(key) else _LOGIN.sub("://***@", value)
    return value
