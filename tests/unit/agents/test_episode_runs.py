"""Rollouts of several rows in runs: collected, resumed, streamed, measured, recorded, shown."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.callbacks import IterationCheckpoint, RolloutRecorder, WeightSync
from lightning_rl.callbacks.preview import preview_table
from lightning_rl.cli.view.flags import find_flags
from lightning_rl.cli.view.page import build_page
from lightning_rl.cli.view.runs import read_run
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.stats import call_metrics, rollout_metrics
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.rollouts.rows import rows_of
from lightning_rl.data.views import as_torchrl
from lightning_rl.engines import TransformersEngine
from lightning_rl.errors import DataError, EngineError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Call, RolloutStatus, Row, SamplingDistribution
from tests.support.lots import LotEngine
from tests.support.planted_run import rollouts_of
from tests.support.small_run import Rows, data_module, grpo, trainer_of
from tests.support.three_calls import ThreeCalls
from tests.support.tolerances import distance


@pytest.fixture
def talk(make_rollout):
    """Make two rows of the run's policy, and a critic's; a call of the first was held to a form."""

    def make(**fields):
        rollout = make_rollout(
            [5, 6],
            [7, 8, 2, 9],
            loss_mask=[True, True, False, False],
            versions=[3, 4, -1, 4],
            logprobs=[-0.5, -0.25, 0.0, -1.0],
            **fields,
        )
        colder = SamplingDistribution(temperature=0.5)
        rollout.rows += [
            Row([5, 2], [8, 1], [True, True], [-0.125, -0.5], [4, 5]),
            Row([6], [4], [True], [-2.0], [5], "critic", colder),
        ]
        rollout.calls = [
            Call(0, 0, 2, 11),
            Call(0, 3, 4, 12, scorable=False),
            Call(1, 0, 2, 13, reward=0.5),
            Call(2, 0, 1, 14),
        ]
        rollout.dropped = 3
        return rollout

    return make


# ---------------------------------------------------------------- measured


def test_rows_calls_and_what_is_not_trained_on_are_counted(talk, make_rollout):
    plain = make_rollout([5], [7, 1])
    assert call_metrics([plain]) == {}
    metrics = rollout_metrics([talk(), plain], seconds=1.0, trainer_version=6)
    expected = {
        "rollout/calls_per_episode": 4.0,
        "rollout/rows_per_episode": 3.0,
        "rollout/merge_misses": 1.0,  # the critic's row is its first
        "rollout/unscorable_calls": 1.0,
        "rollout/dropped_tokens": 4.0,  # three, and the one that was held to a form
        "rollout/tokens_mean": (4 + 2 + 1 + 2) / 2,
        "rollout/staleness_max": 6.0,
        "rollout/staleness_mean": (3 + 2 + 2 + 1 + 1 + 6 + 6) / 7,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


# ---------------------------------------------------------------- kept


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "sqlite"])
def test_every_file_gives_rows_and_calls_back(talk, tmp_path, suffix):
    file = open_rollouts(tmp_path / f"rollouts.{suffix}")
    file.append([talk(reward=1.0)], 7)
    file.close()
    [recorded] = open_rollouts(file.path).read()
    assert recorded.rollout == talk(reward=1.0)
    [record], _ = open_rollouts(file.path).tail(1)
    assert record["rows"][2]["role"] == "critic"
    assert record["calls"][2]["reward"] == 0.5


def test_columns_tell_of_all_rows(talk, tmp_path):
    store = open_rollouts(tmp_path / "rollouts.sqlite")
    store.append([talk(reward=1.0)], 7)
    row = store.connection.execute("SELECT tokens, version_min, version_max FROM rollouts")
    assert tuple(row.fetchone()) == (7, 3, 5)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda r: r["rows"][1]["logprobs"].pop(), "differ in length"),
        (lambda r: r["calls"][3].update(row=3), "0 to 1 of row 3, which do not exist"),
        (lambda r: r["calls"][2].update(stop=3), "0 to 3 of row 1, which do not exist"),
        (lambda r: r["rows"][1].pop("prompt_ids"), "prompt_ids is missing"),
    ],
)
def test_damaged_rows_and_calls_are_named(talk, tmp_path, damage, words):
    file = open_rollouts(tmp_path / "rollouts.jsonl")
    file.append([talk()], 0)
    record = json.loads(file.path.read_text())
    damage(record)
    file.path.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=words):
        list(file.read())


# ---------------------------------------------------------------- shown


def test_a_preview_tells_each_call(talk, make_rollout):
    columns, rows = preview_table(
        [talk(), make_rollout([5], [7], completion="seven")],
        lambda ids: " ".join(map(str, ids)),
    )
    cells = [dict(zip(columns, row, strict=True)) for row in rows]
    assert cells[0]["completion"].splitlines() == [
        "[call 1, row 1] 5 6 → 7 8",
        "[call 2, row 1, not trained on] 5 6 7 8 2 → 9",
        "[call 3, row 2, reward 0.5] 5 2 → 8 1",
        "[call 4, row 3, critic] 6 → 4",
    ]
    assert cells[0]["end"] == "completed, stop, 7 tokens in 3 rows"
    assert cells[1]["completion"] == "seven"


def test_the_page_holds_all_rows_and_flags_count_on(talk, tmp_path):
    file = open_rollouts(tmp_path / "rollouts.jsonl")
    bad = talk(reward=1.0, sample_index=1)
    bad.rows[2].logprobs = [0.5]  # above 0: token 6 of all
    file.append([talk(reward=1.0), bad], 0)
    run = read_run(file.path, 10)
    assert [find_flags(record) for record in run.rollouts] == [{}, {"number": [6]}]
    row = rollouts_of(build_page([run]))[0]
    assert (row["prompt_tokens"], row["tokens"], row["oldest"], row["newest"]) == (5, 7, 3, 5)
    assert row["rows"] == [
        {"role": "", "prompt_tokens": 2, "tokens": 4, "pictures": []},
        {"role": "", "prompt_tokens": 2, "tokens": 2, "pictures": []},
        {"role": "critic", "prompt_tokens": 1, "tokens": 1, "pictures": []},
    ]
    assert [call["row"] for call in row["calls"]] == [0, 0, 1, 2]


# ---------------------------------------------------------------- packed


def test_a_view_has_the_texts_of_each_row(talk, make_rollout):
    rollouts = [talk(completion="long"), make_rollout([5], [7, 1], completion="short")]
    view = as_torchrl(pack_rollouts(rollouts), rollouts)
    assert [row["response"] for row in view] == ["long"] * 3 + ["short"]


def sevens(completions, **columns):
    return [text.count("7") for text in completions]


def test_a_text_is_made_of_all_rows(talk, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    pipeline = RolloutPipeline(TransformersEngine(), ThreeCalls(), Rewards([sevens]), tokenizer)
    rollout, chat = talk(completion=""), talk(completion="")
    chat.prompt.prompt = [{"role": "user", "content": "?"}]
    pipeline._decode([rollout, chat])
    assert rollout.completion == "45=6\n\n5\n\n1"
    assert [m["content"] for m in chat.completion] == ["45=6", "5", "1"]


# ---------------------------------------------------------------- runs


class Watching(Rows):
    """Records rollouts and metrics of every iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts = []

    def on_collect_end(self, trainer, pl_module, rollouts):
        self.rollouts.append([r.to_dict() for r in rollouts])


class Counting(LotEngine):
    """One request at a time, whose rounding no other changes; fails after ``last`` answers."""

    def __init__(self, last: int = 10**9) -> None:
        super().__init__(device="cpu", max_batch_size=1)
        self.last, self.answered = last, 0

    async def generate(self, token_ids, sampling, seed):
        if self.answered >= self.last:
            raise EngineError("the engine broke")
        completion = await super().generate(token_ids, sampling, seed)
        self.answered += 1
        return completion


def fit(tiny_model, tmp_path, engine, *callbacks, ckpt_path=None, **options):
    # Plain gradient steps: Adam's make a step of any gradient, also of one that is rounding only.
    module, watching = grpo(tiny_model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), Watching()
    data = data_module(
        agent=ThreeCalls(), engine=engine, evaluation=None, groups_per_iteration=2,
        group_size=3, iterations_per_epoch=2, **options,
    )  # fmt: skip
    trainer = trainer_of(
        tmp_path, [WeightSync(probe_prompts=0), watching, *callbacks], enable_checkpointing=True
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module, watching


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """Run two iterations without interruption; return module, what was seen, and directory."""
    directory, engine = tmp_path_factory.mktemp("whole"), Counting()
    recorder = RolloutRecorder(num_groups=None)
    return *fit(tiny_model, directory, engine, recorder), directory, engine


def test_each_role_and_edited_history_has_a_row(whole):
    _, watching, _, _ = whole
    row = watching.rows[-1]
    assert row["rollout/calls_per_episode"] == 3
    assert 2 <= row["rollout/rows_per_episode"] <= 2 + row["rollout/merge_misses"]
    for record in watching.rollouts[1]:
        assert {call["row"] for call in record["calls"][:2]} == {0}
        assert record["rows"][1]["role"] == "critic"
        assert record["rows"][1]["sampling"] == record["sampling"] | {"temperature": 0.8}
        assert set(record["rows"][0]["versions"]) == {-1, 1}


@pytest.mark.parametrize("after", [0, 5, 11])
def test_a_run_that_broke_between_calls_ends_as_if_it_had_not(tiny_model, tmp_path, whole, after):
    """18 calls make a batch; the engine breaks in the second, with episodes at any of theirs."""
    expected, seen, _, counted = whole
    assert counted.answered == 2 * 18
    broken, rest = Counting(last=18 + after), Counting()
    saving = IterationCheckpoint(1, dirpath=str(tmp_path / "checkpoints"))
    with pytest.raises(EngineError, match="the engine broke"):
        fit(tiny_model, tmp_path / "a", broken, saving)
    [checkpoint] = tmp_path.glob("checkpoints/**/last.ckpt")
    resumed, watching = fit(tiny_model, tmp_path / "b", rest, ckpt_path=checkpoint)
    assert watching.rollouts == seen.rollouts[1:]
    for ours, theirs in zip(resumed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # Nothing that had been answered was generated again.
    assert broken.answered + rest.answered == 2 * 18


def tokens_of(record) -> list:
    return [record["seed"], record["calls"], *(row["token_ids"] for row in rows_of(record))]


def weights_of(model) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_streamed_run_is_the_same(tiny_model, tmp_path, whole):
    expected, seen, _, _ = whole
    module, watching = fit(tiny_model, tmp_path, Counting(), collector=StreamedCollector(2))
    for ours, theirs in zip(watching.rollouts, seen.rollouts, strict=True):
        assert [tokens_of(record) for record in ours] == [tokens_of(record) for record in theirs]
    assert all(row["policy/streamed_share"] > 0 for row in watching.rows[1:])
    start = weights_of(AutoModelForCausalLM.from_pretrained(tiny_model))
    ours, theirs = (weights_of(run.policy.lm) - start for run in (module, expected))
    # An update that left a group out would be off by the order of its own size.
    assert distance(ours, theirs) < 1e-3


def test_every_row_is_recorded_as_it_was_trained_on(whole):
    _, _, directory, _ = whole
    file = directory / "csv" / "version_0" / "recorded.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 2 * 6
    for record in records:
        assert find_flags(record) == {}
        for row in record["rows"]:
            assert len(row["pieces"]) == len(row["advantages"]) == len(row["token_ids"])
            pairs = zip(row["trainer_logprobs"], row["logprobs"], row["loss_mask"], strict=True)
            assert all(a == pytest.approx(b, abs=1e-4) for a, b, mine in pairs if mine)
    assert RolloutStatus(records[0]["status"]) is RolloutStatus.COMPLETED
