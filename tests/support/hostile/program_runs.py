"""Play hostile programs and rewards, and print what came of them."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.pool import Isolated
from lightning_rl.rewards.rules import PythonTests
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus, Row
from lightning_rl.serving.programs import Launcher, ProgramRequest
from tests.support.hostile.call import Call
from tests.support.hostile.forgeries import FORGERIES, Forgery

ADD = "def add(a, b):\n    return a + b\n"
PASSED_ON = ("PATH", "HOSTILE_CALL")


def graded(reward: Any, texts: list[str], columns: dict[str, list[Any]] | None = None) -> None:
    """Grade completions with one reward, and print a line for each."""
    rows = columns or {}
    group = [
        Rollout(
            prompt=Prompt("p", "1+2=", [3], {name: rows[name][index] for name in rows}),
            group_id="g",
            sample_index=index,
            seed=0,
            rows=[Row([3], [4, 5], [True, True], [-1.0, -1.0], [0, 0])],
            status=RolloutStatus.COMPLETED,
            finish_reason="stop",
            completion=text,
        )
        for index, text in enumerate(texts)
    ]
    rewards = Rewards([reward], max_failed_share=1.0)
    rewards.grade_here([group])
    rewards.close()
    for rollout in group:
        said = rollout.error or "no error"
        print(f"reward {rollout.reward}: {said}; {rollout.token_ids} {rollout.prompt.columns}")


def forged(name: str) -> Call:
    """Play a program that answers nothing and scores 0; the one after it gets what it earns."""

    def play(folder: Path) -> None:
        program, tests = FORGERIES[name]
        # Generous, as a busy machine is slow to start both.
        pool = PythonTests(workers=1, timeout_s=20)
        graded(pool, [program, ADD], {"tests": [tests, "assert add(1, 2) == 3"]})

    return Call(
        f"tests: {name}", play, ("reward 0.0: no error", "reward 1.0: no error"), right=True
    )


def forged_together(name: str, forgeries: dict[str, Forgery]) -> Call:
    """Run such programs in one sandbox: all score 0, and a right one 1."""

    def play(folder: Path) -> None:
        pool = PythonTests(workers=1, timeout_s=20)
        programs = [*forgeries.values(), Forgery(ADD)]
        tests = [one.tests for one in programs]
        paid = asyncio.run(pool(completions=[one.program for one in programs], tests=tests))
        pool.close()
        told = zip([*forgeries, "a right one"], paid, strict=True)
        print("paid:", ", ".join(kind for kind, score in told if score))

    return Call(f"tests: {name}", play, ("paid: a right one",), right=True)


def tested(name: str, program: str, tests: Any, *says: str) -> Call:
    """Test a program with tests of its own."""

    def play(folder: Path) -> None:
        graded(PythonTests(workers=1, timeout_s=20), [program], {"tests": [tests]})

    return Call(f"tests: {name}", play, says, right=True)


def module(folder: Path, body: str) -> Any:
    """Return the function ``reward`` of a new module, with such a body."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    text = f"import os, signal, subprocess, sys, time\ndef reward(completions, **rest):\n{lines}"
    (folder / "mine.py").write_text(text)
    sys.path.insert(0, str(folder))
    return import_module("mine").reward


def isolated(name: str, body: str, *says: str, timeout_s: float = 20) -> Call:
    """Grade by a reward in processes of its own: ``completions[0]`` is "bad", then "good" (1.0)."""

    def play(folder: Path) -> None:
        function = module(folder, f"if completions[0] == 'good': return [1.0]\n{body}")
        pool = Isolated(function, workers=1, timeout_s=timeout_s, memory_mb=512)
        graded(pool, ["bad", "good"])

    return Call(f"isolated: {name}", play, (*says, "reward 1.0: no error"), right=True)


def plain(name: str, body: str, *says: str, right: bool = True) -> Call:
    """Grade by a reward in the trainer's own process."""

    def play(folder: Path) -> None:
        function = module(folder, body)
        graded(function, ["a", "b"], {"answer": [["x"], ["y"]]})

    return Call(f"plain: {name}", play, says, right=right)


def program(name: str, shell: str, *says: str, seconds: float = 20, together: bool = False) -> Call:
    """Run a program of an agent, whose end and output are printed."""

    def play(folder: Path) -> None:
        env = {n: os.environ[n] for n in PASSED_ON} | {"OPENAI_API_KEY": "sk-own"}
        launcher = Launcher(own_processes=not together)

        async def run() -> None:
            asked = ProgramRequest(env, ["/bin/sh", "-c", shell], memory_bytes=2**31)
            async with launcher.running(asked, b"{}\n", 10_000) as started:
                try:
                    async with asyncio.timeout(seconds):
                        end = await started.wait()
                        print(f"ended: {end.kind} {end.reason}")
                except TimeoutError:
                    print("ended: timeout")
                print(f"printed: {started.stdout.decode()}")

        asyncio.run(run())
        launcher.close()

    return Call(f"program: {name}", play, says, right=True)


def killed(name: str, script: Callable[[Path], str]) -> Call:
    """Kill a run with -9 once it has printed "ready"; nothing of it may be left."""

    def play(folder: Path) -> None:
        text = f"import sys\nsys.path.insert(0, {str(folder)!r})\n{script(folder)}"
        run = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        said = run.stdout.readline().strip()
        run.kill()
        run.wait()
        print(f"it said {said}, and was killed")

    return Call(f"killed: {name}", play, ("it said ready, and was killed",), right=True)
