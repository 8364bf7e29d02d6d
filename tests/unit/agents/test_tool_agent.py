"""Test ToolAgent: token-exact turns, its limits, errors told to the model, and resuming."""

import asyncio
import json
import signal
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.agents.base import Agent, continuation_seed, is_over
from lightning_rl.agents.templates import HermesParser, ParsedCall, ToolParser, TurnTemplate
from lightning_rl.agents.tools import ToolAgent, tool_schema
from lightning_rl.collect.pipeline import run_agent
from lightning_rl.data.end_tokens import find_end_tokens
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy, load_tokenizer
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from tests.support.agents import AlwaysCalls, ShortTurns, add
from tests.support.engine_checks import FakeEngine, own_logprobs, require_within_max_tokens
from tests.support.tiny_models import chat_tokenizer, save_chat_model

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
TOKENIZER = chat_tokenizer("qwen3")
END = "<|im_end|>"
OPENING = "<|im_start|>assistant\n"


def call(**arguments):
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>"


def encoded(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def response(*results):
    """Render what Qwen3 reads after a turn that it ended."""
    shown = "".join(f"\n<tool_response>\n{r}\n</tool_response>" for r in results)
    return f"\n<|im_start|>user{shown}{END}\n{OPENING}"


class Script(FakeEngine):
    """An engine whose model writes given turns, a character per token, cut where it must be."""

    version = 7

    def __init__(self, *turns: str, max_length: int = 10_000) -> None:
        self.turns = list(turns)
        self.max_length = max_length
        self.requests: list[tuple[list[int], Sampling, int]] = []

    async def generate(self, token_ids, sampling, seed):
        self.requests.append((list(token_ids), sampling, seed))
        tokens = encoded(self.turns.pop(0))
        reason = "stop" if len(tokens) <= sampling.max_tokens else "length"
        if tokens[-1:] == encoded("<|begin|>"):  # stands for an interruption
            tokens, reason = tokens[:-1], "abort"
        tokens = tokens[: sampling.max_tokens]
        return Completion(tokens, [-0.5] * len(tokens), reason, [self.version] * len(tokens))


def new_rollout(agent, question=QUESTION):
    template = TurnTemplate(TOKENIZER, agent.chat_options)
    prompt = Prompt("p", question, encoded(template.render(question)))
    return Rollout(prompt, group_id="g", sample_index=0, seed=11)


def play(*turns, max_tokens=5000, rollout=None, engine=None, tools=(add,), **options):
    agent = ToolAgent(list(tools), **options)
    agent.configure(TOKENIZER)
    engine = engine or Script(*turns)
    rollout = rollout or new_rollout(agent)
    asyncio.run(agent.run(rollout, engine, Sampling(max_tokens=max_tokens)))
    require_within_max_tokens(agent, rollout, engine, max_tokens)
    return rollout, engine


def written(rollout):
    """Return the completion's text, cut where the writer changes, each with the mask."""
    runs = []
    for token, mask in zip(rollout.token_ids, rollout.loss_mask, strict=True):
        if not runs or runs[-1][0] != mask:
            runs.append((mask, []))
        runs[-1][1].append(token)
    return [(TOKENIZER.decode(tokens), mask) for mask, tokens in runs]


# ---------------------------------------------------------------- turns


def test_a_call_may_end_by_another_token_than_an_answer():
    """Llama 3.1 ends calls by <|eom_id|>, and an answer by <|eot_id|>."""
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.add_tokens(["<|eom_id|>"])  # for this tokenizer an ordinary token
    tokenizer.ends = find_end_tokens(tokenizer, tokenizer("<|eom_id|>")["input_ids"])
    agent = ToolAgent([add])
    agent.configure(tokenizer)
    for end in (END, "<|eom_id|>"):
        asks = tokenizer(call(a=2, b=3) + end)["input_ids"]
        message = asyncio.run(agent._read(asks, [], parse=True))
        [asked] = message["tool_calls"]
        assert (message["content"], asked["function"]["arguments"]) == ("", {"a": 2, "b": 3})
        wrote = tokenizer(f"It is 5.{end}")["input_ids"]
        assert asyncio.run(agent._read(wrote, [], parse=True))["content"] == "It is 5."


def test_each_turn_is_recorded_as_a_call_of_the_model():
    asks, answers = call(a=2, b=3) + END, "It is 5." + END
    rollout, engine = play(asks, answers)
    spans = [(c.start, c.stop) for c in rollout.calls]
    assert [TOKENIZER.decode(rollout.token_ids[a:b]) for a, b in spans] == [asks, answers]
    assert [c.seed for c in rollout.calls] == [seed for _, _, seed in engine.requests]
    assert [(c.reward, c.state) for c in rollout.calls] == [(None, None)] * 2


ASKS = call(a=2, b=3) + END
ASKED, RESULT = len(encoded(ASKS)), len(encoded(response(5)))


@pytest.mark.parametrize(
    ("turns", "max_tokens", "reasons"),
    [
        ([ASKS, "It is 5." + END], ASKED + RESULT + 3, ["stop", "length"]),
        ([ASKS], ASKED + RESULT, ["stop"]),  # no room after the result
        ([ASKS], ASKED - 1, ["length"]),
        ([ASKS, "It<|begin|>"], 5000, ["stop", "abort"]),
    ],
)
def test_a_call_says_whether_it_was_cut(turns, max_tokens, reasons):
    rollout, _ = play(*turns, max_tokens=max_tokens)
    assert [c.finish_reason for c in rollout.calls] == reasons


def test_a_call_is_answered_and_only_the_models_tokens_are_trained_on():
    asks, answers = "Let me add. " + call(a=2, b=3) + END, "It is 5." + END
    rollout, engine = play(asks, answers)
    assert written(rollout) == [(asks, True), (response(5), False), (answers, True)]
    assert rollout.completion == [
        {
            "role": "assistant",
            "content": "Let me add.",
            "tool_calls": [
                {
                    "id": "call00000",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 2, "b": 3}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "stop")
    expected = [(-0.5, 7) if m else (0.0, -1) for m in rollout.loss_mask]
    assert list(zip(rollout.logprobs, rollout.versions, strict=True)) == expected
    first, second = engine.requests
    prompt = rollout.prompt.token_ids
    assert (first[0], first[2]) == (prompt, 11)
    so_far = encoded(asks + response(5))
    assert second[0] == prompt + so_far
    assert second[1].max_tokens == 5000 - len(so_far)
    assert second[2] == continuation_seed(11, len(so_far)) != 11


def test_calls_of_one_turn_run_together_and_answer_in_order():
    arrived = []
    both = asyncio.Event()

    async def meet(name: str) -> str:
        """Wait for the other call.

        Args:
            name: who comes.
        """
        arrived.append(name)
        if len(arrived) == 2:
            both.set()
        await both.wait()
        return f"{name} met"

    two = "".join(call(name=n).replace('"add"', '"meet"') for n in ("x", "y")) + END
    rollout, _ = play(two, "Done." + END, tools=[meet])
    assert written(rollout)[1] == (response("x met", "y met"), False)
    assert [m["tool_call_id"] for m in rollout.completion if m["role"] == "tool"] == [
        "call00000",
        "call00001",
    ]


class Hangs(ToolParser):
    """Reads calls as ``HermesParser`` does; a turn with "slowly" takes until the test is over."""

    released = threading.Event()

    def parse(self, text):
        if "slowly" in text:
            self.released.wait(60)
        return HermesParser().parse(text)


def test_a_turn_that_a_parser_reads_too_slowly_is_one_without_a_call(monkeypatch):
    monkeypatch.setattr("lightning_rl.agents.tool_call_parsing.READ_S", 0.2)
    agent = ToolAgent([add], Hangs())
    agent.configure(TOKENIZER)
    said = f"slowly {call(a=1, b=1)}"

    async def read():
        """Read two such turns and another beside them, while the loop turns."""
        turns = [said, said, call(a=2, b=3)]
        reading = (agent._read(encoded(turn + END), [], parse=True) for turn in turns)
        return await asyncio.gather(*reading)

    with pytest.warns(UserWarning, match=r"Hangs took more than 0\.2 s .* count as text") as warned:
        first, second, third = asyncio.run(read())
    Hangs.released.set()
    assert first == second == {"role": "assistant", "content": said}
    assert third["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3}
    assert len([w for w in warned if "Hangs took" in str(w.message)]) == 1


def test_lists_reach_rewards_as_lists():
    def find(word: str) -> list:
        """Find places of a word.

        Args:
            word: to be found.
        """
        return [word, {"at": (2, 5)}]

    asks = call(word="x").replace('"add"', '"find"')
    rollout, _ = play(asks + END, "Done." + END, tools=[find])
    shown = '["x", {"at": [2, 5]}]'
    assert written(rollout)[1] == (response(shown), False)
    rollout.finish_reason, rollout.status = "stop", RolloutStatus.COMPLETED

    def places(completions):
        _, found, _ = completions[0]
        return [float(found["content"] == shown and found["result"][1]["at"][1])]

    asyncio.run(Rewards([places]).grade([[rollout]]))
    assert rollout.reward == 5


def test_a_tool_with_an_alarm_fails_its_rollout_and_says_why():
    def timed(a: int) -> int:
        """Take it.

        Args:
            a: it.
        """
        try:
            signal.alarm(1)
        except Exception:
            return 0  # as careful tools do
        return a

    agent = ToolAgent([timed])
    agent.configure(TOKENIZER)
    rollout = new_rollout(agent)
    asks = call(a=1).replace('"add"', '"timed"')
    asyncio.run(run_agent(agent, rollout, Script(asks + END), Sampling(max_tokens=5000)))
    assert rollout.status is RolloutStatus.FAILED
    assert "tool 'timed': signal.alarm works in the main thread only" in rollout.error
    assert "call_timeout=10 limits each call" in rollout.error


def test_numbers_of_calls_go_on_over_turns():
    rollout, _ = play(call(a=1, b=1) + END, call(a=2, b=2) + END, "Done." + END)
    assert [m["tool_call_id"] for m in rollout.completion if m["role"] == "tool"] == [
        "call00000",
        "call00001",
    ]
    assert [m["content"] for m in rollout.completion if m["role"] == "tool"] == ["2", "4"]


@pytest.mark.parametrize(
    ("turn", "kind", "text"),
    [
        ("<tool_call>{add 2 3}</tool_call>", "unreadable", "not valid JSON"),
        (call(a=2), "arguments", "b: Missing required argument"),
        (call(a=2, b=3).replace("add", "sum"), "unknown_tool", "there is no tool 'sum'"),
    ],
)
def test_a_bad_call_is_answered_by_its_error_and_the_model_goes_on(turn, kind, text):
    rollout, _ = play(turn + END, "Sorry." + END)
    _, told, last = rollout.completion
    assert (told["error"], last["content"]) == (kind, "Sorry.")
    assert text in told["content"]
    assert written(rollout)[1] == (response(told["content"]), False)


# ---------------------------------------------------------------- limits


def test_calls_of_the_last_turn_are_not_run():
    rollout, engine = play(call(a=1, b=1) + END, call(a=2, b=2) + END, max_turns=2)
    assert rollout.finish_reason == "max_turns"
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.loss_mask[-1]
    assert len(engine.requests) == 2


def test_max_tokens_counts_results_too_and_cuts_a_turn():
    asks = call(a=2, b=3) + END
    used = len(encoded(asks + response(5)))
    rollout, _ = play(asks, "It is 5." + END, max_tokens=used + 4)
    assert rollout.finish_reason == "length"
    assert len(rollout.token_ids) == used + 4
    assert rollout.completion[-1] == {"role": "assistant", "content": "It i"}


def test_a_result_that_leaves_no_room_ends_the_rollout():
    asks = call(a=2, b=3) + END
    used = len(encoded(asks + response(5)))
    rollout, engine = play(asks, max_tokens=used)  # no token would be left for an answer
    assert rollout.finish_reason == "length"
    assert written(rollout) == [(asks, True)]
    assert len(engine.requests) == 1
    fits, _ = play(asks, "5" + END, max_tokens=used + 1)
    assert written(fits)[2] == ("5", True)


def test_the_engines_length_is_a_limit_too():
    asks = call(a=2, b=3) + END
    agent = ToolAgent([add])
    prompt = len(new_rollout(agent).prompt.token_ids)
    engine = Script(asks, max_length=prompt + len(encoded(asks)) + 3)
    rollout, _ = play(engine=engine)
    assert rollout.finish_reason == "length"
    assert engine.requests[0][1].max_tokens == len(encoded(asks)) + 3


def test_a_call_in_a_turn_that_was_cut_off_is_not_run():
    rollout, engine = play(call(a=2, b=3) + " and so on", max_tokens=len(encoded(call(a=2, b=3))))
    assert rollout.finish_reason == "length"
    assert "tool_calls" not in rollout.completion[0]
    assert len(engine.requests) == 1


def test_wall_time_ends_a_rollout_and_keeps_what_it_has():
    async def hang() -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return ""

    asks = '<tool_call>{"name": "hang", "arguments": {}}</tool_call>' + END
    rollout, _ = play(asks, tools=[hang], max_seconds=0.05)
    assert (rollout.finish_reason, rollout.status) == ("max_seconds", RolloutStatus.COMPLETED)
    assert written(rollout) == [(asks, True)]


# ---------------------------------------------------------------- interruptions


@pytest.mark.parametrize("cut", [0, 7])
def test_an_interrupted_turn_goes_on_where_it_was(cut):
    """The turn is the second of three, of which nothing or a part had been written."""
    turns = [call(a=1, b=1) + END, "So. " + call(a=2, b=2) + END, "Done." + END]
    whole, _ = play(*turns)
    part, engine = play(turns[0], turns[1][:cut] + "<|begin|>")
    assert part.status is RolloutStatus.ABORTED
    assert part.finish_reason == "abort"
    kept = Rollout.from_dict(part.to_dict())  # through a checkpoint
    kept.status = RolloutStatus.INIT
    rest, engine = play(turns[1][cut:], turns[2], rollout=kept)
    assert rest.token_ids == whole.token_ids
    assert rest.loss_mask == whole.loss_mask
    assert rest.completion == whole.completion
    assert rest.finish_reason == "stop"
    assert len(engine.requests) == 2


def test_what_the_pipeline_made_of_a_cut_turn_is_not_kept_as_a_message():
    part, _ = play("It i<|begin|>")
    part.completion = [{"role": "assistant", "content": "It i"}]
    rest, _ = play("s 5." + END, rollout=part)
    assert rest.completion == [{"role": "assistant", "content": "It is 5."}]


# ---------------------------------------------------------------- set-up


def test_the_prompt_shows_the_tools():
    agent = ToolAgent([add])
    prompts = IterablePrompts([{"prompt": QUESTION}])
    prompts.load(TOKENIZER, agent.chat_options)
    text = TOKENIZER.decode(prompts[0].token_ids)
    assert json.dumps(tool_schema(add)) in text
    assert text.endswith(f"What is 2 + 3?{END}\n{OPENING}")
    assert Agent.chat_options == {}


def double(a: int) -> int:
    """Double a number.

    Args:
        a: the number.
    """
    return 2 * a


ADD, DOUBLE = tool_schema(add), tool_schema(double)
IN_OTHER_WORDS = {"type": "function", "function": {**DOUBLE["function"], "description": "Twice."}}


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        (None, [ADD, DOUBLE]),
        ([DOUBLE, ADD], [DOUBLE, ADD]),
        ([DOUBLE], [DOUBLE]),
        (json.dumps([IN_OTHER_WORDS]), [IN_OTHER_WORDS]),
        ([], []),
        ("[]", []),
    ],
)
def test_a_row_is_offered_the_tools_that_it_names(given, offered):
    agent = ToolAgent([add, double])
    prompts = IterablePrompts([{"prompt": QUESTION, "tools": given}])
    prompts.load(TOKENIZER, agent.chat_options)
    opened = TurnTemplate(TOKENIZER, {"tools": offered or None}).render(QUESTION)
    assert TOKENIZER.decode(prompts[0].token_ids) == opened
    rollout = Rollout(prompts[0], group_id="g", sample_index=0, seed=11)
    play(call(a=2, b=3) + END, "Done." + END, tools=[add, double], rollout=rollout)
    names = [schema["function"]["name"] for schema in offered]
    refused = f"Error: there is no tool 'add'; there are: {', '.join(names) or 'none'}"
    assert rollout.completion[1]["content"] == ("5" if "add" in names else refused)
    assert rollout.extra["tools"] == offered
    assert {call.tool_choice for call in rollout.calls} == {"auto" if offered else None}


def test_rows_with_other_tools_are_answered_side_by_side():
    agent = ToolAgent([add, double])
    agent.configure(TOKENIZER)
    rows = [{"prompt": QUESTION, "tools": [schema]} for schema in (ADD, DOUBLE)]
    prompts = IterablePrompts(rows)
    prompts.load(TOKENIZER, agent.chat_options)
    rollouts = [Rollout(prompts[n], group_id="g", sample_index=0, seed=n) for n in (0, 1)]

    async def both():
        engines = [Script(call(a=2, b=3) + END, "Done." + END) for _ in rollouts]
        sampling = Sampling(max_tokens=5000)
        runs = zip(rollouts, engines, strict=True)
        await asyncio.gather(*(agent.run(one, engine, sampling) for one, engine in runs))

    asyncio.run(both())
    answers = [rollout.completion[1]["content"] for rollout in rollouts]
    assert answers == ["5", "Error: there is no tool 'add'; there are: double"]


class Commas(ToolParser):
    """Writes calls as ``name,argument``, which no template does."""

    def parse(self, text):
        name, _, value = text.partition(",")
        return "", [ParsedCall(name, {"a": value})] if value else []


def test_a_parser_of_another_format_is_refused():
    with pytest.raises(ConfigError, match="Commas cannot read tool calls as this chat template"):
        ToolAgent([add], Commas()).configure(TOKENIZER)
    llama = chat_tokenizer("llama3_1")
    with pytest.raises(ConfigError, match=r'HermesParser cannot read .*"parameters"'):
        ToolAgent([add], allow_rewrites=True).configure(llama)


def test_a_template_that_hides_the_tools_is_refused():
    template = TOKENIZER.chat_template.replace("tool | tojson", "'tool'")
    with pytest.raises(ConfigError, match="does not show the tool 'add' to the model"):
        ToolAgent([add]).configure(chat_tokenizer("qwen3", template=template))


def test_a_template_with_room_for_one_call_gets_one():
    """Llama 3.1's refuses two: the model is told, and none is run."""
    template = TOKENIZER.chat_template.replace(
        "{%- if message.tool_calls %}",
        "{%- if message.tool_calls and message.tool_calls | length > 1 %}"
        "{{ raise_exception('one') }}{% endif %}{%- if message.tool_calls %}",
    )
    agent = ToolAgent([add])
    agent.configure(chat_tokenizer("qwen3", template=template))
    rollout = new_rollout(agent)
    engine = Script(call(a=1, b=1) + call(a=2, b=2) + END, "Sorry." + END)
    asyncio.run(agent.run(rollout, engine, Sampling(max_tokens=5000)))
    assert written(rollout)[1] == (response("Error: only one tool may be called per turn"), False)


def test_text_prompts_and_bad_limits_are_refused():
    agent = ToolAgent([add])
    rollout = new_rollout(agent)
    rollout.prompt.prompt = "2 + 3 = "
    with pytest.raises(ConfigError, match="ToolAgent needs chats, but prompt 'p' is plain text"):
        play(rollout=rollout)
    with pytest.raises(ConfigError, match="call configure"):
        asyncio.run(ToolAgent([add]).run(new_rollout(agent), Script("x"), Sampling()))
    with pytest.raises(ConfigError, match="max_turns=0 must be >= 1"):
        ToolAgent([add], max_turns=0)
    with pytest.raises(ConfigError, match="max_seconds=0 must be > 0"):
        ToolAgent([add], max_seconds=0)


# ---------------------------------------------------------------- a real model


def test_logprobs_are_the_models_own_given_all_tokens_before(tmp_path):
    """The engine went on from exactly the tokens that training will see."""
    save_chat_model(tmp_path / "model", "qwen3")
    save_skeleton(str(tmp_path / "model"), tmp_path / "skeleton")
    engine = type("Short", (ShortTurns, TransformersEngine), {})(device="cpu")
    engine.start(tmp_path / "skeleton")
    engine.load_weights(Policy(str(tmp_path / "model")).named_weights(), 0)
    agent = ToolAgent([add], AlwaysCalls(), max_turns=3)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    agent.configure(tokenizer)
    rollout = new_rollout(agent)
    asyncio.run(agent.run(rollout, engine, Sampling(max_tokens=900)))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    own = own_logprobs(plain, rollout.prompt.token_ids, rollout.token_ids)
    mask = torch.tensor(rollout.loss_mask)
    assert torch.tensor(rollout.logprobs)[mask] == pytest.approx(own[mask], abs=1e-4)
    assert not torch.tensor(rollout.logprobs)[~mask].any()
    (_, first), (given, between), *_, (_, last) = written(rollout)
    assert (first, between, last, len(written(rollout))) == (True, False, True, 5)
    assert given == END + response(13)  # the turn, which did not end, is closed


# ---------------------------------------------------------------- many calls


def counted():
    """Return a tool, and the list of its calls."""
    ran = []

    def note(n: int) -> str:
        """Note a number.

        Args:
            n: the number.
        """
        ran.append(n)
        return "noted"

    return note, ran


def many(count):
    asked = (json.dumps({"name": "note", "arguments": {"n": n}}) for n in range(count))
    return "".join(f"<tool_call>\n{one}\n</tool_call>" for one in asked) + END


def test_calls_whose_answers_have_no_room_are_not_run():
    note, ran = counted()
    text = many(2000)
    length = len(encoded(text))
    rollout, _ = play(
        text, tools=(note,), max_tokens=length + 20_000, engine=Script(text, max_length=1_000_000)
    )
    assert (rollout.finish_reason, ran) == ("length", [])
    assert len(rollout.completion[0]["tool_calls"]) == 2000
    assert rollout.completed


def test_calls_beyond_a_turns_limit_are_answered_by_an_error():
    note, ran = counted()
    rollout, _ = play(many(5), f"Done.{END}", tools=(note,), max_calls_per_turn=2)
    assert sorted(ran) == [0, 1]
    results = [m for m in rollout.completion if m["role"] == "tool"]
    assert [m["content"] for m in results[:2]] == ["noted"] * 2
    told = "Error: only 2 calls of a turn are run; call again for the rest"
    assert [(m["content"], m["error"]) for m in results[2:]] == [(told, "too_many")] * 3
    assert rollout.finish_reason == "stop"
    with pytest.raises(ConfigError, match="max_calls_per_turn=0 must be >= 1"):
        ToolAgent([note], max_calls_per_turn=0)


# ---------------------------------------------------------------- turns that had ended


def test_a_turn_that_had_ended_is_not_continued_when_a_run_resumes():
    """It was interrupted while its calls were read."""
    for stop, last in (([], END), (["5"], ""), (["s 5."], ".")):
        agent = ToolAgent([add])
        agent.configure(TOKENIZER)
        rollout, wrote = new_rollout(agent), encoded(f"It is 5{last}")
        rollout.rows[0].append_written(wrote, [-0.5] * len(wrote), [7] * len(wrote))
        engine = Script("never")
        asyncio.run(agent.run(rollout, engine, Sampling(max_tokens=500, stop=stop)))
        assert (engine.requests, rollout.token_ids) == ([], wrote)
        assert rollout.finish_reason == "stop"


def test_a_stop_string_may_end_inside_of_a_token():
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.add_tokens(["!\n", "a!", "bc"])
    behind, at_end, other = tokenizer.convert_tokens_to_ids(["!\n", "a!", "bc"])
    sampling = Sampling(stop=["!", "b!"])
    assert is_over([other, behind], sampling, tokenizer)
    assert is_over([other, at_end], sampling, tokenizer)
    assert not is_over([behind, other], sampling, tokenizer)  # min_tokens let it go on
    assert not is_over([other], sampling, tokenizer)
    assert not is_over([], sampling, tokenizer)
    assert not is_over([behind], Sampling(), tokenizer)
