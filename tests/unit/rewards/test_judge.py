"""Test LLMJudge against a real HTTP server that breaks in every way, and against an engine."""

import asyncio
import json
import threading
from collections import Counter
from http.server import ThreadingHTTPServer

import pytest

from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import RewardFailure
from lightning_rl.rewards.judge import LLMJudge
from lightning_rl.rewards.judge_models import EngineJudge, JudgeModel, OpenAIJudge
from lightning_rl.rollout import RolloutStatus
from tests.support.serving import Quiet, serving
from tests.support.tiny_models import chat_tokenizer, save_chat_model

BRIEF = "{prompt}|{completion}"


class JudgeServer(ThreadingHTTPServer):
    """Answers ``prompt|completion`` by what the completion asks for; counts attempts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.attempts: Counter[str] = Counter()
        self.requests: list[tuple[dict, str | None]] = []
        self.together = self.most_together = 0
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(Quiet):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.body())
        question = body["messages"][0]["content"]
        what = question.split("|")[-1]
        server = self.server
        with server.lock:
            server.together += 1
            server.most_together = max(server.together, server.most_together)
            server.attempts[what] += 1
            attempt = server.attempts[what]
            server.requests.append((body, self.headers["Authorization"]))
        if what.startswith("slow") and attempt <= int(what[4:]):
            server.released.wait(60)
        status, answer = 200, what
        if what.startswith("broken") and attempt <= int(what[6:]):
            status = 500
        if what.startswith("refused"):
            status = int(what[7:])
        if what.startswith(("broken", "slow", "refused")):
            answer = f"On attempt {attempt}. Score: 9"
        text = json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]})
        if status != 200:
            text = f"no, {self.headers['Authorization']}"
        if what == "garbage":
            text = "<html>"
        if what == "empty":
            text = '{"choices": []}'
        with server.lock:
            server.together -= 1
        self.send(status, text.encode())


@pytest.fixture
def server():
    with serving(JudgeServer()) as server:
        yield server
        server.released.set()


def judge(server, **options):
    model = options.pop("model", None) or OpenAIJudge(server.url, "grader")
    options = {"question": BRIEF, "first_wait_s": 0.0, "timeout_s": 30.0} | options
    return LLMJudge(model, **options)


def grade(reward, *completions, prompt="p", **columns):
    count = len(completions)
    lists = {name: [value] * count for name, value in columns.items()}
    return asyncio.run(reward(prompts=[prompt] * count, completions=list(completions), **lists))


# ---------------------------------------------------------------- scores


def test_the_last_score_counts_and_is_rescaled(server):
    # (7 - 0)/10, (2.5 - 0)/10, (10 - 0)/10
    scores = grade(judge(server), "Score: 3? No. Score: 7", "score = **2.5**", "SCORE 10")
    assert scores == [0.7, 0.25, 1.0]
    # (4 - 1)/(5 - 1)
    assert grade(judge(server, lowest=1, highest=5, pattern=r"\[(\d)\]"), "[4]") == [0.75]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("I like it.", "no score in the judge's answer 'I like it.'"),
        ("Score: 11", "the judge's score 11 is not between 0 and 10"),
        ("Score: -1", "the judge's score -1 is not between 0 and 10"),
    ],
)
def test_a_verdict_without_a_usable_score_fails_that_sample_at_once(server, answer, reason):
    assert grade(judge(server), answer, "Score: 5") == [RewardFailure(reason), 0.5]
    assert server.attempts[answer] == 1  # the same question would get the same answer


def test_a_failed_verdict_costs_one_rollout_and_not_its_group(server, make_rollout):
    group = [make_rollout([2], [3], completion=c, reward=None) for c in ("Score: 8", "none")]
    asyncio.run(Rewards([judge(server)]).grade([group]))
    assert [r.status for r in group] == [RolloutStatus.COMPLETED, RolloutStatus.FAILED]
    assert (group[0].reward, group[0].reward_parts) == (0.8, {"judge": 0.8})
    told = "reward judge: no score in the judge's answer 'none'; prompt 'text', completion 'none'"
    assert group[1].error == told


# ---------------------------------------------------------------- what is asked


def test_the_question_shows_prompt_completion_and_columns(server):
    reward = judge(server, question="{{{prompt}}} {truth} -> |{completion}")
    grade(reward, "Score: 1 {x}", prompt=[{"role": "user", "content": "Why?"}], truth="42")
    (body, key), *_ = server.requests
    assert body["messages"] == [{"role": "user", "content": "{Why?} 42 -> |Score: 1 {x}"}]
    assert (body["model"], body["temperature"], key) == ("grader", 0.0, None)


def test_a_chat_of_several_messages_is_shown_with_its_roles(server):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "Score: 4"},
    ]
    assert grade(judge(server), chat) == [0.4]
    assert server.requests[0][0]["messages"][0]["content"] == (
        'p|assistant: {"name": "add", "arguments": {"a": 1}}\n\ntool: 1\n\nassistant: Score: 4'
    )


def test_of_a_thought_only_what_follows_is_shown_and_one_that_was_cut_off_is_no_answer(server):
    open_thought = "<think>\nPerhaps. Score: 10"
    chat = [{"role": "assistant", "content": open_thought}]
    scores = grade(judge(server), open_thought, chat, "<think>\nScore: 1?</think>Score: 4")
    assert scores == [0.0, 0.0, 0.4]
    assert [r[0]["messages"][0]["content"] for r in server.requests] == ["p|Score: 4"]


def test_a_thought_that_the_chat_template_opened_is_one(server):
    told = {"opened_thoughts": True}
    assert grade(judge(server), "It is 4. Score: 9", "No.</think>Score: 3", **told) == [0.0, 0.3]


def test_a_column_that_is_missing_is_named(server):
    (failure,) = grade(judge(server, question="{truth} {completion}"), "Score: 1", other=1)
    assert failure.reason == (
        "the judge's question names ['truth'], but the prompts have no such columns; "
        "add them to the data, or correct the question"
    )
    assert not server.requests


# ---------------------------------------------------------------- a server that breaks


def test_what_may_pass_is_tried_again(server):
    reward = judge(server, retries=2)
    scores = grade(reward, "broken2", "refused429", "garbage", "empty", "Score: 5")
    assert scores[0] == 0.9
    assert server.attempts == {
        "broken2": 3, "refused429": 3, "garbage": 3, "empty": 3, "Score: 5": 1
    }  # fmt: skip
    assert "answered 429" in scores[1].reason
    assert "sent no JSON: <html>" in scores[2].reason
    assert "sent no chat completion: choices is empty" in scores[3].reason
    assert scores[4] == 0.5


def test_what_cannot_pass_is_not_tried_again(server):
    (failure,) = grade(judge(server), "refused404")
    assert failure.reason == f"{server.url}/chat/completions answered 404: no, None"
    assert server.attempts["refused404"] == 1


def test_a_slow_answer_is_given_up_and_asked_for_again(server):
    assert grade(judge(server, retries=9, timeout_s=0.25), "slow1") == [0.9]
    (failure,) = grade(judge(server, retries=1, timeout_s=0.05), "slow9")
    assert failure.reason == "TimeoutError: no answer within timeout_s=0.05 (after 2 attempts)"
    assert server.attempts["slow9"] <= 2


def test_no_server_at_all_fails_the_samples():
    model = OpenAIJudge("http://127.0.0.1:9/v1", "grader")  # the port that discards
    (failure,) = grade(judge(None, model=model, retries=0), "Score: 1")
    assert "Cannot connect to host 127.0.0.1:9" in failure.reason


def test_no_more_questions_at_once_than_allowed(server):
    scores = grade(judge(server, max_concurrency=2), *(f"Score: {n % 10}" for n in range(12)))
    assert scores == [n % 10 / 10 for n in range(12)]
    assert server.most_together <= 2


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(server, monkeypatch):
    model = OpenAIJudge(server.url, "grader", api_key_env="JUDGE_TEST_KEY")
    reward = judge(server, model=model)
    monkeypatch.delenv("JUDGE_TEST_KEY", raising=False)
    (failure,) = grade(reward, "Score: 1")
    assert "'JUDGE_TEST_KEY' names an environment variable that is not set" in failure.reason
    assert not server.requests
    monkeypatch.setenv("JUDGE_TEST_KEY", "s3cret")
    score, refused = grade(reward, "Score: 1", "refused401")
    assert score == 0.1
    assert server.requests[0][1] == "Bearer s3cret"
    assert "answered 401: no, Bearer ***" in refused.reason
    assert "s3cret" not in repr([vars(model), vars(reward), refused])


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"question": "{prompt}"}, "must show {completion}"),
        ({"question": "{completion"}, "malformed"),
        ({"pattern": "("}, "malformed"),
        ({"pattern": r"\d"}, "exactly one group"),
        ({"lowest": 3, "highest": 3}, "lowest=3 must be < highest=3"),
        ({"max_concurrency": 0}, "max_concurrency=0 must be >= 1"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        judge(None, model=OpenAIJudge("http://127.0.0.1/v1", "grader"), **options)


def test_an_address_without_a_scheme_is_refused():
    with pytest.raises(ConfigError, match="'localhost:8000' must begin with http"):
        OpenAIJudge("localhost:8000", "grader")


# ---------------------------------------------------------------- other judges


class Echo(JudgeModel):
    async def ask(self, question: str) -> str:
        return question


def test_any_object_may_judge():
    assert grade(judge(None, model=Echo()), "Score: 6") == [0.6]


def test_an_engine_judges_with_a_model_of_its_own(tmp_path):
    save_chat_model(tmp_path / "judge", "qwen2_5")
    sampling = Sampling(max_tokens=8, temperature=0.0)
    model = EngineJudge(str(tmp_path / "judge"), TransformersEngine(device="cpu"), sampling)
    # A random model says anything; whatever it says, its first character is the score.
    reward = judge(None, model=model, pattern=r"(?s)\A(.)", question="{completion}")
    (failure,) = grade(reward, "anything")
    assert "is not a number" in failure.reason
    # What it answers is what its engine generates after the question in its chat format.
    tokenizer = chat_tokenizer("qwen2_5")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "anything"}], tokenize=False, add_generation_prompt=True
    )
    completion = asyncio.run(model.engine.generate(tokenizer(prompt)["input_ids"], sampling, 0))
    expected = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert asyncio.run(model.ask("anything")) == expected
    reward.close()
    assert not model.engine.running
