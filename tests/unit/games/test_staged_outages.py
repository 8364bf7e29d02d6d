"""Test staged runs whose server is out, or whose files are damaged: one message, and they go on."""

import json
import os
import re
from pathlib import Path

import pytest

from lightning_rl.errors import ConfigError, DataError, FineTuneError
from lightning_rl.games.staged.jobs import FineTuneJobs, JobReport, JobStatus
from lightning_rl.games.staged.state import StagedState
from tests.support.openai_server import OpenAIServer, said
from tests.support.serving import serving
from tests.support.staged_runs import group_of, staged

OUTAGES = {
    "no chats": ("POST /v1/chat/completions", "drop", "sample_rollouts"),
    "chats of null": (
        "POST /v1/chat/completions",
        said('{"choices": [{"message": {"content": null}}]}'),
        "sample_rollouts",
    ),
    "a wait of years": (
        "POST /v1/chat/completions", (503, {"Retry-After": "9e9"}), "sample_rollouts",
    ),
    "no files": ("POST /v1/files", 500, "create_fine_tune_jobs"),
    "no creation": ("POST /v1/fine_tuning/jobs", said("{}"), "create_fine_tune_jobs"),
    "no money": ("POST /v1/fine_tuning/jobs", 402, "create_fine_tune_jobs"),
    "no model": (
        "GET /v1/fine_tuning/jobs/ftjob-1",
        said('{"id": "ftjob-1", "status": "succeeded"}'),
        "await_fine_tune_jobs",
    ),
    "a status of its own": (
        "GET /v1/fine_tuning/jobs/ftjob-1",
        said('{"id": "ftjob-1", "status": "napping"}'),
        "await_fine_tune_jobs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTAGES)
def test_an_outage_is_one_message_and_the_run_goes_on(server, tmp_path, name):
    where, fault, stage = OUTAGES[name]
    server.fail(where, *[fault] * 1000)
    with pytest.raises(FineTuneError) as caught:
        staged(tmp_path, server.url).fit()
    message = str(caught.value)
    assert message.isprintable()
    assert f"stopped in stage {stage} of iteration 0; nothing is lost" in message
    server.fail(where)
    state = staged(tmp_path, server.url).fit()
    assert state.groups["all"].models == ["gpt", "ft:gpt+", "ft:gpt++"]
    assert server.bought() == [f"{state.run}-{i}-all-0" for i in range(2)]


class Forgetful(FineTuneJobs):
    """Its jobs succeed, and made nothing."""

    async def create(self, request):
        return "one"

    async def report(self, job):
        return JobReport(JobStatus.SUCCEEDED)

    async def cancel(self, job):
        raise AssertionError


def test_a_job_of_ones_own_that_names_no_model_ends_the_run(server, tmp_path):
    groups = {"all": group_of(server.url, "prover", "verifier", jobs=Forgetful())}
    for _ in range(2):  # it stays undecided
        with pytest.raises(FineTuneError, match="one succeeded, but Forgetful reports no model"):
            staged(tmp_path, server.url, groups=groups, job_attempts=2).fit()


# ---------------------------------------------------------------- damaged files

STATES = {
    "empty": lambda state: "",
    "cut off": lambda state: json.dumps(state)[:-20],
    "a list": lambda state: "[]",
    "no groups": lambda state: json.dumps({"run": "r"}),
    "groups that are a list": lambda state: json.dumps(state | {"groups": []}),
    "models that are a text": lambda state: json.dumps(
        state | {"groups": {"all": {"models": "gpt", "jobs": []}}}
    ),
    "too few models": lambda state: json.dumps(
        state | {"groups": {"all": {"models": ["gpt"], "jobs": []}}}
    ),
    "an iteration below 0": lambda state: json.dumps(state | {"iteration": -1}),
    "an iteration in words": lambda state: json.dumps(state | {"iteration": "one"}),
    "a status of its own": lambda state: json.dumps(state).replace("succeeded", "napping"),
    "a job of the future": lambda state: json.dumps(state).replace(
        '"iteration": 0, "key"', '"iteration": 9, "key"'
    ),
    "a later release's": lambda state: json.dumps(state | {"epoch": 1}),
    "brackets": lambda state: "[" * 100_000,
    "a stage that is none": lambda state: json.dumps(state | {"stage": "lunch"}),
    "a stage that is a setting": lambda state: json.dumps(state | {"stage": "seed"}),
    "a stage that is a method": lambda state: json.dumps(state | {"stage": "fit"}),
    "a stage within": lambda state: json.dumps(state | {"stage": "__init__"}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """Return the state of a run of one iteration."""
    directory = tmp_path_factory.mktemp("whole")
    with serving(OpenAIServer()) as server:
        staged(directory, server.url, iterations=1).fit()
    return json.loads((directory / "state.json").read_text())


@pytest.mark.parametrize("name", STATES)
def test_a_damaged_state_is_told_and_left_as_it_is(whole, tmp_path, name):
    path = tmp_path / "state.json"
    damaged = STATES[name](whole)
    path.write_text(damaged)
    with pytest.raises(DataError, match=r"state\.json.*; restore") as caught:
        staged(tmp_path, "http://127.0.0.1:9/v1").fit()
    assert str(caught.value).isprintable()
    assert path.read_text() == damaged


def test_a_state_that_is_no_file_is_told(server, tmp_path):
    os.mkfifo(tmp_path / "state.json")  # to read it would be to wait for ever
    with pytest.raises(DataError, match=r"state\.json is not a file"):
        staged(tmp_path, server.url).fit()


def test_a_state_is_read_as_it_was_saved(server, tmp_path):
    state = staged(tmp_path, server.url).fit()
    assert StagedState.load(tmp_path / "state.json", ["all"]) == state


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"draw"', '"drawn"'),
        ('"path": [0, 0]', '"path": 3'),
        ('"answers": [{"prover"', '"answers": [{"nobody"'),
        ('"sample": 0, "path"', '"sample": null, "path"'),
    ],
)
def test_an_interaction_that_cannot_be_is_told_with_its_line(server, tmp_path, old, new):
    staged(tmp_path, server.url, iterations=1).fit()
    path = tmp_path / "rollouts.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=r"rollouts\.jsonl:1 holds no interaction of this protocol"):
        staged(tmp_path, server.url).sampler.held(path, 0)


def test_damaged_metrics_cost_their_lines(server, tmp_path):
    staged(tmp_path, server.url, iterations=1).fit()
    path = tmp_path / "metrics.jsonl"
    rows = path.read_text().splitlines()
    path.write_text("\n".join(["{", '{"iteration": "x"}', "[]", "\udcff", *rows]), errors="replace")
    staged(tmp_path, server.url, iterations=2).fit()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["iteration"] for row in kept] == [0, 1, 2]
    assert kept[0] == json.loads(rows[0])


def test_a_run_directory_that_is_a_file_is_told(server, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(Exception, match=re.escape(str(tmp_path / "run"))) as caught:
        staged(tmp_path / "run", server.url).fit()
    assert "could not be written" in str(caught.value)


# ---------------------------------------------------------------- tested beside the run


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_a_retest_leaves_the_run_as_it_is(server, tmp_path):
    run = tmp_path / "run"
    staged(run, server.url).fit()
    before = contents(run)
    rows = staged(run, server.url).retest(tmp_path / "again")
    assert json.loads((tmp_path / "again/retests.json").read_text()) == rows
    assert (tmp_path / "again/retests.jsonl").exists()
    staged(run, server.url).retest()
    assert contents(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "run", "run_retest"]
    for inside in (run, run / "deep", run / ".." / "run"):
        with pytest.raises(ConfigError, match="lies in the tested run's directory"):
            staged(run, server.url).retest(inside)


def test_a_server_that_is_out_while_it_tests_again_is_told(server, tmp_path):
    staged(tmp_path / "run", server.url).fit()
    server.fail("POST /v1/chat/completions", *[500] * 1000)
    with pytest.raises(FineTuneError, match="answered 500"):
        staged(tmp_path / "run", server.url).retest()
