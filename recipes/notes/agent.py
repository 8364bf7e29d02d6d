"""Define an agent that keeps notes: it reads a text once, and goes on from what it wrote down."""

from lightning_rl import Prompt
from lightning_rl.serving import AgentClient


async def solve(client: AgentClient, prompt: Prompt) -> dict[str, float | str]:
    """Sort the digits of a text in ascending order; 1.0 for the right answer, else 0.0.

    The second call sees the notes and not the text: a history that was compacted. So its tokens do
    not go on from the first call's, and the rollout has two rows.
    """
    notes = await client.chat(prompt.prompt)
    answer = await client.chat(f"sort {notes.text}")
    right = answer.finish_reason == "stop" and answer.text == prompt.columns["answer"]
    return {"reward": float(right), "answer": answer.text}
