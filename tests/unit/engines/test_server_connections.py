"""Connections to a server: few, kept, and none is lost because of this process's own limits."""

import asyncio
import itertools
import os
import resource
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import pytest
from aiohttp import ClientConnectorError

from lightning_rl.engines.replicas.http import HTTPReplica, NoFileError
from lightning_rl.engines.replicas.replica import Timeouts
from lightning_rl.engines.replicas.server import VLLMServer
from lightning_rl.engines.sampling import Sampling
from lightning_rl.rewards.openai_api import OpenAIAPI
from lightning_rl.run.loop.background import run_async
from lightning_rl.run.processes.machine import raise_file_limit
from lightning_rl.run.retry import ServerError, lacks_files
from tests.support.plain_server import Served

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def elsewhere():
    """Yield the URL of such a server in a process of its own, with its own files."""
    command = [sys.executable, "-m", "tests.support.plain_server"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().strip()
        process.kill()


@asynccontextmanager
async def replica_of(served, connections, seconds=60.0):
    """Make a replica; ``served`` is a server of this process, or the URL of another."""
    async with nullcontext(served) if isinstance(served, str) else served.at() as url:
        limits = Timeouts(10.0, seconds, seconds)
        replica = HTTPReplica(url, "", None, False, limits, connections=connections)
        await replica.start()
        try:
            yield replica
        finally:
            await replica.close()


async def ask(replica, count):
    asked = (replica.generate([1], Sampling(), seed) for seed in range(count))
    return await asyncio.gather(*asked)


@contextmanager
def files(more: int):
    """This process may have so many files open in addition to those that it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # All that are listed, but for the one that reads the list.
    taken = {int(n) for n in os.listdir("/proc/self/fd") if Path("/proc/self/fd", n).exists()}
    free = (number for number in itertools.count() if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, more, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_requests_share_a_few_connections_that_are_kept():
    served = Served()

    async def run():
        async with replica_of(served, connections=8) as replica:
            before = served.total
            served.at_once = 0
            completions = await ask(replica, 400)
            assert [c.token_ids for c in completions] == [[7]] * 400
            return served.total - before

    assert run_async(run(), 60) == 8
    assert served.at_once <= 9  # one of another call


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_kept_connection_that_the_server_closes_is_no_lost_server(most):
    served = Served(most)

    async def run():
        async with replica_of(served, connections=4) as replica:
            for _ in range(3):
                assert len(await ask(replica, 20)) == 20

    run_async(run(), 60)


def test_too_many_open_files_are_no_lost_server(elsewhere):
    async def run():
        async with replica_of(elsewhere, connections=200) as replica:
            with files(30):
                assert len(await ask(replica, 200)) == 200

    with pytest.warns(match="too many open files"):
        run_async(run(), 100)


def test_where_no_file_is_free_for_too_long_the_limit_is_named(elsewhere):
    async def run():
        async with replica_of(elsewhere, connections=4, seconds=0.5) as replica:
            with files(0):
                with pytest.raises(NoFileError, match="raise the limit"):
                    await ask(replica, 1)
                return await replica.answers()  # it may well: nobody could ask it

    with pytest.warns(match="too many open files"):
        assert run_async(run(), 60)


def test_a_judge_waits_for_a_file_too(elsewhere):
    async def run():
        api = OpenAIAPI(f"{elsewhere}/v1")
        with files(0):
            asking = asyncio.create_task(api.chat({}))
            await asyncio.sleep(0.3)
            assert not asking.done()
        return await asking

    with pytest.warns(match="too many open files"):
        assert run_async(run(), 60) == ("yes", "stop")


def test_the_limit_is_raised_to_what_is_allowed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert raise_file_limit() == min(hard, 2**20)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 2**20), hard)
        assert VLLMServer(replicas=4)._connections() == min(4096, min(hard, 2**20) // 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_caused_by_too_many_files_is_found_in_any_error():
    inner = OSError(24, "Too many open files")
    told = ServerError("no answer")
    told.__cause__ = ClientConnectorError(None, inner)
    assert lacks_files(told)
    assert not lacks_files(OSError(111, "Connection refused"))
    assert not lacks_files(None)
