"""Test Isolated: real processes, real faults; what a completion does stays with that completion."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.reward_faults.rewards import FAULTS, faulty
from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import RewardFailure
from lightning_rl.rewards.log import TrainerState
from lightning_rl.rewards.pool import Isolated
from tests.support.engine_checks import is_running

HELPERS = """
import os
import resource

calls = 0


def state(completions, n):
    global calls
    calls += 1
    open("left", "w").close()
    return [calls + 10 * len(os.listdir()) + 100 * n[0]]


def mixed(completions):
    text = completions[0]
    return [None if text == "none" else float(text)]


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completions):
        return [self.factor * len(completions[0])]


def pids(completions):
    return [os.getppid()]


def logs(completions, trainer_state, log_extra, log_metric):
    log_extra("long", ["x" * 70_000 if completions[0] == "long" else trainer_state.epoch])
    log_metric("length", len(completions[0]))
    return [1.0]


def lowers_limits(completions):
    if completions[0] == "lower":
        resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))
    with open("result", "w") as file:
        file.write("1")
    return [1.0]


def forges(completions, log_extra):
    if completions[0] == "forge":
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, b'{"score": 1.0, "log": {"extra": 5}}')
            except OSError:
                pass
        os._exit(0)
    return [1.0]


def announce_and_hang(completions, path):
    with open(path[0], "w") as file:
        file.write(f"{os.getppid()} {os.getpid()}")
    while True:
        pass
"""


@pytest.fixture(scope="module")
def helpers(tmp_path_factory):
    """Yield a module of reward functions that other processes can import."""
    directory = tmp_path_factory.mktemp("helpers")
    (directory / "pool_helpers.py").write_text(HELPERS)
    sys.path.insert(0, str(directory))
    import pool_helpers

    yield pool_helpers
    sys.path.remove(str(directory))
    del sys.modules["pool_helpers"]


def run(pool, **columns):
    return asyncio.run(pool(**columns))


def wait_until_gone(*pids: int) -> None:
    """Fails by the test's own time limit, not by a guess of how long it takes."""
    while any(is_running(pid) for pid in pids):
        time.sleep(0.01)


OUTCOMES = {
    "raises": "KeyError: 'answer'",
    "wrong_count": "returned 3 scores for 1 completion",
    "exits": "SystemExit: 0",
    "exits_at_once": "ended without a score (exit status 0)",
    "segfault": "killed by SIGSEGV",
    "deep_recursion": "RecursionError",
    "large_allocation": "needed more than memory_mb=256",
    "large_output": 1.0,
    "large_file": "File too large",
    "lingering_child": 1.0,
    "kills_parent": "its worker died or hung, and so did a new one",
    "damages_result": "it overwrote its own result",
}


def test_each_fault_fails_its_completion_and_no_other():
    pool = Isolated(faulty, workers=2, timeout_s=60, memory_mb=256)
    completions = [text for fault in OUTCOMES for text in (fault, "good")]
    scores = run(pool, completions=completions)
    pool.close()
    assert scores[1::2] == [1.0] * len(OUTCOMES)
    for (fault, expected), score in zip(OUTCOMES.items(), scores[::2], strict=True):
        if isinstance(expected, float):
            assert score == expected, fault
        else:
            assert isinstance(score, RewardFailure), fault
            assert expected in score.reason, fault


def test_a_worker_whose_limits_a_completion_lowered_is_replaced(helpers):
    pool = Isolated(helpers.lowers_limits, workers=1, fault_score=0.0)
    assert run(pool, completions=["x", "lower", "x", "x"]) == [1.0] * 4
    pool.close()


def test_what_could_not_be_confined_is_an_error_and_no_score(helpers):
    pool = Isolated(helpers.mixed, workers=1, fault_score=0.0, memory_mb=2**43)
    (score,) = run(pool, completions=["1"])
    pool.close()
    assert "its process could not be confined: " in score.reason


HANGING = ["stubborn_loop", "many_children", "stopped", "floods_result"]


@pytest.mark.slow
def test_what_hangs_is_ended_and_its_worker_serves_on():
    pool = Isolated(faulty, workers=2, timeout_s=0.4)
    run(pool, completions=["raises"] * 4)
    workers = {worker.pid for worker in pool._idle}
    scores = run(pool, completions=HANGING)
    assert scores == [RewardFailure("ran longer than timeout_s=0.4")] * 4
    assert {worker.pid for worker in pool._idle} >= workers
    pool.close()


def test_what_is_not_tried_here_is_in_the_benchmark():
    """NaN passes the pool and is refused by Rewards; the other two differ little from the above."""
    rest = {f.__name__ for f in FAULTS} - OUTCOMES.keys() - set(HANGING)
    assert rest == {"not_a_number", "endless_loop", "stack_overflow"}


@pytest.mark.slow
def test_what_a_completion_started_ends_with_it(tmp_path, monkeypatch):
    """The started process is in a session of its own, and asleep for a day."""
    (tmp_path / "leaving.py").write_text(
        "import subprocess\n"
        "def leave(completions):\n"
        "    child = subprocess.Popen(['sleep', '86400'], start_new_session=True)\n"
        "    return [child.pid]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from leaving import leave

    pool = Isolated(leave, workers=1)
    (pid,) = run(pool, completions=["x"])
    assert not is_running(int(pid))
    pool.close()


@pytest.mark.slow
def test_every_completion_starts_afresh_and_gets_its_own_columns(helpers):
    pool = Isolated(helpers.state, workers=1)
    # One call, one file in the directory, and the row's n.
    assert run(pool, completions=["a", "b", "c"], n=[3, 4, 5]) == [311, 411, 511]
    pool.close()


@pytest.mark.slow
def test_in_rewards_only_what_failed_is_failed(helpers, make_rollout):
    pool = Isolated(helpers.mixed, workers=1)
    texts = ["0.5", "nan", "none", "x", "2"]
    group = [
        make_rollout([3], [4], sample_index=i, completion=t, reward=None)
        for i, t in enumerate(texts)
    ]
    asyncio.run(Rewards([pool]).grade([group]))
    pool.close()
    assert [r.reward for r in group] == [0.5, None, None, None, 2.0]
    failures = [r.error.partition("; prompt 'text', completion ")[::2] for r in group[1:4]]
    assert failures[:2] == [
        ("reward mixed: returned nan; a score must be a finite number or None", "'nan'"),
        ("no reward applies: every function returned None", "'none'"),
    ]
    assert failures[2][0].startswith(
        "reward mixed: ValueError: could not convert string to float: 'x', at "
    )
    assert [r.error for r in group[::4]] == [None, None]


@pytest.mark.slow
def test_what_a_completion_logs_comes_back_from_its_process(helpers, make_rollout):
    pool = Isolated(helpers.logs, workers=1)
    texts = ["a", "long", "four4"]
    group = [
        make_rollout([3], [4], sample_index=i, completion=t, reward=None)
        for i, t in enumerate(texts)
    ]
    rewards = Rewards([pool])
    rewards.state = TrainerState(epoch=0.25)
    asyncio.run(rewards.grade([group]))
    pool.close()
    assert [r.extra.get("long") for r in group] == [0.25, None, 0.25]
    assert group[1].error.startswith("reward logs: score and log take 70")
    assert [r.logged.get("length") for r in group] == [3.0, None, 3.0]


@pytest.mark.slow
def test_a_forged_log_fails_its_completion_and_no_other(helpers, make_rollout):
    pool = Isolated(helpers.forges, workers=1)
    group = [
        make_rollout([3], [4], sample_index=i, completion=t, reward=None)
        for i, t in enumerate(["a", "forge", "b"])
    ]
    asyncio.run(Rewards([pool]).grade([group]))
    pool.close()
    assert [r.reward for r in group] == [1.0, None, 1.0]


@pytest.mark.slow
def test_an_object_with_settings_keeps_them_and_its_name(helpers):
    pool = Isolated(helpers.Scaled(3), workers=1)
    assert run(pool, completions=["ab", ""]) == [6, 0]
    assert pool.__name__ == "Scaled"
    pool.close()


@pytest.mark.slow
def test_closing_ends_the_workers_and_grading_starts_new_ones(helpers):
    pool = Isolated(helpers.pids, workers=1)
    first = run(pool, completions=["x", "y"])
    assert first[0] == first[1]  # one worker serves again and again
    pool.close()
    assert not is_running(int(first[0]))
    second = run(pool, completions=["x"])
    assert second[0] != first[0]
    pool.close()


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_process_and_no_directory(helpers, tmp_path):
    script = (
        "import asyncio, pool_helpers\n"
        "from lightning_rl.rewards.pool import Isolated\n"
        "pool = Isolated(pool_helpers.announce_and_hang, workers=1, timeout_s=3600)\n"
        f"asyncio.run(pool(completions=['x'], path=[{str(tmp_path / 'pids')!r}]))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", script], env=environment)
    while not (tmp_path / "pids").exists() or " " not in (tmp_path / "pids").read_text():
        assert trainer.poll() is None
        time.sleep(0.01)
    worker, sample = map(int, (tmp_path / "pids").read_text().split())
    assert is_running(worker)
    assert is_running(sample)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_until_gone(worker, sample)
    assert [p.name for p in tmp_path.iterdir()] == ["pids"]


def test_what_cannot_be_isolated_is_refused(helpers):
    async def waits(completions):
        return [1.0]

    def local(completions):
        return [1.0]

    with pytest.raises(ConfigError, match=r"waits is async.*Remote"):
        Isolated(waits)
    with pytest.raises(ConfigError, match="local cannot be sent to another process"):
        Isolated(local)
    with pytest.raises(ConfigError, match=r"timeout_s=0 must be >="):
        Isolated(helpers.mixed, timeout_s=0)


@pytest.mark.slow
def test_a_function_that_only_the_trainer_can_import_says_so(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def one(completions): return [1.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from only_here import one

    pool = Isolated(one, workers=1)
    (tmp_path / "only_here.py").unlink()
    (score,) = run(pool, completions=["x"])
    assert "could not load reward one: ModuleNotFoundError" in score.reason
    pool.close()


@pytest.mark.slow
def test_a_worker_whose_trainer_is_gone_as_it_starts_ends_without_a_word(tmp_path):
    script = (
        "import os, pickle, sys\nfrom multiprocessing import Pipe\n"
        "from benchmarks.reward_faults.rewards import faulty\n"
        "from lightning_rl.rewards.pool_worker import Limits, main\n"
        "ours, theirs = Pipe()\n"
        "ours.send_bytes(pickle.dumps(Limits(1.0, 64)))\n"
        "if sys.argv[2] == 'later': ours.send_bytes(pickle.dumps(faulty))\n"
        "ours.close()\nmain(theirs, sys.argv[1])\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for when in ("before", "later"):
        home = tmp_path / when
        home.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", script, str(home), when], env=env, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert not home.exists()
