import base64
import hashlib
import os
import struct
import zlib
from io import BytesIO

import pytest
from PIL import Image

from lightning_rl.errors import ConfigError, DataError, PictureError
from lightning_rl.rollout import Picture
from lightning_rl.vision.limits import PictureAccess, PictureLimits
from lightning_rl.vision.loading import decode, load_picture

LIMITS = PictureLimits()


def file_of(image, kind="PNG", **options):
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def red(width=3, height=2):
    return Image.new("RGB", (width, height), (255, 0, 0))


def header_of(width, height):
    """Make a PNG file that says it is so large, and holds nothing."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


PNG = file_of(red())


def test_a_picture_is_its_file_with_digest_and_size(tmp_path):
    picture = load_picture(PNG, LIMITS)
    assert picture == Picture(hashlib.sha256(PNG).hexdigest(), 3, 2, PNG)
    assert (picture.width, picture.height, picture.data) == (3, 2, PNG)
    assert decode(picture).getpixel((2, 1)) == (255, 0, 0)


def test_every_form_of_a_source_gives_the_same_picture(tmp_path):
    path = tmp_path / "a b.png"
    path.write_bytes(PNG)
    text = base64.b64encode(PNG).decode()
    sources = [
        path,
        str(path),
        "a b.png",
        path.as_uri(),
        f"data:image/png;base64,{text}",
        f"data:image/png;base64,{text[:20]}\n{text[20:].rstrip('=')}",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG),
        bytearray(PNG),
        {"bytes": PNG, "path": None},
        {"bytes": None, "path": "a b.png"},
        {"bytes": PNG, "path": "never/looked/at.png"},
        load_picture(PNG, LIMITS),
    ]
    for source in sources:
        assert load_picture(source, LIMITS, tmp_path).data == PNG, source


def test_an_image_of_pil_becomes_a_png_that_shows_the_same():
    picture = load_picture(red(5, 4), LIMITS)
    assert picture.data.startswith(b"\x89PNG")
    assert (picture.width, picture.height) == (5, 4)
    assert picture == load_picture(red(5, 4), LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_kinds_of_files(kind):
    image = decode(load_picture(file_of(red(8, 8), kind), LIMITS))
    assert image.mode == "RGB"
    got = image.getpixel((4, 4))
    assert got[0] > 240
    assert max(got[1:]) < 15


def test_a_photo_is_turned_as_its_camera_says():
    image = red(6, 2)
    image.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: row 0 is the right side
    picture = load_picture(file_of(image, "PNG", exif=exif), LIMITS)
    assert (picture.width, picture.height) == (2, 6)
    assert decode(picture).size == (2, 6)
    assert decode(picture).getpixel((1, 0)) == (0, 0, 255)


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (255, 0, 0, 128))  # half red: (255, 127, 127)
    image = decode(load_picture(file_of(clear), LIMITS))
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert image.getpixel((1, 0)) == pytest.approx((255, 127, 127), abs=1)


def test_16_bits_of_grey_are_not_clipped():
    grey = Image.new("I;16", (1, 1))
    grey.putpixel((0, 0), 0x4000)
    assert decode(load_picture(file_of(grey), LIMITS)).getpixel((0, 0)) == (64, 64, 64)


def test_of_an_animation_the_first_frame_is_seen():
    file = file_of(red(), "GIF", save_all=True, append_images=[Image.new("RGB", (3, 2), "blue")])
    assert decode(load_picture(file, LIMITS)).getpixel((0, 0)) == (255, 0, 0)


def refused(source, *words, limits=LIMITS, **options):
    with pytest.raises(PictureError) as caught:
        load_picture(source, limits, **options)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"
    assert isinstance(caught.value, DataError)
    return str(caught.value)


def test_a_file_that_is_missing_or_none(tmp_path):
    refused("no.png", f"{tmp_path}/no.png does not exist", base=tmp_path)
    refused(tmp_path, "a folder", "name a file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "a named pipe")
    refused("a\0b.png", "cannot be read")
    refused("s3://bucket/x.png", "s3:// is not supported", "http(s)")


def test_what_is_no_picture():
    refused(b"<html>no</html>", "is not a PNG, JPEG, WebP or GIF", "begins with b'<html>no'")
    refused(b"", "it is empty")
    refused(file_of(red(), "TIFF"), "is not a PNG")
    refused(7, "7 is not a picture")
    refused({"bytes": None, "path": None}, "is not a picture")
    refused("data:image/png;base64", "has no comma")
    refused("data:image/png;base64,a*b=", "is not base64")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_cut_short(kind):
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    file = file_of(noise, kind)
    message = refused(file[: len(file) // 2], f"a picture of {len(file) // 2:,} bytes")
    assert "cut short" in message or "is not a PNG" in message  # WebP tells its length at once


def test_a_decompression_bomb_is_refused_by_its_header():
    refused(
        header_of(20_000, 20_000),
        "Pillow",  # its own bound
    )
    refused(
        header_of(9_000, 9_000),
        "9000×9000 = 81,000,000 pixels, more than max_pixels=33,554,432",
        "raise it",
    )
    refused(red(4, 4), "4×4 = 16 pixels", "max_pixels=15", limits=PictureLimits(max_pixels=15))


def test_files_of_too_many_bytes(tmp_path):
    few = PictureLimits(max_bytes=len(PNG) - 1)
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    bound = f"has {len(PNG)} bytes, more than max_bytes={len(PNG) - 1}"
    refused(PNG, bound, limits=few)
    refused(path, "a.png " + bound, limits=few)
    refused("data:image/png;base64," + base64.b64encode(PNG).decode(), bound, limits=few)
    refused("data:;base64," + "A" * 3 * len(PNG), "max_bytes", limits=few)


def test_a_stranger_names_no_files(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    for source in (str(path), path.as_uri(), "FILE:///etc/passwd"):
        refused(source, "files cannot be named here", access=PictureAccess(files=False))


def test_messages_hold_no_secret_and_no_escape_of_terminals(tmp_path):
    message = refused("data:image/png;base64," + "A" * 500, "(522 characters)")
    assert len(message) < 300
    assert "\x1b" not in refused("\x1b[31m.png", "does not exist", base=tmp_path)


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="max_pixels=0 must be >= 1"):
        PictureLimits(max_pixels=0)
    with pytest.raises(ConfigError, match="timeout_s"):
        PictureLimits(timeout_s=0)
