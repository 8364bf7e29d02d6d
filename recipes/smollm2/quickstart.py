"""Run the quickstart: a real model of 135 million parameters learns arithmetic on this machine.

    lightning-rl quickstart    (make quickstart in a checkout)

Each step is a command that you can run by itself; it is printed before it runs. Where the weights
cannot be downloaded, a model that is made here learns to sort digits instead.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from lightning_rl.cli.quickstart import OUT, parse_arguments
from lightning_rl.run.processes.machine import driver_gpus, memory_bytes
from recipes.smollm2.prepare import prepare
from recipes.smollm2.weights import WeightsUnavailable, fetch
from recipes.sort_digits import quickstart as sort_digits

CONFIG = Path("recipes/smollm2/grpo.yaml")
SHOWN = 3
"""Questions whose answers are printed."""
MEMORY_OF_EACH = 6 << 30
"""Bytes that a training process may need, with its optimizer and its engine."""
GAIN = 0.40
"""The least rise of held-out accuracy."""


def main(arguments: Sequence[str]) -> int:
    """Run all steps; returns 0 if accuracy rose by ``GAIN`` or more, or the run was changed."""
    given = parse_arguments(arguments)
    begin = time.perf_counter()
    try:
        model = given.model or str(fetch(given.out / "model"))
    except WeightsUnavailable as error:
        print(f"SmolLM2 cannot be downloaded ({error}): a small model sorts digits instead")
        same = [] if given.iterations is None else ["--iterations", str(given.iterations)]
        return sort_digits.main(same)
    prepare(given.out)
    sort_digits.run("lightning_rl", "fit", "--config", str(CONFIG), *changes(given, model))
    gain = report(sort_digits.newest_run(given.out / "grpo"), model, time.perf_counter() - begin)
    if given.model is None and given.iterations is None and gain < GAIN:
        print(
            f"accuracy rose by {gain:.3f}, less than the {GAIN:.2f} that this recipe should reach"
        )
        return 1
    return 0


def changes(given: argparse.Namespace, model: str) -> list[str]:
    """List the options by which this run differs from its configuration."""
    options: dict[str, Any] = {}
    if not completed(given.out / "grpo"):
        options["--ckpt_path"] = "last"  # of a run that was stopped, if there is one
    if model != str(OUT / "model"):
        options["--model.model"] = model
    if given.iterations is not None:
        options["--data.iterations_per_epoch"] = given.iterations
    if given.seed is not None:
        options["--seed_everything"] = given.seed
    if given.out != OUT:
        options["--data.train_prompts.path"] = given.out / "train.jsonl"
        options["--data.evaluation.prompts.path"] = given.out / "heldout.jsonl"
        options["--trainer.logger.save_dir"] = given.out
    cores, memory = len(os.sched_getaffinity(0)), memory_bytes()
    if not driver_gpus() and cores > 1 and memory >= 2 * MEMORY_OF_EACH:
        options["--trainer.devices"] = 2  # processes of one thread each
    if find_spec("vllm") is None:
        options["--data.engine"] = "TransformersEngine"
    return [str(part) for option in options.items() for part in option]


def completed(runs: Path) -> bool:
    """Tell whether the last run was completed."""
    if not list(runs.glob("version_*")):
        return False
    summary = sort_digits.newest_run(runs) / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "completed"


def report(directory: Path, model: str, seconds: float) -> float:
    """Tell what changed, show answers before and after; returns by how much accuracy rose."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    lines = (directory.parents[1] / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line) for line in lines[:SHOWN]]
    print("\nQuestions that were not trained on, and the most likely answers:")
    before_after = zip(answers(model, asked), answers(directory / "hf", asked), strict=True)
    for row, said in zip(asked, before_after, strict=True):
        print(f"\n  {row['prompt'][-1]['content']}  ({row['answer']})")
        for when, answer in zip(("before", "after"), said, strict=True):
            print(f"    {when:<7} {' '.join(answer.split())}")
    sort_digits.tell_outcome(directory, summary, seconds)
    return float(summary["accuracy_after"] - summary["accuracy_before"])


@torch.no_grad()
def answers(model: str | Path, asked: Sequence[Mapping[str, Any]]) -> list[str]:
    """Generate answers greedily with plain transformers."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = AutoModelForCausalLM.from_pretrained(model)
    said = []
    for row in asked:
        inputs = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = lm.generate(**inputs, max_new_tokens=32, do_sample=False)
        said.append(
            tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return said


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
