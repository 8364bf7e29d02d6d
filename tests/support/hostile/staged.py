"""Provide hostile calls: staged runs, whose server, files or configuration misbehave."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from tests.support.hostile.call import Call, command
from tests.support.hostile.staged_runs import (
    CHATS,
    FILES,
    JOB,
    JOBS,
    again,
    against,
    body,
    damaged,
    drip,
    flood,
    judged,
    local,
    put,
    raw,
    reset,
    serving,
    trainer,
)

KEPT = "nothing is lost: run the same command to resume"
RESTORE = "restore"
NULL = '{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}'
GZIP = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope"
ENDLESS = '{"data": [{"id": "other"}], "has_more": true}'

SERVER = [
    Call("chats are reset", against({CHATS: reset}), ("gave no answer", KEPT)),
    Call("chats are cut off", against({CHATS: raw(b"HTTP/1.1 200 OK\r\n")}), (KEPT,)),
    Call("chats are no HTTP", against({CHATS: raw(b"220 smtp ready\r\n")}), (KEPT,)),
    Call("chats in bad gzip", against({CHATS: raw(GZIP)}), ("gave no answer", KEPT)),
    Call("chats drip for ever", against({CHATS: drip}), ("no answer within timeout_s=2", KEPT)),
    Call("chats flood", against({CHATS: flood}), (KEPT,)),
    Call("chats are a page", against({CHATS: body("<html>")}), ("sent no JSON: <html>", KEPT)),
    Call("chats of brackets", against({CHATS: body("[" * 10**6)}), ("sent no JSON", KEPT)),
    Call("chats of a number", against({CHATS: body("9" * 5000)}), ("sent no", KEPT)),
    Call("chats of null", against({CHATS: body(NULL)}), ("content is null", KEPT)),
    Call(
        "a chat's text is a list",
        against({CHATS: body(NULL.replace("null", "[1]"))}),
        ("content: input should be a valid string", KEPT),
    ),
    Call("chats without choices", against({CHATS: body('{"choices": []}')}), ("is empty", KEPT)),
    Call("chats cost too much", against({CHATS: body("{}", 402)}), ("answered 402", KEPT)),
    Call(
        "a wait of years",
        against({CHATS: body("{}", 429, Retry_After="999999999")}),
        ("it asks for a wait of 1e+09 s", KEPT),
    ),
    Call(
        "a wait until the year 9999",
        against({CHATS: body("{}", 503, Retry_After="Fri, 31 Dec 9999 23:59:59 GMT")}),
        ("it asks for a wait", KEPT),
    ),
    Call(
        "a wait that is no date",
        against({CHATS: body("{}", 503, Retry_After="Foo, 99 Bar 99999 99:99:99")}),
        ("answered 503", KEPT),
    ),
    Call(
        "an endless redirect",
        against({CHATS: body("", 307, Location="/v1/chat/completions")}),
        (KEPT,),
    ),
    Call(
        "terminal escapes in a refusal",
        against({CHATS: body("\x1b]52;c;aGVsbG8=\x07", 400)}),
        ("answered 400: \N{REPLACEMENT CHARACTER}]52", KEPT),
    ),
    Call(
        "half a character in a chat",
        against({CHATS: body(NULL.replace("null", '"a\\ud800 accept\\naccept"'))}),
        ("models ['gpt', 'ft:gpt']",),
        right=True,
    ),
    Call("uploads fail", against({FILES: body("{}", 500)}), ("answered 500", KEPT)),
    Call("a file without an id", against({FILES: body("{}")}), ("id: field required", KEPT)),
    Call("jobs without end", against({JOBS: body(ENDLESS)}), ("endless list", KEPT)),
    Call("jobs are null", against({JOBS: body("null")}), ("list of fine-tuning jobs", KEPT)),
    Call("a job without an id", against({JOBS: body('{"data": [{}]}')}), ("data.0.id", KEPT)),
    Call("a job is created as a list", against({"create": body("[]")}), ("fine-tuning job", KEPT)),
    Call(
        "a job succeeds without a model",
        against({JOB: body('{"id": "job-1", "status": "succeeded"}')}, job_attempts=3),
        ("succeeded, but the server reports no model", KEPT),
    ),
    Call(
        "a job of another status",
        against({JOB: body('{"id": "job-1", "status": "napping"}')}),
        ("the unknown status 'napping'", KEPT),
    ),
    Call(
        "a job fails and says why in escapes",
        against({JOB: body('{"id": "1", "status": "failed", "error": {"message": "\\u001b[2J"}}')}),
        ("failed: \N{REPLACEMENT CHARACTER}[2J",),
    ),
    Call(
        "it goes on after an outage",
        again({JOB: reset}),
        ("first: FineTuneError", "models ['gpt', 'ft:gpt']"),
        right=True,
    ),
    Call("a judge is reset", judged({CHATS: reset}), ("RewardFailure", "gave no answer"), True),
    Call("a judge says null", judged({CHATS: body(NULL)}), ("content is null",), True),
    Call("a judge says escapes", judged({CHATS: body("\x1b]52;")}), ("sent no JSON: ",), True),
]

DONE = ("models ['gpt', 'ft:gpt', 'ft:gpt']",)
FILE_CALLS = [
    Call("an empty state", damaged("state.json", lambda text: ""), ("state.json", RESTORE)),
    Call("half a state", damaged("state.json", lambda t: t[: len(t) // 2]), ("no JSON", RESTORE)),
    Call("a state of brackets", damaged("state.json", lambda t: "[" * 10**5), (RESTORE,)),
    Call(
        "a state whose stage is fit", damaged("state.json", put("stage", "fit")), ("stage 'fit'",)
    ),
    Call("a state within", damaged("state.json", put("stage", "_do")), ("stage '_do'",)),
    Call("an iteration of -5", damaged("state.json", put("iteration", -5)), (RESTORE,)),
    Call("an iteration of 1e9", damaged("state.json", put("iteration", 10**9)), (RESTORE,)),
    Call("groups that are null", damaged("state.json", put("groups", None)), ("groups", RESTORE)),
    Call("a state of a later release", damaged("state.json", put("era", 2)), ("era", RESTORE)),
    Call(
        "an interaction without a draw",
        lambda folder: _held(folder, '"draw"', '"drew"'),
        ("rollouts.jsonl:1 holds no interaction of this protocol",),
    ),
    Call(
        "an interaction of somebody else",
        lambda folder: _held(folder, '"prover"', '"nobody"'),
        ("rollouts.jsonl:1",),
    ),
    Call(
        "metrics are damaged", damaged("metrics.jsonl", lambda t: "{\n[]\n" + t), DONE, right=True
    ),
]


def _held(folder: Path, old: str, new: str) -> None:
    """Go on within an iteration whose interactions were changed."""
    against({})(folder)
    run = folder / "run"
    text = (run / "rollouts.jsonl").read_text()
    (run / "rollouts.jsonl").write_text(text.replace(old, new))
    state = json.loads((run / "state.json").read_text())
    state["groups"]["all"] = {"models": ["gpt"], "jobs": []}
    (run / "state.json").write_text(json.dumps(state | {"iteration": 0, "stage": "log_stats"}))
    against({})(folder)


def fifo(folder: Path) -> None:
    """Make the state a pipe that nobody writes into."""
    (folder / "run").mkdir()
    os.mkfifo(folder / "run" / "state.json")
    against({})(folder)


def held_twice(folder: Path) -> None:
    """Make the run's directory a file."""
    (folder / "run").write_text("")
    against({})(folder)


def retested_in_itself(folder: Path) -> None:
    """Test again into the run itself."""
    with serving({}) as api:
        trainer(api.url).fit()
        trainer(api.url).retest("run/again")


def damaged_result(folder: Path) -> None:
    """Write no JSON as a local job's result."""
    jobs = local(folder)
    (folder / "jobs" / "one" / "result.json").write_text('{"status": "succ')
    asyncio.run(jobs.report("one"))


def configured(*options: str, **changes: object) -> Callable[[Path], object]:
    """Return the command with a configuration that is wrong somewhere."""

    def play(folder: Path) -> None:
        api = {"base_url": "http://127.0.0.1:9/v1", "api_key_env": None, "retries": 0}
        chat = {"class_path": "OpenAIChat", "init_args": api}
        prompts = {"prover": {"user": "{n}"}, "verifier": {"user": "{n}?"}}
        config = {
            "run_dir": "run",
            "protocol": "Adp",
            "scenario": {"class_path": "TextScenario", "init_args": {"prompts": prompts}},
            "train": {"class_path": "JSONLPrompts", "init_args": {"path": "rows.jsonl"}},
            "groups": {"all": {"agents": ["prover", "verifier"], "model": "gpt", "chat": chat}},
            "algorithm": "ExpertIteration",
        } | changes
        (folder / "rows.jsonl").write_text('{"n": 1, "label": 1}\n')
        (folder / "staged.yaml").write_text(yaml.safe_dump(config))
        command("staged", "--config", "staged.yaml", *options)(folder)

    return play


def spoilt(folder: Path) -> None:
    """Write no YAML as the run's own configuration."""
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("a: [1\nb")
    configured()(folder)


KEYED = {"class_path": "OpenAIChat", "init_args": {"api_key_env": "NO_SUCH_KEY_AT_ALL"}}
WRONG = [
    Call("the state is a pipe", fifo, ("state.json is not a file",)),
    Call("the run's directory is a file", held_twice, ("could not be written",)),
    Call("a retest within the run", retested_in_itself, ("lies in the tested run's directory",)),
    Call("a local job's result is cut off", damaged_result, ("does not hold a job's result",)),
    Call("nobody there", configured(), ("Cannot connect to host 127.0.0.1:9", KEPT)),
    Call("no key", configured(groups={"all": {
        "agents": ["prover", "verifier"], "model": "gpt", "chat": KEYED,
    }}), ("'NO_SUCH_KEY_AT_ALL' names an environment variable that is not set", KEPT)),
    Call("an agent in no group", configured(groups={"all": {
        "agents": ["prover"], "model": "gpt",
    }}), ("'verifier' is in 0 of them",)),
    Call("its configuration is no YAML", spoilt, ("run/config.yaml:2: not valid YAML",)),
    Call("a retest of no run", configured("--retest"), ("holds no staged run to test",)),
    Call("a retest's place alone", configured("--retest_dir", "x"), ("works only with --retest",)),
    Call("a name of no run", command("staged", "--name", "ghost"), ("no run has this name",)),
    Call("no name", command("staged", "--name"), ("--name needs a value",)),
    Call("a logger that is none", configured(logger="Nowhere"), ("Nowhere",)),
    Call("rows that are gone", configured(train={
        "class_path": "JSONLPrompts", "init_args": {"path": "gone.jsonl"},
    }), ("gone.jsonl",)),
]  # fmt: skip

CALLS: list[Call] = SERVER + FILE_CALLS + WRONG
