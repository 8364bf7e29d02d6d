"""Test prompts of a hub on the loopback, read by the real clients; each refusal says what to do."""

import json
import os
import re
import subprocess
import sys
from itertools import repeat

import pytest

from tests.support.hub import CARD, Hub
from tests.support.serving import serving

TOKEN = "hf_a_secret_of_the_tests"


def jsonl(first: int, last: int) -> bytes:
    rows = ({"question": str(n), "answer": f"= {n}"} for n in range(first, last))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def hub():
    hub = Hub(TOKEN)
    math = hub.repository("openai/gsm8k")
    math.commit(
        {
            "README.md": CARD,
            "main/train.jsonl": jsonl(0, 10),
            "main/test.jsonl": jsonl(90, 93),
            "socratic/train.jsonl": jsonl(50, 54),
        },
        branch="v1",
    )
    math.refs["main"] = math.refs["v1"]
    math.commit({"main/train.jsonl": jsonl(0, 20)})
    hub.repository("us/gated", gated=True).commit({"train.jsonl": jsonl(0, 3)})
    for name in ("once", "busy", "later", "gone", "cut", "torn"):
        hub.repository(f"us/{name}").commit({"train.jsonl": jsonl(0, 3000)})
    with serving(hub):
        yield hub


class Reader:
    """A process that loads prompts through the hub's clients."""

    def __init__(self, hub, folder, model, **environment):
        self.errors = folder / f"errors{len(environment)}.txt"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        home = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_ETAG_TIMEOUT": "5"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hub_reader", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
            env=kept | home | environment,
        )

    def __call__(self, path, kind="HFDatasetPrompts", token=None, **options):
        meta = {k: options.pop(k) for k in ("draw", "state", "shuffle", "first") if k in options}
        given = {"columns": {"prompt": "question"}, "path": path} | options
        told = {"kind": kind, "options": given, "token": token} | meta
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()[-3000:]
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def read(hub, folder, tiny_model):
    reader = Reader(hub, folder, tiny_model)
    yield reader
    reader.close()


def refused(answer, *said):
    """Require that the error is one line, holds what it should, and no token."""
    error = answer["error"]
    assert "\n" not in error, error
    assert TOKEN not in error
    for text in said:
        assert re.search(text, error), error


# ---------------------------------------------------------------- what there is


def test_a_slice_of_a_split_is_drawn(read):
    answer = read("openai/gsm8k", name="main", split="train[:90%]", draw=18)
    assert answer["rows"] == 18  # of 20
    assert answer["prompts"] == [str(n) for n in range(18)]
    assert answer["columns"][3] == {"answer": "= 3"}


def test_a_revision_is_that_commit(read, hub):
    first = hub.repository("openai/gsm8k").refs["v1"]
    for revision in ("v1", first):
        answer = read("openai/gsm8k", name="main", split="train", revision=revision)
        assert answer["rows"] == 10


def test_a_configuration_with_one_split_needs_none_named(read):
    assert read("openai/gsm8k", name="socratic")["rows"] == 4


def test_a_run_goes_on_with_the_same_prompts(read):
    options = {"name": "main", "split": "train", "shuffle": True, "seed": 3}
    whole = read("openai/gsm8k", draw=33, **options)
    begun = read("openai/gsm8k", draw=13, **options)
    rest = read("openai/gsm8k", draw=20, state=begun["state"], **options)
    assert begun["prompts"] + rest["prompts"] == whole["prompts"]


def test_a_token_opens_what_is_gated_and_is_never_printed(read, hub):
    answer = read("us/gated", token=TOKEN)
    assert answer["rows"] == 3
    assert TOKEN in hub.tokens
    assert TOKEN not in read.errors.read_text()


# ---------------------------------------------------------------- a stream


@pytest.mark.parametrize("drawn", [0, 3, 7, 12, 23, 41])
def test_a_stream_goes_on_with_the_same_prompts(read, drawn):
    options = {"name": "main", "shuffle": True, "kind": "HFStreamingPrompts", "buffer_size": 6}
    whole = read("openai/gsm8k", draw=drawn + 25, **options)
    begun = read("openai/gsm8k", draw=drawn, **options)
    rest = read("openai/gsm8k", draw=25, state=begun["state"], **options)
    assert begun["prompts"] + rest["prompts"] == whole["prompts"]
    assert begun["ids"] + rest["ids"] == whole["ids"]


def test_a_stream_draws_each_row_once_in_each_pass(read):
    options = {"name": "main", "shuffle": True, "kind": "HFStreamingPrompts", "buffer_size": 6}
    drawn = read("openai/gsm8k", draw=40, first=3, **options)
    rows = {str(n) for n in range(20)}
    assert set(drawn["prompts"][:20]) == set(drawn["prompts"][20:]) == rows
    assert drawn["prompts"][:20] != drawn["prompts"][20:]
    assert set(drawn["prompts"][:6]) == {str(n) for n in range(6)}  # the first block
    assert drawn["ids"] == drawn["prompts"]  # numbers of rows
    assert drawn["first"] == ["0", "1", "2"]


def test_a_stream_is_not_kept_on_the_disk(read, hub, folder):
    hub.repository("us/flow").commit({"train.jsonl": jsonl(0, 5)})
    assert read("us/flow", kind="HFStreamingPrompts", draw=7)["prompts"][5:] == ["0", "1"]
    assert not list((folder / "hf/datasets").glob("us___flow/**/*.arrow"))


@pytest.mark.slow
def test_a_stream_that_breaks_goes_on_where_it_was(read, hub):
    hub.fail("GET /datasets/us/torn/resolve", "cut")
    answer = read("us/torn", kind="HFStreamingPrompts", draw=3000, buffer_size=500)
    assert answer["prompts"] == [str(n) for n in range(3000)]


# ---------------------------------------------------------------- what there is not


def test_what_is_not_there_is_named_with_what_is(read):
    refused(
        read("openai/gsm8k", name="main", split="trian"),
        r"split='trian' is not one of \['test', 'train'\]",
    )
    refused(
        read("openai/gsm8k", name="main", split="trian", kind="HFStreamingPrompts"),
        r"split='trian' is not one of \['train', 'test'\]",
    )
    refused(read("openai/gsm8k", name="man"), r"name='man' is not one of \['main', 'socratic'\]")
    refused(read("openai/gsm8k"), r"name=None is not one of \['main', 'socratic'\]")
    refused(
        read("openai/gsm8k", name="main", split="train", revision="v9"),
        "has no revision='v9'; name a branch, tag or commit",
    )
    refused(
        read("openai/gsm8k", name="main", split="train", columns={"prompt": "query"}),
        r"row 0: no column 'query' among \['answer', 'question'\]; correct columns\.prompt",
    )


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_name_that_is_not_there_is_told(read, token):
    refused(
        read("openai/gsm9k", token=token),
        "'openai/gsm9k' is neither a dataset of the hub",
        "if it is private, set HF_TOKEN",
    )


def test_what_is_gated_names_the_token_that_is_missing(read, hub):
    hub.repository("us/closed", gated=True).commit({"train.jsonl": jsonl(0, 3)})
    refused(
        read("us/closed"),
        "'us/closed' is gated, and HF_TOKEN is not set; accept its terms at http",
    )
    wrong = read("us/closed", token="hf_of_someone_else")
    refused(wrong, "the token in HF_TOKEN has no access")
    assert "someone_else" not in wrong["error"] + read.errors.read_text()


# ---------------------------------------------------------------- a hub in trouble


@pytest.mark.slow
@pytest.mark.parametrize("request_", ["HEAD /datasets/us/once", "GET /api/datasets/us/once"])
@pytest.mark.parametrize("fault", [(429, {"Retry-After": "0"}), 503, "drop"])
def test_what_passes_is_waited_for(read, hub, request_, fault):
    hub.repository("us/once").commit({"more.txt": str(hub.requests.total()).encode()})  # is new
    hub.fail(request_, fault)
    assert read("us/once")["rows"] == 3000
    assert next(hub.faults[request_], None) is None  # it did fail


@pytest.mark.slow
def test_a_download_that_breaks_off_goes_on(read, hub):
    hub.fail("GET /datasets/us/cut/resolve", "cut", "cut")
    answer = read("us/cut", draw=3000)
    assert answer["prompts"] == [str(n) for n in range(3000)]


@pytest.mark.slow
def test_a_hub_that_is_asked_too_often_is_left_alone_after_a_while(read, hub):
    request = "GET /api/datasets/us/busy"
    hub.fail(request, repeat((429, {"Retry-After": "1"})))
    refused(
        read("us/busy"),
        r"the request rate \(status 429\), even after 4 tries; try again in 1 s, or set HF_TOKEN",
    )
    assert hub.requests[request] == 4


@pytest.mark.slow
def test_who_is_asked_to_wait_for_long_is_told_at_once(read, hub):
    request = "GET /api/datasets/us/later"
    hub.fail(request, repeat((429, {"Retry-After": "3600"})))
    refused(read("us/later"), "try again in 3600 s")
    assert hub.requests[request] == 1


@pytest.mark.slow
def test_a_hub_that_breaks_off_each_time_is_named(read, hub):
    hub.fail("HEAD /datasets/us/gone", repeat("drop"))
    refused(
        read("us/gone"),
        rf"'us/gone': the hub \({hub.url}\) breaks off: .*disconnected.*, even after 4 tries",
    )


# ---------------------------------------------------------------- without the hub


@pytest.mark.slow
def test_offline_only_what_was_asked_for_is_taken_from_the_cache(read, hub, folder, tiny_model):
    there = hub.repository("us/grown")
    there.commit({"train.jsonl": jsonl(0, 10)}, branch="v1")
    there.commit({"train.jsonl": jsonl(0, 20)})
    refs = there.refs
    read("us/grown", split="train", revision="v1")
    read("us/grown", split="train")  # the cache's newest
    offline = Reader(hub, folder, tiny_model, HF_HUB_OFFLINE="1")
    before = hub.requests.total()
    try:
        refused(
            offline("us/never"),
            r"'us/never' is not in the cache \(.*hf\), and HF_HUB_OFFLINE is set; load it once",
        )
        for revision in (None, "main", refs["main"]):
            assert offline("us/grown", split="train", revision=revision)["rows"] == 20
        for revision in ("v1", refs["v1"], "v9"):
            refused(
                offline("us/grown", split="train", revision=revision),
                rf"revision='{revision}' .* is not what the cache holds \(commit {refs['main']}",
            )
    finally:
        offline.close()
    assert hub.requests.total() == before
