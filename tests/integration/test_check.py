"""Test lightning-rl check: what fit would refuse is refused, and nothing is written."""

import pytest
import yaml
from torch._subclasses.fake_tensor import FakeTensor

from lightning_rl.cli import main
from lightning_rl.cli.check.command import Built
from lightning_rl.cli.check.disk import disk_plan
from lightning_rl.cli.check.mesh import Candidate
from lightning_rl.cli.check.tracking import follow
from tests.support.bad_configs import CONFIG, files
from tests.support.mixtures import saved_mixture


def test_all_is_checked_and_nothing_written(workplace, capsys):
    trainer = CONFIG["trainer"] | {
        "enable_checkpointing": True,
        "default_root_dir": "elsewhere",
        "logger": {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "runs"}},
        "callbacks": [*CONFIG["trainer"]["callbacks"], "RunReport", "HFExport", "PreviewTable"],
    }
    (workplace / "full.yaml").write_text(yaml.safe_dump(CONFIG | {"trainer": trainer}))
    before = files(workplace)
    schedule = ["--model.lr_scheduler", "WarmupLinear", "--model.lr_scheduler.total_steps", "9"]
    assert main(["fit", "--config", "full.yaml", *schedule, "--dry_run"]) == 0
    assert files(workplace) == before
    said = capsys.readouterr().out
    assert "prompts: 12 of 12 are short enough, mean 3.0 tokens, longest 3" in said
    assert "4 prompts x group_size 2 = 8 rollouts per iteration, at most 56 tokens" in said
    # Each group has 3 prompt tokens once, and 2 x 4 of completions.
    assert "1 minibatch of 4 groups or fewer, in 1 micro-batch of 44 tokens or fewer each" in said
    assert "model.lr_scheduler: it ends after 9 optimizer steps, but the run after 1;" in said
    assert "engine and trainer agree to" in said
    assert said.count("'30=' -> ") == 2
    assert said.count("reward ") == 2


def test_without_a_rollout_no_engine_starts(workplace, capsys, monkeypatch):
    from lightning_rl.engines import TransformersEngine

    monkeypatch.setattr(TransformersEngine, "start", lambda *_: pytest.fail("it was started"))
    assert main(["check", "--config", "good.yaml", "--no_rollout"]) == 0
    assert "optimizer (AdamW)" in capsys.readouterr().out


def test_only_rewards_are_tried(workplace, capsys, monkeypatch):
    from lightning_rl.engines import TransformersEngine

    monkeypatch.setattr(TransformersEngine, "start", lambda *_: pytest.fail("it was started"))
    (workplace / "graded.py").write_text(
        "def contains(completions, answer):\n"
        "    return [float(a in c) for c, a in zip(completions, answer)]\n"
        "def exact(completions, answer):\n"
        "    return [float(a == c) for c, a in zip(completions, answer)]\n"
    )
    rows = "".join(f'{{"prompt": "{n}=", "answer": "{n}"}}\n' for n in range(10, 20))
    (workplace / "answers.jsonl").write_text(rows)
    command = [
        "check",
        "--config",
        "good.yaml",
        "--rewards",
        "--data.train_prompts",
        "answers.jsonl",
    ]
    before = files(workplace)
    assert main([*command, "--data.rewards=[graded.contains]"]) == 1
    assert files(workplace) == before
    told = capsys.readouterr()
    assert "fault: 'every answer in turn' earns as much as the right answer" in told.out
    assert "optimizer (AdamW)" not in told.out
    assert "not good: rewards have faults, as said above" in told.err
    assert main([*command, "--data.rewards=[graded.exact]"]) == 0


@pytest.mark.parametrize("adapted", [False, True])
def test_files_are_as_large_as_planned(workplace, adapted):
    more = ["--trainer.callbacks+=IterationCheckpoint", "--trainer.callbacks+=HFExport"]
    lora = ["--model.lora", "LoRA", "--trainer.callbacks.merge_adapters", "false"]
    options = ["--config", "good.yaml", "--trainer.enable_checkpointing", "true", *more]
    options += lora if adapted else []
    built = Built(options, str(workplace / "scratch"))
    built.model.trainer = built.trainer
    built.model.configure_model()
    kept = disk_plan(built.model, built.datamodule, workplace, True, prompt=3).kept
    checkpoint, export, rollouts = (each.size for each in kept)
    assert rollouts == 4 * 2 * (3 + 4) * 9  # groups, rollouts, tokens, bytes
    assert main(["fit", *options, "--trainer.default_root_dir", "runs"]) == 0
    [saved] = [f for f in workplace.rglob("*.ckpt") if not f.is_symlink()]
    [written] = workplace.rglob("*.safetensors")
    for planned, file in ((checkpoint, saved), (export, written)):
        assert planned <= file.stat().st_size < planned + 2**16  # names, shapes, settings


def test_what_fit_would_refuse_is_refused(workplace, capsys):
    assert main(["check", "--config", "good.yaml", "--data.group_size", "1"]) == 2
    assert "group_size=1 must be >= 2 for GRPO" in capsys.readouterr().err
    twice = ["--trainer.callbacks+=WeightSync", "--no_rollout"]
    assert main(["check", "--config", "good.yaml", *twice]) == 2
    assert "there are 2 WeightSync" in capsys.readouterr().err


def test_a_metric_that_no_evaluation_records_is_known_without_one(workplace, capsys):
    saver = ["--trainer.enable_checkpointing", "true", "--trainer.callbacks+=IterationCheckpoint"]
    command = ["check", "--config", "good.yaml", "--no_rollout", *saver]
    assert main([*command, "--trainer.callbacks.monitor", "eval/pass@4"]) == 2
    assert "monitor='eval/pass@4'): no such metric" in capsys.readouterr().err
    samples = ["--trainer.callbacks.monitor", "eval/pass@4", "--data.evaluation.samples", "4"]
    assert main([*command, *samples]) == 0


def test_lightnings_flags_are_refused_as_by_fit(workplace, capsys):
    option = ["--trainer.callbacks+=SpikeDetection", "--trainer.precision", "64-true"]
    for command in (["check", "--no_rollout"], ["fit"]):
        assert main([*command, "--config", "good.yaml", *option]) == 2
        message = "precision='64-true': 32-true, bf16-mixed and bf16-true work"
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gib", "status", "said"),
    [("80", 0, "GPU of 80.00 GiB: "), ("0.0001", 1, "DOES NOT FIT")],
)
def test_a_gpu_that_is_too_small_is_said(workplace, capsys, gib, status, said):
    command = ["check", "--config", "good.yaml", "--no_rollout", "--gpu_memory_gb", gib]
    assert main(command) == status
    printed = capsys.readouterr()
    assert said in printed.out
    assert ("the GPU is too small" in printed.err) == bool(status)
    assert ("would start" in printed.out) == (not status)


@pytest.mark.slow
def test_a_plan_in_bfloat16_for_two_processes(workplace, capsys):
    """One process measures; nothing is shared out, and no other process is started."""
    options = ["--trainer.precision", "bf16-mixed", "--trainer.devices", "2"]
    options += ["--trainer.strategy", "lightning_rl.ShardedStrategy"]
    options += ["--trainer.strategy.cpu_offload", "true"]
    command = ["check", "--config", "good.yaml", "--no_rollout", "--gpu_memory_gb", "24", *options]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "gathered" in said
    assert "optimizer (AdamW), in host memory" in said
    assert "weights in bfloat16" in said  # the engine's, which follows


@pytest.mark.slow
def test_gpus_share_a_model_as_it_fits_them(workplace, capsys):
    command = ["check", "--config", "good.yaml", "--gpus", "2", "--gpu_memory_gb"]
    assert main([*command, "80"]) == 0
    said = capsys.readouterr().out.splitlines()
    ways = [line.split(":")[0].strip() for line in said if line.startswith("  sequence")]
    assert ways == [
        "sequence 1 x tensor 1", "sequence 2 x tensor 1", "sequence 1 x tensor 2",
    ]  # fmt: skip
    assert "refused: " in said[-3]  # one key-value head
    assert said[-2].startswith("use sequence 1 x tensor 1: ")
    assert "--trainer.devices 2 --trainer.num_nodes 1 " in said[-1]
    [planned] = [line for line in said if line.startswith("planned: ")]
    assert planned.startswith("planned: 2 GPUs of 80 GiB on 1 node, which train as a Sharded")
    assert planned.endswith("; each also has a TransformersEngine:")
    served = ["--trainer.num_nodes", "2", "--data.engine", "VLLMServer"]
    assert main([*command, "80", *served]) == 0
    said = capsys.readouterr().out
    assert "planned: 2 GPUs of 80 GiB on 2 nodes with 1 each, which" in said
    assert "; VLLMServer has GPUs of its own, which are not planned:\n" in said
    assert "--trainer.devices 1 --trainer.num_nodes 2 --trainer.strategy " in said
    assert main([*command, "0.0001"]) == 1
    assert "none of them fits with 5% to spare; nearest is " in capsys.readouterr().out
    assert main(["check", "--config", "good.yaml", "--gpus", "2"]) == 2
    assert "pass --gpu_memory_gb too" in capsys.readouterr().err
    assert main([*command, "80", "--trainer.num_nodes", "4"]) == 2
    assert "--gpus=2 cannot be divided among trainer.num_nodes=4" in capsys.readouterr().err


@pytest.mark.slow
def test_more_gpus_than_heads_share_a_rollout_if_it_takes_them(workplace, capsys):
    """The tiny model has two heads. Of two GPUs for a micro-batch each needs 37 MiB, of four 21."""
    long = ["--data.sampling.max_tokens", "4000"]
    assert (
        main(["check", "--config", "good.yaml", *long, "--gpus", "4", "--gpu_memory_gb", "0.03"])
        == 0
    )
    said = capsys.readouterr().out
    assert "sequence 2 x tensor 1: 36.8 MiB training + 0.2 MiB engine: DOES NOT FIT" in said
    assert "use sequence 4 x tensor 1: " in said


@pytest.mark.slow
def test_gpus_share_the_experts_of_a_mixture(workplace, capsys, monkeypatch):
    mixture = saved_mixture("qwen3_moe", workplace / "mixture")
    command = ["check", "--config", "good.yaml", "--gpus", "2", "--gpu_memory_gb", "80"]
    command += ["--model.model", str(mixture), "--model.optimizer", "torch.optim.SGD"]
    assert main(command) == 0
    said = capsys.readouterr().out
    ways = [line.split(":")[0] for line in said.splitlines() if line.startswith("  sequence")]
    assert ways[:4] == [
        "  sequence 1 x tensor 1", "  sequence 1 x tensor 1 x expert 2",
        "  sequence 2 x tensor 1", "  sequence 2 x tensor 1 x expert 2",
    ]  # fmt: skip
    assert "sequence 1 x tensor 2: refused: " in said
    assert "use sequence 1 x tensor 1: " in said
    monkeypatch.setattr(Candidate, "fits", property(lambda way: way.expert == 2))
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "use sequence 1 x tensor 1 x expert 2: " in said
    assert "--trainer.strategy.tensor 1 --trainer.strategy.expert 2\n" in said


@pytest.mark.slow
def test_a_strategy_that_shares_experts_is_planned_or_refused(workplace, capsys):
    mixture = str(saved_mixture("qwen3_moe", workplace / "mixture"))
    command = ["check", "--config", "good.yaml", "--no_rollout", "--trainer.devices", "2"]
    command += ["--trainer.strategy", "lightning_rl.ShardedStrategy"]
    gathered = []
    for expert in ("1", "2"):
        sharing = ["--trainer.strategy.expert", expert]
        assert main([*command, *sharing, "--model.model", mixture]) == 0
        said = capsys.readouterr().out.splitlines()
        [line] = [line for line in said if line.startswith("  gathered")]
        gathered.append(float(line.split()[1]))
    assert gathered[1] < 0.6 * gathered[0]
    assert main([*command, "--trainer.strategy.expert", "2"]) == 2
    assert "has no experts to spread over processes" in capsys.readouterr().err


def test_a_monitor_that_nothing_records_is_refused_or_said_to_be_unknown(workplace, capsys):
    stopper = "{class_path: EarlyStopping, init_args: {monitor: %s}}"
    callbacks = f"[WeightSync, Evaluate, {stopper}]"
    good = ["check", "--config", "good.yaml", "--trainer.callbacks"]
    assert main([*good, callbacks % "eval/acuracy"]) == 2
    assert "did you mean eval/accuracy?" in capsys.readouterr().err
    assert main([*good, callbacks % "reward/meann"]) == 0
    assert "not checked: whether anything records reward/meann" in capsys.readouterr().out
    assert main([*good, callbacks % "eval/accuracy"]) == 0
    assert "not checked" not in capsys.readouterr().out


def test_groups_that_processes_cannot_share_are_refused(workplace, capsys):
    options = ["--trainer.devices", "4", "--data.groups_per_iteration", "3"]
    assert main(["check", "--config", "good.yaml", *options]) == 2
    assert "groups_per_iteration=3 cannot be divided among 4 processes" in capsys.readouterr().err


@pytest.mark.slow
def test_what_recomputed_layers_keep_is_planned_on_fake_tensors(workplace, capsys, monkeypatch):
    """Host inputs, kept attention and tiles are made of fakes, too."""
    passes = []

    def followed(policy, *arguments):
        assert all(isinstance(p, FakeTensor) for p in policy.parameters())
        passes.append(follow(policy, *arguments))
        return passes[-1]

    monkeypatch.setattr("lightning_rl.cli.check.memory.follow", followed)
    recompute = "{inputs: host, keep: attention, mlp_tokens: 4}"
    command = [
        "check",
        "--config",
        "good.yaml",
        "--model.loading.gradient_checkpointing",
        recompute,
    ]
    assert main([*command, "--gpus", "2", "--gpu_memory_gb", "80"]) == 0
    said = capsys.readouterr().out
    assert "sequence 2 x tensor 1: " in said
    # One head of keys, which two cannot share: it is refused before a pass.
    assert "sequence 1 x tensor 2: refused" in said
    assert len(passes) == 2
    assert all(found.sent > 0 and found.peak.parts["states"] > found.kept for found in passes)
