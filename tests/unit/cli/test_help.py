"""Test lightning-rl help: a class's arguments, those of its bases too, and unknown names."""

from inspect import isclass

import pytest

from lightning_rl.cli import main
from lightning_rl.cli.help import Argument, arguments_of
from lightning_rl.config.names import SURFACES, public
from lightning_rl.errors import LightningRLError
from lightning_rl.games import RolePolicy
from lightning_rl.learn.update_schedules import EveryIteration
from lightning_rl.module import PolicyModule


def test_the_arguments_of_a_class_are_printed(capsys):
    assert main(["help", "WeightSync", "TokenTIS"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Pushes the policy's weights to the engine")
    assert "from lightning_rl import WeightSync\n" in told
    assert "schedule: SyncSchedule (default: FixedSchedule)\n    when." in told
    assert "transport: WeightTransport | None (default: None)\n    how weights travel;" in told
    assert told.endswith("(default: 2.0)\n    largest weight; larger ones count as much.\n")
    assert max(map(len, told.splitlines())) <= 100


def test_arguments_that_a_class_passes_on_are_among_them():
    own, others = arguments_of(RolePolicy), arguments_of(PolicyModule)
    assert [one.name for one in own[:3]] == ["roles", "model", "schedule"]
    assert own[2].default == EveryIteration.__name__
    assert {one.name for one in others} <= {one.name for one in own}
    [compiled] = [one for one in others if one.name == "compile"]
    assert compiled[:3] == ("compile", "bool | None", "None")
    [model] = [one for one in others if one.name == "model"]
    assert model.default is None  # it has to be given


def test_every_public_class_has_a_list():
    classes = [public(name) for name in SURFACES["lightning_rl"]]
    listed = [c for c in classes if isclass(c) and not issubclass(c, LightningRLError)]
    assert len(listed) > 90
    for cls in listed:
        assert all(isinstance(one, Argument) for one in arguments_of(cls)), cls


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("PolicyModul", "'PolicyModul'; did you mean PolicyModule?"),
        ("Frobnicate", "no class of this library is called 'Frobnicate'"),
        ("pack_rollouts", "pack_rollouts is not a class"),
        ("LightningRLError", "LightningRLError is an error"),
    ],
)
def test_names_of_no_class_are_refused(name, says, capsys):
    assert main(["help", name]) == 2
    assert says in capsys.readouterr().err
