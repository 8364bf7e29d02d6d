"""Test --trusted_only: every argument that may hold a text says whether it can be code."""

import inspect

import pytest

from lightning_rl.cli.trusted_texts import KINDS, TABLE, kind_of, takes_text
from lightning_rl.config import names
from lightning_rl.config.hints import parameters

CLASSES = [
    name
    for name in names.MODULE_OF
    if inspect.isclass(names.public(name)) and not issubclass(names.public(name), BaseException)
]


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in TABLE["records"]])
def test_every_argument_of_every_public_class_is_classified(name):
    component = names.public(name)
    unknown = [
        argument for argument in parameters(component) if kind_of(component, argument) is None
    ]
    assert not unknown, f"say in cli/trusted_texts.yaml what {name} does with {unknown}"


def test_the_table_names_no_class_or_argument_that_is_not_there():
    assert set(TABLE["records"]) <= set(CLASSES)
    for kind in KINDS:
        for name, arguments in TABLE[kind].items():
            if name in names.MODULE_OF:
                assert set(arguments) <= parameters(names.public(name)).keys(), (kind, name)


def test_an_argument_is_of_one_kind():
    found = [(n, a) for kind in KINDS for n, given in TABLE[kind].items() for a in given]
    assert len(found) == len(set(found))


class NewAgent:
    def __init__(self, size: int, program: str, places: list[str], mode: bool = True) -> None: ...


def test_a_new_argument_that_takes_a_text_is_not_safe_by_itself():
    assert [kind_of(NewAgent, name) for name in ("size", "mode")] == ["choice", "choice"]
    assert [kind_of(NewAgent, name) for name in ("program", "places", "more")] == [None] * 3
    assert takes_text(dict[str, str])
    assert not takes_text(dict[str, float])
