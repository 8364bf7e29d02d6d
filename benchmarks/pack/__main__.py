"""Pack updates of tiny runs, make them again, and shrink packs with a planted fault.

    python -m benchmarks.pack [--save]

Four sound updates are packed and made again: after a checkpoint, where none was kept, from the
initial weights, and of a LoRA. Then come five runs with one fault each: the logarithm of a reward
of 0, an immense reward, a damaged layer, a loss that divides by zero, and a column that another
machine computed otherwise. An update has 16 groups of four rollouts, and a model of eight layers.
Each pack is shrunk; what is left must be what was planted, and still show it. The last line is
JSON: how many sound ``packs`` there are and came out ``equal``, and to which share of their bytes
the others were ``shrunk_to``. Takes about three minutes.
"""

import io
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from benchmarks.pack.parts import PLANTED
from benchmarks.support.results import parser_of, report
from lightning_rl.cli import main as command
from lightning_rl.cli.pack.archive import extract_archive, write_archive
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.rollout import Rollout
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.recorded_run import make_place, train
from tests.support.tiny_models import save_random_model

PARTS = "benchmarks.pack.parts"
LAYERS = 8
GROUPS, ITERATIONS = 16, 4
SETTINGS = [
    f"--data.groups_per_iteration={GROUPS}",
    "--model.kl=null",
    "--model.update={minibatches: 1, ppo_epochs: 2}",  # since no batch has less than a minibatch
]
COLUMN = "columns.old_logprobs"


@dataclass(frozen=True)
class Fault:
    """A run with a fault, and what should be left of it when its pack is shrunk.

    ``options`` are of ``fit``, and ``change`` is done to the members of the pack. The update is
    that of the planted prompt. Of its rollouts at most ``most`` should be left, with one that is
    ``planted``, and ``layers`` of the model.
    """

    name: str
    options: list[str]
    symptom: str
    most: int
    planted: Callable[[Rollout], bool]
    layers: int = 1
    change: Callable[[Path], None] | None = None


def prepare(folder: Path) -> None:
    """Write prompts, rewards and a model."""
    make_place(folder)
    rows = [json.dumps({"prompt": f"{n}="}) + "\n" for n in range(10, 10 + GROUPS * ITERATIONS)]
    (folder / "train.jsonl").write_text("".join(rows))
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": LAYERS}
    save_random_model(folder / "model", make_tokenizer(), Qwen2Config, **sizes)


def shift_column(parts: Path) -> None:
    """Change what is expected of a rollout to the planted prompt: its second token's logprob."""
    rollouts = rollouts_in(parts)
    begin = 0
    for rollout in rollouts:
        if rollout.prompt.prompt == PLANTED and rollout.length > 1:
            break
        begin += len(rollout.prompt.token_ids) + rollout.length
    tensors = load_file(parts / "expected.safetensors")
    tensors[COLUMN][begin + len(rollout.prompt.token_ids) + 1] += 0.5
    save_file(tensors, parts / "expected.safetensors")


def rollouts_in(folder: Path) -> list[Rollout]:
    """Return the rollouts of a pack's only iteration."""
    log = RerunLog(folder)
    [iteration] = log.iterations()
    return log.rollouts(iteration)


FAULTS = [
    Fault(
        "an advantage that takes the logarithm of a reward of 0",
        [f"--data.rewards=[{PARTS}.with_a_zero]", f"--model.advantage={PARTS}.LogReward"],
        "symptom: not finite: column advantages",
        1,
        lambda rollout: rollout.reward == 0,
    ),
    Fault(
        "an immense reward",
        [f"--data.rewards=[{PARTS}.outlier]", "--model.advantage.normalize_std=false"],
        "symptom: exploding gradient",
        2,
        lambda rollout: rollout.reward == 1e4,
    ),
    Fault(
        "a damaged layer",
        [
            "--trainer.callbacks=[{class_path: WeightSync, init_args: {probe_prompts: 0, "
            "schedule: {class_path: FixedSchedule, init_args: {every_n_iterations: 9}}}}, "
            "{class_path: IterationCheckpoint, init_args: {every_n_iterations: 2}}, "
            f"{PARTS}.Damage]"
        ],
        "symptom: not finite",
        1,
        lambda rollout: True,
    ),
    Fault(
        "a loss that divides by zero",
        [f"--model.loss={PARTS}.MeanOfOthers"],
        "symptom: not finite",
        1,
        lambda rollout: rollout.length == 1,
    ),
    Fault(
        "a column that another machine computed otherwise",
        [],
        "different: column old_logprobs",
        2,
        lambda rollout: rollout.prompt.prompt == PLANTED,
        layers=LAYERS,
        change=shift_column,
    ),
]


def said_by(*arguments: str) -> tuple[int, str]:
    """Run a command of the library, and return its status and what it printed."""
    said = io.StringIO()
    with redirect_stdout(said):
        status = command([*arguments])
    return status, said.getvalue()


def planted_iteration(run: Path) -> int:
    """Return the iteration that trained on the planted prompt."""
    log = RerunLog(run)
    return next(
        iteration
        for iteration in sorted(log.iterations())
        if any(rollout.prompt.prompt == PLANTED for rollout in log.rollouts(iteration))
    )


def equal_of_sound(folder: Path) -> list[bool]:
    """Pack sound updates and make them again; for each True if it was equal to the bit."""
    whole, adapted = (
        train(folder, folder / "model", *SETTINGS, *more) for more in ([], ["--model.lora=LoRA"])
    )
    equal = list[bool]()
    for name, run, iteration in (
        ("from a checkpoint", whole, 3),
        ("where none was kept", whole, 4),
        ("from the initial weights", whole, 1),
        ("of a LoRA", adapted, 3),
    ):
        out = f"sound_{len(equal)}.zip"
        said_by("pack", str(run), f"--iteration={iteration}", f"--out={out}")
        _, said = said_by("unpack", out, "--run")
        last = said.splitlines()[-1]
        equal.append(last == "equal to the bit")
        print(f"a sound update {name}: {last}", flush=True)
    return equal


def share_left(fault: Fault, folder: Path, name: str) -> float:
    """Pack an update with a fault, shrink the pack, and return the share of bytes that is left.

    Raises:
        RuntimeError: if what is left is not what was planted, or does not show it.
    """
    run = train(folder, folder / "model", *SETTINGS, *fault.options)
    iteration = planted_iteration(run)
    trust = f"--trust={PARTS}"
    large, small = folder / f"{name}.zip", folder / f"{name}_small.zip"
    said_by("pack", str(run), f"--iteration={iteration}", f"--out={large}", "--with-code")
    if fault.change is not None:
        parts = folder / f"{name}_parts"
        extract_archive(large, parts)
        fault.change(parts)
        write_archive(parts, large)
    status, said = said_by("unpack", str(large), f"--shrink={small}", trust)
    print(f"{fault.name}:", *said.splitlines()[-6:], sep="\n  ", flush=True)
    if status:
        raise RuntimeError(f"{fault.name}: status {status}")
    _, again = said_by("unpack", str(small), "--run", trust)
    kept = rollouts_in(folder / f"{name}_small")
    config = next((folder / f"{name}_small/models").glob("*/config.json"))
    layers = json.loads(config.read_text())["num_hidden_layers"]
    good = (
        fault.symptom in again
        and len(kept) <= fault.most
        and any(map(fault.planted, kept))
        and layers == fault.layers
    )
    if not good:
        raise RuntimeError(f"{fault.name}: {len(kept)} rollouts, {layers} layers left; {again}")
    return small.stat().st_size / large.stat().st_size


def main() -> int:
    args = parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        folder = Path(scratch)
        prepare(folder)
        equal = equal_of_sound(folder)
        shares = [share_left(fault, folder, f"fault_{n}") for n, fault in enumerate(FAULTS)]
    result = {"packs": len(equal), "equal": sum(equal), "shrunk_to": shares}
    report("pack", result, args.save)
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
