"""Hostile calls: programs that a model wrote, agents' programs, rewards, and what they leave."""

from pathlib import Path

from tests.support.hostile.call import Call
from tests.support.hostile.forgeries import LYING
from tests.support.hostile.program_runs import (
    ADD,
    PASSED_ON,
    forged,
    forged_together,
    isolated,
    killed,
    module,
    plain,
    program,
    tested,
)

_FORGED = (
    "replaces builtins.exec",
    "replaces exec and compile in all frames",
    "replaces unittest's assertions",
    "all functions that can be found become its own, and it hangs",
    "looks for the tests in its memory",
    "looks for the tests in its judge's memory",
    "traces its judge",
    "equals everything",
    "a float that is near everything",
    "hides what a block finds",
    "ends the test's own loop",
    "its own math",
    "os._exit(0)",
    "kills its judge",
    "writes answers to all files",
    "swallows what a test's function finds",
)
_LEAVE = "subprocess.Popen(['sleep', '600'], start_new_session=True)"
_FORK = "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"


def _isolated_run(folder: Path) -> str:
    module(folder, f"{_LEAVE}\n{_FORK}\nprint('ready', file=sys.stderr)\ntime.sleep(600)")
    return (
        "import asyncio, threading, time\nfrom mine import reward\n"
        "from lightning_rl import Isolated\npool = Isolated(reward, workers=2, timeout_s=600)\n"
        "threading.Thread(target=lambda: asyncio.run(pool(completions=['a', 'b']))).start()\n"
        "time.sleep(5)\nprint('ready', flush=True)\ntime.sleep(600)"
    )


def _sandboxed_run(folder: Path) -> str:
    program = f"import os, subprocess, time\n{_LEAVE}\n{_FORK}\ntime.sleep(600)"
    return (
        "import asyncio, threading, time\nfrom lightning_rl import PythonTests\n"
        f"pool = PythonTests(workers=1, timeout_s=600)\nprograms = [{program!r}]\n"
        "run = lambda: asyncio.run(pool(completions=programs, tests=['f()']))\n"
        "threading.Thread(target=run).start()\n"
        "time.sleep(5)\nprint('ready', flush=True)\ntime.sleep(600)"
    )


def _program_run(folder: Path) -> str:
    return (
        "import asyncio, os\nfrom lightning_rl.serving.programs import Launcher, ProgramRequest\n"
        f"env = {{name: os.environ[name] for name in {PASSED_ON!r}}}\n"
        "shell = 'setsid sleep 600 & (setsid sleep 600 &) ; echo there; sleep 600'\n"
        "async def run():\n"
        "    asked = ProgramRequest(env, ['/bin/sh', '-c', shell])\n"
        "    async with Launcher().running(asked, b'', 1000) as program:\n"
        "        while not program.stdout: await asyncio.sleep(0.01)\n"
        "        print('ready', flush=True)\n        await program.wait()\nasyncio.run(run())"
    )


def _server_run(folder: Path) -> str:
    return (
        "import sys, time\nfrom lightning_rl.engines.replicas.server_process import ServerProcess\n"
        "server = ServerProcess(['/bin/sh', '-c', 'setsid sleep 600 & sleep 600'], {})\n"
        "time.sleep(2)\nprint('ready', flush=True)\ntime.sleep(600)"
    )


def _reward_run(folder: Path) -> str:
    module(folder, f"{_FORK}\nreturn [1.0] * len(completions)")
    return (
        "import asyncio, time\nfrom mine import reward\n"
        "from lightning_rl.rewards.calling import RewardCaller\ncalls = RewardCaller()\n"
        "asyncio.run(calls.call_in_loop(reward, {'completions': ['a']}))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )


CALLS: list[Call] = [
    *map(forged, _FORGED),
    forged_together("plain types whose methods lie", LYING),
    tested("of nothing", ADD, "assert True", "the tests never use the program"),
    tested("that do not compile", ADD, "assert add(1, 2 == 3", "SyntaxError"),
    tested("that are a number", ADD, 3, "tests=3 must be a string or a list of strings"),
    tested(
        "that give an object of their own", "def f(x): return x", "class A: pass\nassert f(A())",
        "pass only plain data, functions",
    ),
    isolated("a segmentation fault", "os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
    isolated("stops its worker", "os.kill(os.getppid(), signal.SIGSTOP)\nreturn [0.5]",
             "its worker died or hung", timeout_s=1),
    isolated("kills its worker", "os.kill(os.getppid(), 9)\ntime.sleep(9)", "its worker died"),
    isolated("leaves a session behind", f"{_LEAVE}\nreturn [0.5]", "reward 0.5"),
    isolated("forks, and both return", "os.fork()\nreturn [0.5]", "reward 0.5"),
    isolated("hangs and ignores SIGTERM",
             f"{_LEAVE}\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass",
             "ran longer than timeout_s=1", timeout_s=1),
    isolated("changes its arguments", "completions.clear()\nrest.clear()\nreturn []",
             "ValueError: returned 0 scores for 1 completion"),
    plain("forks, and both return", "os.fork()\nreturn [1.0] * len(completions)", "reward 1.0"),
    plain("forks, and the child fails", "if os.fork() == 0: raise KeyError('x')\nreturn [1.0, 1.0]",
          "reward 1.0"),
    plain("forks a child that hangs", f"{_FORK}\nreturn [1.0, 1.0]", "reward 1.0"),
    plain("changes its arguments",
          "n = len(completions)\ncompletions.clear()\nrest['answer'][0].append(2)\n"
          "rest['completion_ids'][0].clear()\nreturn [1.0] * n",
          "reward 1.0: no error; [4, 5] {'answer': ['x']}"),
    plain("a segmentation fault", "import ctypes\nctypes.string_at(0)",
          "Fatal Python error: Segmentation fault", "mine.py", right=False),
    plain("os._exit(0)", "os._exit(0)", "called os._exit(0), which would have ended the run"),
    program("stops its keeper", "kill -STOP $PPID; echo on", "ended: done", "printed: on"),
    program("kills its keeper", "kill -9 $PPID; echo on", "ended: done", "printed: on"),
    program("stops its keeper where it can", "setsid sleep 600 & kill -STOP $PPID; sleep 600",
            "ended: timeout", seconds=1, together=True),
    program("kills its keeper where it can", "setsid sleep 600 & sleep 1; kill -9 $PPID; sleep 600",
            "ended: killed its keeper was killed", together=True),
    program("kills all that it sees", "(setsid sleep 600 &); kill -9 -1; echo on", "ended: "),
    program("looks for other keys", "cat /proc/*/environ | tr '\\0' '\\n' | grep -c API_KEY=sk-x",
            "ended: exit", "printed: 0"),
    program("daemons", "for i in 1 2 3 4 5; do (setsid sleep 600 &); done", "ended: done"),
    program("ignores SIGTERM", "trap '' TERM; while true; do sleep 1; done", "ended: timeout",
            seconds=1),
    program("a flood", "yes", "ended: output wrote more than max_output_bytes=10000"),
    program("is not there", "exec /no/such", "ended: exit"),
    killed("rewards in processes, with what they left", _isolated_run),
    killed("rewards in a sandbox", _sandboxed_run),
    killed("a program, with its daemons", _program_run),
    killed("a server, with what it started", _server_run),
    killed("a plain reward that forked", _reward_run),
]  # fmt: skip
