"""OpenAIFineTuning against a server that answers as documented, and fails in every way."""

import asyncio

import pytest

from lightning_rl.rewards.openai_api import APIRefusal
from lightning_rl.rewards.remote import ServerError
from lightning_rl.staged.jobs import JobReport, JobRequest, JobStatus
from lightning_rl.staged.openai_jobs import OpenAIFineTuning
from lightning_rl.staged.training_sets import Demonstrations, Example, Pair, Preferences
from tests.openai_server import OpenAIServer
from tests.serving import serving

JOBS = "POST /v1/fine_tuning/jobs"
ASKED = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture
def server():
    with serving(OpenAIServer()) as server:
        yield server


def jobs_of(server, **options) -> OpenAIFineTuning:
    return OpenAIFineTuning(
        server.url, api_key_env=None, **({"first_wait_s": 0.0, "retries": 3} | options)
    )


def request(key: str = "run-0-all-0", training=None) -> JobRequest:
    training = training or Demonstrations([Example(ASKED, "4")])
    return JobRequest(key, "gpt", training, seed=2**40 + 5)


def create(jobs, *arguments) -> str:
    return asyncio.run(jobs.create(request(*arguments)))


def reports(jobs, job: str, count: int) -> list[JobReport]:
    async def look():
        return [await jobs.report(job) for _ in range(count)]

    return asyncio.run(look())


def test_a_job_has_the_rows_and_the_name_that_it_is_found_by(server):
    jobs = jobs_of(server, hyperparameters={"n_epochs": 2})
    assert create(jobs) == "ftjob-1"
    [job] = server.jobs.values()
    assert (job["model"], job["user_provided_suffix"]) == ("gpt", "run-0-all-0")
    assert job["method"] == {
        "type": "supervised",
        "supervised": {"hyperparameters": {"n_epochs": 2}},
    }
    assert server.files["file-1"] == [{"messages": [*ASKED, {"role": "assistant", "content": "4"}]}]


def test_pairs_are_rows_of_preferences(server):
    create(jobs_of(server), "k", Preferences([Pair(ASKED, "4", "fünf")]))
    assert server.jobs["ftjob-1"]["method"] == {"type": "dpo", "dpo": {}}
    assert server.files["file-1"] == [
        {
            "input": {"messages": ASKED},
            "preferred_output": [{"role": "assistant", "content": "4"}],
            "non_preferred_output": [{"role": "assistant", "content": "fünf"}],
        }
    ]


def test_its_statuses_are_ours(server):
    jobs = jobs_of(server)
    create(jobs)
    assert reports(jobs, "ftjob-1", 3) == [
        JobReport(JobStatus.PENDING),
        JobReport(JobStatus.RUNNING),
        JobReport(JobStatus.SUCCEEDED, "ft:gpt+"),
    ]


def test_why_it_failed_is_told(server):
    server.fates = {"all-0": ["running", "failed"]}
    jobs = jobs_of(server)
    create(jobs)
    assert reports(jobs, "ftjob-1", 2)[1] == JobReport(JobStatus.FAILED, None, "bad row 3")


def test_a_job_is_cancelled_unless_it_is_over(server):
    jobs = jobs_of(server)
    for key in ("one", "two"):
        create(jobs, key)
    asyncio.run(jobs.cancel("ftjob-1"))
    assert reports(jobs, "ftjob-1", 1) == [JobReport(JobStatus.CANCELLED)]
    done = reports(jobs, "ftjob-2", 3)[-1]
    asyncio.run(jobs.cancel("ftjob-2"))  # which the server refuses
    assert reports(jobs, "ftjob-2", 1) == [done]
    with pytest.raises(APIRefusal, match="answered 404"):
        asyncio.run(jobs.cancel("ftjob-3"))


# ---------------------------------------------------------------- bought once


@pytest.mark.parametrize("filters", [True, False])
def test_a_job_that_is_there_is_not_created_again(server, filters):
    server.page, server.filters = 2, filters
    jobs = jobs_of(server)
    for number in range(7):
        create(jobs, f"run-0-all-{number}")
    uploads = len(server.files)
    assert create(jobs, "run-0-all-1") == "ftjob-2"  # on the third page, if nothing is filtered
    assert (len(server.jobs), len(server.files)) == (7, uploads)


def test_a_connection_that_breaks_after_the_creation_buys_nothing_twice(server):
    server.fail(JOBS, "lose")
    assert create(jobs_of(server)) == "ftjob-1"
    assert server.bought() == ["run-0-all-0"]


@pytest.mark.parametrize("fault", ["drop", 429, 500, 503, 409])
@pytest.mark.parametrize("where", [JOBS, "GET /v1/fine_tuning/jobs", "POST /v1/files"])
def test_what_may_pass_is_tried_again(server, where, fault):
    server.fail(where, fault, fault)
    assert create(jobs_of(server)) == "ftjob-1"
    assert server.bought() == ["run-0-all-0"]
    assert len(server.files) == 1


def test_a_server_that_stays_down_is_an_error(server):
    server.fail(JOBS, *[503] * 4)
    with pytest.raises(ServerError, match="answered 503"):
        create(jobs_of(server))
    assert not server.jobs


def test_a_refusal_is_told_at_once(server):
    server.fail(JOBS, 401)
    with pytest.raises(APIRefusal, match="answered 401"):
        create(jobs_of(server))
    assert server.requests[JOBS] == 1


def test_the_wait_that_the_server_asks_for_is_kept(server, monkeypatch):
    waited, sleep = [], asyncio.sleep

    async def note(seconds):
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    server.fail(JOBS, (429, {"Retry-After": "20"}), (429, {"Retry-After": "1e9"}), 429)
    create(jobs_of(server, first_wait_s=1.0))
    asked, longest, own = waited
    assert (asked, longest) == (20, 600)  # no server makes us wait for ever
    assert 2 <= own <= 4  # 1 s x 2^2, from half to all of it
