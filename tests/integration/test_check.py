"""lightning-rl check: the algebra and the memory are right, and nothing is written."""

import gc
import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.memory import FollowAllocations
from lightning_rl import LoRA, PolicyModule, SharedValueHead
from lightning_rl.cli import main
from lightning_rl.cli.check import layouts, stopwatch
from lightning_rl.cli.check.activations import measure_activations
from lightning_rl.cli.check.batches import BatchPlan, cut, largest_rollouts
from lightning_rl.cli.check.memory import in_units, training_memory
from lightning_rl.cli.check.mesh import Candidate, configure_without_weights
from lightning_rl.cli.check.training import training_plan
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.extend import Periodic
from lightning_rl.models.memory import forward_tokens
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt
from tests.support.bad_configs import CONFIG, files
from tests.support.followed import kept_for_backward
from tests.support.mixtures import saved_mixture
from tests.support.small_run import data_module as small_data, trainer_of
from tests.support.two_ranks import ROOT
from tests.support.two_roles import roles_data, roles_module


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
    # Of each group 3 prompt tokens once, and 2 x 4 of completions.
    assert "1 minibatch of 4 groups or fewer, in 1 pack of 44 tokens or fewer each" in said
    assert "schedule ends after total_steps=9 optimizer steps, the run after 1;" in said
    assert "engine and trainer agree to" in said
    assert said.count("'30=' -> ") == 2
    assert said.count("reward ") == 2


def test_without_a_rollout_no_engine_starts(workplace, capsys, monkeypatch):
    from lightning_rl.engines import TransformersEngine

    monkeypatch.setattr(TransformersEngine, "start", lambda *_: pytest.fail("it was started"))
    assert main(["check", "--config", "good.yaml", "--no_rollout"]) == 0
    assert "optimizer (AdamW)" in capsys.readouterr().out


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
    samples = ["--trainer.callbacks.monitor", "eval/pass@4", "--data.eval_samples", "4"]
    assert main([*command, *samples]) == 0


def test_batch_algebra_by_hand():
    plan = BatchPlan(
        prompts=100, groups=12, group_size=8, ranks=2, tokens=960, minibatches=3, ppo_epochs=2,
        packs=2, pack_tokens=200, iterations_per_epoch=10, epochs=4,
    )  # fmt: skip
    assert (plan.rollouts, plan.steps, plan.total_steps) == (96, 6, 240)
    lines = list(plan.lines())
    # 12 groups in 3 minibatches are 4 each, and one rank may have them all.
    assert lines[1].startswith("on each of 2 ranks 3 minibatches of 4 groups or fewer, in 2 packs")
    assert "60 per epoch of 10 iterations" in lines[2]
    # 12 prompts x 40 iterations = 480 of 100.
    assert "480 prompts are drawn from 100 (4.8 times each)" in lines[3]


def test_packs_are_those_of_the_update():
    prompts = [Prompt(str(n), "", [3] * n) for n in (2, 5, 3)]
    rollouts = largest_rollouts(prompts, groups=2, group_size=3, max_tokens=4)
    assert [len(r.prompt.token_ids) for r in rollouts] == [5, 5, 5, 3, 3, 3]  # the longest two
    batch = pack_rollouts(rollouts)
    [[whole]] = cut(batch, 1, 1000)
    assert forward_tokens(whole) == 5 + 3 * 4 + 3 + 3 * 4
    # 17 tokens do for the first group; the second's three need 3 + 12 = 15.
    assert [forward_tokens(pack) for pack in cut(batch, 1, 17)[0]] == [17, 15]
    assert [len(packs) for packs in cut(batch, 2, 1000)] == [1, 1]


def test_memory_by_hand(tiny_model):
    policy = Policy(str(tiny_model))
    elements = sum(p.numel() for p in policy.parameters())
    rollouts = largest_rollouts([Prompt("0", "", [3, 2])], 2, 2, 6)
    plan = training_memory(policy, [], torch.optim.AdamW, pack_rollouts(rollouts))
    assert plan.parts["weights"] == plan.parts["gradients"] == 4 * elements
    assert plan.parts["optimizer (AdamW)"] == 8 * elements  # two moments in float32
    # The head's gradient, 16 words of 64 numbers, before it is added to its embedding's.
    assert plan.moment == "the head's backward pass"
    assert plan.parts["copies of weights"] == 4 * 16 * 64
    assert plan.total == sum(plan.parts.values())
    plain = training_memory(policy, [policy], torch.optim.SGD, pack_rollouts(rollouts))
    assert plain.parts["optimizer (SGD)"] == 0
    assert plain.parts["other models"] == 4 * elements
    assert [in_units(3 << 19), in_units(5 << 29)] == ["1.5 MiB", "2.50 GiB"]


def test_activations_grow_with_the_tokens(tiny_model):
    policy = Policy(str(tiny_model))

    def kept(groups: int) -> float:
        prompts = [Prompt(str(n), "", [3 + n, 2]) for n in range(groups)]
        pack = pack_rollouts(largest_rollouts(prompts, groups, 4, 20))
        return kept_for_backward(policy, pack).grows / forward_tokens(pack)

    # What one group tells of eight: that is how the estimate is made.
    assert kept(8) == pytest.approx(kept(1), rel=0.05)
    # Two layers, each with at least its inputs in float32: 64 numbers to four projections.
    assert kept(1) > 2 * 4 * 64 * 4


def test_a_measured_policy_is_freed(tiny_model):
    policy = Policy(str(tiny_model))
    pack = pack_rollouts(largest_rollouts([Prompt("0", "", [3, 2])], 1, 2, 6))
    kept_for_backward(policy, pack)
    weight = weakref.ref(next(policy.parameters()))
    del policy
    gc.collect()
    assert weight() is None


def test_memory_of_two_policies_is_what_their_updates_take(tiny_model, tmp_path):
    """Estimated, and followed from allocation to allocation in an update of both."""
    # The second keeps more of a pass, and the optimizer's state of both stays.
    second = {"lora": LoRA(rank=8), "ppo_epochs": 2, "schedule": Periodic(every=2)}
    module, data, follow = (
        roles_module(tiny_model, second=second),
        roles_data(),
        FollowAllocations(),
    )
    trainer = trainer_of(tmp_path, [follow])
    trainer.strategy.connect(module)
    data.trainer = module.trainer = trainer
    data.load_prompts("fit")
    module.configure_model()
    prompts = data.train_prompts.first()
    lines, memory = training_plan(module, data, prompts, torch.device("cpu"))
    assert [line for line in lines if line.startswith("batches of ")] == [
        "batches of first:", "batches of second:",
    ]  # fmt: skip
    assert any("2 optimizer steps per iteration, 4 per epoch of 4 it" in line for line in lines)
    assert "  it learns in 2 iterations of the first epoch" in lines
    storages = {p.untyped_storage().data_ptr(): p.numel() * 4 for p in module.parameters()}
    assert memory.parts["weights"] == sum(storages.values())  # the base once
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert memory.stays["gradients"] == 4 * trained
    assert memory.parts["optimizer (AdamW)"] == 8 * trained
    rollouts = largest_rollouts(prompts, 4, 4, data.sampling.max_tokens)
    for rollout in rollouts:
        rollout.reward = float(rollout.sample_index % 2)
        [row] = rollout.rows
        rollout.rows = [replace(row, role="first"), replace(row, role="second")]
    trainer.fit(module, LazyLoader(lambda _: pack_rollouts(rollouts, roles=[*module.roles]), 1))
    assert module.role_versions == {"first": 1, "second": 1}
    assert memory.total == pytest.approx(follow.peak + memory.parts["weights"], rel=0.1)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ["--trainer.precision", "64-true"],
            "precision='64-true': 32-true, bf16-mixed and bf16-true work",
        ),
        (["--trainer.gradient_clip_val", "1.0"], "gradient_clip_val=1.0: set model.max_grad_norm"),
        (["--trainer.callbacks+=SpikeDetection"], "SpikeDetection: an iteration has no single"),
    ],
)
def test_lightnings_flags_are_refused_as_by_fit(option, message, workplace, capsys):
    for command in (["check", "--no_rollout"], ["fit"]):
        assert main([*command, "--config", "good.yaml", *option]) == 2
        assert message in capsys.readouterr().err


def test_run_tries_an_iteration_and_writes_nothing(workplace, capsys):
    callbacks = [
        *CONFIG["trainer"]["callbacks"],
        "RunReport",
        "PreviewTable",
        "IterationCheckpoint",
    ]
    export = {"class_path": "HFExport", "init_args": {"directory": "model"}}
    schedule = {"schedule": {"class_path": "FixedSchedule", "init_args": {"every_n_iterations": 5}}}
    callbacks[0] = {"class_path": "WeightSync", "init_args": schedule}
    flags = {"callbacks": [*callbacks, export], "enable_checkpointing": True}
    (workplace / "full.yaml").write_text(
        yaml.safe_dump(CONFIG | {"trainer": CONFIG["trainer"] | flags})
    )
    before = files(workplace)
    assert main(["check", "--config", "full.yaml", "--run"]) == 0
    assert files(workplace) == before
    said = capsys.readouterr().out
    assert "one iteration was trained: reward/mean " in said
    assert "sync/version 1" in said
    assert said.endswith("good: `lightning-rl fit` with the same options would start\n")


@pytest.mark.slow
def test_run_on_two_processes_is_told_once(workplace):
    before = files(workplace)
    command = [sys.executable, "-m", "lightning_rl", "check", "--config", "good.yaml"]
    done = subprocess.run(
        [*command, "--run", "--trainer.devices", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert files(workplace) == before
    said = done.stdout.splitlines()
    assert [line.split(":")[0] for line in said].count("configuration") == 1
    assert said[-2].startswith("one iteration was trained: reward/mean ")
    assert said[-1] == "good: `lightning-rl fit` with the same options would start"
    assert "Starting with 2 processes" in done.stderr


def test_run_finds_what_only_an_update_shows(workplace, capsys):
    Path("breaks.py").write_text(
        "from lightning_rl.callbacks import RLCallback\n"
        "from lightning_rl.errors import ConfigError\n\n"
        "class Breaks(RLCallback):\n"
        "    def on_update_start(self, trainer, pl_module, batch):\n"
        "        raise ConfigError('broken update')\n"
    )
    command = ["check", "--config", "good.yaml", "--trainer.callbacks+=breaks.Breaks"]
    assert main(command) == 0
    assert main([*command, "--run"]) == 2
    said = capsys.readouterr()
    assert "broken update" in said.err
    assert said.out.count("good: `lightning-rl fit`") == 1
    assert main([*command, "--run", "--no_rollout"]) == 2


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


def test_a_plan_in_bfloat16_for_two_processes(workplace, capsys):
    """What is measured is measured on one; nothing is shared out, and no process started."""
    options = ["--trainer.precision", "bf16-mixed", "--trainer.devices", "2"]
    options += ["--trainer.strategy", "lightning_rl.ShardedStrategy"]
    options += ["--trainer.strategy.cpu_offload", "true"]
    command = ["check", "--config", "good.yaml", "--no_rollout", "--gpu_memory_gb", "24", *options]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "gathered" in said
    assert "optimizer (AdamW), in host memory" in said
    assert "weights in bfloat16" in said  # the engine's, which follows


def test_gpus_share_a_model_as_it_fits_them(workplace, capsys):
    command = ["check", "--config", "good.yaml", "--gpus", "2", "--gpu_memory_gb"]
    assert main([*command, "80"]) == 0
    said = capsys.readouterr().out.splitlines()
    ways = [line.split(":")[0].strip() for line in said if line.startswith("  sequence")]
    assert ways == [
        "sequence 1 x tensor 1", "sequence 2 x tensor 1", "sequence 1 x tensor 2",
    ]  # fmt: skip
    assert "refused: " in said[-3]  # one key-value head
    assert said[-2].startswith("take sequence 1 x tensor 1: ")
    assert "--trainer.devices 2" in said[-1]
    assert main([*command, "0.0001"]) == 1
    assert "none of them fits with 5% to spare; nearest is " in capsys.readouterr().out
    assert main(["check", "--config", "good.yaml", "--gpus", "2"]) == 2
    assert "give --gpu_memory_gb too" in capsys.readouterr().err


def test_more_gpus_than_heads_share_a_rollout_if_it_takes_them(workplace, capsys):
    """The tiny model has two heads. With two GPUs for a pack each needs 37 MiB, with four 21."""
    long = ["--data.sampling.max_tokens", "4000"]
    assert (
        main(["check", "--config", "good.yaml", *long, "--gpus", "4", "--gpu_memory_gb", "0.03"])
        == 0
    )
    said = capsys.readouterr().out
    assert "sequence 2 x tensor 1: 36.8 MiB training + 0.2 MiB engine: DOES NOT FIT" in said
    assert "take sequence 4 x tensor 1: " in said


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
    assert "take sequence 1 x tensor 1: " in said
    monkeypatch.setattr(Candidate, "fits", property(lambda way: way.expert == 2))
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "take sequence 1 x tensor 1 x expert 2: " in said
    assert "--trainer.strategy.tensor 1 --trainer.strategy.expert 2\n" in said


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
    assert "has no experts that processes could have together" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_plan_without_weights_is_the_one_with_them(tiny_model, tmp_path, precision):
    plans = []
    for configure in (PolicyModule.configure_model, configure_without_weights):
        module, data = PolicyModule(str(tiny_model), value_head=SharedValueHead()), small_data()
        trainer = trainer_of(tmp_path, [], precision=precision)
        trainer.strategy.connect(module)
        data.trainer = module.trainer = trainer
        data.load_prompts("fit")
        configure(module)
        prompts = data.train_prompts.first()
        plans.append(training_plan(module, data, prompts, torch.device("cpu")))
    assert plans[0] == plans[1]


@pytest.mark.slow
def test_layouts_are_measured_and_the_fastest_named(workplace, capsys, monkeypatch):
    """Each trains in processes of its own; nothing of it stays."""
    of_two_cores = layouts.layouts_of(2, groups=4)[::2]
    monkeypatch.setattr(layouts, "layouts_of", lambda *_: of_two_cores)
    monkeypatch.setattr(layouts, "BUDGET_S", 0.0)
    before = files(workplace)
    assert main(["check", "--config", "good.yaml", "--layout"]) == 0
    assert files(workplace) == before
    said = capsys.readouterr().out.splitlines()
    [head] = [place for place, line in enumerate(said) if line.startswith("layouts, in seconds")]
    names = ("1 process, 1 thread", "2 processes, 1 thread each")
    for name, line in zip(names, said[head + 2 : head + 4], strict=True):
        assert line.startswith(f"  {name} ")
        figures = line.removeprefix(f"  {name}").split()
        iteration, generate, train, sync, measured = map(float, figures)
        assert 0 < max(generate, train, sync) < iteration
        assert measured == stopwatch.MOST - stopwatch.WARM_UP
    assert re.fullmatch(
        r"fastest: .* \(.* times as fast as .*\): "
        r"`OMP_NUM_THREADS=1 lightning-rl fit ... --trainer.devices [12]`",
        said[-2],
    )
    assert said[-1] == "good: `lightning-rl fit` with the same options would start"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--run", "--run and --layout are different checks; give one of them"),
        (
            "--trainer.strategy lightning_rl.ShardedStrategy --trainer.strategy.cpu_offload true "
            "--trainer.devices 2",
            "trainer.strategy is ShardedStrategy; add --trainer.strategy auto",
        ),
        ("--trainer.num_nodes 2", "this run is on 2 machines; leave it out"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(workplace, capsys, options, message):
    assert main(["check", "--config", "good.yaml", "--layout", *options.split()]) == 2
    assert message in capsys.readouterr().err


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
    assert "groups_per_iteration=3 cannot be shared by 4 processes" in capsys.readouterr().err


def test_what_recomputed_layers_keep_is_planned_once_for_each_tensor(
    workplace, capsys, monkeypatch
):
    """On fake tensors, of which host inputs, kept attention and tiles are made, too."""
    measured = []

    def counted(*arguments):
        measured.append(measure_activations(*arguments))
        return measured[-1]

    monkeypatch.setattr("lightning_rl.cli.check.training.measure_activations", counted)
    recompute = "{inputs: host, keep: attention, mlp_tokens: 4}"
    command = ["check", "--config", "good.yaml", "--model.gradient_checkpointing", recompute]
    assert main([*command, "--gpus", "2", "--gpu_memory_gb", "80"]) == 0
    said = capsys.readouterr().out
    assert "sequence 2 x tensor 1: " in said
    # One head of keys, which two cannot share: so only whole matrices are measured, for both.
    assert "sequence 1 x tensor 2: refused" in said
    assert len(measured) == 1
    assert len(measured[0].passes) == 2  # with small tiles and with large ones
    assert min(measured[0].on_host(1000), measured[0].turn) > 0
