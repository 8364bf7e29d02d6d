"""The command line: every mistake gets one message that names key, value and fix."""

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback

from benchmarks.memory import Built
from lightning_rl.callbacks import IterationCheckpoint, RerunRecorder, Watchdog, WeightSync
from lightning_rl.cli import main
from lightning_rl.config.layers import flatten

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="VLLMLocal needs vLLM")

REWARDS = """
def exact(prompts, completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]

class HasLength:
    def __init__(self, length: int):
        self.length = length

    def __call__(self, completions, **columns) -> list[float]:
        return [float(len(c) == self.length) for c in completions]

def starts_right(completions, answer, **columns):
    return [float(c[:1] == a[:1]) for c, a in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """Where the user stands: prompts, a module with rewards, a module that is broken."""
    here = tmp_path_factory.mktemp("workplace")
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(30, 42)]
    (here / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "cli_rewards.py").write_text(REWARDS)
    (here / "cli_broken.py").write_text("1 / 0\n")
    return here


@pytest.fixture
def config(workplace, tiny_model, monkeypatch) -> dict[str, Any]:
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything's, put back afterwards
        monkeypatch.setenv(name, "0")
    prompts = {"class_path": "JSONLPrompts", "init_args": {"path": "train.jsonl"}}
    return {
        "model": {
            "class_path": "PolicyModule",
            "init_args": {
                "model": str(tiny_model),
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
            },
        },
        "data": {
            "class_path": "RLDataModule",
            "init_args": {
                "train_prompts": prompts,
                "eval_prompts": copy.deepcopy(prompts),
                "rewards": ["cli_rewards.starts_right"],
                "engine": {"class_path": "TransformersEngine"},
                "sampling": {"max_tokens": 4},
                "group_size": 2,
                "groups_per_iteration": 4,
                "iterations_per_epoch": 2,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": ""}},
            "callbacks": [
                {"class_path": "WeightSync"},
                {"class_path": "Evaluate", "init_args": {"every_n_iterations": 1}},
                {"class_path": "RunReport"},
            ],
        },
    }


GONE = object()  # remove the key


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration with dotted keys set; ``model.x`` is short for ``model.init_args.x``."""
    for name, value in changes.items():
        for group in ("model", "data"):
            if not name.startswith((f"{group}.class_path", f"{group}.init_args")):
                name = name.replace(f"{group}.", f"{group}.init_args.", 1)
        *above, last = [int(part) if part.isdigit() else part for part in name.split(".")]
        node: Any = config
        for part in above:
            node = node[part] if isinstance(node, list) else node.setdefault(part, {})
        if value is GONE:
            del node[last]
        else:
            node[last] = value
    return config


def complaint(capsys, *arguments: str, status: int = 2) -> str:
    """What a command says about a mistake: a few lines, neither usage text nor a traceback."""
    assert main(list(arguments)) == status
    said = capsys.readouterr().err
    assert "Traceback" not in said
    message = said[said.index("lightning-rl: ") :].strip()
    assert len(message.splitlines()) <= 3
    return message


SAMPLING = "data.init_args.sampling"
GAE = {"class_path": "GAE"}
IN_FILE = {
    "typo in trainer": (
        {"trainer.max_epoch": 3},
        ["trainer.max_epoch: no such key", "did you mean max_epochs?"],
    ),
    "typo in model": ({"model.optimzer": {}}, ["model.init_args.optimzer", "mean optimizer?"]),
    "typo in data": ({"data.group_sizes": 4}, ["data.init_args.group_sizes", "mean group_size?"]),
    "typo at the top": ({"modle": {}}, ["modle: no such key", "mean model?"]),
    "typo in sampling": (
        {"data.sampling": {"temperatur": 1}},
        [f"{SAMPLING}.temperatur: no such key in Sampling", "mean temperature?", "top_p"],
    ),
    "typo in a callback": (
        {"trainer.callbacks.1.init_args": {"every_n_iteration": 1}},
        ["trainer.callbacks[1].init_args.every_n_iteration", "mean every_n_iterations?"],
    ),
    "typo in the optimizer": (
        {"model.optimizer.init_args": {"weight_dekay": 0}},
        ["model.init_args.optimizer.init_args.weight_dekay", "AdamW", "mean weight_decay?"],
    ),
    "typo in a base class's argument": (
        {"data.train_prompts.init_args.promt_column": "x"},
        ["train_prompts.init_args.promt_column", "mean prompt_column?"],
    ),
    "beside class_path": (
        {"data.train_prompts": {"class_path": "JSONLPrompts", "path": "x"}},
        ["train_prompts.path", "move it under init_args"],
    ),
    "word for an int": ({"data.group_size": "eight"}, ["group_size: expected int, got 'eight'"]),
    "null for an int": ({"data.group_size": None}, ["group_size: expected int, got null"]),
    "list for an int": ({"data.group_size": [8]}, ["group_size: expected int, got [8]"]),
    "word for a float": (
        {"data.sampling.temperature": "hot"},
        [f"{SAMPLING}.temperature: expected float, got 'hot'"],
    ),
    "word for lr": (
        {"model.optimizer.init_args.lr": "abc"},
        ["model.init_args.optimizer.init_args.lr: expected float", "got 'abc'"],
    ),
    "wrong choice": (
        {"trainer.precision": "bf16-mixd"},
        ["trainer.precision: expected one of", "bf16-mixed", "got 'bf16-mixd'"],
    ),
    "text for a list": (
        {"data.rewards": "cli_rewards.exact"},
        ["data.init_args.rewards: expected a list", "'cli_rewards.exact'"],
    ),
    "unknown model class": (
        {"model.class_path": "PolicyModul"},
        ["model.class_path", "'PolicyModul'", "did you mean PolicyModule?"],
    ),
    "unknown callback": (
        {"trainer.callbacks.0.class_path": "WeightSnyc"},
        ["trainer.callbacks[0].class_path", "did you mean WeightSync?"],
    ),
    "unknown engine": (
        {"data.engine.class_path": "VLLMLocl"},
        ["data.init_args.engine.class_path", "did you mean VLLMLocal?", "TransformersEngine"],
    ),
    "unknown class in a module": (
        {"model.optimizer.class_path": "torch.optim.Adamw"},
        ["torch.optim has no 'Adamw'", "did you mean AdamW?"],
    ),
    "class of another kind": (
        {"data.engine.class_path": "torch.optim.AdamW"},
        ["data.init_args.engine.class_path: torch.optim.AdamW is no Engine"],
    ),
    "arguments of another class": (
        {"model.advantage": {"class_path": "GRPO", "init_args": {"lam": 0.9}}},
        ["advantage.init_args.lam: no such key in GRPO", "it is a key of GAE"],
    ),
    "class changed, arguments left": (
        {"data.class_path": "SFTDataModule"},
        ["no such key in SFTDataModule", "it is a key of RLDataModule"],
    ),
    "no class_path": (
        {"data.engine": {"init_args": {"dtype": "float32"}}},
        ["data.init_args.engine: needs a class_path", "TransformersEngine"],
    ),
    "missing argument": ({"model.model": GONE}, ["model.init_args.model: is missing", "str"]),
    "missing argument, bare class": ({"model": "PolicyModule"}, ["model.init_args.model: is miss"]),
    "missing group": ({"data": GONE}, ["data: is missing", "--config"]),
    "no such reward module": (
        {"data.rewards": ["no_rewards.exact"]},
        ["rewards[0]", "there is no module 'no_rewards'", "PYTHONPATH"],
    ),
    "no such reward function": (
        {"data.rewards": ["cli_rewards.exakt"]},
        ["rewards[0]", "cli_rewards has no 'exakt'", "did you mean exact?", "cli_rewards.py"],
    ),
    "wrong argument of a reward": (
        {"data.rewards": [{"class_path": "cli_rewards.HasLength", "init_args": {"lenght": 3}}]},
        ["rewards[0].init_args.lenght: no such key in HasLength", "mean length?"],
    ),
    "missing argument of a reward": (
        {"data.rewards": [{"class_path": "cli_rewards.HasLength"}]},
        ["rewards[0].init_args.length: is missing", "HasLength needs it (int)"],
    ),
    "broken reward module": (
        {"data.rewards": ["cli_broken.exact"]},
        ["'cli_broken' fails when imported: ZeroDivisionError"],
    ),
    "reward without a module": (
        {"data.rewards": ["exact"]},
        ["rewards[0]", "'exact' is no import path", "module.name"],
    ),
    "missing data file": (
        {"data.train_prompts.init_args.path": "nope.jsonl"},
        ["data error", "path='nope.jsonl' does not exist"],
    ),
    "missing model": (
        {"model.model": "no/such/model"},
        ["model='no/such/model'", "there is no such directory"],
    ),
    "GRPO with groups of one": (
        {"data.group_size": 1},
        ["group_size=1 must be >= 2 for GRPO", "raise it, or use GAE"],
    ),
    "more minibatches than groups": (
        {"model.minibatches": 5},
        ["minibatches=5 exceeds groups_per_iteration=4"],
    ),
    "negative groups": (
        {"data.groups_per_iteration": -4},
        ["groups_per_iteration=-4 must be >= 1"],
    ),
    "negative max_tokens": (
        {"data.sampling.max_tokens": -1},
        ["sampling.max_tokens=-1 must be >= 1"],
    ),
    "negative eval_limit": ({"data.eval_limit": -1}, ["eval_limit=-1 must be >= 1"]),
    "negative lr": (
        {"model.optimizer.init_args.lr": -1.0},
        ["model.init_args.optimizer", "Invalid learning rate: -1.0"],
    ),
    "GAE without a critic": (
        {"model.advantage": GAE},
        ["advantage=GAE needs a critic", "SharedValueHead"],
    ),
    "schedule that ends before it starts": (
        {
            "model.lr_scheduler": {
                "class_path": "WarmupLinear",
                "init_args": {"total_steps": 3, "warmup_steps": 5},
            }
        },
        ["total_steps=3 must exceed warmup_steps=5"],
    ),
    "accelerator": ({"trainer.accelerator": "cpuu"}, ["accelerator='cpuu'", "cuda"]),
}


@pytest.mark.parametrize("case", IN_FILE)
def test_mistakes_in_a_file(case, config, workplace, capsys):
    changes, words = IN_FILE[case]
    (workplace / "bad.yaml").write_text(yaml.safe_dump(changed(config, changes)))
    message = complaint(capsys, "fit", "--config", "bad.yaml")
    assert [word for word in words if word not in message] == []


@needs_vllm
def test_no_room_for_a_prompt_is_said_before_vllm_starts(config, workplace, capsys, monkeypatch):
    from lightning_rl.engines import VLLMLocal

    monkeypatch.setattr(VLLMLocal, "start", lambda *_: pytest.fail("the engine was started"))
    engine = {"class_path": "VLLMLocal", "init_args": {"max_model_len": 32}}
    changed(config, {"data.engine": engine, "data.sampling.max_tokens": 32})
    (workplace / "bad.yaml").write_text(yaml.safe_dump(config))
    message = complaint(capsys, "fit", "--config", "bad.yaml")
    assert "sampling.max_tokens=32 leaves no room" in message
    assert "raise engine.max_model_len" in message


ON_COMMAND_LINE = {
    # argparse would take a prefix for an abbreviation
    "--trainer.max_epoch 3": ["trainer.max_epoch: no such key", "mean max_epochs?"],
    "--trainer.max_epoch=3": ["trainer.max_epoch: no such key", "mean max_epochs?"],
    "--data.group_siz 3": ["no such key in RLDataModule", "mean group_size?"],
    "--data.init_args.group_size eight": ["expected int, got 'eight'"],
    "--data.group_size": ["--data.group_size needs a value"],
    "--data.group_size=": ["group_size: expected int, got null"],
    "--data.group_size -3": ["group_size=-3 must be >= 1"],
    "--data.sampling.temperatur 1": ["Sampling", "mean temperature?"],
    "--data.sampling {temperatur: 1}": ["Sampling", "mean temperature?"],
    "--data.agent.turns 3": ["data.init_args.agent.turns: no such key in SingleTurn"],
    "--data.engine TransformerEngine": ["mean TransformersEngine?", "at option --data.engine"],
    "--data.rewards+=cli_rewards.exakt": ["rewards[1]", "mean exact?"],
    "--model.optimizer.lr abc": ["optimizer.init_args.lr: expected float"],
    "--model.lr_scheduler WarmupLinear": ["total_steps: is missing", "WarmupLinear needs it"],
    "--trainer.callbacks+=Evalute": ["trainer.callbacks[3].class_path", "mean Evaluate?"],
    "--trainer.callbacks+=Evaluate --trainer.callbacks.every 3": [
        "trainer.callbacks[3].init_args.every: no such key in Evaluate"
    ],
    "--trainer.logger CSVLogger --trainer.logger.nme x": ["no such key in CSVLogger", "mean name?"],
    "--trainer 3": ["trainer: expected keys below it, got 3"],
    "--optimizer 3": ["optimizer: no such key"],
    "--ckpt_path nope.ckpt": ["ckpt_path: 'nope.ckpt' does not exist"],
    "--ckpt_path cli_rewards.py": ["ckpt_path: 'cli_rewards.py' cannot be used"],
    "--config nope.yaml": ["--config nope.yaml: there is no such file"],
    "stray": ["'stray' is no option"],
    "-x 3": ["no such option '-x'"],
    "--model.help PolicyModul": ["PolicyModul"],
}


@pytest.mark.parametrize("options", ON_COMMAND_LINE)
def test_mistakes_on_the_command_line(options, config, workplace, capsys):
    (workplace / "good.yaml").write_text(yaml.safe_dump(config))
    # A YAML value in braces is one argument.
    name, brace, rest = options.partition(" {")
    arguments = [name, brace.strip() + rest] if brace else options.split(" ")
    message = complaint(capsys, "fit", "--config", "good.yaml", *arguments)
    assert [word for word in ON_COMMAND_LINE[options] if word not in message] == []


def test_mistakes_about_commands(config, workplace, capsys):
    (workplace / "good.yaml").write_text(yaml.safe_dump(config))
    assert "no command 'fitt'; did you mean fit?" in complaint(capsys, "fitt")
    assert "model: is missing" in complaint(capsys, "fit")
    assert "output: is missing" in complaint(capsys, "rollout", "--config", "good.yaml")
    options = ["--config", "good.yaml", "--output", "x"]
    assert "output: no such key" in complaint(capsys, "validate", *options)
    assert "iterations=0 must be >= 1" in complaint(
        capsys, "rollout", *options, "--iterations", "0"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model:\n  a: [1, 2\ndata: 3\n", ["bad.yaml:3: not valid YAML"]),
        ("model:\n\ta: 1\n", ["bad.yaml:2: not valid YAML", "'\\t'"]),
        ("- model\n", ["bad.yaml: expected keys"]),
        ("trainer:\n  max_epochs: 1\n  max_epochs: 2\n", ["bad.yaml:3", "twice (also in line 2)"]),
    ],
)
def test_a_file_that_is_no_configuration(text, words, workplace, capsys, monkeypatch):
    monkeypatch.chdir(workplace)
    (workplace / "bad.yaml").write_text(text)
    message = complaint(capsys, "fit", "--config", "bad.yaml")
    assert [word for word in words if word not in message] == []


def test_the_place_is_the_last_source_that_set_the_key(config, workplace, capsys):
    (workplace / "good.yaml").write_text(yaml.safe_dump(config))
    (workplace / "more.yaml").write_text("data:\n  init_args:\n    group_size: eight\n")
    first = ["--config", "good.yaml"]
    assert complaint(capsys, "fit", *first, "--config", "more.yaml").endswith("at more.yaml:3")
    assert complaint(capsys, "fit", *first, "--data.seed", "x").endswith("at option --data.seed")


def test_traceback_on_request(config, capsys, monkeypatch):
    from lightning_rl.errors import ConfigError

    monkeypatch.setenv("LIGHTNING_RL_TRACEBACK", "1")
    with pytest.raises(ConfigError, match="no such file"):
        main(["fit", "--config", "nope.yaml"])


def printed(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_files_merge_in_order_and_options_win(config, workplace, capsys):
    (workplace / "good.yaml").write_text(yaml.safe_dump(config))
    more = {"data": {"init_args": {"group_size": 6, "sampling": {"top_k": 5}}}}
    (workplace / "more.yaml").write_text(yaml.safe_dump(more))
    arguments = ["--config", "good.yaml", "--config", "more.yaml", "--data.groups_per_iteration"]
    text = printed(capsys, "fit", *arguments, "8", "--model.optimizer.lr", "1e-4", "--print_config")
    merged = yaml.safe_load(text)
    data = merged["data"]["init_args"]
    assert (data["group_size"], data["groups_per_iteration"]) == (6, 8)
    assert (data["sampling"]["max_tokens"], data["sampling"]["top_k"]) == (4, 5)
    assert merged["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 1e-4


def test_a_later_class_keeps_only_the_arguments_that_it_has(config, workplace, capsys):
    good = changed(config, {"data.engine.init_args": {"dtype": "bfloat16"}})
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.5, "amsgrad": True}}
    changed(good, {"model.optimizer": optimizer})
    (workplace / "good.yaml").write_text(yaml.safe_dump(good))
    options = ["--config", "good.yaml", "--model.optimizer", "torch.optim.SGD", "--print_config"]
    made = yaml.safe_load(printed(capsys, "fit", *options))["model"]["init_args"]["optimizer"]
    assert made["class_path"] == "torch.optim.SGD"
    assert made["init_args"]["lr"] == 0.5
    assert "amsgrad" not in made["init_args"]


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


def test_whatever_the_parser_takes_is_no_mistake(config, workplace, capsys):
    (workplace / "cli_callbacks.py").write_text(CALLBACK)
    fussy = {
        "colour": "RED",
        "size": {"width": 3},
        "what": {"any": "thing"},
        "untyped": [1, "x"],
        "table": {"class": 1},
        "pair": [2, 3.5],
    }
    config["trainer"]["callbacks"] += [
        {"class_path": "cli_callbacks.Fussy", "init_args": fussy},
        {"class_path": "cli_callbacks.OftenEvaluate", "init_args": {"every_n_iterations": 3}},
        "LearningRateMonitor",
    ]
    reward = {"class_path": "cli_rewards.HasLength", "init_args": {"length": 3}}
    changed(config, {"data.rewards": ["cli_rewards.exact", reward], "trainer.logger": False})
    (workplace / "good.yaml").write_text(yaml.safe_dump(config))
    text = printed(capsys, "fit", "--config", "good.yaml", "--print_config")
    callbacks = yaml.safe_load(text)["trainer"]["callbacks"]
    assert callbacks[3]["init_args"]["size"] == {"width": 3}
    assert callbacks[4]["init_args"]["every_n_iterations"] == 3


def test_help_fits_a_screen_and_says_where_more_is(capsys):
    assert main(["--help"]) == 0
    assert "rollout" in capsys.readouterr().out
    text = printed(capsys, "fit", "--help")
    assert len(text.splitlines()) < 24
    assert "--model.help PolicyModule" in text
    assert "--output" in printed(capsys, "rollout", "--help")
    assert "--model.ppo_epochs" in printed(capsys, "fit", "--model.help", "PolicyModule")
    assert "--trainer.max_epochs" in printed(capsys, "fit", "--trainer.help")


def test_version(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-rl {version('lightning_rl')}\n"


def test_from_print_config_to_fit_validate_and_rollout(config, workplace, capsys):
    """What is printed runs; what fit saved gives validate the accuracy that fit ended with."""
    changed(config, {"trainer.logger.init_args.version": "fit"})
    (workplace / "good.yaml").write_text(yaml.safe_dump(config))
    text = printed(capsys, "fit", "--config", "good.yaml", "--print_config")
    (workplace / "printed.yaml").write_text(text)
    assert main(["fit", "--config", "printed.yaml"]) == 0
    run = workplace / "runs" / "fit"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 2
    [checkpoint] = run.glob("checkpoints/iteration_*.ckpt")

    capsys.readouterr()
    saved = ["--config", str(run / "config.yaml"), "--ckpt_path", str(checkpoint)]
    assert main(["validate", *saved]) == 0
    said = capsys.readouterr().out
    [line] = [line for line in said.splitlines() if "eval/accuracy" in line]
    accuracy = float(line.split("│")[2])
    assert accuracy == pytest.approx(summary["accuracy_after"], abs=1e-6)

    output = ["--config", "good.yaml", "--output", "out.jsonl"]
    assert main(["rollout", *output, "--iterations", "2"]) == 0
    rows = [json.loads(line) for line in (workplace / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 4 * 2  # iterations x groups x group_size
    assert {row["reward"] for row in rows} <= {0.0, 1.0}
    assert main(["rollout", *output, "--iterations", "3"]) == 0  # goes on where it stopped
    assert len((workplace / "out.jsonl").read_text().splitlines()) == 24


def test_fit_adds_what_saves_records_and_watches(config, workplace):
    (workplace / "defaults.yaml").write_text(yaml.safe_dump(config))

    def callbacks(*options: str) -> list[Callback]:
        added = (IterationCheckpoint, RerunRecorder, Watchdog)
        built = Built(["fit", "--config", "defaults.yaml", *options])
        return [c for c in built.trainer.callbacks if isinstance(c, added)]

    by_default = {type(c) for c in callbacks()}
    assert by_default == {IterationCheckpoint, RerunRecorder, Watchdog}
    own = callbacks("--trainer.callbacks+=Watchdog", "--trainer.callbacks.timeout_s", "60")
    assert [c.timeout_s for c in own if isinstance(c, Watchdog)] == [60.0]
    none = callbacks("--trainer.enable_checkpointing", "false", "--trainer.logger", "false")
    assert {type(c) for c in none} == {Watchdog}


@pytest.mark.parametrize("command", ["fit", "validate", "test", "rollout"])
def test_weights_are_pushed_whether_or_not_it_is_said(config, workplace, command):
    given = {"class_path": "WeightSync", "init_args": {"probe_prompts": 1}}
    evaluate = {"class_path": "Evaluate"}
    output = ["--output", "rollouts.jsonl"] if command == "rollout" else []
    probes = []
    for callbacks in (None, [], [evaluate], evaluate, [evaluate, given]):
        config["trainer"]["callbacks"] = callbacks
        (workplace / "pushed.yaml").write_text(yaml.safe_dump(config))
        built = Built([command, "--config", "pushed.yaml", *output])
        [sync] = [c for c in built.trainer.callbacks if isinstance(c, WeightSync)]
        assert (built.trainer.callbacks[0] is sync) == (sync.probe_prompts == 4)
        probes.append(sync.probe_prompts)
        # As a part of the configuration, a run that goes on is compared with it.
        table = flatten(yaml.safe_load(built._parser(command).dump(built.config[command])))
        assert table["trainer.callbacks.WeightSync.probe_prompts"] == sync.probe_prompts
        assert table["trainer.callbacks.WeightSync.schedule.every_n_iterations"] == 1
    assert probes == [4, 4, 4, 4, 1]


def test_a_default_push_is_configured_as_one_that_is_named(config, workplace):
    tables = []
    for callbacks in ([{"class_path": "RunReport"}], ["WeightSync", {"class_path": "RunReport"}]):
        config["trainer"]["callbacks"] = callbacks
        (workplace / "pushed.yaml").write_text(yaml.safe_dump(config))
        built = Built(["fit", "--config", "pushed.yaml"])
        dumped = built._parser("fit").dump(built.config.fit, skip_unset=False)
        tables.append(flatten(yaml.safe_load(dumped)))
    assert tables[0] == tables[1]


def test_a_run_without_an_engine_pushes_nothing(config, workplace):
    prompts = config["data"]["init_args"]["train_prompts"]
    data = {"class_path": "SFTDataModule", "init_args": {"train": prompts}}
    supervised = {
        "model": config["model"] | {"class_path": "SFTModule"},
        "data": data,
        "trainer": {"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    }
    (workplace / "supervised.yaml").write_text(yaml.safe_dump(supervised))
    built = Built(["fit", "--config", "supervised.yaml"])
    assert not any(isinstance(c, WeightSync) for c in built.trainer.callbacks)
