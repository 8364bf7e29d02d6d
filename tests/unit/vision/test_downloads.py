"""Pictures of URLs come side by side, and each one's fault is its own."""

import json
import pickle
import threading
from copy import deepcopy

import pytest

from lightning_rl.data.sources import JSONLPrompts
from lightning_rl.errors import PictureError
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.vision.downloads import AT_ONCE, Downloads
from lightning_rl.vision.limits import PictureAccess, PictureLimits
from tests.support.serving import Loopback, Quiet, serving
from tests.support.tiny_vision import picture, save_vision_model

GIVEN = PictureLimits(retries=0), PictureAccess()


class Handler(Quiet):
    """Lets ``/3.png`` wait until the whole party has asked; ``/404`` has nothing to show."""

    def do_GET(self):
        server = self.server
        with server.lock:
            server.asked.append(self.path)
            server.now += 1
            server.most = max(server.most, server.now)
        if server.party is not None:
            server.party.wait(60)
        with server.lock:
            server.now -= 1
        found = self.path.endswith(".png")
        body = picture(int(self.path[1:-4])).data if found else b""
        self.send(200 if found else 404, body)


@pytest.fixture
def server():
    server = Loopback(Handler)
    server.party, server.lock, server.now, server.most = None, threading.Lock(), 0, 0
    with serving(server):
        yield server


def test_as_many_at_once_as_there_may_be(server):
    server.party = threading.Barrier(AT_ONCE)
    urls = [f"{server.url}/{n}.png" for n in range(2 * AT_ONCE)]
    downloads = Downloads(*GIVEN)
    downloads.want(urls[:1], iter(urls[1:AT_ONCE]))  # none of which ends before all have begun
    assert downloads.take(urls[0]) == picture(0).data
    server.party = None
    downloads.want(urls, ())
    assert [downloads.take(url) for url in urls] == [picture(n).data for n in range(2 * AT_ONCE)]
    assert server.most <= AT_ONCE


def test_what_is_not_wanted_any_more_is_given_up(server):
    downloads = Downloads(*GIVEN)
    one, other = f"{server.url}/1.png", f"{server.url}/2.png"
    downloads.want([one], [other])
    assert downloads.take(one) == downloads.take(one) == picture(1).data
    downloads.want([other], [])
    assert downloads.take(other) == picture(2).data
    assert sorted(server.asked) == ["/1.png", "/2.png"]  # each once
    assert downloads.take(one) == picture(1).data  # anew
    assert server.asked[-1] == "/1.png"
    for copied in (deepcopy(downloads), pickle.loads(pickle.dumps(downloads))):
        copied.want([other], [])
        assert copied.take(other) == picture(2).data


def test_a_fault_is_told_to_who_asks(server):
    downloads = Downloads(*GIVEN)
    downloads.want([f"{server.url}/1.png"], [f"{server.url}/404"])
    assert downloads.take(f"{server.url}/1.png") == picture(1).data
    with pytest.raises(PictureError, match="answered 404"):
        downloads.take(f"{server.url}/404")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(save_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")))


def prompts_of(server, folder, tokenizer, *paths, **options):
    """Make a row for each path: every other one has it in its chat, others in a column."""
    lines = []
    for number, path in enumerate(paths):
        part = {"type": "image_url", "image_url": {"url": server.url + path}}
        parts = [{"type": "image"} if number % 2 else part, {"type": "text", "text": "What?"}]
        columns = {"images": [server.url + path]} if number % 2 else {}
        lines.append(json.dumps({"prompt": [{"role": "user", "content": parts}], **columns}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    prompts = JSONLPrompts(
        str(folder / "rows.jsonl"), picture_limits=PictureLimits(retries=0), **options
    )
    prompts.load(tokenizer)
    return prompts


@pytest.mark.parametrize("shuffle", [False, True])
def test_pictures_of_rows_to_come_are_on_their_way(server, tmp_path, tokenizer, shuffle):
    """The first row waits until those of the next three are asked for, too."""
    server.party = threading.Barrier(4)
    paths = [f"/{n}.png" for n in range(4)]
    prompts = prompts_of(server, tmp_path, tokenizer, *paths, shuffle=shuffle, seed=1)
    drawn = prompts.draw(4)
    assert {p.pictures[0].data for p in drawn} == {picture(n).data for n in range(4)}
    assert sorted(server.asked) == paths
    server.party = None
    assert [p.pictures[0].data for p in prompts.first()] == [picture(n).data for n in range(4)]


def test_a_picture_that_cannot_be_had_costs_its_own_row(server, tmp_path, tokenizer):
    prompts = prompts_of(server, tmp_path, tokenizer, "/0.png", "/404", "/2.png", shuffle=False)
    with pytest.warns(UserWarning, match=r"rows.jsonl:2 is left out: .*/404 answered 404"):
        drawn = prompts.draw(2)
    assert [p.id for p in drawn] == ["0", "2"]
    assert prompts.dropped == 1
