"""Test the server of ``view --follow``: who gets what of it, over real sockets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection, HTTPResponse

import pytest

from lightning_rl.cli import main
from lightning_rl.cli.view.server import HEADERS, PageServer
from tests.support.planted_run import HOSTILE, blocks_of, write_run
from tests.support.serving import serving


@pytest.fixture
def server(tmp_path):
    write_run(tmp_path / "run")
    with serving(PageServer([tmp_path / "run"], 100)) as running:
        yield running


def ask(
    server: PageServer, path: str, method: str = "GET", host: str | None = None
) -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=host is not None)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    return connection.getresponse()


def test_the_page_and_its_data_are_behind_the_token(server):
    page = ask(server, f"/{server.token}/")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    text = page.read().decode()
    assert json.loads(blocks_of(text)["index"])["runs"] == []
    assert "connect-src 'self'" in text
    data = json.loads(ask(server, f"/{server.token}/data?since=0").read())
    assert [row["iteration"] for row in data["runs"][0]["metrics"]] == list(range(1, 8))
    again = ask(server, f"/{server.token}/data?since={data['cursor']}")
    assert json.loads(again.read()) == {"cursor": data["cursor"]}


def test_nothing_else_is_there(server):
    token = server.token
    other = token[:-1] + ("A" if token[-1] != "A" else "B")
    paths = [
        "/", "/data?since=0", f"/{other}/", f"/{other}/data?since=0", f"/{token}", f"//{token}",
        f"/{token}/x", f"/{token}/data", f"/{token}/data?since=", f"/{token}/data?since=-1",
        f"/{token}/data?since=1&x=2", f"/{token}/data?since={'9' * 10}", f"/{token}/?x",
        f"/{token}/../etc/passwd", f"/{token}/metrics.jsonl", f"/{token}/%2e%2e/", "/%ff/",
        f"/{token}/data/", f"/{token}/page.py", f"http://127.0.0.1/{token}/", "*",
    ]  # fmt: skip
    for path in paths:
        answer = ask(server, path)
        assert (answer.status, answer.read()) == (404, b""), path


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_only_get_is_answered(server, method):
    answer = ask(server, f"/{server.token}/", method)
    assert answer.status == 501
    assert server.token not in answer.read().decode()


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:80", "[", "0.0.0.0", "::1"]
)
def test_a_name_that_points_here_is_not_enough(server, host):
    assert ask(server, f"/{server.token}/", host=host).status == 404
    assert ask(server, f"/{server.token}/data?since=0", host=host).status == 404


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "LOCALHOST"])
def test_a_tunnel_may_have_another_port(server, host):
    assert ask(server, f"/{server.token}/", host=host).status == 200


@pytest.mark.parametrize("path", ["/{}/", "/{}/data?since=0", "/"])
def test_every_answer_keeps_the_token_to_this_browser(server, path):
    headers = ask(server, path.format(server.token)).headers
    assert {name: headers[name] for name in HEADERS} == HEADERS
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers
    assert "Python" not in headers["Server"]


def test_other_machines_cannot_connect(server):
    """Its socket listens on the loopback interface only."""
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with socket.socket() as another:
        another.bind(("127.0.0.2", server.server_port))  # free, as it would not be on 0.0.0.0


def test_each_server_has_a_token_of_its_own(server, tmp_path):
    with PageServer([tmp_path], 1) as other:
        assert other.token != server.token
        assert len(other.token) >= 43  # 32 bytes in base64
        assert ask(server, f"/{other.token}/").status == 404


def test_a_hostile_name_is_text_in_the_title(tmp_path):
    with PageServer([tmp_path / HOSTILE], 1) as server:
        assert HOSTILE.encode() not in server.page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--follow", "--out", "x.html"], "--follow writes no file; leave out --out"),
        (["--port", "8000"], "--port 8000 is for --follow"),
        (["--follow", "--port", "{taken}"], "choose another, or leave --port out"),
        (["--follow", "--port", "70000"], "port=70000 cannot be served"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(server, tmp_path, capsys, arguments, message):
    options = [option.format(taken=server.server_port) for option in arguments]
    assert main(["view", str(tmp_path / "run"), *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run" / "view.html").exists()


def test_the_command_says_where_it_serves_and_ends_on_ctrl_c(tmp_path):
    run = write_run(tmp_path / "run")
    command = [sys.executable, "-m", "lightning_rl", "view", str(run), "--follow"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.fullmatch(r"open http://127\.0\.0\.1:(\d+)(/\S+/) \(Ctrl-C ends\)\n", said)
        assert found, said
        connection = HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
        connection.request("GET", f"{found[2]}data?since=0")
        assert len(json.loads(connection.getresponse().read())["runs"]) == 1
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=60)
    assert (process.returncode, rest, complaints) == (0, "", "")
    assert sorted(path.name for path in run.iterdir()) == [
        "metrics.jsonl",
        "recorded.jsonl",
        "summary.json",
    ]  # it wrote nothing
