"""Test that whatever a run started is gone when it ends or is killed, for every kind of worker.

What workers start here is the hardest to find: asleep, in a session of its own, its parent gone.

Slow: each kind of worker is started by a run of its own, which then ends or is killed.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.sandbox import need_sandbox

pytestmark = pytest.mark.slow

MARK = "RUN_OF_TEST"
DEADLINE_S = 120.0
DAEMON = "import subprocess; subprocess.run('(setsid sleep 600 &)', shell=True)\n"
SLEEP = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"

REWARD = f"""
import os, time
def leaves(completions, path):
    {DAEMON.strip()}
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    open(path[0], "w").close()
    time.sleep(600)
def forks(completions):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    return [1.0] * len(completions)
"""
POOL = """
import asyncio, os, threading, time
from mine import leaves
from lightning_rl import Isolated
pool = Isolated(leaves, workers=1, timeout_s=600)
call = lambda: asyncio.run(pool(completions=["a"], path=["there"]))
threading.Thread(target=call, daemon=True).start()
time.sleep(5)
"""
SANDBOX = f"""
import asyncio, os, threading, time
from lightning_rl import PythonTests
program = f'''
import os
os.environ["{MARK}"] = {{os.environ["{MARK}"]!r}}
{DAEMON}while True: pass
'''
pool = PythonTests(workers=1, timeout_s=600)
call = lambda: asyncio.run(pool(completions=[program], tests=["f()"]))
threading.Thread(target=call, daemon=True).start()
time.sleep(5)
"""
WORLD = f"""
import gymnasium
from tests.support.worlds import Walk
gymnasium.register("Simulated-v0", entry_point="mine:Simulated")
class Simulated(Walk):
    def step(self, action):
        import time
        {DAEMON.strip()}
        open("there", "w").close()
        while True: time.sleep(600)
"""
ENVIRONMENTS = """
import threading
from lightning_rl.envs import {kind}
from lightning_rl.envs.collectors import collector_of
from tests.support.env_agents import agent_for
made = collector_of({kind}("mine:Simulated-v0", workers=2), None, 600.0)
made.start(0, 0, 2)
agents = agent_for(made)
threading.Thread(target=lambda: made.collect(agents, 0, 4), daemon=True).start()
import os, time
while not os.path.exists("there"): time.sleep(0.05)
"""
PROGRAM = """
import asyncio, os
from lightning_rl.serving.programs import Launcher, ProgramRequest
async def run():
    shell = "(setsid sleep 600 &); echo there; sleep 600"
    asked = ProgramRequest(dict(os.environ), ["/bin/sh", "-c", shell])
    async with Launcher(own_processes={alone}).running(asked, b"", 1000) as program:
        while not program.stdout: await asyncio.sleep(0.01)
        print("ready", flush=True)
        await program.wait()
asyncio.run(run())
"""
SERVER = f"""
import sys
from lightning_rl.engines.replicas.server_process import ServerProcess
server = ServerProcess([sys.executable, "-c", {DAEMON + "import time; time.sleep(600)"!r}], {{}})
import time; time.sleep(3)
"""
PLAIN = """
import asyncio
from mine import forks
from lightning_rl.rewards.calling import RewardCaller
calls = RewardCaller()
async def grade():
    for _ in range(9):
        await calls.call_in_loop(forks, {"completions": ["a"]})
asyncio.run(grade())
"""
SLOW_FORKS = "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(2))\n"
KINDS = {
    "reward pool": POOL + SLEEP,
    "sandbox": SANDBOX + SLEEP,
    "plain reward": PLAIN + SLEEP,
    "plain reward, killed while it forks": SLOW_FORKS + PLAIN + SLEEP,
    "program alone": PROGRAM.format(alone=True),
    "program together": PROGRAM.format(alone=False),
    "server": SERVER + SLEEP,
    "PooledGym": ENVIRONMENTS.format(kind="PooledGym") + SLEEP,
}


def marked(mark: str) -> list[str]:
    """Return command lines of processes that have a mark in there, or in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if mark.encode() in command + (process / "environ").read_bytes():
                found.append(command.replace(b"\0", b" ").decode())
        except OSError:  # it has ended
            continue
    return found


def wait_until_gone(mark: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert marked(mark) == []


@contextmanager
def run_of(script: str, place: Path) -> Iterator[None]:
    """Yield a run that has said that it is ready, and kill it at the end of the block."""
    path = os.pathsep.join([str(place), *sys.path])
    env = os.environ | {"PYTHONPATH": path, MARK: str(place), "TMPDIR": str(place)}
    run = subprocess.Popen(
        [sys.executable, "-c", script], cwd=place, env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        yield
    finally:
        run.kill()
        run.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_run_outlives_it_when_it_is_killed(kind, tmp_path):
    if kind == "sandbox":
        need_sandbox()
    (tmp_path / "mine.py").write_text(WORLD if "Gym" in kind else REWARD)
    with run_of(KINDS[kind], tmp_path):
        assert len(marked(str(tmp_path))) > 1  # the run is not alone
    wait_until_gone(str(tmp_path))


@pytest.mark.timeout(300)
def test_what_a_plain_reward_forks_does_not_go_on_as_the_trainer(tmp_path):
    """Each call left an idle copy of the trainer behind."""
    (tmp_path / "mine.py").write_text(
        "import os\ndef forks(completions):\n    os.fork()\n    return [1.0] * len(completions)\n"
    )
    with run_of(PLAIN + SLEEP, tmp_path):
        end = time.monotonic() + DEADLINE_S
        while len(marked(str(tmp_path))) > 1 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(marked(str(tmp_path))) == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["cancelled", "killed", "done"])
def test_what_a_local_job_started_ends_with_it(how, tmp_path, monkeypatch):
    """The job itself outlives the run, which finds it again."""
    monkeypatch.setenv(MARK, str(tmp_path))
    command = f"{DAEMON}import time; time.sleep({0 if how == 'done' else 600})"
    script = f"""
import asyncio, sys, time
from pathlib import Path
from lightning_rl.games.staged.jobs import JobRequest
from lightning_rl.games.staged.local_jobs import LocalJobs
from lightning_rl.games.staged.training_sets import Demonstrations, Example
class Quick(LocalJobs):
    def command(self, job):
        return [sys.executable, "-c", {command!r}]
jobs = Quick()
jobs.open(Path("."))
asyncio.run(jobs.create(JobRequest("k", "base", Demonstrations([Example([], "4")]), 0)))
pid = Path("jobs/k/pid")
while not pid.exists() or not pid.read_text(): time.sleep(0.01)
time.sleep(1)
if {how!r} == "cancelled": asyncio.run(jobs.cancel("k"))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    if how == "killed":
        assert marked(str(tmp_path))
        os.kill(int((tmp_path / "jobs/k/pid").read_text()), 9)
    monkeypatch.delenv(MARK)
    wait_until_gone(str(tmp_path))
    if how != "killed":
        told = json.loads((tmp_path / "jobs/k/result.json").read_text())
        assert told["status"] == {"cancelled": "cancelled", "done": "failed"}[how]
