"""Test vLLM servers without vLLM: their processes, commands, answers and refusals."""

import os
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest
import torch

from lightning_rl.engines.replicas import http as http_replica, server_process
from lightning_rl.engines.replicas.http import completion_of, refusal
from lightning_rl.engines.replicas.replica import ReplicaLost
from lightning_rl.engines.replicas.server import VLLMServer, own_cores, server_command
from lightning_rl.engines.replicas.server_process import (
    ListeningServer,
    ServerProcess,
    free_port,
    validation_failure,
)
from lightning_rl.engines.sampling import Completion
from lightning_rl.errors import (
    ConfigError,
    DamagedWeightsError,
    EngineError,
    ReplicaError,
    ServerRefusal,
    WeightSyncError,
)
from tests.support.engine_checks import processes_of, wait_for
from tests.support.serving import Loopback, Quiet, serving

pytestmark = pytest.mark.timeout(60)


def test_versions_come_from_spans():
    choice = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"logprob": -x} for x in (1.0, 2.0, 3.0)]},
        "finish_reason": "length",
        "weight_versions": [
            {"version": "4", "start": 0, "end": 2},
            {"version": "5", "start": 2, "end": 3},
        ],
    }
    assert completion_of(choice) == Completion([5, 6, 7], [-1, -2, -3], "length", [4, 4, 5])
    with pytest.raises(EngineError, match="3 tokens, 3 logprobs and weight versions None"):
        completion_of(choice | {"weight_versions": None})


def test_a_workers_error_keeps_its_class():
    text = (
        '{"error":{"message":"Call to collective_rpc method failed: Worker failed with error '
        "'DamagedWeightsError: x.safetensors cannot be read: no', please check the stack\"}}"
    )
    error = refusal("http://a", "/update_weights", 500, text)
    assert type(error) is DamagedWeightsError
    assert str(error) == "http://a: x.safetensors cannot be read: no"
    assert type(refusal("a", "/b", 500, "WeightSyncError: odd")) is WeightSyncError
    assert str(refusal("a", "/b", 404, "gone")) == "a/b answered 404: gone"
    # A server answers so between its engine's death and its own: another one may.
    dead = '{"error":{"message":"EngineCore encountered an issue. See stack trace (above)..."}}'
    assert type(refusal("a", "/b", 500, dead)) is ReplicaLost
    assert type(refusal("a", "/b", 500, "Internal Server Error")) is ServerRefusal


def test_servers_on_one_machine_have_cores_of_their_own(monkeypatch):
    """vLLM itself would bind each of them to the same cores."""
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(bind, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7, 9})
    assert own_cores(0, 2) == {bind: "4,6,9"}
    assert own_cores(1, 2) == {bind: "5,7"}
    assert own_cores(6, 7) == {bind: "5"}  # more servers than cores
    monkeypatch.setenv(bind, "0-3")  # the user's
    assert own_cores(0, 2) == {}


def test_a_command_for_a_server():
    command = server_command({"model": "m", "enforce_eager": True, "x_y": None, "a": {"b": 1}})
    assert command[command.index("--model") + 1] == "m"
    assert "--enforce-eager" in command
    assert "--x-y" not in command
    assert command[command.index("--a") + 1] == '{"b": 1}'
    assert command[command.index("--weight-transfer-config") + 1] == '{"backend": "lightning_rl"}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, r"urls=\[\] are running servers"),
        ({"urls": ["http://a"], "replicas": 2}, "leave out replicas"),
        ({"replicas": 0}, "replicas=0 must be >= 1"),
        ({"replicas": 2, "devices": ["0"]}, r"devices=\['0'\] must name one entry"),
        ({"dtype": "int8"}, "dtype='int8' must be"),
        ({"call_timeout_s": 0}, "call_timeout_s=0 must be"),
        (
            {"urls": ["localhost:8000"]},
            r"'localhost:8000' must have the form http://host:port, like",
        ),
        ({"urls": ["http://a:port"]}, "must have the form http://host:port"),
        ({"urls": ["http://a:80/v1"]}, "must end before /v1: 'http://a:80'"),
    ],
)
def test_impossible_servers_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        VLLMServer(**options)


def test_a_server_that_does_not_start_says_why(tmp_path, tiny_model):
    engine = VLLMServer(urls=["http://127.0.0.1:9"], start_timeout_s=0.5)
    with pytest.raises(ReplicaError, match=r"127\.0\.0\.1:9 did not answer within .*=0\.5"):
        engine.start(tiny_model)
    assert not engine.running


@pytest.fixture
def stranger():
    """Answers every request with the status and body that a test puts into ``says``."""
    says = {"status": 200, "body": b"<html></html>"}

    class Stranger(Quiet):
        def do_GET(self):
            self.send(says["status"], says["body"])

    with serving(Loopback(Stranger)) as server:
        yield server.url, says


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html></html>", "is not a vLLM server.*answered unlike a vLLM server"),
        (404, b"", "is not a vLLM server.*/health answered 404"),
        (401, b"", "needs another key in api_key_env.*/health answered 401"),
        (200, b'{"data": []}', r"is not a vLLM server: its /v1/models does not report"),
    ],
)
def test_a_server_that_is_no_vllm_is_told_at_once(stranger, tiny_model, status, body, message):
    url, says = stranger
    says.update(status=status, body=body)
    engine = VLLMServer(urls=[url], start_timeout_s=1e9)
    with pytest.raises(ReplicaError, match=message):
        engine.start(tiny_model)


def test_a_proxy_whose_server_still_loads_is_waited_for(stranger, tiny_model):
    url, says = stranger
    says.update(status=503, body=b"")
    engine = VLLMServer(urls=[url], start_timeout_s=0.5)
    with pytest.raises(ReplicaError, match=r"did not answer within .*/health answered 503"):
        engine.start(tiny_model)


def test_a_refused_port_is_told_again_and_again(tiny_model, caplog, monkeypatch):
    for name in ("_FIRST_NOTICE_S", "_NEXT_NOTICE_S"):
        monkeypatch.setattr(http_replica, name, 0.2)
    engine = VLLMServer(urls=["http://127.0.0.1:9"], start_timeout_s=1.5)
    with pytest.raises(ReplicaError, match=r"Connect call failed"):
        engine.start(tiny_model)
    told = [record for record in caplog.records if "no answer from" in record.getMessage()]
    assert len(told) > 1
    assert "http://127.0.0.1:9" in told[0].getMessage()


def test_a_missing_key_is_named(monkeypatch, tiny_model):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    engine = VLLMServer(urls=["http://127.0.0.1:9"], api_key_env="NO_SUCH_KEY")
    with pytest.raises(EngineError, match="api_key_env='NO_SUCH_KEY'"):
        engine.start(tiny_model)


SLEEPS = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"]


def test_killing_a_server_leaves_nothing():
    server = ServerProcess(SLEEPS, {})
    leader = server._process.pid
    wait_for(lambda: len(processes_of(leader)) == 3)  # keeper, python, sleep
    assert server.running
    server.kill()
    assert not server.running
    wait_for(lambda: not processes_of(leader))


def test_a_server_does_not_outlive_us():
    # The file by itself, for importing the package takes seconds.
    program = f"""
        import runpy, time
        ServerProcess = runpy.run_path({server_process.__file__!r})["ServerProcess"]
        print(ServerProcess({SLEEPS!r}, {{}})._process.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    leader = int(parent.stdout.readline())
    wait_for(lambda: len(processes_of(leader)) == 3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not processes_of(leader))


def test_a_server_says_why_it_ended():
    server = ServerProcess([sys.executable, "-c", "print('x'); raise ValueError('bad port')"], {})
    wait_for(lambda: not server.running)
    assert server.tail() == "ValueError: bad port"


@pytest.mark.skipif(sys.platform != "linux", reason="a port can be held on Linux alone")
def test_nobody_else_gets_the_port_until_a_server_listens_on_it(monkeypatch):
    program = (
        "import sys; from http.server import HTTPServer, SimpleHTTPRequestHandler as Handler\n"
        "sys.stdin.read(); HTTPServer((sys.argv[2], int(sys.argv[4])), Handler).serve_forever()"
    )
    server = ListeningServer([sys.executable, "-c", program], {})
    place = urlsplit(server.url)
    monkeypatch.setattr(server_process, "_ASKED_FOR", range(place.port, place.port + 1))
    try:
        with pytest.raises(OSError, match=r"none of .* is free"):
            free_port(place.hostname)
        wait_for(lambda: answers(server.url))
    finally:
        server.kill()


def answers(url):
    try:
        with urllib.request.urlopen(url) as reply:
            return reply.status == 200
    except urllib.error.URLError:
        return False


def test_what_a_server_refuses_is_said_without_what_surrounds_it():
    """The lines that vLLM prints."""
    told = (
        "Traceback (most recent call last):\n  File x\n"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, max_model_len (10) is too large. [type=value_error, input_value=Args()]\n"
        "    For further information visit https://errors.pydantic.dev/value_error"
    )
    assert validation_failure(told) == "max_model_len (10) is too large."
    told = told.replace("ModelConfig\n  Value error, max", "ModelConfig\ndtype\n  Max")
    assert validation_failure(told) == "dtype: Max_model_len (10) is too large."
    assert validation_failure("ValueError: 1 2 3") is None


def test_an_engine_core_that_fails_is_the_root_cause():
    program = "import sys; sys.stderr.write(sys.argv[1])"
    printed = (
        "(EngineCore pid=9) ERROR [core.py:1]     raise ValueError(\n"
        "ValueError: No memory for the cache.\n    raise RuntimeError(\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}\n"
        "UserWarning: leaked objects\n"
    )
    server = ServerProcess([sys.executable, "-c", program, printed], {})
    wait_for(lambda: not server.running)
    assert server.tail() == "ValueError: No memory for the cache."
