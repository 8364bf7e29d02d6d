"""Test StagedTrainer: every stage once, every job once, wherever it was interrupted."""

import json

import pytest

from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.errors import ConfigError, FineTuneError
from tests.support.staged_runs import group_of, numbers, staged


def rows_of(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_by_jobs(server, tmp_path):
    state = staged(tmp_path, server.url).fit()

    assert (state.stage, state.iteration) == ("done", 2)
    assert state.groups["all"].models == ["gpt", "ft:gpt+", "ft:gpt++"]
    assert server.bought() == [f"{state.run}-{i}-all-0" for i in range(2)]
    rows = rows_of(tmp_path)
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[0]["eval/accuracy"] < 1  # guesses
    assert [row["eval/accuracy"] for row in rows[1:]] == [1, 1]  # fine-tuned ones know
    # 6 interactions in each iteration; 3 of them are of even numbers, which a verifier accepts.
    assert rows[1]["train/reward_prover"] == 0.5
    recorded = list(open_rollouts(tmp_path / "rollouts.jsonl").read())
    assert [sum(r.iteration == i for r in recorded) for i in range(2)] == [6, 6]
    # What is learned is what paid: the first iteration's right verdicts, and accepted proofs.
    first = [r.rollout for r in recorded if r.iteration == 0]
    right = sum(r.reward == 1 for r in first)
    accepted = sum(r.role_rewards["prover"] == 1 for r in first)
    assert len(server.files["file-1"]) == right + accepted
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["jobs"] == 2
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (rows[0]["eval/accuracy"], 1)
    assert (tmp_path / "curves.png").exists()


def test_what_was_done_is_not_done_again(server, tmp_path):
    first = staged(tmp_path, server.url).fit()
    asked = len(server.chats)
    assert staged(tmp_path, server.url).fit() == first
    assert len(server.chats) == asked
    # More iterations than before: the run goes on.
    state = staged(tmp_path, server.url, iterations=3).fit()
    assert state.groups["all"].models == ["gpt", "ft:gpt+", "ft:gpt++", "ft:gpt+++"]
    assert server.bought() == [f"{state.run}-{i}-all-0" for i in range(3)]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "sqlite"])
def test_interactions_survive_in_all_formats(server, tmp_path, ending):
    run = staged(tmp_path, server.url, iterations=1, rollout_format=ending)
    run.fit()
    held = run.sampler.held(tmp_path / f"rollouts.{ending}", 0)
    assert len(held) == 6
    asked = {json.dumps(chat["messages"]) for chat in server.chats}
    for tree in held.values():  # they are played again to the letter, nested rows included
        [leaf] = tree.leaves
        assert tree.unit.columns["about"] == {"kinds": ["even", "odd"], "ünï": None}
        assert [turn.agent for turn in leaf.conversation.turns] == ["prover", "verifier"]
        assert all(json.dumps(turn.messages) in asked for turn in leaf.conversation.turns)
        assert tree.rollouts(0)[0].reward == leaf.conversation.rewards["verifier"]
    asked = len(server.chats)
    rows = run.retest()
    assert run.retest() == rows
    assert len(server.chats) == asked + 2 * 2 * 8


def test_too_few_rows_are_no_job(server, tmp_path):
    state = staged(tmp_path, server.url, min_rows=1000).fit()
    assert state.groups["all"].models == ["gpt", "gpt", "gpt"]
    assert not server.jobs


def test_a_group_without_jobs_is_never_trained(server, tmp_path):
    groups = {
        "provers": group_of(server.url, "prover", jobs=None),
        "verifier": group_of(server.url, "verifier"),
    }
    state = staged(tmp_path, server.url, groups=groups).fit()
    assert state.groups["provers"].models == ["gpt"] * 3
    assert state.groups["verifier"].models == ["gpt", "ft:gpt+", "ft:gpt++"]


# ---------------------------------------------------------------- jobs that make no model


@pytest.mark.parametrize("fate", ["failed", "cancelled"])
def test_a_job_that_made_no_model_ends_the_run_unless_told_otherwise(server, tmp_path, fate):
    server.fates = {"0-all-0": ["running", fate]}
    why = "bad row 3" if fate == "failed" else "no reason was given"
    for _ in range(2):  # also when it is run again: it is not bought again
        with pytest.raises(FineTuneError, match=f"job ftjob-1 of group 'all'.* {fate}: {why}"):
            staged(tmp_path, server.url).fit()
    assert len(server.jobs) == 1
    state = staged(tmp_path, server.url, keep_model_after_failure=True).fit()
    assert state.groups["all"].models == ["gpt", "gpt", "ft:gpt+"]
    assert [job.status for job in state.groups["all"].jobs] == [fate, "succeeded"]


def test_another_attempt_is_another_job(server, tmp_path):
    server.fates = {"0-all-0": ["failed"], "0-all-1": ["failed"]}
    state = staged(tmp_path, server.url, job_attempts=3).fit()
    assert server.bought() == [f"{state.run}-{name}" for name in (
        "0-all-0", "0-all-1", "0-all-2", "1-all-0"
    )]  # fmt: skip
    assert state.groups["all"].models == ["gpt", "ft:gpt+", "ft:gpt++"]
    with pytest.raises(FineTuneError, match="job ftjob-6"):
        staged(tmp_path / "other", server.url, job_attempts=2).fit()


def test_a_job_that_takes_too_long_is_cancelled(server, tmp_path):
    server.fates = {"0-all-0": ["running"] * 10**6}
    with pytest.raises(
        FineTuneError, match=r"cancelled: it was not done within job_timeout_s=0\.2"
    ):
        staged(tmp_path, server.url, job_timeout_s=0.2, poll_s=0.01).fit()
    assert server.jobs["ftjob-1"]["status"] == "cancelled"


# ---------------------------------------------------------------- tests of saved states


def test_each_iterations_models_are_tested_again(server, tmp_path):
    run = staged(tmp_path, server.url, test_every_n_iterations=None)
    run.fit()
    assert ["eval/accuracy" in row for row in rows_of(tmp_path)] == [False, False, True]
    rows = staged(tmp_path, server.url, test=numbers(200, 212)).retest()
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert rows[0]["eval/accuracy"] < 1
    assert [row["eval/accuracy"] for row in rows[1:]] == [1, 1]
    retests = tmp_path.with_name(f"{tmp_path.name}_retest")
    assert json.loads((retests / "retests.json").read_text()) == rows


def test_there_must_be_something_to_test(server, tmp_path):
    with pytest.raises(ConfigError, match="holds no staged run"):
        staged(tmp_path, server.url).retest()
    staged(tmp_path, server.url, test=None, iterations=0).fit()
    with pytest.raises(ConfigError, match="nothing to test on"):
        staged(tmp_path, server.url, test=None).retest()


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"all": ["prover"]}, "'verifier' is in 0 of them"),
        ({"one": ["prover", "verifier"], "two": ["prover"]}, "'prover' is in 2 of them"),
        ({"all": ["prover", "verifier", "judge"]}, "'judge' is not an agent of the protocol"),
        ({"a b": ["prover", "verifier"]}, "'a b' becomes a part of its jobs' names"),
    ],
)
def test_each_agent_is_in_one_group(tmp_path, groups, message):
    url = "http://127.0.0.1:9/v1"
    given = {name: group_of(url, *agents) for name, agents in groups.items()}
    with pytest.raises(ConfigError, match=message):
        staged(tmp_path, url, groups=given)


def test_the_directory_is_of_one_run_with_these_groups(server, tmp_path):
    staged(tmp_path, server.url, iterations=0).fit()
    groups = {"others": group_of(server.url, "prover", "verifier")}
    with pytest.raises(ConfigError, match="belongs to a run with groups all, not others"):
        staged(tmp_path, server.url, groups=groups).fit()
