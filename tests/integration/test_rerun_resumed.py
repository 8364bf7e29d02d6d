"""Test reruns of a run that was resumed with other settings: each iteration has its own again."""

import shutil
from pathlib import Path

import pytest

from lightning_rl.cli import main
from lightning_rl.cli.bisect.trials import Trials
from lightning_rl.cli.rerun.change import RerunChange
from lightning_rl.cli.rerun.compare import rerun_iteration
from lightning_rl.cli.rerun.rollouts import rerun_rollout
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.cli.rerun.what_if import what_if
from tests.support.recorded_run import stand_in, train

pytestmark = pytest.mark.usefixtures("there")

CHANGES = ("--model.optimizer.lr=0.02", "--model.lr_scheduler.total_steps=24")


@pytest.fixture(scope="module")
def whole(place, tiny_model) -> Path:
    """Run four iterations, and two more with other settings; versions 2, 4 and 6 are kept."""
    run = train(place, tiny_model, "--trainer.callbacks.keep_last=9")
    with pytest.MonkeyPatch.context() as patch:
        stand_in(place, patch)
        more = ("--data.iterations_per_epoch=2", "--trainer.max_epochs=2", "--ckpt_path=last")
        options = ("--trainer.callbacks.keep_last=9", *CHANGES, *more, "--allow_changes=true")
        assert main(["fit", "--config", "config.yaml", *options]) == 0
    assert (run / "config_4.yaml").is_file()
    return run


@pytest.fixture(scope="module")
def rotated(whole, tmp_path_factory) -> Path:
    """Return the same without the checkpoint from which it was resumed."""
    run = shutil.copytree(whole, tmp_path_factory.mktemp("rotated") / "run", symlinks=True)
    (run / "checkpoints" / "iteration_4.ckpt").unlink()
    return run


@pytest.mark.parametrize(
    ("which", "iteration", "since", "begun"),
    [
        ("whole", 6, None, 4),
        ("whole", 6, 0, 0),
        ("rotated", 5, None, 2),
        ("rotated", 6, None, 2),
        ("rotated", 4, None, 2),
    ],
)
def test_iterations_have_the_settings_that_they_had(request, which, iteration, since, begun):
    rerun = rerun_iteration(RecordedRun(request.getfixturevalue(which)), iteration, since)
    assert rerun.equal, rerun.lines()
    assert rerun.kept.version == begun


@pytest.mark.parametrize("which", ["whole", "rotated"])
@pytest.mark.parametrize("iteration", [5, 6])
def test_packs_hold_the_settings_of_their_update(request, which, iteration, tmp_path, capsys):
    run = request.getfixturevalue(which)
    pack = str(tmp_path / "pack.zip")
    assert main(["pack", str(run), "--iteration", str(iteration), "--out", pack]) == 0
    assert "equal" in capsys.readouterr().out.splitlines()


def test_what_is_left_out_before_and_after_the_change_is_trained_with_both(rotated):
    found = what_if(RecordedRun(rotated), RerunChange(("4/1",)), to=6)
    assert (found.first, found.plain.kept.version, found.not_reproduced) == (4, 2, None)
    assert found.changed.outcomes.keys() == {2, 3, 4, 5, 6}


def test_rollouts_are_generated_with_the_weights_of_any_version(rotated):
    run = RecordedRun(rotated)
    for iteration in (5, 6):  # by the version from which the run was resumed, and by the next
        [rerun] = rerun_rollout(run, run.log.rollouts(iteration)[1].id)
        assert rerun.equal, rerun.lines()
        assert not rerun.weights_differ


def test_a_bisection_trains_again_across_the_change(rotated):
    made = Trials(RecordedRun(rotated), "accuracy", 600.0).batches(4, 6)
    recorded = RecordedRun(rotated).log.outcomes()
    assert [made.outcomes[v].weights == recorded[v].weights for v in (4, 5, 6)] == [True] * 3


def test_an_audit_repeats_all_of_them(whole, capsys):
    assert main(["audit", str(whole), "--share", "1"]) == 0, capsys.readouterr().out
