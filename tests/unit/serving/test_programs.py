"""Test running programs: their input and output, limits, and that nothing of them is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.serving import programs
from lightning_rl.serving.programs import Launcher, ProgramRequest
from lightning_rl.serving.results import Ending

ENV = {"PATH": os.environ["PATH"]}
MARK = "PROGRAM_OF_TEST"
LEFT_BEHIND_S = 60.0


@pytest.fixture(params=["alone", "together"])
def launcher(request):
    made = Launcher(own_processes=request.param == "alone")
    yield made
    made.close()


async def result_of(
    launcher: Launcher, shell: str, limit: int = 10_000, seconds: float = 30.0, **request
) -> tuple[Ending | None, str]:
    """Return how a shell's command ended (None: not in time), and what it printed."""
    asked = ProgramRequest(**({"env": ENV, "command": ["/bin/sh", "-c", shell]} | request))
    async with launcher.running(asked, b'{"id": 7}\n', limit) as program:
        try:
            async with asyncio.timeout(seconds):
                end = await program.wait()
        except TimeoutError:
            end = None
        return end, program.stdout.decode()


def marked(mark: str) -> list[str]:
    """Return processes with a mark in their environment, by their numbers outside."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
        except OSError:  # it has ended
            continue
    return found


def assert_gone(printed: str, count: int, mark: str) -> None:
    assert len(printed.split()) == count  # so many were there
    end = time.monotonic() + LEFT_BEHIND_S
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.01)
    assert marked(mark) == []


@pytest.fixture
def mark(request):
    return f"{request.node.name}-{os.getpid()}"


@pytest.mark.parametrize(
    ("shell", "end", "printed"),
    [
        ("cat", Ending("done"), '{"id": 7}\n'),
        ("cat /dev/stdin; echo; pwd", Ending("done"), '{"id": 7}\n\n/\n'),
        ("echo a; exit 3", Ending("exit", "ended with exit status 3"), "a\n"),
        (
            "seq 1 9 >&2; false",
            Ending("exit", "ended with exit status 1: 7 | 8 | 9"),
            "",
        ),
        ("kill -9 $$", Ending("killed", "was killed by SIGKILL"), ""),
        ("kill -KILL 0", Ending("killed", "was killed by SIGKILL"), ""),
        ("env | grep -v ^PWD | grep -v ^_ | sort", Ending("done"), "A=b\n"),
    ],
)
def test_what_goes_in_and_comes_out(launcher, shell, end, printed):
    found = asyncio.run(result_of(launcher, shell, cwd="/", env={"A": "b"}))
    assert found[0] == end
    assert found[1] == printed


@pytest.mark.parametrize("request_", [{"command": ["/no/such"]}, {"cwd": "/no/such"}])
def test_one_that_cannot_be_started_says_why(launcher, request_):
    end, _ = asyncio.run(result_of(launcher, "true", **request_))
    assert end == Ending(
        "exit",
        "could not be started: FileNotFoundError: [Errno 2] No such file or directory: '/no/such'",
    )


@pytest.mark.parametrize("stream", ["&1", "&2"])
def test_a_flood_is_stopped_and_no_other_program_notices(launcher, stream):
    async def both():
        return await asyncio.gather(
            result_of(launcher, f"yes >{stream}"), result_of(launcher, "sleep 0.3; echo fine")
        )

    (flood, printed), (end, other) = asyncio.run(both())
    assert flood == Ending("output", "wrote more than max_output_bytes=10000 to its output")
    assert len(printed) < 10_000 + 2**18
    assert (end, other) == (Ending("done"), "fine\n")


def test_memory_is_bounded(launcher):
    asked = {"command": [sys.executable, "-I", "-S", "-c", "x = bytearray(2**31)"]}
    end, _ = asyncio.run(result_of(launcher, "", memory_bytes=2**30, **asked))
    assert end.kind == "exit"
    assert end.reason.endswith("MemoryError")


LEAVERS = {
    "children": ("sleep 600 & echo $! >> said; sleep 600 & echo $! >> said", 2),
    "sessions": ("for i in 1 2 3; do setsid sh -c 'echo $$ >> said; exec sleep 600' & done", 3),
    "deaf": ("trap '' TERM; setsid sh -c 'trap \"\" TERM; echo $$ >> said; sleep 600' &", 1),
    # The child of a child whose parent is gone, in a session of its own: what a daemon does.
    "daemons": ("(setsid sh -c '(echo $$ >> said; exec sleep 600) &' &)", 1),
    "forks": (
        "for i in $(seq 40); do (setsid sh -c 'echo $$ >> said; exec sleep 600' &); done",
        40,
    ),
}


@pytest.mark.parametrize("name", LEAVERS)
def test_what_a_program_leaves_behind_ends_with_it(launcher, name, mark, tmp_path):
    shell, count = LEAVERS[name]
    shell = (
        f"touch said\n{shell}\nwhile [ $(wc -l < said) -lt {count} ]; do sleep 0.02; done; cat said"
    )
    place = {"env": ENV | {MARK: mark}, "cwd": str(tmp_path)}
    end, printed = asyncio.run(result_of(launcher, shell, **place))
    assert end == Ending("done")
    assert_gone(printed, count, mark)


def test_one_that_hangs_is_ended(launcher, mark):
    async def run():
        env = ENV | {MARK: mark}
        shells = ["echo $$; sleep 600", "trap '' TERM; echo $$; while true; do sleep 1; done"]
        return await asyncio.gather(
            *(result_of(launcher, shell, seconds=1.0, env=env) for shell in shells)
        )

    ended = asyncio.run(run())
    assert [end for end, _ in ended] == [None, None]
    assert_gone(" ".join(printed for _, printed in ended), 2, mark)


def test_a_program_may_tidy_up_when_it_is_told_to_end(launcher, tmp_path):
    async def ended():
        shell = "trap 'echo tidy > \"$SAID\"; exit' TERM; echo $$; sleep 600 & wait"
        asked = ProgramRequest(ENV | {"SAID": str(tmp_path / "said")}, ["/bin/sh", "-c", shell])
        async with launcher.running(asked, b"", 100) as program:
            while not program.stdout:
                await asyncio.sleep(0.01)

    asyncio.run(ended())
    assert (tmp_path / "said").read_text() == "tidy\n"


def test_a_program_ends_when_its_task_is_cancelled(launcher, mark):
    printed = []

    async def cancelled():
        env = ENV | {MARK: mark}
        asked = ProgramRequest(env, ["/bin/sh", "-c", "setsid sleep 600 & echo $!; wait"])
        async with launcher.running(asked, b"", 100) as program:
            while not program.stdout:
                await asyncio.sleep(0.01)
            printed.append(program.stdout.decode())
            asyncio.current_task().cancel()
            await program.wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert_gone(printed[0], 1, mark)


@pytest.mark.parametrize("alone", [True, False])
def test_programs_end_with_a_trainer_that_is_killed(alone, mark):
    script = (
        "import asyncio, sys\n"
        "from lightning_rl.serving.programs import Launcher, ProgramRequest\n"
        "async def run():\n"
        "    shell = 'setsid sleep 600 & echo $!; echo $$; wait'\n"
        f"    asked = ProgramRequest({{{MARK!r}: {mark!r}}}, ['/bin/sh', '-c', shell])\n"
        f"    async with Launcher(own_processes={alone}).running(asked, b'', 100) as program:\n"
        "        while program.stdout.count(b'\\n') < 2: await asyncio.sleep(0.01)\n"
        "        print(program.stdout.decode(), flush=True)\n"
        "        await program.wait()\n"
        "asyncio.run(run())\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        printed = trainer.stdout.readline() + trainer.stdout.readline()
        trainer.kill()
    assert_gone(printed, 2, mark)


def test_a_program_ends_with_its_keeper(launcher, mark):
    """Everything that it started ends, too, whoever else has to end that."""

    async def run():
        shell = "setsid sleep 600 & echo $!; echo $$; exec sleep 600"
        asked = ProgramRequest(ENV | {MARK: mark}, ["/bin/sh", "-c", shell])
        async with launcher.running(asked, b"", 100) as program:
            while program.stdout.count(b"\n") < 2:
                await asyncio.sleep(0.01)
            signal.pidfd_send_signal(program._keepers_end, signal.SIGKILL)
            return await program.wait(), program.stdout.decode()

    end, printed = asyncio.run(run())
    assert end == Ending("killed", "its keeper was killed")
    assert_gone(printed, 2, mark)


STOPS = {
    "stops its keeper": "kill -STOP $PPID",
    "kills its keeper": "kill -KILL $PPID",
    "stops all that it may": "trap '' CONT; kill -STOP $PPID; kill -KILL $PPID",
}


def test_a_program_alone_cannot_reach_its_keeper(mark):
    """Nor can any of several at once."""
    launcher = Launcher()
    if not can_be_alone(launcher):
        pytest.skip("no namespaces on this machine")

    async def run():
        shells = [f"setsid sleep 600 & {s}; sleep 0.1; echo on; sleep 600" for s in STOPS.values()]
        env = ENV | {MARK: mark}
        return await asyncio.gather(
            *(result_of(launcher, shell, seconds=3, env=env) for shell in shells)
        )

    ended = dict(zip(STOPS, asyncio.run(run()), strict=True))
    launcher.close()
    assert ended == dict.fromkeys(STOPS, (None, "on\n"))
    assert_gone("", 0, mark)


def test_one_that_stops_its_keeper_does_not_live_on(monkeypatch, mark):
    monkeypatch.setattr(programs, "_END_S", 0.5)
    launcher = Launcher(own_processes=False)
    shell = "setsid sleep 600 & kill -STOP $PPID; echo on; sleep 600"
    end, printed = asyncio.run(result_of(launcher, shell, seconds=1, env=ENV | {MARK: mark}))
    launcher.close()
    assert end is None
    assert_gone(printed, 1, mark)


def can_be_alone(launcher) -> bool:
    _, printed = asyncio.run(result_of(launcher, "echo $PPID"))
    return printed == "1\n"


READS_KEYS = """
for way in true 'umount /proc' 'unshare --user --map-root-user --mount umount /proc'; do
  $way 2>/dev/null
  for file in /proc/*/environ /proc/*/task/*/environ /proc/*/root/proc/*/environ; do
    tr '\\0' '\\n' < $file 2>/dev/null | grep ^OPENAI_API_KEY=
  done
done | sort -u
"""


@pytest.mark.parametrize("privileged", [True, False])
def test_programs_do_not_find_the_keys_of_others(privileged):
    """The sandbox may make namespaces; where it may not, each program has one of users, too."""
    launcher = Launcher()
    if not can_be_alone(launcher):
        pytest.skip("no namespaces on this machine")
    launcher.close()
    without = [] if privileged or os.getuid() else ["setpriv", "--bounding-set", "-sys_admin"]
    done = subprocess.run(
        [*without, sys.executable, "-c", KEYS_OF_TWO, READS_KEYS], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout.split() == ["OPENAI_API_KEY=one"], done.stderr


KEYS_OF_TWO = """
import asyncio, os, sys
from lightning_rl.serving.programs import Launcher, ProgramRequest

async def main():
    launcher = Launcher()
    def running(key, shell):
        env = {"PATH": os.environ["PATH"], "OPENAI_API_KEY": key}
        return launcher.running(ProgramRequest(env, ["/bin/sh", "-c", shell]), b"", 10_000)
    async with running("two", "echo here; sleep 600") as other:
        while not other.stdout:
            await asyncio.sleep(0.01)
        async with running("one", sys.argv[1]) as program:
            await program.wait()
            print(program.stdout.decode())
    launcher.close()

asyncio.run(main())
"""


def test_where_there_are_no_namespaces_a_warning_says_what_that_means():
    forbid = "for kind in user pid; do echo 0 > /proc/sys/user/max_${kind}_namespaces; done"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", f'{forbid} && exec "$0" "$@"',
         sys.executable, "-c", KEYS_OF_TWO, "echo $PPID"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert int(done.stdout) > 1
    assert (
        done.stderr.count("each program can read the others' keys in /proc: allow user namespaces")
        == 1
    )


def test_a_launcher_that_was_killed_is_replaced(launcher):
    assert asyncio.run(result_of(launcher, "echo 1"))[1] == "1\n"
    before = launcher._process
    before.kill()
    before.wait()
    assert asyncio.run(result_of(launcher, "echo 2"))[1] == "2\n"
    assert launcher._process is not before


def test_many_at_once(launcher):
    async def all_of_them():
        return await asyncio.gather(*(result_of(launcher, f"echo {i}") for i in range(200)))

    results = asyncio.run(all_of_them())
    assert [printed for _, printed in results] == [f"{i}\n" for i in range(200)]
    assert all(end == Ending("done") for end, _ in results)


def test_a_closed_launcher_is_gone_and_starts_again(launcher):
    asyncio.run(result_of(launcher, "true"))
    process = launcher._process
    launcher.close()
    assert process.poll() == 0
    assert asyncio.run(result_of(launcher, "echo again"))[1] == "again\n"


# ---------------------------------------------------------------- scripts


SCRIPT = """
import json, os, sys
import warm
from helper import LETTER
print(__name__, sys.argv[1:], json.load(sys.stdin)["id"], LETTER, warm.count, dict(os.environ))
warm.count += 1
if "fail" in sys.argv: raise KeyError("three")
if "leave" in sys.argv: sys.exit(4)
"""


@pytest.fixture
def script(tmp_path):
    place = tmp_path / "agent"
    place.mkdir()
    (place / "main.py").write_text(SCRIPT)
    (place / "helper.py").write_text("LETTER = 'h'\n")
    (tmp_path / "warm.py").write_text("import os\ncount = 0\nprint('imported', os.getpid())\n")
    made = Launcher(["warm"], sys.executable, ENV | {"PYTHONPATH": str(tmp_path)})
    yield made, str(place / "main.py")
    made.close()


def test_a_script_runs_with_what_was_imported_once(script):
    launcher, path = script

    async def run(*arguments):
        return await result_of(
            launcher, "", command=(), script=path, arguments=arguments, env={"A": "b"}
        )

    for _ in range(2):  # what one changes, another does not see
        end, printed = asyncio.run(run("x", "y"))
        assert end == Ending("done")
        assert printed == "__main__ ['x', 'y'] 7 h 0 {'A': 'b'}\n"
    assert asyncio.run(run("leave"))[0] == Ending("exit", "ended with exit status 4")
    end, _ = asyncio.run(run("fail"))
    assert end.kind == "exit"
    assert end.reason.endswith("KeyError: 'three'")


def test_a_module_that_cannot_be_imported_is_named(tmp_path):
    launcher = Launcher(["no_such_module"], sys.executable)
    with pytest.raises(ConfigError, match="cannot import 'no_such_module': ModuleNotFoundError"):
        asyncio.run(result_of(launcher, "true"))
    launcher.close()
