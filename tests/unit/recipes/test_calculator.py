"""The calculator recipe: a tool that runs nothing, and warm-start turns in the agent's format."""

import asyncio
import random

import pytest

from lightning_rl.agents.templates import TurnTemplate
from lightning_rl.agents.tools import ToolAgent, tool_schema
from recipes.calculator.prepare import (
    STRATEGIES,
    draw_questions,
    make_chat_tokenizer,
    sft_rows,
    slip,
    user,
)
from recipes.calculator.reward import right_answer
from recipes.calculator.tool import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*34+5", 413), ("10-99", -89), ("-3*-(2+1)", 9), (" 7", 7)],
)
def test_arithmetic(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "9**9**9**9",
        "1/2",
        "1.5+1",
        "True+1",
        "'a'*9",
        "a+1",
        "(1).__class__",
        "[1][0]",
        "1 if 1 else 2",
        "9*" * 30 + "9",
    ],
)
def test_anything_else_is_refused_and_not_run(expression):
    with pytest.raises(ValueError, match=r"only whole numbers|longer than 50"):
        calculate(expression)


@pytest.mark.parametrize("expression", ["1+", "", "1 2", "((((", "1\x002"])
def test_what_is_no_expression_is_refused(expression):
    with pytest.raises((SyntaxError, ValueError)):
        calculate(expression)


def test_warm_start_turns_are_what_the_agent_reads_and_writes():
    tokenizer = make_chat_tokenizer()
    agent = ToolAgent([calculate])
    agent.configure(tokenizer)  # template, tools and parser agree
    template = TurnTemplate(tokenizer, {"tools": [tool_schema(calculate)]})
    rng = random.Random(0)
    while len(rows := sft_rows("47*86", rng, template)) == 1:
        pass  # a guess
    ask, answer = rows
    wrote = tokenizer(ask["completion"])["input_ids"]
    assert len(wrote) == 7  # five characters between the two fixed parts
    message = asyncio.run(agent._read([*wrote, tokenizer.eos_token_id], [], parse=True))
    (call,) = message["tool_calls"]
    result = str(calculate(call["function"]["arguments"]["expression"]))
    assert answer["completion"] == result
    reply = {"role": "tool", "content": result}
    grown = tokenizer(ask["prompt"])["input_ids"] + wrote + template.suffix(wrote, [reply], [call])
    assert grown == tokenizer(answer["prompt"])["input_ids"]
    assert ask["prompt"] == template.render([user("47*86")])


def test_the_ways_are_mixed_as_declared():
    template = TurnTemplate(make_chat_tokenizer(), {"tools": [tool_schema(calculate)]})
    rng = random.Random(1)
    rows = [sft_rows("47*86", rng, template) for _ in range(400)]
    asked = sum(len(r) == 2 and "47*86" in r[0]["completion"] for r in rows)
    guessed = sum(len(r) == 1 for r in rows)
    # 400 draws: standard deviations of 0.024 and 0.025
    assert asked / 400 == pytest.approx(STRATEGIES["ask"], abs=0.08)
    assert guessed / 400 == pytest.approx(STRATEGIES["guess"], abs=0.08)


def test_a_slip_asks_for_something_else():
    rng = random.Random(2)
    for _ in range(50):
        wrong = slip("10*99", rng)
        assert len(wrong) == 5
        assert sum(a != b for a, b in zip(wrong, "10*99", strict=True)) == 1
        calculate(wrong)


def test_questions_are_distinct_and_held_out():
    train, heldout = draw_questions()
    assert len(set(train) | set(heldout)) == len(train) + len(heldout) == 20_512


def test_the_reward_looks_at_the_last_message():
    chats = [[{"role": "tool", "content": "4042"}, {"role": "assistant", "content": c}] for c in
             ("4042", "4042", "402")]  # fmt: skip
    assert right_answer(chats, ["4042"] * 3, ["stop", "length", "stop"]) == [1.0, 0.0, 0.0]
