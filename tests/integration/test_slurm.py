"""A real Slurm of two nodes on this machine, where there is one: ``sbatch``, ``srun``, requeue."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.support import forked
from lightning_rl.engines.replicas.server_process import free_port
from recipes.math.make_model import prepare
from tests.support import slurm_cluster
from tests.support.signalled import configure

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        slurm_cluster.missing() is not None, reason=slurm_cluster.missing() or "it is installed"
    ),
]
ROOT = Path(__file__).parents[2]

SCRIPT = ROOT / "launch" / "slurm" / "fit.sbatch"
TWO_NODES = SCRIPT.with_name("two_nodes.sbatch")
OUTPUT = "lightning_rl_{job}.out"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def call(slurm: dict[str, str], folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, env=slurm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(slurm: dict[str, str], folder: Path) -> str:
    """Submit a job; return its number."""
    slurm |= {
        "PATH": f"{Path(sys.executable).parent}:{slurm['PATH']}",
        # These nodes have no names that anything could look up.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(ROOT),
    }
    return call(slurm, folder, "sbatch", "--parsable", str(SCRIPT), "--config", "run.yaml").strip()


def wait_until(slurm: dict[str, str], folder: Path, job: str, said: str) -> str:
    """Return what the job printed, once it holds the words."""
    output = folder / OUTPUT.format(job=job)

    def found() -> bool:
        return output.exists() and said in output.read_text()

    wait_for(found, lambda: output.read_text() if output.exists() else "nothing was printed")
    return output.read_text()


def wait_for(found: Callable[[], bool], why: Callable[[], str], seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, why()
        time.sleep(0.5)


def state(slurm: dict[str, str], folder: Path, job: str) -> str:
    return call(slurm, folder, "squeue", "-h", "-j", job, "-o", "%T").strip()


def start_again(slurm: dict[str, str], folder: Path, job: str) -> None:
    """Let a requeued job go on at once; Slurm lets it wait for two minutes."""
    wait_for(lambda: state(slurm, folder, job) == "PENDING", lambda: state(slurm, folder, job), 60)
    call(slurm, folder, "scontrol", "update", f"JobId={job}", "StartTime=now")


def wait_for_the_end(slurm: dict[str, str], folder: Path, job: str, seconds: float = 150) -> str:
    """Return how the job ended, as Slurm says."""

    def shown() -> str:
        words = call(slurm, folder, "scontrol", "show", "job", job).split()
        return next(w.partition("=")[2] for w in words if w.startswith("JobState="))

    wait_for(lambda: shown() not in ("PENDING", "RUNNING", "COMPLETING"), shown, seconds)
    return shown()


@pytest.mark.parametrize(
    "at", [("1 learn 2 SIGUSR1",), ("0 collect 2 SIGUSR1", "1 learn 2 SIGUSR1")]
)
def test_a_job_is_saved_requeued_and_goes_on(slurm, tiny_model, tmp_path, at):
    folder = configure(tmp_path / "job", tiny_model, *at)
    job = submit(slurm, folder)
    wait_until(slurm, folder, job, f"job {job} was requeued")
    start_again(slurm, folder, job)
    assert wait_for_the_end(slurm, folder, job) == "COMPLETED"
    text = (folder / OUTPUT.format(job=job)).read_text()
    assert text.count("SIGUSR1; saved runs/one/version_0/checkpoints/iteration_2.ckpt") >= 1
    assert text.count("was requeued") == 1
    assert "Traceback" not in text
    saved = folder / "runs" / "one" / "version_0" / "checkpoints"
    assert os.readlink(saved / "last.ckpt") == "iteration_4.ckpt"
    assert not list(folder.rglob("hpc_ckpt*"))


def test_a_preempted_job_makes_way_goes_on_and_ends_as_if_it_had_not(slurm, tiny_model, tmp_path):
    alone, folder = (slow_run(tmp_path / name, tiny_model) for name in ("alone", "job"))
    command = ["fit", "--config", "run.yaml"]
    assert forked.run("lightning_rl", command, alone / "said", folder=alone) == 0
    job = submit(slurm, folder)
    wait_for(lambda: len(rows(folder)) > 3, lambda: state(slurm, folder, job))
    urgent = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--wrap=true"]
    urgent_job = call(slurm, folder, *urgent).strip()
    wait_until(slurm, folder, job, f"job {job} was requeued")
    assert wait_for_the_end(slurm, folder, urgent_job) == "COMPLETED"
    begun = len(rows(folder))
    assert 3 < begun < len(rows(alone))
    start_again(slurm, folder, job)
    assert wait_for_the_end(slurm, folder, job) == "COMPLETED"
    require_same_run(folder, alone)


def slow_run(folder: Path, model: Path) -> Path:
    """Configure twenty iterations of half a second and more: time to be preempted in."""
    configure(folder, model, iterations=20)
    (folder / "slow_rewards.py").write_text(
        "import time\n\n\ndef length(completions, **columns):\n    time.sleep(0.5)\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    configuration = yaml.safe_load((folder / "run.yaml").read_text())
    configuration["data"]["init_args"]["rewards"] = ["slow_rewards.length"]
    configuration["trainer"]["callbacks"].append({"class_path": "RunReport"})
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration))
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "runs/one/version_0/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def require_same_run(ours: Path, theirs: Path) -> None:
    """Require the same weights and metrics, to the bit, but for those of time."""
    states = [
        torch.load(run / "runs/one/version_0/checkpoints/last.ckpt", weights_only=True)
        for run in (ours, theirs)
    ]
    weights = [state["state_dict"] for state in states]
    assert weights[0].keys() == weights[1].keys()
    assert [n for n in weights[0] if not torch.equal(weights[0][n], weights[1][n])] == []
    timed = ("cpu_s", "wall_s", "sync/seconds", "rollout/tokens_per_s")
    metrics = [
        [{name: row[name] for name in row if name not in timed} for row in rows(run)]
        for run in (ours, theirs)
    ]
    assert metrics[0] == metrics[1]


def test_scancel_signals_all_tasks_while_a_run_starts(slurm, tiny_model, tmp_path):
    folder = configure(tmp_path / "job", tiny_model)
    job = submit(slurm, folder)
    wait_until(slurm, folder, job, "Seed set to 0")  # the command listens
    call(slurm, folder, "scancel", "--signal=USR1", f"{job}.0")
    assert wait_for_the_end(slurm, folder, job) == "FAILED"
    text = (folder / OUTPUT.format(job=job)).read_text()
    assert text.count("SIGUSR1 came while the run was starting") == 2  # each task
    assert "Traceback" not in text


SMALL = """
model:
  init_args: {{model: {model}, loading: {{random_init: false, gradient_checkpointing: false}}}}
data:
  init_args:
    train_prompts: {{class_path: JSONLPrompts, init_args: {{path: {rows}/train.jsonl}}}}
    evaluation:
      prompts: {{class_path: JSONLPrompts, init_args: {{path: {rows}/heldout.jsonl}}}}
      limit: 1
    rewards: [recipes.math.data.digit_share]
    agent: {{init_args: {{max_thinking_tokens: 4}}}}
    engine: {{init_args: {{dtype: float32}}}}
    sampling: {{max_tokens: 16}}
    groups_per_iteration: 4
    group_size: 2
    iterations_per_epoch: 2
trainer: {{accelerator: cpu, precision: 32-true, max_epochs: 1}}
"""
"""The changes that make of the 8B example one that a CPU computes."""


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip


@pytest.fixture
def wide_slurm(tmp_path):
    with slurm_cluster.cluster(tmp_path / "slurm", cpus=2) as environment:
        yield environment


def test_one_node_trains_while_servers_on_the_other_generate(wide_slurm, tmp_path):
    """The example's configuration and launch file run, with two processes a node."""
    prepare(tmp_path, "qwen3-8b", **SIZES)
    model, recipe = tmp_path / "qwen3-8b", ROOT / "recipes" / "math"
    (tmp_path / "small.yaml").write_text(SMALL.format(model=model, rows=tmp_path))
    files = [recipe / "grpo.yaml", recipe / "variants" / "qwen3_8b.yaml", tmp_path / "small.yaml"]
    own = wide_slurm | {
        "PATH": f"{Path(sys.executable).parent}:{wide_slurm['PATH']}",
        "PYTHONPATH": str(ROOT),
        **dict.fromkeys(("MASTER_ADDR", "TRAINER_HOST", "ENGINE_HOST"), "127.0.0.1"),
        "MASTER_PORT": str(free_port()),
        "PORT": str(free_port()),
        "MODEL": str(model),
        "LENGTH": "512",
        "DTYPE": "float32",
        "SERVER_OPTIONS": "--kv-cache-memory-bytes 67108864 --enforce-eager --block-size 32 "
        '--no-enable-chunked-prefill --hf-overrides {"tie_word_embeddings":false}',
    }
    given = [word for file in files for word in ("--config", str(file))]
    small = ["--ntasks-per-node=2", "--gres=none"]
    job = call(own, tmp_path, "sbatch", "--parsable", *small, str(TWO_NODES), *given).strip()
    output = tmp_path / OUTPUT.format(job=job)
    ended = wait_for_the_end(own, tmp_path, job, 600)
    assert ended == "COMPLETED", output.read_text()[-5000:]
    assert len((tmp_path / "servers.txt").read_text().split()) == 2
    run = tmp_path / "runs" / "math" / "qwen3-8b" / "version_0"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in metrics if "reward/mean" in row]
    assert len(trained) == 2
    assert all(row["rollout/logprob_gap_max"] < 1e-3 for row in trained)
    assert (run / "hf" / "model.safetensors").exists()
