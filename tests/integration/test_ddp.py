"""Test two processes, and one for comparison: the same rollouts, the same losses, the same errors.

Slow: every scenario trains in two processes, and in one for comparison.
"""

import json
import math
import shutil

import pytest

from lightning_rl.cli import main
from lightning_rl.cli.pack.archive import extract_archive
from lightning_rl.cli.rerun.compare import rerun_iteration
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.errors import DataError
from tests.support.packs import with_number
from tests.support.ranks_bare import bare_loop
from tests.support.ranks_checks import guarded, rerun
from tests.support.ranks_roles import fit_roles, roles_refused
from tests.support.ranks_run import GROUP_SIZE, GROUPS, ITERATIONS
from tests.support.ranks_settings import failing, mixed_ahead, trained
from tests.support.two_ranks import (
    TOLERANCE,
    checkpoint_of,
    require_same_export,
    require_same_rollouts,
    require_same_rows,
    require_same_run,
)

slow = pytest.mark.slow


@pytest.fixture(scope="session")
def one(together, tiny_model):
    """Return a run on one process."""
    return lambda names: together.alone(trained, str(tiny_model), names)


@pytest.fixture(scope="session")
def two(together, tiny_model):
    """Return a run on two processes."""
    return lambda strategy, names: together(2, trained, str(tiny_model), names, strategy)


def slowly(*values):
    return pytest.param(*values, marks=slow)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("ddp", "everything"),
        ("ddp", "critic minibatches everything"),
        slowly("ddp", "shared measuring"),
        slowly("ddp", "qlora"),
        slowly("ddp", "turns"),
        slowly("ddp", "branches"),
        slowly("ddp", "turns_critic"),
        slowly("ddp", "curriculum"),
        slowly("ddp", "mixture"),
        slowly("ddp", "three replay"),
        ("fsdp", "everything measuring"),
        slowly("fsdp", "critic"),
        slowly("fsdp", "lora export"),
        slowly("fsdp", "qlora export"),
        slowly("fsdp", "minibatches export"),
    ],
)
def test_two_processes_train_as_one(one, two, strategy, names):
    alone, ranks = one(names), two(strategy, names)
    require_same_run(alone, ranks)
    iterations = 3 if "three" in names else ITERATIONS
    for iteration in range(iterations):
        replayed = (0, 3, 3)[iteration] if "replay" in names else 0  # of four and eight groups
        groups = [(GROUPS + replayed + 1) // 2, (GROUPS + replayed) // 2]
        shares = [rank["rollouts"][iteration] for rank in ranks]
        begun = [sum("+" not in name for name, _ in share) for share in shares]  # but for branches
        assert begun == [count * GROUP_SIZE for count in groups]
    assert len(alone["rows"]) == iterations + 1
    # Engine and trainer agree on every rank.
    assert all(row["sync/probe_gap"] < 1e-4 for row in ranks[0]["rows"])
    if "ex" in names or "everything" in names:
        require_same_export(alone, ranks[0])


@slow
def test_two_processes_train_as_one_with_an_engine_for_both(one, two):
    ranks = two("ddp", "everything shared")
    require_same_run(one("everything"), ranks)
    assert ranks[0]["monitored"] == ranks[1]["monitored"]


@slow
@pytest.mark.parametrize("names", ["everything streamed recomputed", "streamed minibatches"])
def test_two_processes_stream_as_one_trains(one, two, names):
    words = [name for name in names.split() if name not in ("streamed", "recomputed")]
    alone, ranks = one(" ".join(words)), two("ddp", names)
    require_same_rollouts(alone["rollouts"], [rank["rollouts"] for rank in ranks])
    for expected, row in zip(alone["rows"][1:], ranks[0]["rows"][1:], strict=True):
        assert 0 < row["policy/streamed_share"] <= 1
        same = {name: row[name] for name in row.keys() & expected.keys()}
        require_same_rows([{name: expected[name] for name in same}], [same])


@slow
def test_ranks_that_work_ahead_draw_and_learn_the_same_mixture(together, tiny_model):
    one, two = together(2, mixed_ahead, str(tiny_model))
    assert one["learned"] == two["learned"]
    assert set(one["learned"]["mixed"]) != {1.0}
    drawn = sorted((one["drawn"], two["drawn"]), key=len)
    assert drawn[0] == drawn[1][: len(drawn[0])]
    assert len(drawn[0]) >= 6 * GROUPS


@slow
def test_several_policies_train_on_two_processes_as_on_one(together, tiny_model):
    """Each from its own rows, of which a rank has none while the other has some."""
    model = str(tiny_model)
    one, two = together.alone(fit_roles, model), together(2, fit_roles, model, "ddp")
    assert one["versions"] == two[0]["versions"] == {"first": 4, "second": 2, "rare": 3}
    for iteration, told in enumerate(one["learned"]):
        shares = [rank["learned"][iteration] for rank in two]
        assert told == {name: sum(share[name] for share in shares) for name in shares[0]}
    require_same_rollouts(one["rollouts"], [rank["rollouts"] for rank in two])
    # One group, two of one rank each, none.
    assert [rank["learned"][0]["rare"] for rank in two].count(0) == 1
    require_same_rows(one["rows"], two[0]["rows"])
    assert two[0]["weights"] == two[1]["weights"]  # of all ranks, to the bit
    path = str(checkpoint_of(two[0], "iteration_2.ckpt"))
    for whole, rest in zip(two, together(2, fit_roles, model, "ddp", ckpt_path=path), strict=True):
        assert rest["rollouts"] == whole["rollouts"][2:]
        assert rest["weights"] == whole["weights"]


def test_a_loop_of_ones_own_trains_as_one(together, tiny_model):
    model = str(tiny_model)
    one, two = together.alone(bare_loop, model), together(2, bare_loop, model, 2)
    assert two[0]["weights"] == two[1]["weights"] == pytest.approx(one["weights"], rel=TOLERANCE)
    assert two[0]["rows"] == two[1]["rows"]
    for expected, row in zip(one["rows"], two[0]["rows"], strict=True):
        assert row == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    require_same_rollouts(one["rollouts"], [rank["rollouts"] for rank in two])
    assert one["rows"][-1]["policy/grad_norm"] > 0.5  # it was clipped


@pytest.mark.parametrize("strategy", ["ddp", slowly("fsdp")])
def test_a_gradient_that_is_nan_on_one_rank_is_left_out_on_all(two, strategy):
    """Both of the second iteration's two epochs; the third goes on from finite, equal weights."""
    for rank in two(strategy, "three poisoned"):
        skipped = [row["policy/nonfinite_skipped"] for row in rank["rows"][1:]]
        assert skipped == [0, 2, 0]
        last = rank["rows"][-1]
        assert math.isfinite(last["policy/grad_norm"])
        assert last["policy/kl_old"] > 1e-5
        assert last["sync/probe_gap"] < 1e-4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_monitor_the_same_and_rank_0_records_its_rollouts(one, two, strategy):
    first, second = two(strategy, "everything")
    assert first["monitored"] == second["monitored"]
    assert "eval/accuracy" in first["monitored"][-1]
    recorded = []
    for run in (first, one("everything")):
        assert [path.name for path in (run["where"] / "lightning_logs").iterdir()] == ["version_0"]
        lines = (run["where"] / "lightning_logs/version_0/recorded.jsonl").read_text().splitlines()
        recorded.append({line["id"]: line["rows"] for line in map(json.loads, lines)})
    ours, theirs = recorded
    assert len(ours) == ITERATIONS * GROUPS * GROUP_SIZE // 2
    for name, [row] in ours.items():
        expected = theirs[name][0]["trainer_logprobs"]
        assert row["trainer_logprobs"] == pytest.approx(expected, abs=TOLERANCE)
        assert any(row["trainer_logprobs"])


def test_filters_that_reject_more_on_one_rank_lose_no_prompt(two):
    ranks = two("ddp", "filtered")
    prompts = [r[0].split("/")[2] for rank in ranks for share in rank["rollouts"] for r in share]
    assert len(set(prompts)) == ITERATIONS * GROUPS  # no prompt twice
    row = ranks[0]["rows"][1]
    assert (row["filter/NotOnRankOne"], row["rollout/skipped"]) == (2, 2 * GROUP_SIZE)


@pytest.mark.parametrize(
    ("strategy", "names", "error", "message"),
    [
        ("ddp", "broken_reward", "RewardError", "6 of 6 rollouts could not be graded"),
        slowly(
            "fsdp", "stale_push", "WrongWeightsError",
            "after the push of version 1, StaleOnRankOne holds",
        ),
        slowly("fsdp", "broken_push", "LightningRLError", "RuntimeError: out of memory"),
    ],
)  # fmt: skip
def test_what_fails_on_one_rank_ends_all_with_its_error(
    together, tiny_model, strategy, names, error, message
):
    first, second = together(2, failing, str(tiny_model), names, strategy)
    assert first["error"] == error
    assert first["message"].startswith(f"rank 1: {message}")
    # Rank 1 names its own file of rollouts, too.
    assert second["message"].partition("; all ")[0] in first["message"]


@pytest.mark.parametrize(
    ("function", "names", "strategy", "layout", "message"),
    [
        (
            failing, "three_groups", "ddp", {},
            "groups_per_iteration=3 cannot be divided among 2 processes",
        ),
        slowly(
            failing, "", "sharded", {"tensor": 2},
            "tensor=2 does not divide the model's 1 key-value heads",
        ),
        slowly(
            failing, "streamed", "fsdp", {},
            "sharded weights are gathered by all ranks at once",
        ),
        slowly(
            failing, "eight_bits", "fsdp", {},
            "optimizer=AdamW8bit needs whole parameters, but",
        ),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(
    together, tiny_model, function, names, strategy, layout, message
):
    for rank in together(2, function, str(tiny_model), names, strategy, **layout):
        assert rank["error"] == "ConfigError"
        assert message in rank["message"]


@slow
def test_several_policies_are_not_sharded(together, tiny_model):
    for rank in together(2, roles_refused, str(tiny_model), "fsdp"):
        assert rank["error"] == "ConfigError"
        assert "not with ModelParallelStrategy; set trainer.strategy: ddp" in rank["message"]


def test_a_guard_that_trips_on_one_rank_acts_on_all(together, tiny_model):
    """No rank skips, masks or stops by itself: the others would wait for it for ever."""
    first, second = together(2, guarded, str(tiny_model))
    assert first == second  # rows, weights, why it stopped, and what was saved
    assert first["reason"].startswith("MetricGuard at iteration 3: local/metric is 2, bound=1.5")
    assert first["saved"] == "iteration_3.ckpt"
    skipped, masked, last = first["rows"][1:]
    assert ["policy/loss" in row for row in (skipped, masked, last)] == [False, True, True]
    names = ("on_rank_one_0", "on_rank_one_1", "local_metric")
    for row, name in zip(first["rows"][1:], names, strict=True):
        acted = [key for key, value in row.items() if key.endswith("_acted") and value]
        assert acted == [f"guard/{name}_acted"]


def test_two_processes_rerun_what_two_trained(together, tiny_model):
    first, second = together(2, rerun, str(tiny_model))
    assert (first["fit"][0], first["iteration"][0], second["iteration"][0]) == (0, 0, 0)
    said = first["iteration"][1].splitlines()
    assert said[0].endswith("the initial weights (version 0) and 3 iterations trained again")
    assert said[-2].endswith("iteration_4.ckpt  weights and optimizer: equal")
    assert said[-1] == "equal"
    assert second["iteration"][1] == ""  # the other has only helped
    said = first["without"][1].splitlines()
    assert said[1:4] == [
        "without the change all of them are equal to the record, bit for bit",
        "iteration 4: 3 rollouts left out",
        "up to iteration 3 nothing is changed: all is equal",
    ]
    assert said[-2].startswith("held-out accuracy of version 4, unchanged → changed: ")
    assert second["without"][:2] == (first["without"][0], "")
    # The second rank's groups are 1 and 3; both say so, and neither waits for the other.
    words = "without 4/1, 4/3: leaves too few groups of iteration 4, 2 + 0 on 2 ranks"
    assert first["too much"][0] == second["too much"][0] == 2
    assert words in first["too much"][2]
    said = first["bisect"][1].splitlines()
    assert said[0].startswith(("nothing found: eval/accuracy", "eval/accuracy drops with"))
    assert said[1].startswith("versions 2 → 4: ")
    assert second["bisect"][:2] == (first["bisect"][0], "")
    assert (first["audit"][0], second["audit"][0]) == (0, 0), first["audit"][1]
    said = first["audit"][1].splitlines()
    assert [line.endswith("bit for bit") for line in said[3:5]] == [True] * 2
    assert sum(" tokens equal, reward " in line for line in said) == 2
    assert second["audit"][1] == ""


def test_two_processes_make_a_pack_of_two_again(together, tiny_model, tmp_path):
    first, second = together(2, rerun, str(tiny_model))
    assert (first["pack"][0], second["pack"][0]) == (0, 0), first["pack"]
    assert (first["unpack"][0], second["unpack"][0]) == (0, 0), first["unpack"]
    assert first["unpack"][1].splitlines()[-1] == "equal to the bit"
    assert second["pack"][1] == second["unpack"][1] == ""
    about = extract_archive(first["step"], tmp_path / "parts")
    assert about["processes"] == 2
    shares = [RerunLog(tmp_path / "parts").rollouts(4, rank) for rank in range(2)]
    assert [len(share) for share in shares] == [GROUPS * GROUP_SIZE // 2] * 2


@slow
def test_a_sharded_run_is_packed_bisected_and_audited(together, tiny_model):
    """Whole weights are gathered by both, and one alone generates and pushes with them."""
    first, second = together(2, rerun, str(tiny_model), True)
    assert [first[name][0] for name in ("fit", "pack", "unpack", "audit")] == [0] * 4, first
    assert first["unpack"][1].splitlines()[-1] == "equal to the bit"
    assert first["bisect"][1].splitlines()[1].startswith("versions 2 → 4: ")
    assert sum(" tokens equal, reward " in line for line in first["audit"][1].splitlines()) == 2
    assert second["pack"][1] == second["bisect"][1] == second["audit"][1] == ""


@slow
def test_a_pack_of_two_processes_is_shrunk_as_one(together, tiny_model, tmp_path, capsys):
    step = together(2, rerun, str(tiny_model))[0]["step"]
    name = "state_dict.policy.lm.model.layers.1.mlp.up_proj.weight"
    broken = with_number(step, tmp_path, "checkpoint", name, 0, math.nan)
    small = tmp_path / "small.zip"
    told = ["--shrink", str(small), "--out", str(tmp_path / "run")]
    assert main(["unpack", str(broken), *told]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "one process trains on the rollouts of all 2"
    assert any(line.startswith("groups: 2 of 4 stay") for line in said)  # one for each minibatch
    assert extract_archive(small, tmp_path / "last")["processes"] == 1
    assert main(["unpack", str(small), "--run", "--out", str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "equal to the bit"


@slow
def test_one_process_says_what_it_needs_to_rerun_two(together, tiny_model, tmp_path):
    made = together(2, rerun, str(tiny_model))[0]
    run = shutil.copytree(made["run"], tmp_path / "run")
    text = (run / "config.yaml").read_text()
    text = text.replace("devices: 2", "devices: 1").replace("strategy: ddp", "strategy: auto")
    (run / "config.yaml").write_text(text)
    with pytest.raises(DataError, match=r"version 3 was trained by 2 processes, but this rerun "
                       r"has 1; rerun with as many: start it as the run was started"):  # fmt: skip
        rerun_iteration(RecordedRun(run), 3)
    with pytest.raises(DataError, match="holds no rollouts of rank 2 of iteration 1, only of iter"):
        RecordedRun(run).log.rollouts(1, rank=2)
