"""Test messages of ranks that train over NCCL: two processes with gloo, that take it for NCCL."""

import multiprocessing
import os
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

from lightning_rl.engines.replicas.server_process import free_port
from lightning_rl.errors import ConfigError, RewardError
from lightning_rl.run.processes import dist

TIMEOUT = timedelta(seconds=77)
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list")


class Spy:
    """Notes over which group each collective went; the default one is called ``backend``."""

    def __init__(self, backend):
        self.calls, self.made = [], []
        real = {name: getattr(torch_dist, name) for name in (*COLLECTIVES, "new_group")}
        get_backend = torch_dist.get_backend
        torch_dist.get_backend = lambda group=None: get_backend(group) if group else backend

        def noting(name):
            def call(*args, group=None, **options):
                self.calls.append((name, "default" if group is None else "control"))
                return real[name](*args, group=group, **options)

            return call

        def new_group(**options):
            self.made.append(options["timeout"])
            return real["new_group"](**options)

        for name in COLLECTIVES:
            setattr(torch_dist, name, noting(name))
        torch_dist.new_group = new_group


def talk(rank):
    """Talk in every way; return what this rank heard."""
    heard = [
        dist.any_rank(rank == 1),
        dist.all_reduce_max(float(rank)),
        dist.gather({"rank": rank}),
        dist.from_rank_zero(["from", rank]),
        dist.scatter([5, 6, 7]),
        dist.all_sum(torch.tensor([1.0 + rank])).tolist(),
        dist.global_mean_std(torch.tensor([float(rank)]))[0].item(),
    ]
    value = torch.tensor([float(rank)])
    dist.take_from_rank_zero(value)
    try:
        with dist.every_rank():
            if rank == 1:
                raise RewardError("no reward")
    except RewardError as error:
        heard.append(str(error))
    return [*heard, value.item()]


def run_rank(rank, ports, backend, results):
    try:
        spy, heard = Spy(backend), []
        for port in ports:
            torch_dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=2,
                timeout=TIMEOUT,
            )
            heard.append(talk(rank))
            torch_dist.destroy_process_group()
        results.put((rank, heard, spy.calls, spy.made))
    except Exception:
        results.put((rank, traceback.format_exc(), None, None))
    results.close()
    results.join_thread()
    os._exit(0)  # nothing of the tests' own process is to end here


def two_ranks(backend, groups=1):
    """Return by rank what it heard in each group, the collectives, and the groups made."""
    context = multiprocessing.get_context("fork")
    results, ports = context.Queue(), [free_port() for _ in range(groups)]
    ranks = [
        context.Process(target=run_rank, args=(rank, ports, backend, results)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    told = sorted(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(30)
    return told


def expected(rank):
    failed = "no reward" if rank == 1 else "rank 1: no reward"
    share = [5, 7] if rank == 0 else [6]
    gathered = [{"rank": 0}, {"rank": 1}]
    return [True, 1.0, gathered, ["from", 0], share, [3.0], 0.5, failed, 0.0]


def test_over_nccl_what_is_on_no_gpu_goes_over_gloo():
    """The tensors go through two process groups in turn; each has one group beside it."""
    for rank, heard, calls, made in two_ranks("nccl", groups=2):
        assert heard == [expected(rank)] * 2
        assert made == [TIMEOUT] * 2  # or a machine that vanished would be waited for in vain
        assert {name for name, _ in calls} == set(COLLECTIVES)
        assert {group for _, group in calls} == {"control"}


def test_over_gloo_there_is_one_group_as_before():
    for rank, heard, calls, made in two_ranks("gloo"):
        assert heard == [expected(rank)]
        assert made == []
        assert {group for _, group in calls} == {"default"}


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_tensors_on_gpus_stay_with_nccl(monkeypatch, backend):
    def unreachable(**options):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(torch_dist, "get_backend", lambda group=None: backend)
    monkeypatch.setattr(torch_dist, "new_group", unreachable)
    monkeypatch.setattr(dist, "_timeout", lambda: TIMEOUT)
    cuda = torch.device("cuda", 1)
    assert dist._route(cuda) == (None, cuda)
    with pytest.raises(ConfigError, match=r"a gloo group.* no route to host; .*GLOO_SOCKET_IF"):
        dist._route(torch.device("cpu"))
