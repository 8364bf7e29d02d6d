"""Test agents of the OpenAI Agents SDK, at its defaults, in an environment of their own."""

import re
from pathlib import Path

import pytest

from lightning_rl.engines.sampling import Sampling
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.run.loop.background import run_async
from lightning_rl.serving import ScriptAgent
from tests.support.served_chats import END, QUESTION, TOKENIZER, Script

ROOT = Path(__file__).parents[2]
MADE = ROOT / "build" / "agents_sdk"
PAGE = (ROOT / "docs" / "agents.md").read_text("utf-8")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MADE / "made").exists(), reason="install/environment.sh agents_sdk makes it"
    ),
]

THOUGHT = "<think>\nI have a tool.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
RESULT = f"{END}\n<|im_start|>user\n<tool_response>\n5\n</tool_response>{END}\n"
STREAMED = """
import asyncio

async def run(said):
    streamed = Runner.run_streamed(agent, said, auto_previous_response_id=True)
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == KIND]
    return streamed, kinds

KIND = "raw_response_event"
result, kinds = asyncio.run(run(task["prompt"]))
kinds = sorted(set(kinds))
"""


def script() -> str:
    found = re.search(r'```python title="sdk_agent.py"\n(.*?)```', PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def play(tmp_path: Path, code: str, *turns: str) -> tuple[Rollout, Script]:
    (tmp_path / "sdk_agent.py").write_text(code)
    variables = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
    python = str(MADE / "bin" / "python")
    preload = ["agents"]
    agent = ScriptAgent(
        "sdk_agent.py", preload=preload, python=python, cwd=str(tmp_path), env=variables
    )
    agent.configure(TOKENIZER)
    rollout = Rollout(Prompt("p", QUESTION, [1, 2], {"answer": "It is 5."}), "g", 0, seed=11)
    engine = Script(*turns)
    try:
        run_async(agent.run(rollout, engine, Sampling(max_tokens=5000)))
    finally:
        agent.close()
    assert rollout.error is None
    return rollout, engine


@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_an_agent_calls_its_tool_and_is_recorded(tmp_path, way):
    code = script()
    if way == "streamed":
        code = code.replace('result = Runner.run_sync(agent, task["prompt"])\n', STREAMED)
        code = code.replace("print(json.dumps({", 'print(json.dumps({"kinds": kinds, ')
    wrote = [THOUGHT + "Let me add. " + CALL, THOUGHT + "It is 5."]
    rollout, engine = play(tmp_path, code, *(turn + END for turn in wrote))
    assert rollout.environment_reward == 1.0
    first, second = [TOKENIZER.decode(tokens) for tokens, _, _ in engine.requests]
    assert "Add with the tool." in first
    assert '"name": "add"' in first
    assert second == f"{first}{wrote[0]}{RESULT}<|im_start|>assistant\n"
    (row,) = rollout.rows[1:]
    assert [call.row for call in rollout.calls] == [1, 1]
    said = [t for t, own in zip(row.token_ids, row.loss_mask, strict=True) if own]
    assert TOKENIZER.decode(said) == "".join(turn + END for turn in wrote)
    if way == "streamed":
        expected = {
            "response.created", "response.output_text.delta", "response.completed",
            "response.function_call_arguments.delta", "response.reasoning_text.delta",
        }  # fmt: skip
        assert expected <= set(rollout.extra["kinds"])
