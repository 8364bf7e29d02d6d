"""Test which wheels are brought to a GPU machine: they are chosen as pip would there."""

import pytest

from benchmarks.gpu.wheels import best_url, own_requirements, pins, tags_of

INDEX = "https://packages.example/ab/"


def test_versions_come_from_the_lines_that_name_one():
    lines = [
        "Torch==2.11.0+cu130",
        "my_package==1.2 ; python_version >= '3.12'",
        "-e git+https://example.org/x",
        "later>=3",
        "any==4.*",
        "",
    ]
    assert pins(lines) == {"torch": "2.11.0", "my-package": "1.2"}


@pytest.mark.parametrize(
    ("python", "glibc", "expected"),
    [
        ("3.12", 35, "x-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"),
        ("3.12", 27, "x-1.0-cp310-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"),
        ("3.11", 35, "x-1.0-cp310-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"),
        ("3.9", 35, "x-1.0-py3-none-any.whl"),
    ],
)
def test_the_wheel_for_that_python_and_glibc(python, glibc, expected):
    urls = [
        f"{INDEX}x-1.0-{tags}.whl"
        for tags in (
            "py3-none-any",
            "cp312-cp312-macosx_11_0_arm64",
            "cp312-cp312-manylinux_2_28_aarch64",
            "cp312-cp312-manylinux_2_28_x86_64",
            "cp310-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64",
        )
    ]
    tags = tags_of(python, glibc)
    assert best_url(urls, tags) == INDEX + expected
    assert best_url(urls[1:3], tags) is None


def test_what_the_library_needs_is_among_what_is_resolved():
    names = [line.split(">")[0].split("[")[0] for line in own_requirements()]
    assert names[0] == "torch"
    assert {"lightning", "transformers", "tensordict", "jsonargparse", "datasets"} < set(names)
