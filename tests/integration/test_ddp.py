"""Two processes, and one for comparison: the same rollouts, the same losses, the same errors."""

import json
import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lightning_rl.algos.tree import TreeRLOO
from lightning_rl.algos.turns import GiGPO, TurnGAE
from lightning_rl.cli.rerun.compare import rerun_iteration
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.errors import DataError
from tests.support.ranks_roles import fit_roles
from tests.support.ranks_run import (
    GROUP_SIZE,
    GROUPS,
    ITERATIONS,
    HFExport,
    LoRA,
    bare_loop,
    critic,
    everything,
    fit,
    in_few_bits,
    in_minibatches,
    mixed,
    replaying,
    rows,
    share_of_even_digits,
    turns,
)
from tests.support.two_ranks import SECONDS, TOLERANCE, Results, comparable, run_two

pytestmark = pytest.mark.timeout(SECONDS + 60)  # the first waits for two processes that do all


@pytest.fixture(scope="module")
def results(tiny_model, folder) -> Results:
    return run_two("tests.support.ranks_run", tiny_model, folder)


@pytest.fixture(scope="module")
def alone(tiny_model, folder) -> Callable[[str], dict[str, Any]]:
    """The same on one process."""
    model = str(tiny_model)
    runs = {
        "plain": lambda where: fit(model, where, "auto", *everything()),
        "critic": lambda where: fit(model, where, **critic()),
        "lora": lambda where: fit(
            model, where, "auto", HFExport(merge_adapters=True), lora=LoRA(rank=4)
        ),
        "qlora": lambda where: fit(
            model, where, "auto", HFExport(merge_adapters=True), **in_few_bits()
        ),
        "minibatches": lambda where: fit(model, where, "auto", *everything(), **in_minibatches()),
        "critic_minibatches": lambda where: fit(model, where, **critic(), **in_minibatches()),
        "turns": lambda where: fit(model, where, **turns(GiGPO())),
        "branches": lambda where: fit(model, where, **turns(TreeRLOO())),
        "turns_critic": lambda where: fit(model, where, **turns(TurnGAE())),
        "curriculum": lambda where: fit(model, where, curriculum=True),
        "mixture": lambda where: fit(model, where, data={"train_prompts": mixed()}),
        "replay": lambda where: fit(model, where, **replaying(where)),
    }
    return cache(lambda name: runs[name](folder / "alone" / name))


@pytest.mark.parametrize("name", ["plain", "minibatches"])
def test_two_processes_stream_as_one_trains(results, alone, name):
    one, two = alone(name), results({"plain": "streamed"}.get(name, f"streamed_{name}"))
    for iteration in range(ITERATIONS):
        shares = [rank["rollouts"][iteration] for rank in two]
        assert sorted(shares[0] + shares[1]) == sorted(map(list, one["rollouts"][iteration]))
    for expected, row in zip(one["rows"][1:], two[0]["rows"][1:], strict=True):
        assert 0 < row.pop("policy/streamed_share") <= 1
        same = {key: value for key, value in expected.items() if key in row}
        assert comparable(row) == pytest.approx(comparable(same), rel=TOLERANCE, abs=TOLERANCE)


def test_sharded_weights_are_not_streamed(results):
    for rank in results("streamed_fsdp"):
        assert rank["error"] == "ConfigError"
        assert "sharded weights are gathered by all ranks together" in rank["message"]


@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        ("ddp", "plain"),
        ("fsdp", "plain"),
        ("shared", "plain"),
        ("ddp_critic", "critic"),
        ("fsdp_critic", "critic"),
        ("fsdp_lora", "lora"),
        ("ddp_qlora", "qlora"),
        ("fsdp_qlora", "qlora"),
        ("ddp_minibatches", "minibatches"),
        ("ddp_critic_minibatches", "critic_minibatches"),
        ("ddp_turns", "turns"),
        ("ddp_branches", "branches"),
        ("ddp_turns_critic", "turns_critic"),
        ("curriculum", "curriculum"),
        ("mixture", "mixture"),
        ("replay", "replay"),
    ],
)
def test_two_processes_train_as_one(results, alone, scenario, name):
    one, two = alone(name), results(scenario)
    for iteration in range(ITERATIONS):
        shares = [rank["rollouts"][iteration] for rank in two]
        replayed = (0, 3, 3)[iteration] if scenario == "replay" else 0  # of four and eight groups
        groups = [(GROUPS + replayed + 1) // 2, (GROUPS + replayed) // 2]
        begun = [sum("+" not in name for name, _ in share) for share in shares]  # but for branches
        assert begun == [count * GROUP_SIZE for count in groups]
        assert sorted(shares[0] + shares[1]) == sorted(map(list, one["rollouts"][iteration]))
    assert len(one["rows"]) == len(two[0]["rows"]) == ITERATIONS + 1
    for expected, row in zip(one["rows"], two[0]["rows"], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
    # Engine and trainer agree on every rank, and the policy moved.
    assert all(row["sync/probe_gap"] < 1e-4 for row in two[0]["rows"])
    assert one["rows"][-1]["policy/kl_old"] > 1e-4


def test_ranks_that_work_ahead_draw_and_learn_the_same_mixture(results):
    one, two = results("mixture_ahead")
    assert one["learned"] == two["learned"]
    assert set(one["learned"]["mixed"]) != {1.0}
    drawn = sorted((one["drawn"], two["drawn"]), key=len)
    assert drawn[0] == drawn[1][: len(drawn[0])]
    assert len(drawn[0]) >= 6 * GROUPS


def test_several_policies_train_on_two_processes_as_on_one(results, folder, tiny_model):
    """Each from its own rows, of which a rank has none while the other has some."""
    one = fit_roles(str(tiny_model), folder / "alone" / "roles")
    two = [rank["whole"] for rank in results("roles")]
    assert one["versions"] == two[0]["versions"] == {"first": 4, "second": 2, "rare": 3}
    for iteration, told in enumerate(one["learned"]):
        shares = [rank["learned"][iteration] for rank in two]
        assert told == {name: sum(share[name] for share in shares) for name in shares[0]}
        shares = [rank["rollouts"][iteration] for rank in two]
        assert sorted(shares[0] + shares[1]) == sorted(map(list, one["rollouts"][iteration]))
    # One group, two of one rank each, none.
    assert [rank["learned"][0]["rare"] for rank in two].count(0) == 1
    for expected, row in zip(one["rows"], two[0]["rows"], strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=TOLERANCE, abs=TOLERANCE)
    assert two[0]["weights"] == two[1]["weights"]  # of all ranks, to the bit


def test_several_policies_go_on_as_if_not_interrupted(results):
    for rank in results("roles"):
        whole, rest = rank["whole"], rank["rest"]
        assert rest["rollouts"] == whole["rollouts"][2:]
        assert rest["weights"] == whole["weights"]


def test_several_policies_are_not_sharded(results):
    for rank in results("roles_fsdp"):
        assert rank["error"] == "ConfigError"
        assert "not with ModelParallelStrategy; set trainer.strategy: ddp" in rank["message"]


def test_a_loop_of_ones_own_trains_as_one(results, tiny_model):
    one, two = bare_loop(str(tiny_model), rows(), share_of_even_digits), results("bare_loop")
    assert two[0]["weights"] == two[1]["weights"] == pytest.approx(one["weights"], rel=TOLERANCE)
    for iteration, (expected, row) in enumerate(zip(one["rows"], two[0]["rows"], strict=True)):
        assert row == two[1]["rows"][iteration]
        assert row == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
        shares = [rank["rollouts"][iteration] for rank in two]
        assert sorted(shares[0] + shares[1]) == sorted(map(list, one["rollouts"][iteration]))
    assert one["rows"][-1]["policy/grad_norm"] > 0.5  # it was clipped


@pytest.mark.parametrize("scenario", ["nonfinite_ddp", "nonfinite_fsdp"])
def test_a_gradient_that_is_nan_on_one_rank_is_left_out_on_all(results, scenario):
    """Both of the second iteration's two epochs; the third goes on from finite, equal weights."""
    for rank in results(scenario):
        skipped = [row["policy/nonfinite_skipped"] for row in rank["rows"][1:]]
        assert skipped == [0, 2, 0]
        last = rank["rows"][-1]
        assert math.isfinite(last["policy/grad_norm"])
        assert last["policy/kl_old"] > 1e-5
        assert last["sync/probe_gap"] < 1e-4


@pytest.mark.parametrize("scenario", ["ddp", "fsdp", "shared"])
def test_all_ranks_monitor_the_same(results, scenario):
    first, second = results(scenario)
    assert first["monitored"] == second["monitored"]
    assert "eval/accuracy" in first["monitored"][-1]


@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        ("ddp", "plain"),
        ("fsdp", "plain"),
        ("fsdp_lora", "lora"),
        ("fsdp_qlora", "qlora"),
        ("ddp_minibatches", "minibatches"),
        ("fsdp_minibatches", "minibatches"),
    ],
)
def test_exports_are_equal(results, alone, folder, scenario, name):
    alone(name), results(scenario)
    file = Path("lightning_logs", "version_0", "hf", "model.safetensors")
    one, two = load_file(folder / "alone" / name / file), load_file(folder / scenario / file)
    assert one.keys() == two.keys()
    for tensor in one:
        assert float((one[tensor] - two[tensor]).abs().max()) < TOLERANCE, tensor


def test_one_run_directory_with_rank_0s_rollouts_and_their_logprobs(results, alone, folder):
    results("fsdp"), alone("plain")
    recorded = {}
    for run in ("fsdp", "alone/plain"):
        assert [path.name for path in (folder / run / "lightning_logs").iterdir()] == ["version_0"]
        lines = (folder / run / "lightning_logs/version_0/recorded.jsonl").read_text().splitlines()
        recorded[run] = {line["id"]: line for line in map(json.loads, lines)}
    assert len(recorded["fsdp"]) == ITERATIONS * GROUPS * GROUP_SIZE // 2
    for name, line in recorded["fsdp"].items():
        [ours], [theirs] = line["rows"], recorded["alone/plain"][name]["rows"]
        assert ours["trainer_logprobs"] == pytest.approx(theirs["trainer_logprobs"], abs=TOLERANCE)
        assert any(ours["trainer_logprobs"])


def test_filters_that_reject_more_on_one_rank_lose_no_prompt(results):
    ranks = results("filter")
    prompts = [r[0].split("/")[2] for rank in ranks for share in rank["rollouts"] for r in share]
    assert len(set(prompts)) == ITERATIONS * GROUPS  # no prompt twice
    row = ranks[0]["rows"][1]
    assert (row["filter/NotOnRankOne"], row["rollout/skipped"]) == (2, 2 * GROUP_SIZE)


@pytest.mark.parametrize(
    ("scenario", "error", "message"),
    [
        ("reward_error", "RewardError", "6 of 6 rollouts could not be graded"),
        ("stale_error", "WrongWeightsError", "after the push of version 1, StaleOnRankOne holds"),
        ("push_error", "LightningRLError", "RuntimeError: out of memory"),
    ],
)
def test_what_fails_on_one_rank_ends_all_with_its_error(results, scenario, error, message):
    first, second = results(scenario)
    assert first["error"] == error
    assert first["message"].startswith(f"rank 1: {message}")
    assert second["message"] in first["message"]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("config_error", "groups_per_iteration=3 cannot be shared by 2 processes"),
        ("tensor_parallel", "tensor=2 does not divide the model's 1 key-value heads"),
    ],
)
def test_impossible_settings_are_refused(results, scenario, message):
    for rank in results(scenario):
        assert rank["error"] == "ConfigError"
        assert rank["message"].startswith(message)


# -------------------------------------------------------------------- guards and reruns


def test_a_guard_that_trips_on_one_rank_acts_on_all(results):
    """No rank skips, masks or stops by itself: the others would wait for it for ever."""
    first, second = results("guards")
    assert first == second  # rows, weights, why it stopped, and what was saved
    assert first["reason"].startswith("MetricGuard at iteration 3: local/metric is 2, bound=1.5")
    assert first["saved"] == "iteration_3.ckpt"
    skipped, masked, last = first["rows"][1:]
    assert ["policy/loss" in row for row in (skipped, masked, last)] == [False, True, True]
    names = ("on_rank_one_0", "on_rank_one_1", "local_metric")
    for row, name in zip(first["rows"][1:], names, strict=True):
        acted = [key for key, value in row.items() if key.endswith("_acted") and value]
        assert acted == [f"guard/{name}_acted"]


def test_two_processes_rerun_what_two_trained(results):
    first, second = results("again")
    assert (first["fit"][0], first["iteration"][0], second["iteration"][0]) == (0, 0, 0)
    said = first["iteration"][1].splitlines()
    assert said[0].endswith("the initial weights (version 0) and 3 iterations trained again")
    assert said[-2].endswith("iteration_4.ckpt  weights and optimizer: equal")
    assert said[-1] == "equal"
    assert second["iteration"][1] == ""  # the other has only helped
    assert (first["audit"][0], second["audit"][0]) == (0, 0), first["audit"][1]
    said = first["audit"][1].splitlines()
    assert [line.endswith("bit for bit") for line in said[3:5]] == [True] * 2
    assert sum(" tokens equal, reward " in line for line in said) == 2
    assert second["audit"][1] == ""


def test_one_process_says_what_it_needs_to_rerun_two(results, folder, tmp_path):
    results("again")
    run = shutil.copytree(folder / "again" / "lightning_logs" / "version_0", tmp_path / "run")
    text = (run / "config.yaml").read_text()
    text = text.replace("devices: 2", "devices: 1").replace("strategy: ddp", "strategy: auto")
    (run / "config.yaml").write_text(text)
    with pytest.raises(DataError, match=r"version 3 was trained by 2 processes, and this rerun "
                       r"has 1; rerun with as many: start it as the run was started"):  # fmt: skip
        rerun_iteration(RecordedRun(run), 3)
    with pytest.raises(DataError, match="holds no rollouts of rank 2 of iteration 1, but of iter"):
        RecordedRun(run).log.rollouts(1, rank=2)
