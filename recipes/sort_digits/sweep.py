"""Search a learning rate and a clip range with Optuna, over the command line.

    pip install optuna
    python -m recipes.sort_digits.sweep --trials 20

Each trial is a ``lightning-rl fit`` with overrides, in a process of its own. Optuna keeps the
trials in a file, so the same command continues a search that was stopped. The best of many trials
is partly the luckiest: compare it with the recipe on other seeds (docs/compare.md).
"""

import argparse
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

OUT = Path("runs/sort_digits/sweep")
SEED = 1000  # not one of those with which the best is compared later


def accuracy_of(trial: Any) -> float:
    """Train with what Optuna suggests; returns the held-out accuracy."""
    options = {
        "model.optimizer.lr": trial.suggest_float("lr", 3e-5, 1e-3, log=True),
        "model.loss.clip_high": trial.suggest_float("clip_high", 0.1, 0.4),
        "trainer.logger.save_dir": OUT / f"trial_{trial.number}",
        "seed_everything": SEED,
    }
    command = [sys.executable, "-m", "lightning_rl", "fit", "--config"]
    command += ["recipes/sort_digits/grpo.yaml"]
    subprocess.run([*command, *(f"--{key}={value}" for key, value in options.items())], check=True)
    (summary,) = (OUT / f"trial_{trial.number}").rglob("summary.json")
    return float(json.loads(summary.read_text(encoding="utf-8"))["accuracy_after"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    trials = parser.parse_args().trials
    try:
        optuna: Any = import_module("optuna")
    except ModuleNotFoundError:
        raise SystemExit("this search needs Optuna: pip install optuna") from None
    OUT.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{OUT}/trials.db"
    study = optuna.create_study(
        study_name="grpo", storage=storage, direction="maximize", load_if_exists=True
    )
    study.optimize(accuracy_of, n_trials=trials)
    print(f"{study.best_value:.3f} with {study.best_params}")


if __name__ == "__main__":
    main()
