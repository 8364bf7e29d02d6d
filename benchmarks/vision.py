"""Models that see: do engine and trainer agree, and what does it save to see a picture once?

    OMP_NUM_THREADS=1 python -m benchmarks.vision [--save]

``gap_max``, in nats: of each family a tiny model of random weights writes 96 answers of 12 tokens
to prompts with up to three pictures, in float32, and the trainer scores them in one micro-batch.

``shared_tower_ratio``: forward and backward of the vision recipe's model, its tower trained too, on
8 rollouts of a prompt with one picture, in CPU seconds; divided by those of the same micro-batch
where the tower runs for each rollout. The median of pairs, in turn.

The last line is JSON: these, the families, and the accuracy of the recipe's runs before and after,
as ``benchmarks.vision_recipe --save`` left it; null without.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.results import RESULTS, parser_of, report
from lightning_rl import Sampling, TransformersEngine, Vision
from lightning_rl.agents.base import new_rollouts
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.learn.probe import probe_gap
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Picture, Prompt, Rollout
from lightning_rl.vision.families import Features, Prepared
from lightning_rl.vision.reader import encode
from recipes.vision.prepare import make_image_processor, make_model, make_tokenizer
from tests.support.tiny_vision import FAMILIES, picture, save_vision_model

PAIRS, GROUP, WRITTEN = 15, 8, 24


def prompt(policy: Policy, pictures: Sequence[Picture], text: str) -> Prompt:
    """Make a chat with pictures before its text."""
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    chat = [{"role": "user", "content": parts}]
    written = policy.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids, places = encode(policy.tokenizer, written, pictures, special=False)
    return Prompt(text, chat, ids, pictures=list(pictures), places=places)


def gap_of(family: str, folder: Path) -> dict[str, float]:
    """Return the largest distance of an engine's logprob from the trainer's, and the mean."""
    policy = Policy(str(save_vision_model(folder / family, family)))
    shown = [picture(seed, 32 + 16 * (seed % 3), 32) for seed in range(12)]
    prompts = [prompt(policy, shown[n : n + n % 4], f"{n}?") for n in range(12)]
    engine = TransformersEngine(device="cpu")
    save_skeleton(policy.model, folder / "skeleton")
    engine.start(folder / "skeleton")
    try:
        engine.load_weights(policy.named_weights(), 0)
        gap = probe_gap(engine, policy, prompts, 1.0, tokens=12, samples=8)
        return {"max": gap.value, "mean": gap.mean}
    finally:
        engine.close()


class SeesAgain:
    """Runs a family's tower as often as there are rollouts, and takes what the first run gave."""

    def __init__(self, features: Any, times: int) -> None:
        self.features, self.times = features, times

    def __call__(self, lm: Any, pictures: Sequence[Prepared]) -> Features:
        found: Features = self.features(lm, [*pictures] * self.times)
        count = sum(one.count for one in pictures)
        first = found.first.unflatten(0, (self.times, count)).mean(0)
        return Features(first, found.deeper)


def shared_ratio(folder: Path) -> float:
    """Return the CPU seconds of a step with one tower run, relative to one run for each."""
    tokenizer = make_tokenizer(["How many circles are there?"] * 50)
    for part in (make_model(tokenizer), tokenizer, make_image_processor()):
        part.save_pretrained(folder / "recipe")
    policy = Policy(str(folder / "recipe"), vision=Vision(train_tower=True, train_projector=True))
    assert policy.reader is not None
    asked = prompt(policy, [picture(0, 112, 112)], "How many circles are there?")
    rollouts = [answered(asked, number) for number in range(GROUP)]
    batch = policy.with_sight(pack_rollouts(rollouts))
    family = policy.reader.family
    once, again = family.features, SeesAgain(family.features, GROUP)
    ratios = []
    for _ in range(PAIRS):
        taken = []
        for features in (once, again):
            family.features = features  # type: ignore[method-assign]
            begin = time.process_time()
            policy(batch).logprobs.sum().backward()
            taken.append(time.process_time() - begin)
            policy.zero_grad()
        ratios.append(taken[0] / taken[1])
    family.features = once  # type: ignore[method-assign]
    return statistics.median(ratios)


def answered(asked: Prompt, number: int) -> Rollout:
    [rollout] = new_rollouts([asked], 1, Sampling(max_tokens=WRITTEN), 0, 0, number)
    written = [10 + (number + place) % 200 for place in range(WRITTEN)]
    rollout.rows[0].append_written(written, [0.0] * WRITTEN, [0] * WRITTEN)
    return rollout


def accuracy() -> dict[str, float | None]:
    """Return the accuracy of the recipe's runs, if they were kept."""
    kept = RESULTS / "vision-recipe-cpu.json"
    found = json.loads(kept.read_text())["result"] if kept.exists() else {}
    return {name: found.get(name) for name in ("accuracy_before", "accuracy_after")}


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as place:
        gaps = {family: gap_of(family, Path(place)) for family in FAMILIES}
        for family, gap in gaps.items():
            print(f"{family:<14} {gap['max']:.2g} nats at most, {gap['mean']:.2g} on average")
        ratio = shared_ratio(Path(place))
    result = {"families": list(gaps), "gap_max": max(gap["max"] for gap in gaps.values())}
    result |= {"gaps": gaps, **accuracy(), "shared_tower_ratio": ratio}
    report("vision", result, arguments.save)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
