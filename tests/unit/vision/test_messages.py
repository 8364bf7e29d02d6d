import base64
from copy import deepcopy

import pytest

from lightning_rl.errors import PictureError
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.messages import has_pictures, pictures_of, with_sources
from tests.support.tiny_vision import png

LIMITS = PictureLimits()


RED, BLUE = png("red", 2, 2), png("blue", 2, 2)
TEXT = base64.b64encode(RED).decode()
URI = f"data:image/png;base64,{TEXT}"


def user(*parts):
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URI, "detail": "high"}},
        {"type": "image_url", "image_url": URI},
        {"type": "input_image", "image_url": URI},
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": TEXT},
        },
        {"type": "image", "source": {"type": "url", "url": URI}},
        {"type": "image", "image": RED},
        {"type": "image", "image": {"bytes": RED, "path": None}},
        {"type": "image", "url": URI, "text": None},
        {"type": "image", "path": "red.png"},
        {"type": "image", "base64": TEXT},
    ],
)
def test_each_api_writes_the_same_picture(part, tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    given = [user(part, {"type": "text", "text": "Which colour?"})]
    before = deepcopy(given)
    messages, pictures = pictures_of(given, LIMITS, tmp_path)
    assert messages == [user({"type": "image"}, {"type": "text", "text": "Which colour?"})]
    assert [picture.data for picture in pictures] == [RED]
    assert given == before


def test_pictures_come_in_the_order_of_the_chat():
    messages, pictures = pictures_of(
        [
            {"role": "system", "content": "Look."},
            user({"type": "image", "image": RED}, {"type": "input_text", "text": "and"}),
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": [{"type": "image", "image": BLUE}]},
            user({"type": "image", "image": RED}),
        ],
        LIMITS,
    )
    assert [picture.data for picture in pictures] == [RED, BLUE, RED]
    assert messages[0] == {"role": "system", "content": "Look."}
    assert messages[1]["content"] == [{"type": "image"}, {"type": "text", "text": "and"}]
    assert messages[3]["content"] == [{"type": "image"}]


def test_a_column_of_pictures_fills_the_places_of_a_chat():
    chat = [
        user({"type": "image"}, {"type": "text", "text": "or"}, {"type": "image", "text": None})
    ]
    filled = with_sources(chat, [RED, BLUE])
    assert [picture.data for picture in pictures_of(filled, LIMITS)[1]] == [RED, BLUE]
    assert filled[0]["content"][1] == {"type": "text", "text": "or"}
    assert not has_pictures(with_sources([{"role": "user", "content": "Hi"}], []))
    with pytest.raises(PictureError, match="1 pictures are given, but the chat has 2 places"):
        with_sources(chat, [RED])


def test_without_places_pictures_precede_the_first_text_of_the_user():
    chat = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Which?"}]
    assert with_sources(chat, [RED, BLUE]) == [
        chat[0],
        user(
            {"type": "image", "image": RED},
            {"type": "image", "image": BLUE},
            {"type": "text", "text": "Which?"},
        ),
    ]
    assert chat[1]["content"] == "Which?"


def test_too_many_are_refused_before_any_is_read():
    chat = [user(*[{"type": "image", "path": "missing.png"}] * 3)]
    with pytest.raises(PictureError, match=r"3 pictures are more than max_per_prompt=2.*raise it"):
        pictures_of(chat, PictureLimits(max_per_prompt=2))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": {}},
        {"type": "image", "source": {"type": "file", "file_id": "f-1"}},
    ],
)
def test_a_part_without_a_picture_says_what_is_expected(part):
    with pytest.raises(PictureError, match="names no picture; expected image_url"):
        pictures_of([user(part)], LIMITS)
