"""Answers a question about numbers with a tool, by pydantic-ai; knows nothing of training.

Reads its task from standard input, and asks the model at OPENAI_BASE_URL.
"""

import json
import sys

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel

from recipes.calculator import tool

agent = Agent(OpenAIChatModel("policy"), output_type=str)


@agent.tool_plain
def calculate(expression: str) -> str:
    """Work out a sum, a difference or a product of whole numbers.

    Args:
        expression: such as 12*34+5.
    """
    try:
        return str(tool.calculate(expression))
    except (SyntaxError, ValueError) as error:
        return f"Error: {error}"


task = json.load(sys.stdin)
question = task["prompt"][-1]["content"]
try:
    answer = agent.run_sync(question, usage_limits=UsageLimits(request_limit=3)).output
except AgentRunError as error:  # the model's doing, which is no failure of this program
    answer = f"{type(error).__name__}: {error}"
print(json.dumps({"answer": answer}))
