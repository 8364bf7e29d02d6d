"""The card of an exported model: its base, its training, and its results."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCardData
from lightning.pytorch import Trainer
from transformers import AutoModelForSequenceClassification

from lightning_rl.callbacks.report import (
    LABELS,
    RunReport,
    headline,
    installed_versions,
    plot_curves,
)
from lightning_rl.config import secrets
from lightning_rl.config.yaml_text import dump_yaml
from lightning_rl.data.rollouts.ledger import FILE, Ledger, digest_of_file
from lightning_rl.engines.vllm.lora import RANKS
from lightning_rl.learn.base import LanguageModule
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import base_of, weight_bytes
from lightning_rl.run.files.rundir import run_dir
from lightning_rl.run.hooks import find_callbacks

_SECRET = re.compile(r"(^|_)(key|token|secret|password)s?$", re.IGNORECASE)
"""Matches keys whose values are secret."""

_WHOLE = """```python
from transformers import {model}, {reader}

model = {model}.from_pretrained("path/to/this/folder")
{name} = {reader}.from_pretrained("path/to/this/folder")
```
"""
_ADAPTERS = """These are a LoRA's adapters, which are loaded on top of their base. With peft:

```python
from peft import PeftModel
from transformers import {model}, {reader}

base = {model}.from_pretrained({base})
model = PeftModel.from_pretrained(base, "path/to/this/folder")
{name} = {reader}.from_pretrained("path/to/this/folder")
```

With vLLM, unless they are DoRA's:

```python
from vllm import LLM
from vllm.lora.request import LoRARequest

llm = LLM({base}, enable_lora=True, max_lora_rank={rank})
adapters = LoRARequest("trained", 1, "path/to/this/folder")
answers = llm.generate(["1+1="], lora_request=adapters)
```

Merged into the base, so that all libraries load them:

```python
model.merge_and_unload().save_pretrained("path/to/merged")
{name}.save_pretrained("path/to/merged")
```

lightning_rl goes on from there:

```python
from lightning_rl import PolicyModule

module = PolicyModule("path/to/merged")
```
"""


@dataclass(frozen=True)
class ModelCard:
    """Files beside a model's weights: ``README.md``, ``curves.png`` and ``config.yaml``.

    Args:
        history: rows of metrics, one per iteration.
        base: the model that training began with, by the name under which others find it.
        revision: its revision on the hub; None: the latest.
        described: what it is, if adapters need it and only this machine has it; else empty.
        name: the run's name, for headings.
        configuration: the run's YAML, without secrets; empty if a script created the objects.
        rank: the maximum rank of the LoRA whose adapters the weights are alone; 0: they are all.
        ledger: the last hash of the run's ledger; empty if it has none.
        sees: the model reads pictures.
        writes: the model generates; False: it is a reward model.
    """

    history: list[dict[str, float]]
    base: str
    revision: str | None
    described: str
    name: str
    configuration: str
    rank: int
    ledger: str = ""
    sees: bool = False
    writes: bool = True

    @classmethod
    def of(cls, trainer: Trainer, module: LanguageModule, merge_adapters: bool) -> "ModelCard":
        """Return the card of a run in its present state; its figures are those of ``RunReport``."""
        reports = find_callbacks(trainer, RunReport)
        [policy, *_] = module.loaded_policies.values()
        base, revision = base_of(policy.model, policy.loading)
        rank = 0 if policy.lora is None or merge_adapters else policy.lora.max_rank
        directory = run_dir(trainer)
        config = directory / "config.yaml"
        return cls(
            [dict(row) for row in reports[0].history] if reports else [],
            base,
            revision,
            _described(policy) if rank and _is_local(base) else "",
            "/".join(directory.parts[-2:]),
            without_secrets(config.read_text(encoding="utf-8")) if config.is_file() else "",
            rank,
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
            f"Trained with reinforcement learning by lightning_rl, from {self._base()}.\n",
            self._figures(),
            "![curves](curves.png)\n" if curves else "",
            f"## Use\n\n{self._use()}",
            self._audit(),
            "## Versions\n\n" + "".join(f"- {n} {v}\n" for n, v in installed_versions().items()),
        ]
        if self.configuration:
            parts.append(f"## Configuration\n\n```yaml\n{self.configuration.strip()}\n```\n")
        return "\n".join(part for part in parts if part)

    def _data(self) -> Any:
        task = "image-text-to-text" if self.sees else "text-generation"
        return ModelCardData(
            library_name="peft" if self.rank else "transformers",
            pipeline_tag=task if self.writes else "text-classification",
            base_model=None if _is_local(self.base) else self.base,
            tags=["lightning_rl", "reinforcement-learning"],
        )

    def _base(self) -> str:
        """Say what training began with; of a folder also how to recognise a copy elsewhere."""
        base = f"`{self.base}`" if self.base else "a model in memory"
        if not self.described:
            return base + (f" at revision `{self.revision}`" if self.revision else "")
        return (
            f"{base}, which only the machine that trained has: elsewhere, put the path of a copy "
            f"in its place. It is {self.described}"
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
        if not self.rank:
            return _WHOLE.format(model=model, reader=reader, name=name)
        base = f'"{self.base or "path/to/the/base"}"'
        base += f', revision="{self.revision}"' if self.revision else ""
        largest = min((r for r in RANKS if r >= self.rank), default=self.rank)
        return _ADAPTERS.format(model=model, reader=reader, name=name, base=base, rank=largest)


def _described(policy: Policy) -> str:
    """Describe the files of a local model so that a copy of them is recognised."""
    kind = None if policy.lm.can_generate() else AutoModelForSequenceClassification
    count = weight_bytes(policy.model, policy.loading, torch.int8, kind)
    files = sorted(f for f in Path(policy.model).iterdir() if f.suffix in (".safetensors", ".bin"))
    sums = (f", `{f.name}` with the SHA-256 `{_digest(f, f.stat().st_mtime_ns)}`" for f in files)
    return f"a {type(policy.lm).__name__} of {count:,} parameters{''.join(sums)}"


@cache  # a run exports more than once
def _digest(file: Path, modified: int) -> str:
    return digest_of_file(file)


def _is_local(base: str) -> bool:
    return not base or Path(base).exists()  # else a name that the hub knows


def without_secrets(configuration: str) -> str:
    """Return a YAML configuration without secrets: by the names of keys, and by their form."""
    return dump_yaml(_masked(yaml.safe_load(configuration)))


def _masked(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _masked(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner, key) for inner in value]
    if isinstance(value, str):
        return secrets.HIDDEN if _SECRET.search(key) else secrets.without_secrets(value)
    return value
