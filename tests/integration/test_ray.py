"""RayEngine with two actors on a two-node Ray cluster of this machine; VLLMLocal is the yardstick.

Every test pushes first, so each finds the engine as it wants it, whatever the one before did.
What it does as every engine does is in test_engine_contract.py. It takes minutes: a cluster, its
actors and a whole run start, and actors and nodes that were killed start anew.

Slow: Ray's nodes and vLLM's actors are processes that import everything anew.
"""

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lightning_rl.engines import RayEngine, Sampling
from lightning_rl.engines.replicas.server_process import free_port
from lightning_rl.errors import EngineError, IncompleteWeightsError, ReplicaError
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.memory import MemoryTransport
from tests.support.engine_checks import (
    PROMPTS,
    Forgetful,
    connected,
    generate,
    is_running,
    same_draws,
    scaled,
    wait_for,
)
from tests.support.shared_engines import NODE, SIZES

ray = pytest.importorskip("ray")
# A hang is a failure; starting Ray and vLLM takes its time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine(cluster, request):
    handler = signal.getsignal(signal.SIGTERM)
    engine = request.getfixturevalue("actors")
    assert signal.getsignal(signal.SIGTERM) is handler  # Ray would end a run without saving
    return engine


@pytest.fixture(scope="module")
def local(vllm):
    return vllm


def require_same(completions, expected):
    assert same_draws(completions, expected)
    for ours, theirs in zip(completions, expected, strict=True):
        assert set(ours.versions) == set(theirs.versions)
        if ours.token_ids == theirs.token_ids:
            assert ours.finish_reason == theirs.finish_reason


def inside(replica, function):
    """Call it on the RayActor itself."""
    return ray.get(replica._actor.__ray_call__.remote(function), timeout=60)


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_cluster_that_is_not_there_is_named(monkeypatch, skeleton, by_environment):
    """The test runs before anything here has connected."""
    nobody = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", nobody if by_environment else "127.0.0.1:1")
    engine = RayEngine(None if by_environment else nobody)
    with pytest.raises(ReplicaError, match=rf"no Ray cluster at address='{nobody}'.*refused"):
        engine.start(skeleton)
    assert not ray.is_initialized()


def test_without_an_address_no_cluster_is_joined_that_somebody_else_has_started(tmp_path):
    """Separate processes run, whose Ray notes the clusters of this machine in a folder apart."""
    folder = tempfile.mkdtemp(prefix="ray_", dir="/tmp")  # sockets have short names only
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    head = f"--head --port={free_port()} --num-cpus=1 --include-dashboard=false --block".split()
    script = (
        "import ray\n"
        "from lightning_rl import RayEngine\n"
        "engine = RayEngine(replicas=1)\n"
        "engine._connect()\n"
        "print('nodes', [n['Resources'].get('foreign') for n in ray.nodes()])\n"
        "engine._release()\n"
    )
    foreign = subprocess.Popen(
        [*ray_command, "start", *head, '--resources={"foreign": 1}'],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: Path(folder, "ray", "ray_current_cluster").exists(), 60)
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
    finally:
        foreign.terminate()
        foreign.wait(60)
        shutil.rmtree(folder, ignore_errors=True)
    assert "nodes [None]" in done.stdout, done.stderr


def test_a_cluster_that_wants_a_token_says_so(monkeypatch, tmp_path, skeleton):
    """A separate process runs: Ray reads once in a process whether it is to show a token."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    monkeypatch.setenv("HOME", str(tmp_path))
    port = free_port()
    head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    head += ["--port", str(port), "--num-cpus", "1", "--include-dashboard", "false"]
    program = f"""
from pathlib import Path
from lightning_rl.engines import RayEngine
engine = RayEngine("127.0.0.1:{port}", replicas=1)
try:
    engine._connect()
    print("connected")
    engine.close()
except Exception as error:
    print(type(error).__name__, error)
"""

    def drive(**environment: str) -> str:
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
        )
        return done.stdout.strip().splitlines()[-1]

    with subprocess.Popen(
        head, env=os.environ | {"RAY_AUTH_MODE": "token"}, start_new_session=True,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert any("Ray runtime started" in line for line in process.stdout)
            refused = drive()
            assert refused.startswith("ReplicaError the Ray cluster at address='127.0.0.1:")
            assert "requires a token; set RAY_AUTH_MODE=token for this command" in refused
            assert drive(RAY_AUTH_MODE="token") == "connected"
        finally:
            os.killpg(process.pid, signal.SIGTERM)


# -------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=16, temperature=0.7),
        Sampling(max_tokens=16, temperature=1.3, top_k=3, min_tokens=3, stop=["="]),
    ],
)
def test_each_replica_writes_what_vllm_local_writes(weights, engine, local, sampling):
    engine.load_weights(weights.items(), 3)
    local.load_weights(weights.items(), 3)
    expected = generate(local, PROMPTS * 4, sampling)
    require_same(generate(engine, PROMPTS * 4, sampling), expected)
    for replica in engine.replicas:
        require_same(generate(replica, PROMPTS * 4, sampling), expected)
    nodes = ray.util.placement_group_table(engine._group)["bundles_to_node_id"]
    assert len(set(nodes.values())) == 2  # spread over both


def test_a_request_that_is_given_up_ends_in_the_actor(weights, engine):
    engine.load_weights(weights.items(), 0)

    async def give_up():
        await engine.pause()
        sampling = Sampling(max_tokens=100, min_tokens=100)
        tasks = [asyncio.create_task(engine.generate([3], sampling, s)) for s in range(4)]
        await asyncio.to_thread(wait_for, lambda: requests() == 4, 60.0)
        for task in tasks[:3]:
            task.cancel()
        await asyncio.to_thread(wait_for, lambda: requests() == 1, 60.0)
        await engine.resume()
        return await tasks[3]

    def requests():
        return sum(inside(r, lambda actor: len(actor._engine._requests)) for r in engine.replicas)

    assert len(run_async(give_up()).token_ids) == 100
    assert [replica.load for replica in engine.replicas] == [0, 0]


def test_a_collective_push_reaches_all_replicas(weights, engine, local):
    sampling = Sampling(max_tokens=8, min_tokens=8)
    layer = "model.layers.1.self_attn.q_proj.weight"  # a part of what vLLM fuses
    states = [weights, scaled(weights, 0.8)]
    states.append(states[-1] | {layer: weights[layer] * 2})
    transport = CollectiveTransport(bucket_mb=0.05)
    with connected(transport, engine):
        for version, state in enumerate(states):
            transport.push(state.items(), version)
            local.load_weights(state.items(), version)
            expected = generate(local, PROMPTS, sampling)
            for replica in engine.replicas:
                require_same(generate(replica, PROMPTS, sampling), expected)


# -------------------------------------------------------------------- faults


def test_errors_name_the_actor_and_its_node(weights, engine):
    who = r"replica \d of RayEngine \(actor [0-9a-f]{12} on node [\d.]+\): "
    with (
        connected(Forgetful(), engine) as transport,
        pytest.raises(IncompleteWeightsError, match=f"^{who}the push left 5 of the engine's"),
    ):
        transport.push(weights.items(), 1)
    engine.load_weights(weights.items(), 2)
    with pytest.raises(EngineError, match=f"^{who}.*vocab") as caught:
        generate(engine, [[99]], Sampling(max_tokens=1))
    assert caught.value.__suppress_context__  # no Ray stack behind it
    assert [replica.alive for replica in engine.replicas] == [True, True]


def test_resources_that_the_cluster_has_not_are_named(engine, skeleton):
    greedy = RayEngine(replicas=2, bundle={"CPU": 2.0, "GPU": 1.0}, start_timeout_s=1.0)
    with pytest.raises(
        ReplicaError, match=r"2 times .*'GPU': 1.0.*the whole cluster has .*'CPU': 4.0"
    ):
        greedy.start(skeleton)
    assert not greedy.running
    assert all(replica.alive for replica in engine.replicas)  # Ray itself is still connected


def test_requests_outlive_the_actor_that_they_were_sent_to(weights, engine, local, fault):
    sampling = Sampling(max_tokens=100, min_tokens=100)
    prompts = PROMPTS[:3] * 4
    with connected(MemoryTransport(), engine) as transport:
        transport.push(weights.items(), 5)
        local.load_weights(weights.items(), 5)
        expected = generate(local, prompts, sampling)
        doomed = engine.replicas[1]
        life, name = doomed.life, doomed.name

        async def kill_one():
            tasks = [
                asyncio.create_task(engine.generate(p, sampling, s)) for s, p in enumerate(prompts)
            ]
            await asyncio.sleep(0.05)  # each was sent
            assert doomed.load == 6
            await asyncio.to_thread(ray.kill, doomed._actor)
            return await asyncio.gather(*tasks)

        with fault(
            "a Ray actor killed with six requests in flight", "the same tokens, by the other"
        ):
            require_same(run_async(kill_one()), expected)
        assert f"{name}: " in str(engine.supervision.outages)
        with fault("the same", "it is made anew and filled"):
            wait_for(lambda: doomed.version == 5)
        assert doomed.life == life + 1
        assert doomed.name != name  # another actor
        require_same(generate(doomed, prompts, sampling), expected)


def test_a_whole_node_dies_under_requests(weights, cluster, engine, local, fault):
    """Its replica comes back on the node that is left, with the weights of the last push."""
    sampling = Sampling(max_tokens=100, min_tokens=100)
    prompts = PROMPTS[:3] * 4
    node = cluster.worker_nodes.copy().pop()
    (doomed,) = (r for r in engine.replicas if node_of(r) == node.node_id)
    life = doomed.life
    with connected(MemoryTransport(), engine) as transport:
        transport.push(weights.items(), 6)
        local.load_weights(weights.items(), 6)
        expected = generate(local, prompts, sampling)

        async def remove_node():
            tasks = [
                asyncio.create_task(engine.generate(p, sampling, s)) for s, p in enumerate(prompts)
            ]
            await asyncio.sleep(0.05)  # each was sent
            await doomed.pause()  # an actor outlives its node for a moment: it must not finish
            assert doomed.load == 6
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            return await asyncio.gather(*tasks)

        try:
            with fault("a node of two removed, its actor with six requests", "the same tokens"):
                require_same(run_async(remove_node()), expected)
            with fault("the same", "its actor is made anew on the other node and filled"):
                wait_for(lambda: doomed.life > life and doomed.version == 6)
            assert node_of(doomed) == cluster.head_node.node_id
            require_same(generate(doomed, prompts, sampling), expected)
        finally:
            cluster.add_node(**NODE)


def node_of(replica) -> str:
    """Return the id of the cluster's node that its actor runs on."""
    return inside(replica, lambda actor: ray.get_runtime_context().get_node_id())


# -------------------------------------------------------------------- beyond two replicas
def test_tensor_parallel_inside_an_actor(weights, engine, local, skeleton):
    """The cluster is the one that `engine` is connected to; its processes end with the actor."""
    pair = RayEngine(
        replicas=1,
        tensor_parallel_size=2,
        bundle={"CPU": 1.0},
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|0"},
        **SIZES,
    )
    pair.start(skeleton)
    try:
        (replica,) = pair.replicas
        pids = inside(replica, lambda actor: [p.pid for p in multiprocessing.active_children()])
        assert len(pids) >= 2
        with connected(CollectiveTransport(), pair) as transport:
            transport.push(weights.items(), 1)
            local.load_weights(weights.items(), 1)
            sampling = Sampling(max_tokens=16)
            require_same(generate(pair, PROMPTS, sampling), generate(local, PROMPTS, sampling))
    finally:
        pair.close()
    assert ray.is_initialized()  # `engine` still needs it
    wait_for(lambda: not [pid for pid in pids if is_running(pid)])


def begin_training(address, tiny_model, tmp_path, **more):
    """Start the recipe, which says nothing of this cluster: RAY_ADDRESS does."""
    rows = [{"prompt": f"{n}=", "answer": "".join(sorted(str(n)))} for n in range(300, 364)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ray_rewards.py").write_text(
        "def sevens(completions, **columns):\n    return [c.count('7') / 10 for c in completions]\n"
    )  # that an untrained model gets some of
    recipe = ROOT / "recipes" / "sort_digits"
    settings = {
        "model.init_args.model": tiny_model,
        "data.init_args.train_prompts.init_args.path": prompts,
        "data.init_args.evaluation.prompts.init_args.path": prompts,
        "data.init_args.rewards": "[ray_rewards.sevens]",
        "data.init_args.groups_per_iteration": 8,
        "trainer.accelerator": "cpu",
        "trainer.logger.init_args.save_dir": tmp_path,
        **{f"data.init_args.{key}": value for key, value in more.items()},
    }
    files = ["--config", recipe / "grpo.yaml", "--config", recipe / "variants" / "ray.yaml"]
    arguments = [*files, *(f"--{key}={value}" for key, value in settings.items())]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_rl", "fit", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_training_from_the_command_line(cluster, tiny_model, tmp_path):
    run = begin_training(cluster.address, tiny_model, tmp_path, iterations_per_epoch=2)
    _, told = run.communicate(timeout=400)
    assert run.returncode == 0, told
    (summary,) = tmp_path.glob("ray/*/summary.json")
    told = json.loads(summary.read_text())
    assert (told["status"], told["iterations"]) == ("completed", 2)
    rows = [json.loads(line) for line in summary.with_name("metrics.jsonl").open()]
    assert [row["sync/version"] for row in rows] == [0, 1, 2]
    assert all(row["sync/probe_gap"] < 1e-4 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows[1:])


def test_when_the_clusters_head_dies_the_run_saves_and_ends(monkeypatch, tiny_model, tmp_path):
    """Ray would end the trainer with its nodes. It comes back from its checkpoint elsewhere."""
    from ray.cluster_utils import Cluster

    with monkeypatch.context() as patch:  # else the nodes would wait for a minute
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        cluster.add_node(**NODE)
    try:
        engine = {"engine.init_args.recovery_timeout_s": 10, "engine.init_args.health_every_s": 1}
        run = begin_training(
            cluster.address, tiny_model, tmp_path, iterations_per_epoch=1000, **engine
        )
        wait_for(lambda: any(tmp_path.glob("ray/*/metrics.jsonl")), 200)
        for processes in cluster.head_node.all_processes.values():
            for process in processes:
                process.process.kill()
        _, told = run.communicate(timeout=200)
    finally:
        cluster.shutdown()
    assert run.returncode == 1
    assert "the head of the Ray cluster at" in told
    (saved,) = tmp_path.glob("ray/*/checkpoints/last.ckpt")
    rows = saved.parents[1].joinpath("metrics.jsonl").read_text().splitlines()
    done = json.loads(rows[-1])["iteration"]  # or one more, whose push found nobody
    assert saved.resolve().name in {f"iteration_{n}.ckpt" for n in (done, done + 1)}
