"""Test programs and functions as agents: what is recorded, what they say, and how they may end."""

import asyncio
import functools
import json
import math
import os
import re
import ssl
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rl import Prompt, Rewards, Rollout, Sampling, TransformersEngine
from lightning_rl.agents.endings import ending_metrics
from lightning_rl.agents.templates import TurnTemplate
from lightning_rl.errors import ConfigError, EngineError
from lightning_rl.extend import Completion, RolloutPipeline, RolloutStatus
from lightning_rl.models.policy import Policy
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.run.loop.background import run_async
from lightning_rl.serving import AgentClient, FunctionAgent, ProgramAgent, ScriptAgent
from lightning_rl.serving.results import last_result, note_result
from tests.support.tiny_models import chatml_tokenizer, save_random_model

QUESTION = [{"role": "user", "content": "Why?"}]
SAMPLING = Sampling(max_tokens=5)
ASK = """
import json, os, signal, sys, time, urllib.request

def ask(messages, **fields):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **fields}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]

def say(**result):
    print(json.dumps(result), flush=True)

def twice():
    chat = task["prompt"]
    chat = [*chat, ask(chat), {"role": "user", "content": "Go on."}]
    between()
    return ask(chat)

def between(): pass

task = json.load(sys.stdin)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = chatml_tokenizer()
    sizes = {"max_position_embeddings": 256, "initializer_range": 0.2}
    save_random_model(directory, tokenizer, vocab_size=len(tokenizer), **sizes)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(str(model))


class Counting(TransformersEngine):
    """Counts what it generates."""

    asked = 0

    async def generate(self, token_ids, sampling, seed):
        self.asked += 1
        return await super().generate(token_ids, sampling, seed)


@pytest.fixture(scope="module")
def engine(model):
    made = Counting(device="cpu")
    made.start(model)
    made.load_weights(Policy(str(model)).named_weights(), 3)
    yield made
    made.close()


@pytest.fixture
def run(engine, tokenizer):
    """Run an agent for rollouts side by side; closes it afterwards."""
    agents = []

    def of(agent, *rollouts, engine=engine):
        agents.append(agent)
        agent.configure(tokenizer)

        async def all_of_them():
            await asyncio.gather(*(agent.run(r, engine, SAMPLING) for r in rollouts))

        run_async(all_of_them())
        return rollouts[0]

    yield of
    for agent in agents:
        agent.close()


@pytest.fixture
def rollout(tokenizer):
    def make(index: int = 0, **columns) -> Rollout:
        text = TurnTemplate(tokenizer).render(QUESTION)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Rollout(Prompt("p7", QUESTION, prompt, columns), "g", index, 40 + index)

    return make


def program(code: str, **options) -> ProgramAgent:
    return ProgramAgent([sys.executable, "-I", "-S", "-c", ASK + code], **options)


# ---------------------------------------------------------------- what is recorded


def test_a_program_is_given_its_task_and_says_how_it_went(run, rollout, engine, tokenizer):
    code = """
message = ask(task["prompt"], max_tokens=4)
print("some words")
say(reward=0.5, metrics={"turns": 1}, answer=[task["id"], task["columns"], task["seed"]])
print("more words")
"""
    made = run(program(code), rollout(answer=3))
    assert (made.status, made.environment_reward) == (RolloutStatus.COMPLETED, 0.5)
    assert made.logged == {"turns": 1.0}
    assert len(made.extra.pop("session_id")) == 16
    assert made.extra == {"answer": ["p7", {"answer": 3}, 40], "agent_end": "done"}
    # One call of the rollout's own prompt is what a single turn is.
    alone = run_async(
        engine.generate(made.prompt.token_ids, replace(SAMPLING, max_tokens=4), made.seed)
    )
    assert made.token_ids == alone.token_ids
    assert made.logprobs == alone.logprobs
    assert made.versions == [3] * len(alone.token_ids)
    assert made.finish_reason == made.calls[-1].finish_reason == alone.finish_reason
    text = tokenizer.decode(made.token_ids, skip_special_tokens=True)
    assert made.completion == [{"role": "assistant", "content": text}]


def test_a_chat_that_goes_on_is_one_row_of_the_tokens_that_were_written(run, rollout):
    made = run(program("twice()"), rollout())
    assert [(c.row, made.loss_mask[c.start : c.stop]) for c in made.calls] == [
        (0, [True] * (c.stop - c.start)) for c in made.calls
    ]
    assert len(made.calls) == 2
    assert sum(made.loss_mask) == sum(c.stop - c.start for c in made.calls) < len(made.loss_mask)
    assert [m["role"] for m in made.completion] == ["assistant", "user", "assistant"]
    assert made.environment_reward is None  # for reward functions to grade


def test_rewards_of_roles_and_calls(run, rollout):
    code = """
first = ask(task["prompt"])
ask([{"role": "user", "content": first["content"] + "?"}], model="critic")
say(reward=1, role_rewards={"critic": 0.25}, call_rewards=[None, -1])
"""
    made = run(program(code, roles=["critic"]), rollout())
    assert [row.role for row in made.rows] == ["", "critic"]
    assert made.role_rewards == {"critic": 0.25}
    assert [call.reward for call in made.calls] == [None, -1.0]


def test_many_at_once(run, rollout):
    rollouts = [rollout(i) for i in range(24)]
    run(program("twice()\nsay(reward=task['seed'])", max_concurrency=8), *rollouts)
    assert [r.environment_reward for r in rollouts] == [40.0 + i for i in range(24)]
    assert len({tuple(r.token_ids) for r in rollouts}) == 24


def test_a_script_is_run_with_its_imports_made_once(run, rollout, tmp_path):
    (tmp_path / "agent.py").write_text(ASK + "twice()\nsay(reward=len(sys.argv[1:]))")
    agent = ScriptAgent("agent.py", ["a", "b"], ["urllib.request"], cwd=str(tmp_path))
    assert run(agent, rollout()).environment_reward == 2.0


def test_a_shell_command_and_what_it_sees_of_the_environment(run, rollout, monkeypatch, tmp_path):
    (tmp_path / "ask.py").write_text(ASK + "ask(task['prompt']); say(answer=os.environ['SEEN'])")
    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    monkeypatch.setenv("NAMED", "passed")
    shell = f'SEEN="$TOKEN_OF_MINE-$NAMED-$SET-$NO_PROXY" exec {sys.executable} ask.py'
    agent = ProgramAgent(shell, env={"SET": "set"}, pass_env=["NAMED"], cwd=str(tmp_path))
    made = run(agent, rollout())
    assert made.extra["answer"] == "-passed-set-localhost,127.0.0.1,::1"


# ---------------------------------------------------------------- how it may end

FINE = "twice()\nsay(reward=1)"
FAULTS = {
    "exit": ("twice()\nprint('no such fruit', file=sys.stderr)\nsys.exit(3)",
             "ended with exit status 3: no such fruit"),
    "killed": ("twice()\nos.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    "output": ("twice()\nwhile True: print('x' * 10000)", "wrote more than max_output_bytes=50000"),
    "silent": ("say(reward=1)", "asked no model"),
    "result": ("twice()\nprint('{\"reward\": NaN}')", "said reward=nan must be a finite number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_a_program_that_fails_costs_its_rollout_alone(run, rollout, kind):
    code, reason = FAULTS[kind]
    code = f"if task['columns']['bad']:\n  exec({code!r})\nelse:\n  exec({FINE!r})"
    rollouts = [rollout(0, bad=1), rollout(1, bad=0), rollout(2, bad=0)]
    bad = run(program(code, max_output_bytes=50_000), *rollouts)
    assert bad.status is RolloutStatus.FAILED
    assert bad.error.startswith("program '")
    assert f"{reason}" in bad.error
    assert bad.error.endswith("(prompt 'p7')")
    # What the model had written is still there.
    assert sum(bad.loss_mask) == sum(c.stop - c.start for c in bad.calls)
    assert len(bad.calls) == (0 if kind == "silent" else 2)
    assert [r.environment_reward for r in rollouts] == [None, 1.0, 1.0]
    shares = ending_metrics(rollouts)
    assert shares.pop(f"agent/{kind}_share") == pytest.approx(1 / 3)
    assert set(shares.values()) == {0.0}


def limit(call):
    """Return seconds that are plenty for what ``call`` does, however busy the machine is."""
    began = time.monotonic()
    call()
    return max(1.0, 10 * (time.monotonic() - began))


def test_at_its_limit_counts_what_was_said_until_then(run, rollout):
    code = "twice()\nif task['columns']['says']: say(reward=0.25)\ntime.sleep(600)"
    rollouts = [rollout(0, says=False), rollout(1, says=True)]
    seconds = limit(lambda: run(program("twice()"), rollout()))
    run(program(code, max_seconds=seconds), *rollouts)
    assert [r.status for r in rollouts] == [RolloutStatus.COMPLETED] * 2
    assert [r.finish_reason for r in rollouts] == ["max_seconds"] * 2
    assert [r.environment_reward for r in rollouts] == [0.0, 0.25]
    assert ending_metrics(rollouts)["agent/timeout_share"] == 1.0


def test_waiting_for_a_place_is_not_counted(run, rollout, engine, tokenizer):
    seconds = limit(lambda: run(ProgramAgent("exit 3"), rollout()))
    agent = ProgramAgent("exit 3", max_seconds=seconds, max_concurrency=1)
    agent.configure(tokenizer)
    late = rollout()

    async def wait_for_it():
        async with agent._places():
            task = asyncio.create_task(agent.run(late, engine, SAMPLING))
            await asyncio.sleep(1.2 * seconds)
        await task

    run_async(wait_for_it())
    agent.close()
    assert late.extra["agent_end"] == "exit"


WAITS = """
try:
    twice()
except Exception:
    time.sleep(3600)
"""


@pytest.mark.parametrize("code", ["FINE", "WAITS"])
def test_an_engine_that_fails_ends_the_run_whatever_programs_make_of_it(run, rollout, model, code):
    class Broken(TransformersEngine):
        async def generate(self, token_ids, sampling, seed):
            raise EngineError("out of order")

    broken = Broken(device="cpu")
    broken.start(model)
    with pytest.raises(EngineError, match="out of order"):
        run(program(globals()[code]), rollout(), engine=broken)


def equal(a: Rollout, b: Rollout) -> bool:
    return a.to_dict() == b.to_dict()


def test_a_program_that_was_killed_goes_on_and_nothing_is_generated_twice(
    run, rollout, engine, tmp_path
):
    code = f"""
mark = {str(tmp_path)!r} + "/died"
def between():
    if task["columns"]["dies"] and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
twice()
say(reward=1)
"""
    whole = run(program(code), rollout(dies=False))
    before = engine.asked
    killed = run(program(code), rollout(dies=True))
    assert (tmp_path / "died").exists()
    assert engine.asked - before == 2
    killed.prompt.columns["dies"] = False
    assert equal(killed, whole)


def test_a_rollout_that_was_interrupted_is_finished_from_a_record(run, rollout, engine):
    whole = run(program(FINE), rollout())
    half = run(program("ask(task['prompt'])"), rollout())
    record = json.loads(json.dumps(half.to_dict() | {"status": "init", "finish_reason": None}))
    before = engine.asked
    again = Rollout.from_dict(record)
    assert equal(run(program(FINE), again), whole)
    assert engine.asked - before == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ProgramAgent([]), "command is empty"),
        (
            lambda: ProgramAgent(["no-such-program"]),
            "'no-such-program' is not an executable program",
        ),
        (lambda: ProgramAgent(["true"], cwd="/no/such"), "cwd='/no/such' is not a directory"),
        (lambda: ProgramAgent(["true"], pass_env=["NO_SUCH"]), "pass_env names 'NO_SUCH'"),
        (lambda: ProgramAgent(["true"], max_seconds=0), "max_seconds=0"),
        (lambda: ProgramAgent(["true"], max_concurrency=0), "max_concurrency=0 must be >= 1"),
        (lambda: ProgramAgent(["true"], retries=-1), "retries=-1 must be >= 0"),
        (lambda: ScriptAgent("no_such.py"), r"script='no_such\.py' is not a file"),
        (lambda: FunctionAgent(len), "function len is not async"),
        (lambda: FunctionAgent("no.such.function"), "no"),
    ],
)
def test_what_cannot_be_is_refused(make, words, tokenizer):
    with pytest.raises(ConfigError, match=words):
        make().configure(tokenizer)


# ---------------------------------------------------------------- what a program may say


def test_the_last_line_that_is_a_result_counts():
    lines = ['{"reward": 1}', '{"other": 2}', '{"reward": ', "text", '[{"reward": 3}]', '"x"']
    assert last_result("\n".join(lines).encode()) == {"reward": 1}
    assert last_result(b'{"reward": 1}\n  {"answer": "b"}\n\n') == {"answer": "b"}
    assert last_result(b'\xff\n{"x": 1}\n' + b"{" * 100_000) == {}
    assert last_result(b"") == {}
    assert last_result(b'{"reward": ' + b"1" * 400 + b"}")["reward"] == math.inf
    assert last_result(b'{"reward": -' + b"1" * 5000 + b"}")["reward"] == -math.inf


def nested(levels):
    return functools.reduce(lambda inner, _: [inner], range(levels), 0)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"reward": "1"}, "reward='1' must be a finite number"),
        ({"reward": float("inf")}, "reward=inf"),
        ({"role_rewards": {"critic": 1}}, r"role_rewards names \['critic'\]; roles that wrote"),
        ({"reward": 10**399}, "reward is a number beyond float64"),
        ({"call_rewards": [10**399]}, r"call_rewards=\[1000"),
        ({"metrics": {"a": 10**399}}, r"metrics\.a is a number beyond float64"),
        ({"role_rewards": {"": 1e300}}, r"role_rewards\.=1e\+300 must be within ±1e\+06"),
        ({"answer": "\ud800"}, r"\\ud800 is half a surrogate pair"),
        ({"x": nested(80)}, "nested more than 64 levels"),
        ({"role_rewards": 3}, "role_rewards=3 must be an object"),
        ({"metrics": {"a": None}}, r"metrics\.a=None"),
        ({"call_rewards": [1, 2, 3]}, r"call_rewards=\[1, 2, 3\] must be a list of 0, one per"),
    ],
)
def test_what_makes_no_sense_is_named_and_nothing_is_noted(make_rollout, said, words):
    rollout = make_rollout([5], [7])
    before = rollout.to_dict()
    with pytest.raises(ValueError, match=words):
        note_result(rollout, {"metrics": {"a": 1}, "answer": 2} | said)
    assert rollout.to_dict() == before


# ---------------------------------------------------------------- functions


async def solve(client: AgentClient, prompt: Prompt):
    first = await client.chat(prompt.prompt)
    chat = [*prompt.prompt, first.message, {"role": "user", "content": "Go on."}]
    second = await client.chat(chat, max_tokens=3)
    first.call.reward = 0.75
    return {"reward": len(second.completion.token_ids), "answer": second.text}


def test_a_function_is_an_agent(run, rollout):
    made = run(FunctionAgent("tests.unit.serving.test_program_agent.solve"), rollout())
    assert made.status is RolloutStatus.COMPLETED
    assert made.environment_reward == made.calls[1].stop - made.calls[1].start
    assert made.calls[0].reward == 0.75
    assert made.completion[-1] == {"role": "assistant", "content": made.extra["answer"]}
    # The same as a program's, which asks over HTTP.
    twin = run(program("twice()"), rollout())
    assert twin.token_ids[: made.calls[1].start + 3] == made.token_ids[: made.calls[1].start + 3]


async def through_openai(client: AgentClient, prompt: Prompt):
    reply = await client.openai.chat.completions.create(model="policy", messages=prompt.prompt)
    return float(len(reply.choices))


def test_a_function_may_use_the_openai_package(run, rollout):
    made = run(FunctionAgent(through_openai), rollout())
    assert (made.environment_reward, len(made.calls)) == (1.0, 1)


def test_clients_share_the_certificates_that_the_first_has_read(run, rollout, monkeypatch):
    run(FunctionAgent(through_openai), rollout())
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", pytest.fail)
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", pytest.fail)
    assert run(FunctionAgent(through_openai), rollout()).completed


async def no_call(client, prompt):
    return 1


async def never(client, prompt):
    await client.chat(prompt.prompt)
    await asyncio.sleep(600)


async def nonsense(client, prompt):
    await client.chat(prompt.prompt)
    return "good"


async def nothing(client, prompt):
    await client.chat(prompt.prompt)


@pytest.mark.parametrize(
    ("function", "status", "ending"),
    [
        (no_call, RolloutStatus.FAILED, "silent"),
        (never, RolloutStatus.COMPLETED, "timeout"),
        (nonsense, RolloutStatus.FAILED, "result"),
        (nothing, RolloutStatus.COMPLETED, "done"),
    ],
)
def test_how_a_function_may_end(run, rollout, function, status, ending):
    seconds = limit(lambda: run(FunctionAgent(nothing), rollout()))
    made = run(FunctionAgent(function, max_seconds=seconds), rollout())
    assert (made.status, made.extra["agent_end"]) == (status, ending)


async def breaks(client, prompt):
    await client.chat(prompt.prompt)
    if prompt.columns["bad"]:
        raise KeyError("fruit")
    return 2.0


def lengths(completions, extras):
    assert [extra["agent_end"] for extra in extras] == ["done"] * len(completions)
    return [float(len(messages)) for messages in completions]


def test_in_a_pipeline_a_function_that_raises_costs_its_rollout(engine, tokenizer, rollout):
    agent = FunctionAgent(breaks)
    agent.configure(tokenizer)
    pipeline = RolloutPipeline(engine, agent, Rewards([lengths], max_failed_share=0.5), tokenizer)
    groups = [[rollout(0, bad=True)], [rollout(1, bad=False)]]
    pipeline.complete(groups, SAMPLING)
    agent.close()
    bad, good = groups[0][0], groups[1][0]
    assert bad.error == "agent FunctionAgent: KeyError: 'fruit' (prompt 'p7')"
    assert (good.reward, good.environment_reward) == (1.0, 2.0)
    assert ending_metrics([bad, good])["agent/exit_share"] == 0.5


def test_a_function_that_was_interrupted_is_no_failure(run, rollout, engine):
    class Aborts:
        max_length = engine.max_length

        def of_role(self, role):
            return self

        async def generate(self, token_ids, sampling, seed):
            return Completion([5], [-0.5], "abort", [3])

    made = run(FunctionAgent(nothing), rollout(), engine=Aborts())
    assert (made.status, made.error) == (RolloutStatus.ABORTED, None)
    assert run(FunctionAgent(nothing), made).status is RolloutStatus.COMPLETED


PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text("utf-8")


def block_of(name: str) -> str:
    found = re.search(rf'```python title="{name}"\n(.*?)```', PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_pages_script_runs(run, rollout, tmp_path):
    (tmp_path / "my_agent.py").write_text(block_of("my_agent.py"))
    made = run(ScriptAgent("my_agent.py", [], ["openai"], cwd=str(tmp_path)), rollout(answer="x"))
    assert (made.error, made.environment_reward, len(made.calls)) == (None, 0.0, 2)


def test_the_pages_function_runs(run, rollout, tmp_path, monkeypatch):
    (tmp_path / "my_function.py").write_text(block_of("my_function.py"))
    monkeypatch.syspath_prepend(tmp_path)
    made = run(FunctionAgent("my_function.solve"), rollout(answer="x"))
    assert (made.error, made.environment_reward, len(made.calls)) == (None, 0.0, 2)
    # The second call samples otherwise than the first, so its tokens are a row of their own.
    assert [row.sampling and row.sampling.temperature for row in made.rows] == [None, 0.5]


def test_secrets_do_not_reach_programs(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-1")
    monkeypatch.setenv("HF_TOKEN", "secret-1")
    assert "secret-1" not in "".join(ProgramAgent(["true"])._environment().values())
    assert os.environ["PATH"] == ProgramAgent(["true"])._environment()["PATH"]
