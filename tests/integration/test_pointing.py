"""Test a shortened recipes/pointing: a debate and a proof on vLLM, by two adapters on a base."""

import json
from pathlib import Path

import pytest

from lightning_rl.cli import main
from recipes.pointing.prepare import chat_tokenizer, draw_rows, draw_sft, make_pointer
from recipes.pointing.scenario import PLACES
from recipes.sort_digits.prepare import write_jsonl, write_model

pytestmark = pytest.mark.slow

pytest.importorskip("vllm")
ROOT = Path(__file__).parents[2]


def fit(name, place, **options):
    """Run a configuration of the recipe, with other options, into a directory."""
    options |= {"trainer.accelerator": "cpu", "trainer.logger.save_dir": place}
    arguments = [f"--{key}={value}" for key, value in options.items()]
    assert main(["fit", "--config", str(ROOT / f"recipes/pointing/{name}.yaml"), *arguments]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a model that has seen how turns are written, and a few rows."""
    place, rows = tmp_path_factory.mktemp("pointing"), draw_rows()[0]
    write_model(place / "model", make_pointer(), chat_tokenizer())
    write_jsonl(place / "rows.jsonl", rows[:16])
    write_jsonl(place / "sft.jsonl", draw_sft(rows[:600]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "0")
        warm = {"model.model": place / "model", "data.train.path": place / "sft.jsonl"}
        warm |= {"data.batch_size": 32, "trainer.max_steps": 30}
        fit("sft", place, **warm, **{"trainer.callbacks.directory": place / "hf"})
    return place


def test_rows_and_turns_are_as_the_page_says():
    train, heldout = draw_rows()
    for row in heldout:
        assert (row["prompt"].count("7"), row["prompt"].count("3")) == (
            row["label"],
            1 - row["label"],
        )
    assert sum(row["label"] for row in heldout) == len(heldout) / 2
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    [ask, decide] = draw_sft(train[:1])
    place = PLACES.index(ask["completion"])
    assert decide["prompt"][0]["content"].endswith(f"\nprover: {train[0]['prompt'][place]}")


@pytest.mark.parametrize(("name", "roles"), [("adp", 2), ("debate", 3)])
def test_agents_are_trained_by_what_the_protocol_pays(made, name, roles, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    small = {"data.groups_per_iteration": 4, "data.group_size": 4, "data.iterations_per_epoch": 2}
    rows = dict.fromkeys(
        ("data.train_prompts.path", "data.evaluation.prompts.path"), made / "rows.jsonl"
    )
    fit(name, tmp_path, **{"model.model": made / "hf"}, **small, **rows)
    run = tmp_path / name / "version_0"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["iterations"]) == ("completed", 2)
    metrics = summary["metrics"]
    assert metrics["rollout/rows_per_episode"] == roles
    gaps = [gap for name, gap in metrics.items() if name.endswith("/logprob_gap_max")]
    assert len(gaps) == 2  # one of each policy
    assert max(gaps) < 1e-4
    assert {"eval/worst_accuracy", "eval/recall", "logged/right"} <= metrics.keys()
    for line in (run / "rollouts.jsonl").read_text().splitlines():
        record = json.loads(line)
        decision, label = record["extra"]["decision"], record["extra"]["label"]
        paid = {"verifier": 1.0 if decision == label else -1.0}
        paid |= {"prover": float(decision == 1)} if name == "adp" else {}
        paid |= {f"prover{n}": float(decision == n) for n in (0, 1)} if name == "debate" else {}
        assert record["role_rewards"] == paid
        assert record["reward"] == paid["verifier"]
        assert [turn["role"] for turn in record["completion"]][-1] == "verifier"
