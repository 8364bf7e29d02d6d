"""Test a worker that sends invalid messages: whoever asked it is told, and waits for nothing."""

import asyncio
import sys

import pytest

from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from lightning_rl.run.loop.background import run_async
from lightning_rl.verifiers import VerifiersAgent
from lightning_rl.verifiers.hosting import Hosting
from lightning_rl.verifiers.worker import Worker, WorkerDied, WorkerError
from tests.support.engine_checks import is_running
from tests.support.served_chats import END, Script
from tests.support.tiny_models import chatml_tokenizer

HOST = """#!{python}
import json, os, signal, sys, time
sys.stdin.readline()
def say(line):
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()
def ask(order):
    import urllib.request
    request = urllib.request.Request(
        order["base_url"] + "/chat/completions",
        json.dumps({{"messages": [{{"role": "user", "content": "?"}}]}}).encode(),
        {{"Authorization": "Bearer " + order["api_key"], "Content-Type": "application/json"}},
    )
    urllib.request.urlopen(request).read()
{start}
for line in sys.stdin:
    order = json.loads(line)
    if "cancel" in order:
        continue
    number = order["id"]
    {answer}
"""
READY = """say('{"ready": "1", "seats": ["agent"]}')"""
FINE = """say(json.dumps({"id": number}))"""


@pytest.fixture
def hosting(tmp_path):
    """Makes a host of a few lines of Python."""

    def make(answer=FINE, start=READY):
        program = tmp_path / "python"
        program.write_text(HOST.format(python=sys.executable, start=start, answer=answer))
        program.chmod(0o755)
        return Hosting("wordle", str(program))

    return make


async def asked(hosting, count=1):
    """Return what each of several askers gets, within a minute; afterwards nothing is left."""
    worker = Worker(hosting)
    await worker.start()
    process = worker._process.pid
    try:
        asking = (worker.ask(run={}) for _ in range(count))
        async with asyncio.timeout(60):
            return await asyncio.gather(*asking, return_exceptions=True)
    finally:
        await worker.close()
        assert not is_running(process)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("say('{}')", "answers no order"),
        ("""say('{"error": "no"}')""", r"\{\"error\": \"no\"\}\\n' answers no order"),
        ("""say('{"id": null}')""", "answers no order"),
        ("""say('{"id": 77}')""", "answers no order"),
        ("""say('{"id": "1"}')""", "answers no order"),
        ("""say('{"id": true}')""", "answers no order"),
        ("""say('{"id": [1]}')""", "answers no order"),
        ("say('7')", "is not a JSON object"),
        ("say('[]')", "is not a JSON object"),
        ("say('')", "is not valid JSON"),
        ("say('{')", "is not valid JSON"),
        ("say('[' * 100000)", "is not valid JSON"),
        ("say('x' * 20000000)", "sent an invalid message: .*limit"),
        ("sys.stdout.buffer.write(bytes([255, 10])); sys.stdout.flush()", "is not valid JSON"),
        ("number > 1 or os.close(1)", "the worker closed its output, and was killed"),
        ("sys.exit(3)", "the worker ended with exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the worker was killed by SIGKILL"),
        ("raise ValueError('the reason')", "exit status 1: .*ValueError: the reason"),
    ],
)
def test_an_answer_that_is_none_ends_the_wait_of_all(hosting, answer, says, monkeypatch):
    monkeypatch.setattr("lightning_rl.verifiers.worker._GRACE_S", 2.0)
    for outcome in asyncio.run(asked(hosting(answer), 3)):
        with pytest.raises(WorkerDied, match=says):
            raise outcome


def test_a_second_answer_to_one_question_is_none(hosting):
    twice = "say(json.dumps({'id': 1})); say(json.dumps({'id': 1}))"
    first, second = asyncio.run(asked(hosting(twice), 2))
    assert first == {"id": 1}
    assert isinstance(second, WorkerDied)


def test_an_answer_to_who_no_longer_waits_is_dropped(hosting):
    async def main():
        worker = Worker(hosting("time.sleep(0.2); " + FINE))
        await worker.start()
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await worker.ask(run={})
            async with asyncio.timeout(60):
                return await worker.ask(run={})
        finally:
            await worker.close()

    assert asyncio.run(main()) == {"id": 2}


def test_an_error_is_told_to_its_asker_alone(hosting):
    some = "say(json.dumps({'id': number, 'error': 'no' if number == 2 else None}))"
    first, second, third = asyncio.run(asked(hosting(some), 3))
    assert first["id"] == 1
    assert third["id"] == 3
    with pytest.raises(WorkerError, match=r"^no$"):
        raise second


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("say('{')", "sent an invalid message: .* is not valid JSON"),
        ("say('3')", "is not a JSON object"),
        ("say('{}')", "no seats in"),
        ("""say('{"seats": 3}')""", "no seats in"),
        ("say('x' * 20000000)", "sent an invalid message"),
        ("sys.exit(3)", "the worker ended with exit status 3"),
        ("os.close(1)", "closed its output, and was killed"),
        ("""say('{"refused": "no such taskset"}')""", "no such taskset"),
    ],
)
def test_a_start_that_is_none_is_refused(hosting, start, says, monkeypatch):
    monkeypatch.setattr("lightning_rl.verifiers.worker._GRACE_S", 2.0)

    async def main():
        async with asyncio.timeout(60):
            await Worker(hosting(start=start)).start()

    with pytest.raises(ConfigError, match=rf"(?s)environment 'wordle' under .*{says}"):
        asyncio.run(main())


TRACE = {
    "seat": "agent", "trainable": True, "reward": 1.0, "rewards": {}, "metrics": {}, "turns": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("traces", "says"),
    [
        (None, "TypeError"),
        ([], "ZeroDivisionError"),
        ([{}], "KeyError"),
        ([TRACE | {"reward": "high"}], "TypeError"),
        ([TRACE | {"reward": 10**400}], "OverflowError"),
        ([TRACE | {"reward": float("nan")}], "reward=nan must be a finite number"),
        ([TRACE | {"rewards": 3}], "TypeError"),
    ],
)
def test_an_episode_that_cannot_be_costs_its_rollout(hosting, traces, says):
    answer = f"ask(order); say(json.dumps({{'id': number, 'traces': {traces!r}}}))"
    answer = answer.replace("nan", "float('nan')")
    agent = VerifiersAgent("wordle", hosting(answer).python)
    agent.configure(chatml_tokenizer())
    prompt = Prompt("p", "?", [1], {"task": {}})
    rollout = Rollout(prompt, "g", 0, seed=1)
    try:
        run_async(agent.run(rollout, Script("Yes." + END), Sampling(max_tokens=50)), timeout=60)
    finally:
        agent.close()
    assert rollout.status is RolloutStatus.FAILED
    assert says in rollout.error
    assert rollout.extra["agent_end"] == "result"
