"""Test reruns: recorded rollouts and iterations done again, and every difference found."""

import json
import logging
import shutil

import pytest

from lightning_rl.cli import main
from lightning_rl.cli.rerun.compare import rerun_iteration
from lightning_rl.cli.rerun.rollouts import rerun_rollout
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.data.rollouts.log import Outcome, RerunLog
from lightning_rl.data.rollouts.parquet import ParquetRollouts
from lightning_rl.errors import DataError
from lightning_rl.models.policy import Policy
from tests.support.engine_checks import ROUNDING
from tests.support.recorded_run import train

pytestmark = pytest.mark.usefixtures("there")


@pytest.fixture
def run(finished, tmp_path) -> RecordedRun:
    """Return a copy, to be tampered with."""
    return RecordedRun(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def test_every_iteration_is_trained_again_bit_by_bit(finished, caplog):
    caplog.set_level(logging.INFO)
    run = RecordedRun(finished)
    assert [kept.version for kept in run.kept] == [0, 2, 4]
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    whole = rerun_iteration(run, 4, since=0)  # all four; every version's checksums are compared
    nearest = rerun_iteration(run, 3)
    for rerun, version in ((whole, 0), (nearest, 2)):
        assert rerun.kept.version == version
        assert rerun.equal, rerun.lines()
        assert {"policy/loss", "policy/grad_norm", "policy/kl_ref"} <= rerun.again.metrics.keys()
    assert (whole.checkpoint.version, nearest.checkpoint) == (4, None)
    assert "Results are in" not in caplog.text  # in a scratch folder that is gone
    # Nothing is written into the run.
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_changed_reward_or_weight_is_found(run):
    file = run.log.path / "iteration-000003-000.parquet"
    rollouts = [recorded.rollout for recorded in ParquetRollouts(file).read()]
    rollouts[0].reward += 1e-3
    run.log.write_rollouts(3, 0, rollouts)
    rerun = rerun_iteration(run, 4)
    assert rerun.diverged_at == 3  # the weights that iteration 3 makes
    assert not rerun.equal
    assert rerun.checkpoint_differs == "policy.lm.model.embed_tokens.weight"
    lines = rerun.lines()
    assert "weight tensors  differ since version 3, now first in lm.model" in lines[-3]
    assert lines[-1] == "different"


def test_a_rollout_is_generated_again(finished, capsys):
    run = RecordedRun(finished)
    recorded = run.log.rollouts(4)[5]  # by version 3, made again from version 2
    [rerun] = rerun_rollout(run, recorded.id)
    assert (rerun.version, rerun.generated) == (3, True)
    assert rerun.again.token_ids == recorded.token_ids
    assert rerun.again.versions == recorded.versions
    assert rerun.equal
    assert not rerun.weights_differ
    assert rerun.gap < ROUNDING
    said = rerun.lines()
    assert said[1] == (
        "weights of version 3: checkpoint iteration_2.ckpt (version 2) and 1 iterations trained "
        "again"
    )
    count = len(recorded.token_ids)
    assert said[2].startswith(f"equal: {count} of {count} tokens, logprobs within ")


@pytest.mark.slow
def test_weights_that_were_trained_in_16_bits_are_made_so_again(place, tiny_model):
    run = RecordedRun(train(place, tiny_model, "--trainer.precision=bf16-true"))
    for iteration in (3, 4):  # by version 2, which was kept, and by one that is trained again
        [rerun] = rerun_rollout(run, run.log.rollouts(iteration)[1].id)
        assert rerun.equal, rerun.lines()
        assert not rerun.weights_differ


def test_the_first_other_token_is_named(run, capsys):
    rollouts = run.log.rollouts(1)
    chosen = next(r for r in rollouts if len(r.token_ids) >= 4)
    was = chosen.token_ids[2]
    chosen.token_ids[2] = 3 if was != 3 else 4  # the digit 0, or 1
    run.log.write_rollouts(1, 0, rollouts)
    assert main(["rerun", str(run.path), "--rollout", chosen.id]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"different from token 2 on: recorded {chosen.token_ids[2]} ")
    assert f"again {was} " in last


@pytest.mark.slow
def test_a_rollout_of_two_versions_is_scored_with_each(run):
    """The right weights score each: version 1 its first token, version 3 the others."""
    rollouts = run.log.rollouts(4)
    chosen = next(r for r in rollouts if len(r.token_ids) >= 3)
    earlier = next(rerun_rollout(run, chosen.id, version=1)).again.logprobs
    assert abs(earlier[0] - chosen.logprobs[0]) > 1e-3  # else nothing would be tested
    chosen.versions[0], chosen.logprobs[0] = 1, earlier[0]
    run.log.write_rollouts(4, 0, rollouts)
    first, second = rerun_rollout(run, chosen.id)
    assert (first.version, second.version) == (1, 3)
    assert not first.generated
    assert first.gap < ROUNDING
    assert first.lines()[-1].startswith("1 tokens are of this version: logprobs within ")
    assert second.gap < ROUNDING


def test_what_was_not_kept_is_said(run, capsys):
    with pytest.raises(DataError, match=r"no rollout '9/9/9/9', but others, such as '4/2/"):
        next(rerun_rollout(run, "9/9/9/9"))
    with pytest.raises(DataError, match=r"iteration 5 \(recorded: 0, 1, 2, 3, 4\)"):
        rerun_iteration(run, 5)
    (run.log.path / "iteration-000003-000.parquet").unlink()
    assert main(["rerun", str(run.path), "--iteration", "4"]) == 2
    said = capsys.readouterr().err
    assert "weights of version 4 cannot be rebuilt: the run kept versions 0, 2, 4" in said
    with pytest.raises(DataError, match="holds no rollouts of iteration 3"):
        run.log.rollouts(3)
    (run.path / "config.yaml").unlink()
    assert main(["rerun", str(run.path), "--iteration", "1"]) == 2
    assert "holds no config.yaml" in capsys.readouterr().err


def test_exported_models_are_told_from_runs(run, tiny_model, tmp_path, capsys):
    """A run may begin with one; it cannot be gone on with from one."""
    policy = Policy(str(tiny_model))
    next(policy.parameters()).data.add_(0.01)
    policy.save_pretrained(run.path / "hf")
    assert main(["rerun", str(run.path / "hf"), "--iteration", "1"]) == 2
    assert "is an exported model, which has weights but no optimizer" in capsys.readouterr().err
    for file in (run.path / "checkpoints").glob("*.ckpt"):
        file.unlink()
    (run.log.path / "iteration-000001-000.parquet").unlink()
    again = RecordedRun(run.path)
    with pytest.raises(
        DataError, match="and the next; the exports of HFExport have no optimizer state"
    ):
        rerun_iteration(again, 4)


@pytest.mark.slow
def test_a_model_that_changed_since_is_found(run, tiny_model, tmp_path):
    policy = Policy(str(tiny_model))
    next(policy.parameters()).data.add_(0.01)
    policy.save_pretrained(tmp_path / "model")
    text = run.config.read_text()
    run.config.write_text(text.replace(f"model: {tiny_model}", f"model: {tmp_path / 'model'}"))
    rerun = rerun_iteration(run, 1)
    assert rerun.diverged_at == 0
    assert not rerun.equal
    said = "differ from the start: the initial weights changed since the run"
    assert any(line.endswith(said) for line in rerun.lines())


def test_iterations_after_a_change_of_configuration_are_trained_again(place, tiny_model):
    """The run went on from version 2 with another learning rate, as it was permitted to."""
    lr, epoch = "model.optimizer.lr", "--data.iterations_per_epoch=2"
    train(place, tiny_model, epoch)
    changed = [f"--{lr}=0.02", "--trainer.max_epochs=2"]
    resumed = ["--ckpt_path=last", f"--allow_changes=[{lr}]"]
    run = RecordedRun(train(place, tiny_model, epoch, *changed, *resumed))
    assert rerun_iteration(run, 3).equal
    assert rerun_iteration(run, 2, since=0).equal
    [(version, changes)] = run.changes(1, 4).items()
    assert (version, list(map(str, changes))) == (2, [f"{lr}: 0.01 then, 0.02 now"])
    assert run.changes(1, 2) == run.changes(3, 4) == {}


def test_how_far_it_goes_back_and_what_that_took_is_said_first(run, capsys):
    rows = [
        {"iteration": n, "time/train": seconds} for n, seconds in ((1, 1.5), (2, 2.0), (3, 9.0))
    ]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rerun_iteration(run, 2)
    words = "version 2: 2 iterations are trained again, from the initial weights (version 0) on, "
    assert f"{words}whose updates took 3.5 s" in capsys.readouterr().err


def test_options_that_do_not_go_together(capsys):
    for options, words in (
        (["--iteration", "1", "--version", "2"], "--version 2 requires --rollout"),
        (["--rollout", "x", "--since", "2"], "--since 2 requires --iteration"),
        (["--iteration", "-1"], "iteration=-1 must be >= 1"),
        ([], "one of the arguments --rollout --iteration --to is required"),
    ):
        assert main(["rerun", "somewhere", *options]) == 2
        assert words in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_used(run):
    file = run.path / "checkpoints" / "iteration_2.ckpt"
    file.write_bytes(file.read_bytes()[:-1000])
    assert [kept.version for kept in run.kept] == [0, 4]
    assert run.nearest(3, latest=2).version == 0


# ------------------------------------------------------------------------------- the log itself


def test_a_run_that_goes_on_forgets_what_lay_ahead(tmp_path, make_rollout):
    log = RerunLog(tmp_path)
    for iteration in range(1, 4):
        log.write_rollouts(iteration, 0, [make_rollout([3], [4, 1], group_id=f"{iteration}/0/p")])
        log.write_outcome(Outcome(iteration, {"w": "aa"}, {"policy/loss": 0.5}))
    log.forget_after(1)
    assert log.iterations() == {1}
    assert log.outcomes() == {1: Outcome(1, {"w": "aa"}, {"policy/loss": 0.5})}
    log.write_outcome(Outcome(1, {"w": "aa"}, {"eval/accuracy": 0.25}))  # what its first sync adds
    with (log.path / "versions.jsonl").open("a") as lines:
        lines.write('{"version": 2, "wei')  # killed here
    both = {"policy/loss": 0.5, "eval/accuracy": 0.25}
    assert log.outcomes() == {1: Outcome(1, {"w": "aa"}, both)}
    [kept] = log.rollouts(1)
    assert (kept.id, kept.token_ids) == ("1/0/p/0", [4, 1])


def test_rollouts_come_back_as_they_were(finished):
    log = RerunLog(finished)
    assert log.iterations() == {1, 2, 3, 4}
    assert [len(log.rollouts(i)) for i in range(1, 5)] == [12] * 4
    assert sorted(log.outcomes()) == [0, 1, 2, 3, 4]
