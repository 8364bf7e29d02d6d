"""Every block of the README and of the pages in "Start" runs as it stands, as a reader runs it.

In the order of the pages and in one folder, with the engines and the models that are named: nothing
is put in their place. What a page tells to write to a file is written there. Commands that train
for minutes are stopped by Ctrl-C after their first iteration, unless a later one needs the result.

Slow: real models are trained, and vLLM starts dozens of times.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lightning_rl.run.files.metrics import read_rows
from tests.support.pages import ROOT, Block, read_blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class _Loader(yaml.SafeLoader):
    """Reads ``mkdocs.yml``, whose tags name Python objects."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def start_pages() -> list[Path]:
    """Return the README, which stands for ``index.md``, and the first tab's other pages."""
    [start] = [
        tab["Start"]
        for tab in yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]
        if "Start" in tab
    ]
    names = [entry if isinstance(entry, str) else next(iter(entry.values())) for entry in start]
    return [ROOT / ("README.md" if n == "index.md" else f"docs/{n}") for n in names]


PAGES = start_pages()
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
COMMANDS = [
    (block, line)
    for block in BLOCKS
    if block.language == "bash"
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines()
    if line.strip()
]

INSTALLS = "it installs packages, which CI does on a clean clone with the commands of `make`"
OF_CI = "a target that CI runs on a clean clone"
HUB = "it needs the 🤗 hub, which tests do not reach"
ELSEWHERE = {
    r"make (quickstart|test|doctor)\b": OF_CI,
    r"(LIGHTNING_RL_BACKEND=\w+ )?make setup": OF_CI,
    r"uv (venv|pip install)\b": INSTALLS,
    r"printf .*>overrides.txt": INSTALLS,
    r"pip uninstall\b": INSTALLS,
    r"lightning-rl quickstart --model HuggingFaceTB/": HUB,
    r"tensorboard --logdir": "it serves pages until it is stopped",
}
"""Commands that do not run here, each with the reason."""

STOPPED = [
    r"python -m lightning_rl fit --config recipes/smollm2/grpo.yaml --ckpt_path last",
    r"python -m lightning_rl fit --config recipes/sort_digits/grpo.yaml",
    r"lightning-rl quickstart( --out runs/mine --seed 1 --iterations 40)?",
    r"lightning-rl fit --config train.yaml .*",  # train.py before it runs to its end
    r"(?!.* --print_config)(OMP_NUM_THREADS=1 )?lightning-rl fit --config recipes/.*",
]
"""Commands that are stopped once they have trained for an iteration."""

# The reader comes from elsewhere and brings these.
ROW = '{"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}\n'
BROUGHT = {
    "my_heldout.jsonl": ROW,
    "prompts.jsonl": ROW,
    "grpo.yaml": (
        "model_name_or_path: runs/smollm2/model\nuse_vllm: true\nvllm_mode: colocate\n"
        "max_completion_length: 32\nnum_generations: 4\nper_device_train_batch_size: 4\n"
        "max_steps: 4\nreward_funcs: my_rewards.right\n"
    ),
    "run_qwen.sh": (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "data.train_files=prompts.jsonl data.train_batch_size=8 data.max_response_length=32 "
        "actor_rollout_ref.model.path=runs/smollm2/model actor_rollout_ref.rollout.n=4 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=8 trainer.total_training_steps=4\n"
    ),
    "outputs/run/.hydra/overrides.yaml": (
        "- algorithm.adv_estimator=grpo\n- data.train_files=prompts.jsonl\n"
        "- data.train_batch_size=8\n- actor_rollout_ref.actor.ppo_mini_batch_size=8\n"
        "- actor_rollout_ref.model.path=runs/smollm2/model\n- trainer.total_training_steps=4\n"
    ),
    "rl.toml": (
        'max_steps = 4\n[model]\nname = "runs/smollm2/model"\n[orchestrator]\nbatch_size = 16\n'
        'group_size = 4\n[[orchestrator.train.source]]\nname = "reverse"\n'
        '[orchestrator.train.source.env.taskset]\nid = "reverse-text"\n'
    ),
}


def reason(command: str) -> str | None:
    """Return why a command does not run here; None if it does."""
    return next((why for what, why in ELSEWHERE.items() if re.match(what, command)), None)


def is_stopped(command: str) -> bool:
    return any(re.fullmatch(what, command) for what in STOPPED)


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    """Return the folder of a reader who has cloned the repository and stopped the quickstart."""
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "recipes", place / "recipes")
    (place / ".venv").symlink_to(sys.prefix)
    for name, text in BROUGHT.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    status, stopped, said = run_until_an_iteration(place, "lightning-rl quickstart")
    assert stopped, said[-3000:]
    assert status, said[-3000:]
    return place


# This is as when tests are collected: those that run before may leave a rank or a seed in it.
ENVIRONMENT = dict(os.environ)
ENVIRONMENT["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])


def run(place: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a line as a shell does; the output is that of both streams."""
    return subprocess.run(
        ["bash", "-c", command], cwd=place, env=ENVIRONMENT, text=True, timeout=3000,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_until_an_iteration(place: Path, command: str) -> tuple[int, bool, str]:
    """Press Ctrl-C once an iteration is done; return the exit status, if so, and the output."""
    log, stopped = place / "printed.log", False
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=place, env=ENVIRONMENT, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + 1800
        while process.poll() is None and time.monotonic() < end:
            if re.search(rb"iteration \d+/", log.read_bytes()):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                stopped = True
                break
            time.sleep(0.2)
        status = process.wait(timeout=1200)
    return status, stopped, log.read_text(errors="replace")


def named(block: Block, line: str) -> str:
    return f"{block.place}: {line}"


@pytest.mark.parametrize(("block", "command"), [pytest.param(*c, id=named(*c)) for c in COMMANDS])
def test_a_command_runs(block, command, reader):
    if (why := reason(command)) is not None:
        pytest.skip(why)
    for other in BLOCKS:  # the files of this page, as it shows them
        if other.page == block.page and other.title is not None:
            (reader / other.title).write_text(other.text)
    if not is_stopped(command):
        done = run(reader, command)
        assert done.returncode == 0, done.stdout[-3000:]
        return
    status, stopped, said = run_until_an_iteration(reader, command)
    # A run that is complete ends by itself where `last` is told to go on.
    assert status == (128 + signal.SIGINT if stopped else 0), said[-3000:]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, id=b.place) for b in BLOCKS if b.language == "python" and b.runs],
)
def test_a_program_runs(block, reader):
    for other in BLOCKS:
        if other.page == block.page and other.title is not None:
            (reader / other.title).write_text(other.text)
    (reader / "printed.py").write_text(block.text)
    done = run(reader, "python printed.py")
    assert done.returncode == 0, done.stdout[-3000:]


def test_what_was_learned_is_what_the_readme_promises(reader):
    """The README's Python example has been run by a command above: from 0.13 to 0.45, it says."""
    rows = read_rows((reader / "lightning_logs/version_0/metrics.jsonl").read_text())
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert rewards[-1] > rewards[0] + 0.1


# ---------------------------------------------------------------- nothing is left out


def test_each_block_runs_or_is_used():
    """Text and console blocks are no code; a console block's output is test_pages.py's."""
    commands = "\n".join(line for _, line in COMMANDS)
    texts = commands + "".join(block.text for block in BLOCKS)
    for block in BLOCKS:
        if block.language in ("bash", "text", "console") or block.runs:
            continue
        assert block.title is not None, f"{block.place}: no command can name this block"
        name = Path(block.title)
        assert name.name in texts or f"{name.stem}." in texts, f"{block.place}: nothing uses it"


@pytest.mark.parametrize("what", [*ELSEWHERE, *STOPPED])
def test_what_is_treated_apart_is_printed(what):
    assert any(re.match(what, line) for _, line in COMMANDS)


@pytest.mark.parametrize("what", [w for w, why in ELSEWHERE.items() if why == OF_CI])
def test_targets_left_to_ci_exist(what):
    made = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = re.search(r"make \(?([\w|-]+)\)?", what)[1].split("|")
    assert set(targets) <= set(made)
