"""A run of seconds that is recorded: four iterations, of which every second's weights are kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from lightning_rl.cli import main

MODULE = """
def sevens(completions, completion_ids, **columns):
    return [text.count("7") / len(ids) for text, ids in zip(completions, completion_ids)]
"""


def make_place(here: Path) -> Path:
    """Make a folder with prompts and a reward."""
    rows = [json.dumps({"prompt": f"{n}="}) + "\n" for n in range(30, 42)]
    (here / "train.jsonl").write_text("".join(rows))
    (here / "rerun_rewards.py").write_text(MODULE)
    return here


def stand_in(place: Path, patch: pytest.MonkeyPatch) -> None:
    """Work in that folder, with its modules, and put back what `seed_everything` sets."""
    patch.chdir(place)
    patch.syspath_prepend(place)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything's, put back afterwards
        patch.setenv(name, "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def finished(place: Path, tiny_model: Path) -> Path:
    """Run four iterations of two optimizer steps; the weights of versions 2 and 4 are kept."""
    return train(place, tiny_model)


@pytest.fixture
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(place, monkeypatch)


def config_of(model: Path) -> dict[str, Any]:
    """Configure four iterations of two optimizer steps; weights of versions 2 and 4 are kept."""
    return {
        "model": {
            "class_path": "PolicyModule",
            "init_args": {
                "model": str(model),
                "update": {"minibatches": 2},
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
                "lr_scheduler": {
                    "class_path": "WarmupLinear",
                    "init_args": {"warmup_steps": 2, "total_steps": 8},
                },
                "kl": {"class_path": "K3Penalty", "init_args": {"coef": 0.1}},
            },
        },
        "data": {
            "class_path": "RLDataModule",
            "init_args": {
                "train_prompts": {
                    "class_path": "JSONLPrompts",
                    "init_args": {"path": "train.jsonl"},
                },
                "rewards": ["rerun_rewards.sevens"],
                "engine": {
                    "class_path": "tests.support.lots.LotEngine",
                    "init_args": {"device": "cpu"},
                },
                "sampling": {"max_tokens": 5},
                "group_size": 4,
                "groups_per_iteration": 3,
                "iterations_per_epoch": 4,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": ""}},
            "callbacks": [
                {"class_path": "WeightSync"},
                {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 2}},
            ],
        },
    }


def train(place: Path, model: Path, *options: str) -> Path:
    """Train in that folder; the run directory."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(place, patch)
        (place / "config.yaml").write_text(yaml.safe_dump(config_of(model)))
        assert main(["fit", "--config", "config.yaml", *options]) == 0
    return max((place / "runs").iterdir(), key=lambda run: int(run.name[8:]))
