"""Test RolloutRecorder: what it writes is what training used."""

import json

import pytest
import torch

from lightning_rl.algos.advantages import GAE
from lightning_rl.callbacks import (
    PreviewTable,
    RerunRecorder,
    RLCallback,
    RolloutRecorder,
    WeightSync,
)
from lightning_rl.cli.view.flags import find_flags
from lightning_rl.collect.loader import RolloutLoader
from lightning_rl.data.batch import token_rows
from lightning_rl.data.rollouts.files import as_record, open_rollouts
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.data.rollouts.validation import whole
from lightning_rl.errors import ConfigError
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.module import PolicyModule
from lightning_rl.rollout import RolloutStatus
from tests.support.grouped import grouped
from tests.support.small_run import data_module, numbers, trainer_of


def fit(tiny_model, tmp_path, *callbacks, iterations=2, **module) -> list[dict]:
    """Train for some iterations of 3 groups of 4; the lines of recorded.jsonl."""
    data = data_module(
        train_prompts=numbers(100, 120, seed=1),
        evaluation=None,
        group_size=4,
        groups_per_iteration=3,
        iterations_per_epoch=iterations,
    )
    trainer = trainer_of(tmp_path, [WeightSync(), *callbacks])
    optimizer = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)}
    trainer.fit(PolicyModule(str(tiny_model), **grouped(seed=7, **(optimizer | module))), data)
    file = tmp_path / "csv" / "version_0" / "recorded.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Used(RLCallback):
    """Advantages of each iteration's batch, per rollout, as the update got them."""

    def __init__(self) -> None:
        self.advantages: list[list[float]] = []

    def on_update_start(self, trainer, pl_module, batch) -> None:
        rows = token_rows(batch)
        for row in range(len(batch["rollouts"])):
            whole = batch["tokens", "advantages"][rows == row].tolist()
            self.advantages.append(whole[batch["rollouts", "prompt_length"][row] :])


# Old logprobs are known with two minibatches, not with one; a critic adds its columns.
@pytest.mark.parametrize("minibatches", [1, 2])
def test_every_token_is_recorded_as_it_was_used(tiny_model, tmp_path, minibatches):
    used = Used()
    records = fit(
        tiny_model, tmp_path, used, RolloutRecorder(num_groups=None), minibatches=minibatches
    )
    assert [r["iteration"] for r in records] == [1] * 12 + [2] * 12
    assert len({r["id"] for r in records}) == 24
    assert [r["rows"][0]["advantages"] for r in records] == used.advantages
    # On policy, so the trainer's logprobs before the update are the engine's: after it they would
    # differ by much more (lr 1e-2), as would zeros.
    for record in records:
        [row] = record["rows"]
        assert row["trainer_logprobs"] == pytest.approx(row["logprobs"], abs=1e-4)
        assert find_flags(record) == {}
        # A completion's text is without special tokens.
        text = "".join(row["pieces"]).replace("<eos>", "").replace("<pad>", "")
        assert text == record["completion"]
        assert "".join(row["prompt_pieces"]) == record["prompt"]["prompt"]


def test_a_critic_adds_its_values(tiny_model, tmp_path):
    records = fit(
        tiny_model,
        tmp_path,
        RolloutRecorder(),
        iterations=1,
        advantage=GAE(),
        critic=SharedValueHead(),
    )
    for record in records:
        # Advantages are whitened after returns were made, so these two are enough.
        [row] = record["rows"]
        assert len(row["values"]) == len(row["returns"]) == len(row["token_ids"])
        assert row["returns"][-1] == pytest.approx(record["reward"], abs=1e-5)  # lambda is 1


def test_engine_logprobs_that_are_trusted_are_still_compared(tiny_model, tmp_path):
    class Shifted(RLCallback):
        def on_collect_end(self, trainer, pl_module, rollouts) -> None:
            for rollout in rollouts:
                rollout.rows[0].logprobs = [logprob - 2 for logprob in rollout.logprobs]

    records = fit(
        tiny_model, tmp_path, Shifted(), RolloutRecorder(), iterations=1, use_rollout_logprobs=True
    )
    for record in records:
        [row] = record["rows"]
        gaps = zip(row["trainer_logprobs"], row["logprobs"], strict=True)
        assert [a - b for a, b in gaps] == pytest.approx([2.0] * len(row["pieces"]), abs=1e-4)
        assert list(find_flags(record)) == ["gap"]


def test_whole_groups_every_so_often(tiny_model, tmp_path):
    recorder = RolloutRecorder(num_groups=2, every_n_iterations=2)
    records = fit(tiny_model, tmp_path, recorder, iterations=3)
    assert [r["iteration"] for r in records] == [1] * 8 + [3] * 8
    assert len({r["group_id"] for r in records}) == 4


def test_what_failed_is_recorded_whatever_its_group(tiny_model, tmp_path):
    class Break(RLCallback):
        def on_collect_end(self, trainer, pl_module, rollouts) -> None:
            rollouts[-1].status, rollouts[-1].reward = RolloutStatus.FAILED, None
            rollouts[-1].error = "boom"

    records = fit(tiny_model, tmp_path, Break(), RolloutRecorder(num_groups=1), iterations=1)
    assert len(records) == 5
    assert records[-1]["error"] == "boom"
    *others, failed = (record["rows"][0] for record in records)
    assert "trainer_logprobs" not in failed
    assert "advantages" not in failed
    assert all("trainer_logprobs" in row for row in others)
    assert find_flags(records[-1]) == {"failed": []}


def test_recording_changes_nothing(tiny_model, tmp_path):
    class Weights(RLCallback):
        def on_train_end(self, trainer, pl_module) -> None:
            self.weights = [p.detach().clone() for p in pl_module.parameters()]

    plain, recorded = Weights(), Weights()
    assert fit(tiny_model, tmp_path / "a", recorded, RolloutRecorder(), iterations=1, minibatches=3)
    assert not fit(tiny_model, tmp_path / "b", plain, iterations=1, minibatches=3)
    assert all(map(torch.equal, plain.weights, recorded.weights))


def test_without_a_data_module_it_says_so(tiny_model, train_on, random_batch):
    with pytest.raises(ConfigError, match="not Batches; remove it, or train with an RLDataModule"):
        train_on(PolicyModule(str(tiny_model)), [random_batch(0)], callbacks=[RolloutRecorder()])


def test_bounds():
    with pytest.raises(ConfigError, match="num_groups=0 must be >= 1"):
        RolloutRecorder(num_groups=0)


def test_after_a_resume_the_pending_rollouts_are_recorded(make_rollout):
    class Source:
        def state_dict(self) -> dict:
            return {}

        def load_shares(self, states: list[dict]) -> None:
            pass

    def loader() -> RolloutLoader:
        failed = make_rollout([3], [1], reward=None, status=RolloutStatus.FAILED, sample_index=1)
        return RolloutLoader(lambda i: [make_rollout([3], [1]), failed], Source(), 2, lambda: 0)

    interrupted = loader()
    next(iter(interrupted))
    resumed = RolloutLoader(lambda i: pytest.fail("collected again"), Source(), 2, lambda: 0)
    resumed.load_state_dict(interrupted.state_dict())
    next(iter(resumed))
    assert [r.status.value for r in resumed.current] == ["completed", "failed"]


def test_every_file_of_a_run_holds_its_rollouts_in_the_same_form(tiny_model, tmp_path):
    class Collected(RLCallback):
        def __init__(self) -> None:
            self.rollouts = []

        def on_collect_end(self, trainer, pl_module, rollouts) -> None:
            self.rollouts += [(pl_module.present_iteration, rollout) for rollout in rollouts]

    collected = Collected()
    recorders = [PreviewTable(num_rollouts=3), RolloutRecorder(num_groups=None), RerunRecorder()]
    fit(tiny_model, tmp_path, collected, *recorders)
    run = tmp_path / "csv" / "version_0"
    log, recorded = RerunLog(run), open_rollouts(run / "recorded.jsonl")
    assert [(i, rollout) for i in (1, 2) for rollout in log.rollouts(i)] == collected.rollouts
    assert [(r.iteration, r.rollout) for r in recorded.read()] == collected.rollouts
    shown = [(r.iteration, r.rollout) for r in open_rollouts(run / "rollouts.jsonl").read()]
    assert [iteration for iteration, _ in shown] == [1] * 3 + [2] * 3
    assert all(entry in collected.rollouts for entry in shown)
    # The viewer reads them so: the record, and what else the recorder tells.
    [last], count = recorded.tail(1)
    assert count == 24
    expected = whole(as_record(collected.rollouts[-1][1]))
    for row, told in zip(expected.pop("rows"), last.pop("rows"), strict=True):
        assert row.items() <= told.items()
    assert expected.items() <= last.items()
    files = (run / "rollouts.jsonl", log.path / "iteration-000002-000.parquet")
    for [record], _ in (open_rollouts(file).tail(1) for file in files):
        assert set(record) == {"iteration", *as_record(collected.rollouts[0][1])}


def test_what_lies_behind_a_checkpoint_is_taken_back(make_rollout, tmp_path):
    trainer = trainer_of(tmp_path)
    first, again = PreviewTable(), PreviewTable()

    def write(recorder, iteration: int, reward: float) -> None:
        recorder.write(trainer, iteration, [make_rollout([3], [1], reward=reward)])

    first.setup(trainer, None, "fit")
    write(first, 0, 0.0)
    state = first.state_dict()
    write(first, 1, 0.25)
    again.setup(trainer, None, "fit")
    again.load_state_dict(state)
    write(again, 1, 0.5)
    write(again, 2, 0.75)
    file = open_rollouts(tmp_path / "csv" / "version_0" / "rollouts.jsonl")
    assert [(r.iteration, r.rollout.reward) for r in file.read()] == [(0, 0.0), (1, 0.5), (2, 0.75)]
