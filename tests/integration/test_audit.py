"""Test audits: a run that is as it was comes out again, and every forgery is found."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl.callbacks import RLCallback
from lightning_rl.cli import main
from lightning_rl.cli.audit.claims import Claims
from lightning_rl.cli.audit.examination import examine
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.data.rollouts.ledger import Ledger, hash_of
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.data.rollouts.seals import seal_of
from lightning_rl.run.files.checkpoint_io import write_checkpoint
from tests.support.hostile.forged_runs import FOUND, agree, chain_anew, rechained_ledger
from tests.support.recorded_run import make_place, stand_in, train

pytestmark = pytest.mark.usefixtures("there")


@pytest.fixture(scope="module")
def finished(place, tiny_model) -> Path:
    return train(place, tiny_model, "--trainer.callbacks+=PreviewTable")


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """Return a copy, to be tampered with."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def audit(run: Path, capsys, *options: str) -> tuple[int, list[str]]:
    status = main(["audit", str(run), *options])
    told = capsys.readouterr()
    return status, (told.out + told.err).splitlines()


class RaisesRewards(RLCallback):
    """Pays a rollout of each batch what its reward function did not."""

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        rollouts[0].reward += 0.5


def fails(trainer_state, completions, **columns):
    assert trainer_state.global_step < 2
    return [0.5] * len(completions)


def test_every_iteration_and_a_rollout_of_each_come_out_again(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    status, lines = audit(finished, capsys, "--share", "1", "--seed", "3")
    assert status == 0, lines
    # A start, its metrics, four iterations, the checkpoints of versions 2 and 4, and the end.
    assert lines[0].startswith("ledger: 9 entries, one chain; 4 iterations, 1 start, 2 checkpoints")
    assert [line.endswith("bit for bit") for line in lines[3:7]] == [True] * 4
    assert [" tokens equal, reward " in line for line in lines[7:11]] == [True] * 4
    assert lines[11] == "nothing was changed"
    assert lines[12].startswith("version 1: 1 iteration is trained again, from the initial weights")
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


@pytest.mark.slow
def test_a_share_is_drawn_and_can_be_drawn_again(finished, capsys):
    options = ("--share", "0.5", "--rollouts", "0")
    drawn = [audit(finished, capsys, *options, "--seed", str(seed))[1][3:5] for seed in (0, 1, 0)]
    assert drawn[0] == drawn[2]
    assert all("equal" in line for two in drawn for line in two)


def change_reward(run: Path) -> None:
    rollouts = RerunLog(run).rollouts(3)
    rollouts[0].reward += 1e-3
    RerunLog(run).write_rollouts(3, 0, rollouts)


def change_token(run: Path) -> None:
    rollouts = RerunLog(run).rollouts(2)
    rollouts[1].rows[0].token_ids[0] ^= 1
    RerunLog(run).write_rollouts(2, 0, rollouts)


def remove_rollouts(run: Path) -> None:
    (run / "rerun" / "iteration-000001-000.parquet").unlink()


def change_line(run: Path, version: int, field: str) -> None:
    file = run / "rerun" / "versions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    row = next(row for row in rows if row["version"] == version)
    name = sorted(row[field])[0]
    row[field][name] = "0" * 16 if field == "weights" else row[field][name] + 1e-6
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_checkpoint(run: Path) -> None:
    """Change a checkpoint so that it is whole, and has a checksum of its own."""
    file = run / "checkpoints" / "iteration_2.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    checkpoint["state_dict"]["policy.lm.model.embed_tokens.weight"][0, 0] += 1e-6
    write_checkpoint(checkpoint, file)


def flip_a_bit(run: Path) -> None:
    file = run / "checkpoints" / "iteration_4.ckpt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_configuration(run: Path) -> None:
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("lr: 0.01", "lr: 0.02"))


@pytest.mark.parametrize(
    ("forge", "found"),
    [
        (change_reward, "rerun/iteration-000003-000.parquet is not what iteration 3 was trained"),
        (change_token, "rerun/iteration-000002-000.parquet is not what iteration 2 was trained"),
        (
            remove_rollouts,
            "rerun/iteration-000001-000.parquet, which iteration 1 was trained on, i",
        ),
        (lambda run: change_line(run, 3, "metrics"), "the recorded metrics of iteration 3 were ch"),
        (lambda run: change_line(run, 2, "weights"), "the recorded checksums of version 2 were ch"),
        (change_checkpoint, "checkpoints/iteration_2.ckpt is not the checkpoint that the run sav"),
        (flip_a_bit, "checkpoints/iteration_4.ckpt was changed: its content has changed since"),
        (change_configuration, "config.yaml is not what the run was started with"),
    ],
)
def test_whatever_was_changed_is_named(run, capsys, forge, found):
    forge(run)
    status, lines = audit(run, capsys, "--share", "0")
    assert status == 1
    [changed] = [line for line in lines if line.startswith("CHANGED: ")]
    assert changed.startswith(f"CHANGED: {found}")
    assert lines[-1] == "CHANGED"


@pytest.mark.parametrize("forge", FOUND, ids=lambda forge: forge.__name__)
def test_every_forgery_is_found(run, capsys, forge):
    head = Ledger(run).head
    forge(run)
    noted = ["--head", head] if forge is rechained_ledger else []
    status, lines = audit(run, capsys, "--share", "0", *noted)
    assert status in (1, 2)
    assert [line for line in lines if FOUND[forge] in line], lines
    assert not [c for line in lines for c in line if c < " "]


def test_no_field_that_other_files_tell_can_be_forged_with_the_ledger(run):
    """Each is changed alone, in the last of its file's objects, with the digest that agrees."""
    records = examine(RecordedRun(run))
    assert not records.changed
    own = {"cpu_s", "wall_s", "model", "device", "stopped_early", "alarms"}
    forged = 0
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json"):
        file = run / name
        text = file.read_text()
        *lines, last = text.splitlines(keepends=True) if name.endswith("l") else [text]
        for path in paths_in(json.loads(last)):
            if path[0] in own:
                continue
            row = json.loads(last)
            place = row
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = other_than(place[path[-1]])
            file.write_text("".join(lines) + json.dumps(row) + "\n")
            records.files[name] = seal_of(file) or {}
            changed = list(Claims(RecordedRun(run), records).contradictions())
            assert changed, (name, path)
            assert all(line.startswith(name) for line in changed), (path, changed)
            assert path == ("iteration",) or str(path[0]) in " ".join(changed), (path, changed)
            forged += 1
        file.write_text(text)
        records.files[name] = seal_of(file) or {}
    assert forged > 100
    agree(run)
    assert not examine(RecordedRun(run)).changed


AS_NOBODY_FORGED = {
    "all kinds of rows": [
        *("--trainer.callbacks+=Evaluate", "--trainer.callbacks.every_n_iterations=1"),
        *("--data.evaluation.prompts=JSONLPrompts", "--data.evaluation.prompts.path=train.jsonl"),
        *("--trainer.callbacks+=RolloutRecorder", "--trainer.callbacks+=PreviewTable"),
    ],
    "filters": ["--trainer.callbacks+=PreviewTable", "--data.selection.filters+=RewardSpread"],
    "a buffer": [
        *("--trainer.callbacks+=PreviewTable", "--data.buffer=ReplayBuffer"),
        *("--data.buffer.path=buffer.sqlite", "--data.buffer.capacity=6"),
        *("--data.buffer.max_staleness=4", "--model.correction=TokenTIS"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("options", AS_NOBODY_FORGED.values(), ids=AS_NOBODY_FORGED.keys())
def test_resumed_runs_and_further_runs_in_their_place_contradict_nothing(
    tmp_path, tiny_model, monkeypatch, options
):
    run = train(make_place(tmp_path), tiny_model, *options)
    stand_in(tmp_path, monkeypatch)
    here = ["--trainer.logger.init_args.save_dir=runs", "--trainer.logger.version=version_0"]
    resumed = ["--ckpt_path", str(run / "checkpoints" / "iteration_2.ckpt")]
    for more in ([], resumed, [*resumed, *here], here):
        if more:
            assert main(["fit", "--config", "config.yaml", *options, *more]) == 0
        for one in run.parent.iterdir():
            assert not examine(RecordedRun(one)).changed


def test_a_run_that_stopped_early_or_failed_contradicts_nothing(tmp_path, tiny_model, monkeypatch):
    make_place(tmp_path)
    stop = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=reward/mean"]
    stopped = train(tmp_path, tiny_model, *stop, "--trainer.callbacks.stopping_threshold=0.5")
    stand_in(tmp_path, monkeypatch)
    failing = [
        "--trainer.callbacks+=PreviewTable",
        "--data.rewards=[tests.integration.test_audit.fails]",
    ]
    assert main(["fit", "--config", "config.yaml", *failing]) == 1
    failed = stopped.with_name("version_1")
    for run, status in ((stopped, "completed"), (failed, "failed")):
        assert json.loads((run / "summary.json").read_text())["status"] == status
        assert not examine(RecordedRun(run)).changed


def paths_in(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values that hold no others."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        inner = list(paths_in(part)) if isinstance(part, dict | list) else []
        yield from [(key, *rest) for rest in inner] or [(key,)]


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"not {value}"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"kind": 3}, "it is of kind 3"),
        ({"kind": "x" * 99}, "it is of kind 'xxx"),
        ({"version": None}, "version of 'iteration' is None"),
        ({"version": True}, "version of 'iteration' is True"),
        ({"rollouts": ["a"]}, "rollouts of 'iteration' is ['a']"),
        ({"rollouts": {"a": 1}}, "rollouts of 'iteration' are not digests"),
        ({"metrics": {}}, "metrics of 'iteration' is {}"),
        ({"files": 3}, "files of 'iteration' are not digests"),
        ({"files": {"metrics.jsonl": {"bytes": -1, "sha256": ""}}}, "files of 'iteration' are no"),
    ],
)
def test_an_entry_that_no_run_writes_is_named(run, capsys, change, what):
    chain_anew(run, lambda e: e.update(change) if e["kind"] == "iteration" else None)
    status, lines = audit(run, capsys, "--share", "0")
    assert status == 2
    assert f"is not an entry that a run writes: {what}" in lines[-1]


def test_a_run_that_was_told_to_go_on_where_nothing_was_comes_out_again(
    tmp_path, tiny_model, monkeypatch, capsys
):
    run = train(make_place(tmp_path), tiny_model, "--ckpt_path", "last")
    stand_in(tmp_path, monkeypatch)
    status, lines = audit(run, capsys, "--share", "1", "--rollouts", "0")
    assert status == 0, lines
    assert any(line.startswith("iteration 1, from the initial weights: eq") for line in lines)


def test_a_changed_ledger_is_no_chain(run, capsys):
    file = run / "ledger.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    entry = json.loads(lines[2])
    entry["weights_after"] = "0" * 64
    forged = [*lines[:2], json.dumps(entry) + "\n", *lines[3:]]
    entry["hash"] = hash_of(entry)
    rehashed = [*lines[:2], json.dumps(entry) + "\n", *lines[3:]]
    for text, words in (
        (forged, "ledger.jsonl:3 was changed: its hash does not match"),
        (rehashed, "ledger.jsonl:4 does not follow the line before"),
        (lines[:1] + lines[2:], "ledger.jsonl:2 does not follow the line before"),
        ([lines[1], lines[0], *lines[2:]], "ledger.jsonl:1 does not follow the line before"),
        ([*lines[:3], "no entry\n", *lines[3:]], "ledger.jsonl:4 is not an entry"),
    ):
        file.write_text("".join(text))
        status, told = audit(run, capsys, "--share", "0")
        assert (status, words in told[-1]) == (2, True), told


def test_a_ledger_that_was_written_anew_does_not_lead_through_the_head(run, finished, capsys):
    heads = [entry["hash"] for entry in Ledger(finished).entries()]
    for head in (heads[-1], heads[3][:16]):
        assert audit(run, capsys, "--share", "0", "--head", head)[0] == 0
    rechained_ledger(run)
    assert audit(run, capsys, "--share", "0")[0] == 0  # the files are as they were
    status, lines = audit(run, capsys, "--share", "0", "--head", heads[-1])
    assert status == 2
    assert f"does not contain --head {heads[-1]}" in lines[-1]


@pytest.mark.slow
def test_rewards_that_no_function_paid_are_found_by_grading_again(place, tiny_model, capsys):
    callback = "--trainer.callbacks+=tests.integration.test_audit.RaisesRewards"
    forged = train(place, tiny_model, callback)
    status, lines = audit(forged, capsys, "--share", "1", "--rollouts", "12")
    assert status == 1
    assert sum("bit for bit" in line for line in lines) == 4  # training used what was recorded
    found = [line for line in lines if "when it is graded again" in line]
    assert len(found) == 4
    assert all("DIFFERENT, reward was " in line for line in found)


@pytest.mark.slow
def test_an_iteration_made_twice_after_a_resume_came_out_the_same(run, place, capsys):
    """The run goes on from version 2 and makes versions 3 and 4 once more."""
    checkpoint = run / "checkpoints" / "iteration_2.ckpt"
    assert _go_on(run, checkpoint) == 0
    capsys.readouterr()
    status, lines = audit(run, capsys, "--share", "0")
    assert status == 0, lines
    assert "4 iterations, 2 starts" in lines[0]
    assert lines[1] == "2 iterations were trained twice, after a resume: each with the same result"


@pytest.mark.slow
def test_going_on_from_a_changed_checkpoint_is_found(run, capsys):
    change_checkpoint(run)
    assert _go_on(run, run / "checkpoints" / "iteration_2.ckpt") == 0
    capsys.readouterr()
    status, lines = audit(run, capsys, "--share", "0")
    assert status == 1
    words = "CHANGED: the run resumed from version 2 with other weights than iteration 2 ended with"
    assert any(line.startswith(words) for line in lines)


def _go_on(run: Path, checkpoint: Path) -> int:
    logger = ["--trainer.logger.init_args.save_dir", str(run.parent)]
    logger += ["--trainer.logger.init_args.version", run.name]
    return main(["fit", "--config", "config.yaml", "--ckpt_path", str(checkpoint), *logger])


def test_what_a_kill_left_of_a_line_is_removed(run, capsys):
    ledger = Ledger(run)
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + b'{"kind": "iter')
    assert [entry["hash"] for entry in ledger.entries()][-1] == ledger.head
    again = Ledger(run)
    again.append("metrics", version=4, metrics="0" * 64)
    assert again.path.read_bytes().startswith(whole)
    assert len(again.entries()) == 10


def test_options_out_of_range(capsys):
    for options, words in (
        (["--share", "2"], "--share 2 must be in [0, 1]"),
        (["--head", "abc"], "--head abc must be at least 16 of the 64 digits of a hash"),
        (["--rollouts", "-1"], "rollouts=-1 must be >= 0"),
    ):
        assert main(["audit", "somewhere", *options]) == 2
        assert words in capsys.readouterr().err


def test_a_run_without_a_ledger_is_told_so(run, capsys):
    (run / "ledger.jsonl").unlink()
    status, lines = audit(run, capsys)
    assert status == 2
    assert "has no ledger.jsonl, which RerunRecorder writes" in lines[-1]


def test_a_changed_configuration_is_refused_by_the_checkpoint_it_does_not_fit(run, capsys):
    config = run / "config.yaml"
    text = config.read_text()
    assert "coef: 0.1" in text
    config.write_text(text.replace("coef: 0.1", "coef: 0.2"))
    main(["audit", str(run), "--share", "1"])
    said = "".join(capsys.readouterr())
    assert "checkpoints/iteration_2.ckpt cannot be resumed" in said
    assert "coef: 0.1 then, 0.2 now: the run was trained with the old values; restore" in said
    assert "None cannot" not in said
    with pytest.raises(SystemExit, match="0"):
        main(["audit", "--help"])
    options = {*re.findall(r"--[a-z_]+", capsys.readouterr().out)}
    assert {*re.findall(r"--[a-z_]+", said)} <= options
