"""Test OpenAIFineTuning against a server that answers as documented, and fails in every way."""

import asyncio
import json
import re
import sys

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.games.staged.chat import ChatAnswer, OpenAIChat
from lightning_rl.games.staged.jobs import JobReport, JobRequest, JobStatus
from lightning_rl.games.staged.openai_jobs import OpenAIFineTuning
from lightning_rl.games.staged.training_sets import Demonstrations, Example, Pair, Preferences
from lightning_rl.rewards.openai_api import APIRefusal
from lightning_rl.run.retry import ServerError
from tests.support.openai_server import raw, said

JOBS = "POST /v1/fine_tuning/jobs"
CHATS = "POST /v1/chat/completions"
ASKED = [{"role": "user", "content": "2 + 2?"}]


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


def test_the_wait_that_the_server_asks_for_is_kept(server, waits):
    server.fail(JOBS, (429, {"Retry-After": "20"}), (429, {"Retry-After": "40"}), 429)
    with pytest.warns(UserWarning, match="waiting 40 s, as the server asks"):
        create(jobs_of(server, first_wait_s=1.0))
    first, second, own = waits
    assert (first, second) == (20, 40)
    assert 2 <= own <= 4  # 1 s x 2^2, from half to all of it


@pytest.mark.parametrize(
    "asked", ["1e9", "inf", "315360000", "Sun, 06 Nov 2994 08:49:37 GMT", "601"]
)
def test_a_server_that_asks_for_years_is_not_waited_for(server, asked):
    server.fail(JOBS, (429, {"Retry-After": asked}))
    with pytest.raises(ServerError, match=r"asks for a wait of .* run again then"):
        create(jobs_of(server))
    assert server.requests[JOBS] == 1


@pytest.mark.parametrize("asked", ["nan", "-5", "soon", "Sun, 99 Foo 99999 99:99:99 GMT", ""])
def test_a_wait_that_is_none_is_not_kept(server, asked):
    server.fail(JOBS, (429, {"Retry-After": asked}))
    assert create(jobs_of(server)) == "ftjob-1"


# ---------------------------------------------------------------- answers that are none

FAULTS = {
    "no connection": ("drop", "gave no answer: Server disconnected"),
    "half an answer": (
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
        "gave no answer",
    ),
    "no HTTP": (raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "gave no answer"),
    "bad gzip": (
        raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope"),
        "gave no answer: 400, message: Can not decode content-encoding: gzip",
    ),
    "headers without end": (
        raw(b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 99_000 + b"\r\n\r\n"),
        "gave no answer",
    ),
    "a web page": (
        said("<html>\x1b]52;c;aGk=\x07"),
        "sent no JSON: <html>\N{REPLACEMENT CHARACTER}]52",
    ),
    "nothing": (said(""), "sent no JSON"),
    "brackets": (said("[" * 100_000), "sent no JSON"),
    "half a character": (
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe"),
        "sent no JSON",
    ),
    "null": (said("null"), "sent no list of fine-tuning jobs: the whole text: "),
    "a list": (said("[]"), "sent no list of fine-tuning jobs: the whole text: "),
    "no data": (said("{}"), "sent no list of fine-tuning jobs: data: field required"),
    "data that is a text": (said('{"data": "x"}'), "data: input should be a valid list"),
    "a job without an id": (said('{"data": [{}]}'), r"data.0.id: field required"),
    "a job's id that is a list": (said('{"data": [{"id": []}]}'), r"data.0.id: input should be"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_answer_is_one_line_and_may_pass(server, name):
    fault, says = FAULTS[name]
    # aiohttp makes two of a request that may be repeated, if it meets a closed connection.
    server.fail("GET /v1/fine_tuning/jobs", *[fault] * 4)
    with pytest.raises(ServerError, match=re.escape(says)) as caught:
        create(jobs_of(server, retries=1))
    assert str(caught.value).endswith("(after 2 attempts)")
    assert str(caught.value).isprintable()
    server.fail("GET /v1/fine_tuning/jobs", fault)
    assert create(jobs_of(server)) == "ftjob-1"


def test_a_server_that_never_answers_is_given_up(server):
    server.fail(JOBS, *["hang"] * 2)
    with pytest.raises(ServerError, match=r"no answer within timeout_s=0\.2 \(after 2 attempts\)"):
        create(jobs_of(server, retries=1, timeout_s=0.2))


def test_nobody_there_is_told_in_a_line():
    jobs = OpenAIFineTuning("http://127.0.0.1:9/v1", None, first_wait_s=0.0, retries=1)
    with pytest.raises(ServerError, match=r"gave no answer: Cannot connect to host 127\.0\.0\.1:9"):
        create(jobs)


@pytest.mark.parametrize("moves", [True, False])
def test_a_list_without_end_buys_nothing(server, moves):
    def page():
        for number in range(10**6):
            job = {"id": f"other-{number * moves}"}
            yield said(json.dumps({"data": [job], "has_more": True}))

    server.faults["GET /v1/fine_tuning/jobs"] = page()
    with pytest.raises(APIRefusal, match="returns an endless list of fine-tuning jobs"):
        create(jobs_of(server))
    assert not server.jobs
    assert not server.files


def test_a_job_that_succeeded_without_a_model_is_looked_at_again(server):
    jobs = jobs_of(server)
    create(jobs)
    done = said('{"id": "ftjob-1", "status": "succeeded", "fine_tuned_model": null}')
    server.fail("GET /v1/fine_tuning/jobs/ftjob-1", done)
    server.jobs["ftjob-1"]["to_come"] = ["succeeded"]
    assert reports(jobs, "ftjob-1", 1) == [JobReport(JobStatus.SUCCEEDED, "ft:gpt+")]
    server.fail("GET /v1/fine_tuning/jobs/ftjob-1", *[done] * 4)
    with pytest.raises(ServerError, match="ftjob-1 succeeded, but the server reports no model"):
        reports(jobs, "ftjob-1", 1)


def test_a_job_that_failed_made_no_model(server):
    jobs = jobs_of(server)
    create(jobs)
    failed = '{"id": "ftjob-1", "status": "failed", "fine_tuned_model": "step-3", "error": null}'
    server.fail("GET /v1/fine_tuning/jobs/ftjob-1", said(failed))
    assert reports(jobs, "ftjob-1", 1) == [JobReport(JobStatus.FAILED, None, "the newest event")]


# ---------------------------------------------------------------- chats


def chat(server) -> ChatAnswer:
    model = OpenAIChat(server.url, None, retries=1, first_wait_s=0.0)
    model.use("gpt")
    return asyncio.run(model.ask(ASKED, 3))


def completion(content, ending="stop", **message):
    choice = {"message": {"content": content} | message, "finish_reason": ending}
    return said(json.dumps({"choices": [choice]}))


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        (completion("four"), ChatAnswer("four", False)),
        (completion("", "stop"), ChatAnswer("", False)),
        # All of it was thought, or withheld; a model that refuses says so.
        (completion(None, "length"), ChatAnswer("", True)),
        (completion(None, "content_filter"), ChatAnswer("", False)),
        (completion(None, "stop", refusal="I won't."), ChatAnswer("I won't.", False)),
        # Half a character, which no file and no tokenizer takes.
        (completion("a\ud800b"), ChatAnswer("a\N{REPLACEMENT CHARACTER}b", False)),
    ],
)
def test_what_a_chat_answers(server, fault, answer):
    server.fail(CHATS, fault)
    assert chat(server) == answer


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (completion(None), "choices.0.message.content is null (ended by stop)"),
        (completion(["a"]), "choices.0.message.content: input should be a valid string"),
        (completion(5), "choices.0.message.content: input should be a valid string"),
        (said('{"choices": []}'), "choices is empty"),
        (said('{"choices": [{}]}'), "choices.0.message: field required"),
        (said('{"choices": {"0": 1}}'), "choices: input should be a valid list"),
        (said('{"error": "overloaded"}'), "choices: field required"),
    ],
)
def test_what_is_no_chat_completion_is_told(server, fault, says):
    server.fail(CHATS, fault, fault)
    with pytest.raises(ServerError, match=re.escape(f"sent no chat completion: {says}")):
        chat(server)
    server.fail(CHATS, fault)  # and may pass
    assert chat(server).text in ("accept", "reject")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://", "http:///v1", "http://h:99999/v1", "http://a b/v1", ""]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="must begin with http:// or https:// and name a host"):
        OpenAIChat(url)


def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(server, monkeypatch):
    monkeypatch.setenv("STAGED_TEST_KEY", "s3cret\n")
    jobs = OpenAIFineTuning(server.url, "STAGED_TEST_KEY")
    with pytest.raises(APIRefusal, match="'STAGED_TEST_KEY' holds characters that no header") as e:
        create(jobs)
    assert "s3cret" not in str(e.value)


def test_without_pydantic_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(ConfigError, match=r"pip install 'pydantic>=2.12'"):
        OpenAIChat("http://127.0.0.1:9/v1")
