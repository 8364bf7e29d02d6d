"""Test mistakes beside those of docs/api/mistakes.md: one message that names key, value and fix."""

import copy
import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_rl.cli import main
from lightning_rl.errors import ConfigError
from tests.support.bad_configs import CONFIG, complaint
from tests.support.recorded_run import stand_in

HAS_LENGTH = """
class HasLength:
    def __init__(self, length: int):
        self.length = length

    def __call__(self, completions, **columns) -> list[float]:
        return [float(len(c) == self.length) for c in completions]
"""


@pytest.fixture(autouse=True)
def place(furnished, monkeypatch) -> Path:
    """Prepare the working directory, with a broken module and one with a reward's class."""
    stand_in(furnished, monkeypatch)
    (furnished / "broken.py").write_text("1 / 0\n")
    (furnished / "has_length.py").write_text(HAS_LENGTH)
    return furnished


def require_message(status: int, message: str, words: list[str]) -> None:
    """Require a few lines that say all this, neither usage text nor a traceback."""
    assert [word for word in words if word not in message] == []
    assert status == 2
    assert "Traceback" not in message
    assert len(message.splitlines()) <= 3


GONE = object()  # remove the key


def changed(name: str, value: Any) -> dict[str, Any]:
    """Return the good configuration with one dotted key set."""
    config = copy.deepcopy(CONFIG)
    *above, last = name.split(".")
    node: Any = config
    for part in above:
        node = node[part]
    if value is GONE:
        del node[last]
    else:
        node[last] = value
    return config


REWARDS = "data.init_args.rewards"
IN_FILE = {
    "beside class_path": (
        "data.init_args.train_prompts",
        {"class_path": "JSONLPrompts", "path": "x"},
        ["train_prompts.path", "move it under init_args"],
    ),
    "class changed, arguments left": (
        "data.class_path",
        "SFTDataModule",
        ["no such key in SFTDataModule", "it is a key of RLDataModule"],
    ),
    "no class_path": (
        "data.init_args.engine",
        {"init_args": {"dtype": "float32"}},
        ["data.init_args.engine: needs a class_path", "TransformersEngine"],
    ),
    "null for an int": ("data.init_args.group_size", None, ["group_size: expected int, got null"]),
    "missing argument": (
        "model.init_args.model",
        GONE,
        ["model.init_args.model: is missing", "str"],
    ),
    "missing argument, bare class": (
        "model",
        "PolicyModule",
        ["model.init_args.model: is missing"],
    ),
    "missing group": ("data", GONE, ["data: is missing", "--config"]),
    "wrong argument of a reward": (
        REWARDS,
        [{"class_path": "has_length.HasLength", "init_args": {"lenght": 3}}],
        ["rewards[0].init_args.lenght: no such key in HasLength", "mean length?"],
    ),
    "missing argument of a reward": (
        REWARDS,
        [{"class_path": "has_length.HasLength"}],
        ["rewards[0].init_args.length: is missing", "HasLength needs it (int)"],
    ),
    "broken reward module": (
        REWARDS,
        ["broken.exact"],
        ["'broken' fails when imported: ZeroDivisionError"],
    ),
    "a text that is read as null": (
        "data.init_args.engine.init_args.device",
        "null",
        ["engine.init_args.device: the text 'null' is read as null", "without quotes"],
    ),
    "another text that is read as null": (
        "data.init_args.engine.init_args.device",
        "~",
        ["engine.init_args.device: the text '~' is read as null", "without quotes"],
    ),
    "reward without a module": (
        REWARDS,
        ["exact"],
        ["rewards[0]", "'exact' is not an import path", "module.name"],
    ),
}


@pytest.mark.parametrize("case", IN_FILE)
def test_mistakes_in_a_file(case, place):
    name, value, words = IN_FILE[case]
    (place / "bad.yaml").write_text(yaml.safe_dump(changed(name, value)))
    require_message(*complaint("", config="bad.yaml"), words)


def written_to(kind: str, **arguments: Any) -> str:
    return shlex.quote(json.dumps({"class_path": kind, "init_args": arguments}))


S3 = "s3://bucket/runs"
URLS = {
    f"--trainer.default_root_dir {S3}": "trainer.default_root_dir",
    f"--trainer.logger true --trainer.default_root_dir {S3}": "trainer.default_root_dir",
    **{
        f"--trainer.logger {written_to(kind, save_dir=S3)}": "trainer.logger.save_dir"
        for kind in ("CSVLogger", "TensorBoardLogger", "WandbLogger")
    },
    f"--trainer.logger [{written_to('CSVLogger', save_dir=S3)}]": "trainer.logger.save_dir",
    f"--trainer.callbacks+ {written_to('IterationCheckpoint', dirpath=S3)}": "dirpath",
    f"--trainer.callbacks+ {written_to('HFExport', directory=S3)}": "directory",
    f"--data.buffer {written_to('ReplayBuffer', path=f'{S3}.sqlite')}": "path",
}


@pytest.mark.parametrize("case", URLS)
def test_a_url_where_a_run_writes_is_refused_by_its_key(case, place):
    """The key is refused where Lightning would ask for s3fs first, too, which does not help."""
    before = sorted(place.iterdir())
    require_message(*complaint(case), [f"{URLS[case]}='{S3}", "is a URL", "choose a local"])
    assert sorted(place.iterdir()) == before


NO_NAMES = {"x" * 300: "300 bytes", "é" * 150: "300 bytes", f"a/{'y' * 256}/b": "256 bytes"}
NO_NAMES["a\0b"] = "holds a NUL character"
PLACES = [
    "trainer.default_root_dir",
    "trainer.logger.name",
    "trainer.logger.version",
    "data.buffer.path",
    "data.train_prompts",
    "data.train_prompts.path",
    "data.evaluation.prompts.path",
    "model.model",
]


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize("key", PLACES)
def test_a_name_that_no_file_can_have_is_refused_by_its_key(key, name):
    good = "--trainer.logger CSVLogger --trainer.logger.save_dir . --data.buffer ReplayBuffer"
    said = complaint(f"{good} --data.buffer.path b.sqlite --{key} {shlex.quote(name)}")
    require_message(*said, [f"{key.rpartition('.')[2]}: ", NO_NAMES[name], f"at option --{key}"])


def test_a_name_that_no_file_can_have_is_refused_by_every_command(capsys):
    for command in ("audit", "view", "rerun --iteration 1"):
        assert main([*command.split(), "x" * 300]) == 2
        assert "shorten it" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("vllm") is None, reason="VLLMLocal needs vLLM")
def test_no_room_for_a_prompt_is_said_before_vllm_starts(monkeypatch):
    from lightning_rl.engines import VLLMLocal

    monkeypatch.setattr(VLLMLocal, "start", lambda *_: pytest.fail("the engine was started"))
    engine = "{class_path: VLLMLocal, init_args: {max_model_len: 32}}"
    words = ["sampling.max_tokens=32 leaves no room", "raise engine.max_model_len"]
    said = complaint(f"--data.engine {shlex.quote(engine)} --data.sampling.max_tokens 32")
    require_message(*said, words)


ON_COMMAND_LINE = {
    # argparse would take a prefix for an abbreviation
    "--trainer.max_epoch=3": ["trainer.max_epoch: no such key", "mean max_epochs?"],
    "--data.group_siz 3": ["no such key in RLDataModule", "mean group_size?"],
    "--data.init_args.group_size eight": ["expected int, got 'eight'"],
    "--data.group_size [8]": ["group_size: expected int, got [8]"],
    "--data.group_size": ["--data.group_size needs a value"],
    "--data.group_size=": ["group_size: expected int, got null"],
    "--data.group_size -3": ["group_size=-3 must be >= 1"],
    "--data.evaluation.limit -1": ["evaluation.limit=-1 must be >= 1"],
    "--data.sampling.temperatur 1": ["Sampling", "mean temperature?", "top_p"],
    "--data.sampling '{temperatur: 1}'": ["Sampling", "mean temperature?"],
    "--data.train_prompts.promt_column x": [
        "train_prompts.init_args.promt_column",
        "mean prompt_column?",
    ],
    "--data.engine TransformerEngine": [
        "mean TransformersEngine?",
        "known: ",
        "VLLMLocal",
        "at option --data.engine",
    ],
    "--model PolicyModul": ["model.class_path", "'PolicyModul'", "did you mean PolicyModule?"],
    "--model.optimizer torch.optim.Adamw": ["torch.optim has no 'Adamw'", "did you mean AdamW?"],
    "--model.lr_scheduler WarmupLinear": ["total_steps: is missing", "WarmupLinear needs it"],
    "--trainer.callbacks+=Evaluate --trainer.callbacks.every 3": [
        "trainer.callbacks[2].init_args.every: no such key in Evaluate"
    ],
    "--trainer.callbacks+=my_rewards.length": [
        "callbacks[2].class_path: my_rewards.length is a function, and a Callback is needed"
    ],
    "--trainer.callbacks+=math.sqrt": ["math.sqrt is a function, and a Callback is needed"],
    "--data.engine.class_path my_rewards.length": ["is a function, and a", "Engine"],
    "--model.loss.class_path my_rewards.length": ["is a function, and a PolicyLoss is needed"],
    "--seed_everything 99999999999999999999": ["must be in [0, 4294967295]", "at option"],
    "--seed_everything=-1": ["seed_everything=-1 must be in [0, 4294967295]", "at option"],
    "--trainer.logger CSVLogger --trainer.logger.nme x": ["no such key in CSVLogger", "mean name?"],
    "--trainer 3": ["trainer: expected keys below it, got 3"],
    "--optimizer 3": ["optimizer: no such key"],
    "stray": ["'stray' is not an option"],
    "-x 3": ["no such option '-x'"],
    "--model.help PolicyModul": ["PolicyModul"],
}


@pytest.mark.parametrize("options", ON_COMMAND_LINE)
def test_mistakes_on_the_command_line(options):
    require_message(*complaint(options), ON_COMMAND_LINE[options])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("fitt", "no command 'fitt'; did you mean fit?"),
        ("fit", "model: is missing"),
        ("rollout --config good.yaml", "output: is missing"),
        ("validate --config good.yaml --output x", "output: no such key"),
        ("rollout --config good.yaml --output x --iterations 0", "iterations=0 must be >= 1"),
    ],
)
def test_mistakes_about_commands(arguments, words, capsys):
    assert main(arguments.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model:\n  a: [1, 2\ndata: 3\n", ["bad.yaml:3: not valid YAML"]),
        ("model:\n\ta: 1\n", ["bad.yaml:2: not valid YAML", "'\\t'"]),
        ("- model\n", ["bad.yaml: expected keys"]),
    ],
)
def test_a_file_that_is_no_configuration(text, words, place):
    (place / "bad.yaml").write_text(text)
    require_message(*complaint("", config="bad.yaml"), words)


def test_the_place_is_the_last_source_that_set_the_key(place):
    (place / "more.yaml").write_text("data:\n  init_args:\n    group_size: eight\n")
    assert complaint("--config more.yaml")[1].endswith("at more.yaml:3")
    assert complaint("--data.seed x")[1].endswith("at option --data.seed")


def test_null_on_the_command_line_is_null_at_every_level(capsys):
    keys = ("data.engine.dtype", "data.train_prompts.template", "data.train_prompts.id_column")
    options = [word for key in keys for word in (f"--{key}", "null")]
    with pytest.raises(SystemExit):
        main(["fit", "--config", "good.yaml", *options, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    assert printed["engine"]["init_args"]["dtype"] is None
    prompts = printed["train_prompts"]["init_args"]
    assert (prompts["template"], prompts["id_column"]) == (None, None)


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("LIGHTNING_RL_TRACEBACK", "1")
    with pytest.raises(ConfigError, match="no such file"):
        main(["fit", "--config", "nope.yaml"])
