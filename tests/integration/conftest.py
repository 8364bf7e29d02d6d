"""Share fixtures between integration tests: engines that are started once, and the fault table."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from lightning_rl.envs.collector import EnvCollector
from lightning_rl.envs.collectors import collector_of
from lightning_rl.envs.maker import EnvMaker
from tests.support.bad_configs import furnish
from tests.support.browser import browser
from tests.support.ranks import Together
from tests.support.ranks_checks import command
from tests.support.recorded_run import finished, place, stand_in, there
from tests.support.shared_engines import actors, cluster, servers, transformers, vllm, vllm_in
from tests.support.signalled import FIT, configure

__all__ = [
    "actors",
    "browser",
    "cluster",
    "finished",
    "place",
    "servers",
    "there",
    "transformers",
    "vllm",
    "vllm_in",
]

Fault = Callable[..., AbstractContextManager[None]]


SERVED = {"test_digests", "test_engine_contract", "test_server", "test_server_faults"}
"""The files whose tests share the session's vLLM servers, which take half a minute to start."""


class ServersOnce(LoadFileScheduling):
    """A file's tests share a worker of pytest-xdist, as do all files that share the servers.

    ``--dist loadgroup`` is meant for that, but pytest-xdist 3.8 sets an attribute for it that
    pytest 9.2 does not read, and then spreads a file's tests over the workers.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "servers" if Path(file).stem in SERVED else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return ServersOnce(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    """Forget what Lightning's launcher sets, or commands that a later test runs wait for ranks."""
    names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    """Runs of several processes, which stay alive, and of this one."""
    runs = Together(tmp_path_factory.mktemp)
    yield runs
    runs.end()


@pytest.fixture(scope="session")
def whole_job(together, tiny_model, tmp_path_factory) -> Path:
    """Return the folder of an uninterrupted job of two processes: tests/support/signalled.py."""
    folder = configure(tmp_path_factory.mktemp("whole") / "job", tiny_model)
    for status, _, errors in together(2, command, *FIT, folders=(folder,)):
        assert status == 0, errors
    return folder


@pytest.fixture
def started() -> Iterator[Callable[..., EnvCollector]]:
    """Starts collectors of five environments, and ends their processes."""
    made = []

    def start(env: EnvMaker, seconds: float = 60.0) -> EnvCollector:
        made.append(collector_of(env, None, seconds))
        made[-1].start(0, 0, 5)
        return made[-1]

    yield start
    for collector in made:
        collector.close()


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> Fault:
    """Break what a line of the fault table (``python -m benchmarks.faults``) says, in the block.

    ``with fault(injected, happened)`` notes how long the block took; with ``error`` and ``match``
    it must raise that, and what happened is the error's name and ``happened``.
    """

    @contextmanager
    def broken(
        injected: str,
        happened: str,
        error: type[Exception] | tuple[type[Exception], ...] | None = None,
        match: str | None = None,
    ) -> Iterator[None]:
        begin = time.perf_counter()
        if error is None:
            yield
        else:
            with pytest.raises(error, match=match) as caught:
                yield
            happened = f"`{type(caught.value).__name__}` {happened}"
        seconds = time.perf_counter() - begin
        record_property("fault", json.dumps([injected, happened, seconds]))

    return broken


@pytest.fixture
def workplace(tiny_model, tmp_path, monkeypatch) -> Path:
    """Prepare the working directory: a good configuration, and what it names."""
    furnish(tmp_path, tiny_model)
    stand_in(tmp_path, monkeypatch)
    return tmp_path
