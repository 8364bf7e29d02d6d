"""Test what a resume keeps: averages, the best, and whose folder of checkpoints it is."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.cli import main
from tests.support.lightning_cases import added

SAVES = ["--data.iterations_per_epoch=2", "--trainer.enable_checkpointing=true"]


def fit(*options: str) -> int:
    return main(["fit", "--config", "good.yaml", *SAVES, *options])


def state(folder: str) -> dict:
    return torch.load(Path(folder, "last.ckpt"), weights_only=True)


@pytest.mark.parametrize("decay", ["", "decay: 0.5", "decay: 0.5, update_starting_at_step: 2"])
def test_an_average_goes_on(workplace, decay):
    """Four iterations at once, or two and two, give the same average and the same weights."""
    kind = "EMAWeightAveraging" if decay else "WeightAveraging"

    def run(folder: str, epochs: int, *more: str) -> None:
        kept = added("IterationCheckpoint", f"dirpath: {folder}")
        options = [kept, added(kind, decay), added("HFExport", f"directory: {folder}/hf")]
        assert fit(*options, f"--trainer.max_epochs={epochs}", *more) == 0

    run("whole", 2)
    run("parts", 1)
    first = state("parts")
    if "starting" in decay:  # the average has not begun, and is not where the run began
        torch.testing.assert_close(
            first["state_dict"], first["current_model_state"], rtol=0, atol=0
        )
    run("parts", 2, "--ckpt_path=last")
    whole, parts = state("whole"), state("parts")
    for key in ("state_dict", "current_model_state", "averaging_state"):
        torch.testing.assert_close(parts[key], whole[key], rtol=0, atol=0)
    weights = dict(AutoModelForCausalLM.from_pretrained("parts/hf").named_parameters())
    average = parts["state_dict"]
    for name, weight in weights.items():
        torch.testing.assert_close(weight.data, average[f"policy.lm.{name}"])
    assert any(
        not torch.equal(average[name], weight)
        for name, weight in whole["current_model_state"].items()
    )


def test_an_early_stop_goes_on(workplace):
    """The row that a resumed run writes first was recorded before, and is judged like any other."""
    stop = added("EarlyStopping", "monitor: reward/mean, mode: max, patience: 100")

    def judged(folder: str, *more: str) -> dict:
        options = f"dirpath: {folder}, every_n_iterations: 1, keep_last: 9"
        kept = added("IterationCheckpoint", options)
        assert fit(kept, stop, "--trainer.max_epochs=2", *more) == 0
        return next(v for k, v in state(folder)["callbacks"].items() if "EarlyStopping" in k)

    whole = judged("whole")
    assert judged("parts", "--ckpt_path=whole/iteration_1.ckpt") == whole


def test_an_average_that_never_begins_exports_the_last_weights(workplace, recwarn):
    ema = added("EMAWeightAveraging", "update_starting_at_step: 99")
    kept = added("IterationCheckpoint", "dirpath: kept")
    assert fit(ema, kept, added("HFExport", "directory: hf")) == 0
    last = state("kept")["current_model_state"]
    for name, weight in AutoModelForCausalLM.from_pretrained("hf").named_parameters():
        torch.testing.assert_close(weight.data, last[f"policy.lm.{name}"])
    assert any("EMAWeightAveraging averaged nothing" in str(one.message) for one in recwarn)


MONITORED = "monitor: reward/mean, mode: {}, dirpath: {}"


@pytest.mark.parametrize("saver", ["IterationCheckpoint", "ModelCheckpoint"])
def test_the_best_is_known_in_another_folder(workplace, saver):
    """The resumed run's rewards are all lower, so the best stays that of the run before."""
    (workplace / "falling.py").write_text(
        "from pathlib import Path\n"
        "def length(completions, **columns):\n"
        "    return [float(len(c)) - 100 * Path('later').exists() for c in completions]\n"
    )
    rewards = "--data.rewards=[falling.length]"
    best = added(saver, MONITORED.format("max", "first"))
    last = [] if saver == "IterationCheckpoint" else [added("IterationCheckpoint", "dirpath: ends")]
    assert fit(rewards, best, *last) == 0
    (workplace / "later").touch()
    again = added(saver, MONITORED.format("max", "second"))
    further = ["--trainer.max_epochs=2", f"--ckpt_path={'first' if not last else 'ends'}/last.ckpt"]
    assert fit(rewards, again, *[c.replace("ends", "others") for c in last], *further) == 0
    if saver == "IterationCheckpoint":
        found = Path("second/best.ckpt").resolve()
        assert found.parent == workplace / "first"
        assert found.is_file()
    else:
        assert list(Path("first").glob("*.ckpt"))
        assert not list(Path("second").glob("*.ckpt"))  # none was better


def test_a_second_run_replaces_nothing_of_the_first(workplace, capsys):
    kept = added("IterationCheckpoint", "dirpath: kept")
    assert fit(kept) == 0
    before = {path.name: path.read_bytes() for path in Path("kept").iterdir()}
    assert fit(kept) == 2
    assert "holds another run's checkpoints, such as iteration_2.ckpt" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path("kept").iterdir()} | {".lock": b""} == (
        before | {".lock": b""}
    )
    assert fit(kept, "--trainer.max_epochs=2", "--ckpt_path=last") == 0
    starts = json.loads(Path("kept/run.json").read_text())["starts"]
    assert [start["iteration"] for start in starts] == [0, 2]


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_a_refused_run_leaves_a_file_of_exceptions_alone(workplace, command, capsys):
    Path("failed").mkdir()
    Path("failed/on_exception.ckpt").write_bytes(b"kept")
    refused = added("OnExceptionCheckpoint", "dirpath: failed")
    assert main([command, "--config", "good.yaml", *SAVES, refused]) == 2
    assert "trainer.callbacks: OnExceptionCheckpoint: the next run" in capsys.readouterr().err
    assert Path("failed/on_exception.ckpt").read_bytes() == b"kept"
