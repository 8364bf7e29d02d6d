"""The command line prints what it should if nothing is wrong, and if a run pushes weights."""

from importlib.metadata import version

import pytest
import yaml

from benchmarks.support.built import Built
from lightning_rl.callbacks import WeightSync
from lightning_rl.cli import main
from lightning_rl.config.layers import flatten
from tests.support.bad_configs import CONFIG
from tests.support.recorded_run import stand_in


@pytest.fixture(autouse=True)
def place(furnished, monkeypatch):
    """Prepare the working directory, with a good configuration."""
    stand_in(furnished, monkeypatch)
    return furnished


def printed(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_files_merge_in_order_and_options_win(place, capsys):
    more = {"data": {"init_args": {"group_size": 6, "sampling": {"top_k": 5}}}}
    (place / "more.yaml").write_text(yaml.safe_dump(more))
    arguments = ["--config", "good.yaml", "--config", "more.yaml", "--data.groups_per_iteration"]
    text = printed(capsys, "fit", *arguments, "8", "--model.optimizer.lr", "1e-4", "--print_config")
    merged = yaml.safe_load(text)
    data = merged["data"]["init_args"]
    assert (data["group_size"], data["groups_per_iteration"]) == (6, 8)
    assert (data["sampling"]["max_tokens"], data["sampling"]["top_k"]) == (4, 5)
    assert merged["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 1e-4


def test_a_later_class_keeps_only_the_arguments_that_it_has(place, capsys):
    first = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.5, "amsgrad": True}}
    model = {"model": {"init_args": {"optimizer": first}}}
    (place / "more.yaml").write_text(yaml.safe_dump(model))
    options = ["--config", "good.yaml", "--config", "more.yaml"]
    options += ["--model.optimizer", "torch.optim.SGD", "--print_config"]
    made = yaml.safe_load(printed(capsys, "fit", *options))["model"]["init_args"]["optimizer"]
    assert made["class_path"] == "torch.optim.SGD"
    assert made["init_args"]["lr"] == 0.5
    assert "amsgrad" not in made["init_args"]


@pytest.mark.parametrize("source", ["file", "option"])
def test_short_names_of_classes_stand_where_any_text_may(place, capsys, source):
    (place / "more.yaml").write_text("trainer: {strategy: ShardedStrategy, profiler: simple}")
    of_file = ["--config", "more.yaml"]
    of_option = ["--trainer.strategy", "ShardedStrategy", "--trainer.profiler", "simple"]
    options = of_file if source == "file" else of_option
    text = printed(capsys, "fit", "--config", "good.yaml", *options, "--print_config")
    trainer = yaml.safe_load(text)["trainer"]
    assert trainer["strategy"]["class_path"] == "lightning_rl.ShardedStrategy"
    assert trainer["strategy"]["init_args"]["tensor"] == 1
    assert (trainer["profiler"], trainer["accelerator"]) == ("simple", "cpu")  # Lightning's names


CALLBACK = """
from enum import Enum
from typing import Any, Literal, TypedDict
from lightning.pytorch.callbacks import Callback
from lightning_rl import Evaluate

class Colour(Enum):
    RED = 1

class Size(TypedDict):
    width: int

class Fussy(Callback):
    def __init__(self, colour: Colour, size: Size, what: Any, untyped=None, how: Literal["a"] = "a",
                 table: dict[str, Any] | None = None, pair: tuple[int, float] = (1, 2.0)):
        pass

class OftenEvaluate(Evaluate):
    def __init__(self, **options: Any):
        super().__init__(**options)
"""


def test_whatever_the_parser_takes_is_no_mistake(place, capsys):
    (place / "cli_callbacks.py").write_text(CALLBACK)
    fussy = {
        "colour": "RED",
        "size": {"width": 3},
        "what": {"any": "thing"},
        "untyped": [1, "x"],
        "table": {"class": 1},
        "pair": [2, 3.5],
    }
    callbacks = [
        {"class_path": "cli_callbacks.Fussy", "init_args": fussy},
        {"class_path": "cli_callbacks.OftenEvaluate", "init_args": {"every_n_iterations": 3}},
        "LearningRateMonitor",
    ]
    more = {"trainer": {"callbacks": callbacks, "logger": False}}
    (place / "more.yaml").write_text(yaml.safe_dump(more))
    options = ["--config", "good.yaml", "--config", "more.yaml", "--print_config"]
    callbacks = yaml.safe_load(printed(capsys, "fit", *options))["trainer"]["callbacks"]
    assert callbacks[0]["init_args"]["size"] == {"width": 3}
    assert callbacks[1]["init_args"]["every_n_iterations"] == 3


def test_help_fits_a_screen_and_says_where_more_is(capsys):
    assert main(["--help"]) == 0
    assert "rollout" in capsys.readouterr().out
    text = printed(capsys, "fit", "--help")
    assert len(text.splitlines()) < 24
    assert "--model.help PolicyModule" in text
    assert "--output" in printed(capsys, "rollout", "--help")
    assert "--model.update.ppo_epochs" in printed(capsys, "fit", "--model.help", "PolicyModule")
    assert "--trainer.max_epochs" in printed(capsys, "fit", "--trainer.help")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-rl {version('lightning_rl')}\n"


GIVEN = {"class_path": "WeightSync", "init_args": {"probe_prompts": 1}}
EVALUATE = {"class_path": "Evaluate"}


def pushing(place, callbacks, command="fit") -> Built:
    (place / "pushed.yaml").write_text(
        yaml.safe_dump(CONFIG | {"trainer": CONFIG["trainer"] | {"callbacks": callbacks}})
    )
    output = ["--output", "rollouts.jsonl"] if command == "rollout" else []
    return Built([command, "--config", "pushed.yaml", *output])


@pytest.mark.parametrize(
    ("command", "callbacks", "probes"),
    [
        *((command, None, 4) for command in ("fit", "validate", "test", "rollout")),
        ("fit", [], 4),
        ("fit", [EVALUATE], 4),
        ("fit", EVALUATE, 4),
        ("fit", [EVALUATE, GIVEN], 1),
    ],
)
def test_weights_are_pushed_whether_or_not_it_is_said(command, callbacks, probes, place):
    built = pushing(place, callbacks, command)
    [sync] = [c for c in built.trainer.callbacks if isinstance(c, WeightSync)]
    assert (built.trainer.callbacks[0] is sync) == (probes == 4)
    assert sync.probe_prompts == probes
    # A run that goes on is compared with it as a part of the configuration.
    table = flatten(yaml.safe_load(built._parser(command).dump(built.config[command])))
    assert table["trainer.callbacks.WeightSync.probe_prompts"] == probes
    assert table["trainer.callbacks.WeightSync.schedule.every_n_iterations"] == 1


def test_a_default_push_is_configured_as_one_that_is_named(place):
    report = {"class_path": "RunReport"}
    tables = [pushing(place, callbacks).table() for callbacks in ([report], ["WeightSync", report])]
    assert tables[0] == tables[1]


def test_a_run_without_an_engine_pushes_nothing(place):
    prompts = CONFIG["data"]["init_args"]["train_prompts"]
    supervised = {
        "model": CONFIG["model"] | {"class_path": "SFTModule"},
        "data": {"class_path": "SFTDataModule", "init_args": {"train": prompts}},
        "trainer": {"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    }
    (place / "supervised.yaml").write_text(yaml.safe_dump(supervised))
    built = Built(["fit", "--config", "supervised.yaml"])
    assert not any(isinstance(c, WeightSync) for c in built.trainer.callbacks)
