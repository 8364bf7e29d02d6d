import re
import threading

import pytest

from lightning_rl.errors import PictureError
from lightning_rl.vision.fetching import is_public
from lightning_rl.vision.limits import PictureAccess, PictureLimits
from lightning_rl.vision.loading import load_picture
from tests.support.serving import Loopback, Quiet, serving
from tests.support.tiny_vision import png

STRANGER = PictureAccess(files=False, private_hosts=False)


class Handler(Quiet):
    """Answers ``/404`` so; ``/to/x`` leads on to ``/x``, and others do as their names say."""

    def do_GET(self):
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/twice/"):  # as the rest says, and then a picture
            path = "/a.png" if self.server.asked.count(path) > 2 else path.removeprefix("/twice")
        if path == "/a.png":
            return self.send(200, png("red", 3, 2))
        if path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while not self.server.closing.is_set():
                    self.wfile.write(bytes(2**16))
            except OSError:  # the client went away, as it should
                pass
            return None
        if path == "/large":
            self.send_response(200)
            self.send_header("Content-Length", str(10**12))
            self.end_headers()
            return None
        if path == "/breaks":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(png("red", 3, 2))
            return self.connection.close()
        if path == "/drop":
            return self.connection.close()
        if path == "/hang":
            self.server.closing.wait(60)
            return None
        if path == "/round":
            return self.send(302, b"", Location="/round")
        if path.startswith("/to/"):
            return self.send(302, b"", Location=path.removeprefix("/to"))
        if path == "/page":
            return self.send(200, b"<html>not here</html>")
        return self.send(int(path[1:]), b"")


@pytest.fixture
def server():
    server = Loopback(Handler)
    server.closing = threading.Event()
    with serving(server):
        yield server
        server.closing.set()


def refused(url, words, access=None, **limits):
    limits = PictureLimits(**{"retries": 0, **limits})
    with pytest.raises(PictureError, match=words) as caught:
        load_picture(url, limits, access=access or PictureAccess())
    return str(caught.value)


def test_a_picture_of_a_server_also_where_it_leads_on(server):
    for path in ("/a.png", "/to/to/a.png"):
        assert load_picture(server.url + path, PictureLimits()).data == png("red", 3, 2)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/404", "/404 answered 404 Not Found; correct the address"),
        ("/401", "/401 answered 401 Unauthorized: it requires a key"),
        ("/403", "it requires a key"),
        ("/500", "answered 500"),
        ("/204", "answered 204"),
        ("/page", "/page is not a PNG, JPEG, WebP or GIF file: it begins with b'<html>no'"),
        ("/breaks", "/breaks cannot be downloaded"),
        ("/drop", "/drop cannot be downloaded"),
        ("/round", "redirects more than 5 times"),
        ("/large", r"has 1,000,000,000,000 bytes, more than max_bytes=20,971,520"),
        ("/endless", r"has more than 20,971,520 bytes"),
    ],
)
def test_faults_of_a_server(server, path, words):
    refused(server.url + path, words)


def test_a_server_that_hangs_costs_a_time_limit(server):
    refused(server.url + "/hang", "did not arrive within timeout_s=0.2", timeout_s=0.2)


def test_what_may_pass_is_tried_again(server):
    assert load_picture(server.url + "/twice/503", PictureLimits()).data == png("red", 3, 2)
    assert server.asked == ["/twice/503"] * 3
    assert load_picture(server.url + "/twice/drop", PictureLimits()).data == png("red", 3, 2)
    server.asked.clear()
    refused(server.url + "/404", "answered 404", retries=2)
    refused(server.url + "/503", "answered 503", retries=1)
    assert server.asked == ["/404", "/503", "/503"]


def test_no_server_and_no_address():
    refused("http://127.0.0.1:1/a.png", r"127.0.0.1:1/a.png cannot be downloaded")
    refused("http:///a.png", "name a host")
    refused("http://[::1/a.png", "name a host")
    refused("http://a:99999/b", "name a host")


def test_messages_hold_neither_passwords_nor_what_a_query_signs(server):
    url = server.url.replace("//", "//me:secret@") + "/404?X-Signature=secret"
    assert "secret" not in refused(url, "answered 404")
    assert server.asked == ["/404?X-Signature=secret"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0", "2130706433"]
)
def test_a_stranger_reaches_no_internal_host_however_it_is_called(server, host):
    url = f"http://{host}:{server.server_port}/a.png"
    with pytest.raises(PictureError):
        load_picture(url, PictureLimits(), access=STRANGER)
    assert server.asked == []


def test_a_stranger_hears_why_and_what_to_do(server):
    words = r"127\.0\.0\.1.*not a public internet address.*data: URI"
    refused(server.url + "/a.png", words, access=STRANGER)


def test_a_host_can_be_allowed_and_does_not_lead_to_others(server):
    allowed = PictureAccess(files=False, private_hosts=False, hosts=["localhost"])
    url = server.url.replace("127.0.0.1", "localhost")
    try:
        found = load_picture(url + "/a.png", PictureLimits(), access=allowed)
    except PictureError as error:  # pragma: no cover - a machine without the name
        pytest.skip(str(error))
    assert found.data == png("red", 3, 2)

    class Onward(Handler):
        def do_GET(self):
            self.send(302, b"", Location=server.url + "/a.png")

    server.asked.clear()
    with serving(Loopback(Onward)) as other:
        refused(f"http://localhost:{other.server_port}/x", "public internet", access=allowed)
    assert server.asked == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("10.1.2.3", False),
        ("169.254.169.254", False),  # metadata of clouds
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),  # NAT64 of 127.0.0.1
        ("2002:7f00:1::", False),  # 6to4 of 127.0.0.1
    ],
)
def test_addresses_of_the_public_internet(address, public):
    assert is_public(address) is public


def test_a_url_loads_within_a_running_event_loop(server):
    import asyncio

    async def inside():
        return load_picture(server.url + "/a.png", PictureLimits())

    assert re.fullmatch("[0-9a-f]{64}", asyncio.run(inside()).digest)
