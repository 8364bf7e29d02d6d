"""Environments for verifiers 0.4, as an author writes them; written where its Python finds them."""

from pathlib import Path

GUESS = '''
"""A number to guess: the task's own, in turns of a chat."""
import asyncio
import os
import re
import signal

import verifiers.v1 as vf

__all__ = ["GuessTaskset", "GuessEnv"]


class GuessConfig(vf.TasksetConfig):
    largest: int = 9
    endless: bool = False


class GuessData(vf.TaskData):
    answer: int
    trap: str = ""


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def hit(self, trace: vf.Trace) -> float:
        return float(any(str(self.data.answer) in m.content for m in trace.assistant_messages))

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / trace.num_turns

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(sum(len(m.content) for m in trace.assistant_messages))


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    @property
    def bounded(self) -> bool:
        return not self.config.endless

    def load(self):
        for answer in range(self.config.largest + 1):
            data = {"prompt": f"0 to {self.config.largest}?", "system_prompt": "Guess."}
            yield GuessTask(GuessData(answer=answer, **data), self.config.task)


class GuessEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as chat:
            turn = await chat.turn()
            for _ in range(2):
                if turn.terminated:
                    return
                if "dies" in task.data.trap:
                    if not os.path.exists(task.data.trap) or "always" in task.data.trap:
                        open(task.data.trap, "w").close()
                        print("struck down")
                        os.kill(os.getpid(), signal.SIGKILL)
                if task.data.trap == "raises":
                    raise RuntimeError("the board is gone")
                if task.data.trap == "hangs":
                    await asyncio.sleep(3600)
                found = re.search("[0-9]+", turn.last_reply)
                if found and int(found[0]) == task.data.answer:
                    return
                larger = not found or int(found[0]) < task.data.answer
                turn = await chat.turn("Larger." if larger else "Smaller.")
'''

DUEL = '''
"""Two seats: one proposes, the other, which does not learn, answers."""
import verifiers.v1 as vf

__all__ = ["DuelTaskset", "DuelEnv"]


class DuelTask(vf.Task[vf.TaskData]):
    pass


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self):
        return [DuelTask(vf.TaskData(prompt="Propose.", name=f"duel {n}")) for n in range(2)]


class DuelConfig(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        proposed = await agents.proposer.run(task)
        judged = await agents.judge.run(DuelTask(vf.TaskData(prompt=proposed.last_reply)))
        proposed.record_reward("liked", 1.0)
        judged.record_reward("spoke", 0.25)
'''


LOOKUP = '''
"""A tool to call, which knows the answer."""
import verifiers.v1 as vf

__all__ = ["LookupTaskset"]


class LookupTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, fruit: str) -> str:
        """What some fruit costs."""
        return {"pear": "4 coins"}.get(fruit, "not sold")


class LookupTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        return float("4" in trace.last_reply)


class LookupConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    @classmethod
    def toolsets(cls, config):
        return [LookupTools(config.tools)]

    def load(self):
        yield LookupTask(vf.TaskData(prompt="What is a pear?"), self.config.task)


if __name__ == "__main__":
    LookupTools.run()
'''


def write_games(place: Path) -> Path:
    """Write modules that a worker imports with PYTHONPATH at this place."""
    for name, text in {"vf_guess": GUESS, "vf_duel": DUEL, "vf_lookup": LOOKUP}.items():
        (place / f"{name}.py").write_text(text)
    return place
