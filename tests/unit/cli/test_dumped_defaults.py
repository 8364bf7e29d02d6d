"""A class with its defaults, as --print_config tells it: whole, and the same when read again."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import Strategy

from lightning_rl import Prompt
from lightning_rl.cli import main
from lightning_rl.cli.parser import RLArgumentParser
from lightning_rl.cli.trusted_texts import TABLE
from lightning_rl.config import names
from lightning_rl.config.hints import classes, item_hint, mapping_hint, parameters
from lightning_rl.errors import ConfigError
from lightning_rl.extend import Environment
from lightning_rl.games import RewardThreshold, Selection, StagedAlgorithm, StagedTrainer
from tests.support.dumped import of, require_same_again

ROOTS = (LightningModule, LightningDataModule, Callback, CheckpointIO, Precision, Strategy)
"""The classes that a configuration of ``lightning-rl fit`` names."""

HERE = __name__


def world(prompt: Prompt) -> Environment: ...


FUNCTION = "builtins.len"
PROMPTS = of("JSONLPrompts", path="rows.jsonl")
PROTOCOL = "Debate"
SCENARIO = of("TextScenario", prompts={"judge": {"user": "{question}"}})
NEEDED = {
    "ChatGroup": {"agents": ["judge"], "model": "gpt"},
    "CheckpointTransport": {"directory": "weights"},
    "ClassHead": {"classes": 3},
    "ConstantSchedule": {"value": 0.1},
    "Criterion": {"text": "It is right."},
    "Critic": {"head": of("SharedValueHead")},
    "DPOModule": {"model": "base"},
    "DemonstrationRows": {"prompts": PROMPTS, "per_iteration": 1},
    "EngineJudge": {"model": "base"},
    "EnvDataModule": {"env": of("Gym", name="CartPole-v1")},
    "EvaluateRollouts": {"prompts": PROMPTS},
    "Evaluation": {"prompts": PROMPTS},
    "ExponentialSchedule": {"start": 0.5, "decay": 0.9},
    "FunctionAgent": {"function": FUNCTION},
    "FunctionData": {"make": FUNCTION},
    "GameRolesModule": {"model": "base", "policies": {"all": {"policies": {"a": {}}}}},
    "Guard": {"bound": 1.0},
    "Gym": {"name": "CartPole-v1"},
    "HFDatasetPrompts": {"path": "folder"},
    "HFStreamingPrompts": {"path": "folder"},
    "Isolated": {"function": FUNCTION},
    "IterablePrompts": {"rows": FUNCTION},
    "JSONLPrompts": {"path": "rows.jsonl"},
    "KTODataModule": {"train": PROMPTS},
    "KTOModule": {"model": "base"},
    "LengthReward": {"scale": of("RankedLength")},
    "LinearLength": {"longest": 20},
    "LinearSchedule": {"start": 0.5, "final": 0.1, "iterations": 10},
    "LLMJudge": {"judge": of("OpenAIJudge", base_url="http://there", model="gpt")},
    "MetricFloorGuard": {"metric": "reward/mean", "bound": 0.1},
    "MetricGuard": {"metric": "reward/mean", "bound": 0.1},
    "Mixture": {"sets": [{"name": "a", "prompts": PROMPTS}]},
    "MultiTurn": {"environment": f"{HERE}.world"},
    "OfflineDataModule": {"path": "rows.jsonl"},
    "OpenAIJudge": {"base_url": "http://there", "model": "gpt"},
    "OverlongPenalty": {"max_tokens": 20, "buffer": 4},
    "PairDataModule": {"train": PROMPTS},
    "ParquetPrompts": {"path": "rows.parquet"},
    "PassRateCurriculum": {"prompts": PROMPTS},
    "MultiPolicyEngine": {"engines": {"a": "TransformersEngine"}},
    "PolicyModule": {"model": "base"},
    "PooledGym": {"name": "CartPole-v1"},
    "ProgramAgent": {"command": "true"},
    "PromptSet": {"name": "a", "prompts": PROMPTS},
    "ProtocolAgent": {"protocol": PROTOCOL, "scenario": SCENARIO},
    "RankingJudge": {"judge": of("OpenAIJudge", base_url="http://there", model="gpt")},
    "RLDataModule": {"train_prompts": PROMPTS, "rewards": [FUNCTION]},
    "ReasoningGymPrompts": {"task": "chain_sum"},
    "Remote": {"function": FUNCTION},
    "ReplayBuffer": {"path": "buffer.sqlite"},
    "RewardModelModule": {"model": "base"},
    "RewardPairDataModule": {"train": PROMPTS},
    "RolesModule": {"model": "base", "policies": {"all": {"policies": {"a": {}}}}},
    "RolloutPairs": {"path": "rows.jsonl"},
    "RubricJudge": {
        "judge": of("OpenAIJudge", base_url="http://there", model="gpt"),
        "criteria": ["It is right."],
    },
    "SFTDataModule": {"train": PROMPTS},
    "SFTModule": {"model": "base"},
    "ScriptAgent": {"script": "agent.py"},
    "ServersByName": {"url": "http://there:8000"},
    "ServersInFile": {"path": "servers.txt"},
    "SoloDataModule": {"train": of("FunctionData", make=FUNCTION)},
    "SoloModule": {"head": "NumberHead"},
    "StagedLoggers": {"loggers": [of("CSVLogger", save_dir="logs")]},
    "StagedTrainer": {
        "run_dir": "run",
        "protocol": PROTOCOL,
        "scenario": SCENARIO,
        "train": PROMPTS,
        "groups": {"all": {"agents": ["judge"], "model": "gpt"}},
        "algorithm": "ExpertIteration",
    },
    "TextScenario": {"prompts": {"judge": {"user": "{question}"}}},
    "FixedCalls": {"numbers": [1]},
    "ThinkingBudget": {"max_thinking_tokens": 16},
    "TokenSum": {"max_tokens": 20},
    "ToolAgent": {"tools": [FUNCTION]},
    "TorchRLEnv": {"make": FUNCTION},
    "TorchRLLoss": {"make": FUNCTION},
    "VLLMParser": {"name": "hermes"},
    "WarmupCosine": {"total_steps": 10},
    "WarmupLinear": {"total_steps": 10},
    "ZeroKnowledge": {"protocol": PROTOCOL},
}
"""Arguments that a class cannot do without."""
GIVEN_BY_LIGHTNING = {"optimizer"}
"""The argument of schedulers, which are called with it."""


REWARDS = (
    "EnvironmentReward",
    "Isolated",
    "LLMJudge",
    "LengthReward",
    "OverlongPenalty",
    "PythonTests",
    "RankingJudge",
    "Remote",
    "RubricJudge",
)
"""Classes of functions, so named with their package."""


def hints_in(hint: Any) -> Iterator[Any]:
    """Yield a hint, and those of the items that it lets a list or mapping hold."""
    yield hint
    for inner in (item_hint(hint), mapping_hint(hint)):
        if inner is not None:
            yield from hints_in(inner)


def nameable() -> dict[str, Any]:
    """Return public classes that a configuration can name, each with a fitting argument's hint."""
    names.load_all()
    public = [names.public(name) for name in names.MODULE_OF]
    public = [c for c in public if inspect.isclass(c) and not inspect.isabstract(c)]
    public = [c for c in public if c.__name__ in NEEDED or c.__name__ not in TABLE["records"]]
    found: dict[str, Any] = dict.fromkeys(REWARDS, Callable[..., list[float]])
    todo: list[Any] = [*ROOTS, StagedTrainer]
    todo += [p.annotation for name in REWARDS for p in parameters(names.public(name)).values()]
    looked_at = set()
    while todo:
        for hint in hints_in(todo.pop()):
            if str(hint) in looked_at or not (bases := tuple(classes(hint))):
                continue
            looked_at.add(str(hint))
            for component in public:
                if issubclass(component, bases) and component.__name__ not in found:
                    found[component.__name__] = hint
                    todo += [p.annotation for p in parameters(component).values()]
    return found


NAMEABLE = nameable()


def test_every_needed_argument_is_of_a_class_that_can_be_named():
    assert set(NEEDED) <= set(NAMEABLE)
    assert {"RLDataModule", "PolicyModule", "ExpertIteration", "LLMJudge", "Gym"} <= set(NAMEABLE)


@pytest.mark.parametrize("name", sorted(NAMEABLE))
def test_a_class_with_its_defaults_is_told_whole_and_read_again(name, tmp_path):
    component, hint = names.public(name), NAMEABLE[name]
    called = f"lightning_rl.{name}" if name in REWARDS else name
    part: Any = of(called, **NEEDED[name]) if name in NEEDED else called
    if is_dataclass(component) and hint is component:
        part = NEEDED.get(name, {})  # there is no other class
    _, told = require_same_again(hint, part, tmp_path / "part.yaml")
    arguments = told if "class_path" not in told else told.get("init_args", {})
    assert parameters(component).keys() - arguments.keys() <= GIVEN_BY_LIGHTNING


def test_prompts_by_their_path_are_told_so(tmp_path):
    part = of("RLDataModule", train_prompts="rows.jsonl", rewards=[FUNCTION])
    _, told = require_same_again(LightningDataModule, part, tmp_path / "part.yaml")
    assert told["init_args"]["train_prompts"] == "rows.jsonl"


@pytest.mark.parametrize("given", ["rows.jsonl", PROMPTS])
def test_print_config_tells_prompts_as_they_are_given(given, tmp_path, capsys):
    file = tmp_path / "fit.yaml"
    data = of("RLDataModule", train_prompts=given, rewards=[FUNCTION])
    file.write_text(yaml.safe_dump({"model": of("PolicyModule", model="base"), "data": data}))
    told = []
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(file), "--print_config"])
        told.append(capsys.readouterr().out)
        file.write_text(told[-1])
    assert told[0] == told[1]
    prompts = yaml.safe_load(told[0])["data"]["init_args"]["train_prompts"]
    path = prompts if isinstance(prompts, str) else prompts["init_args"]["path"]
    assert path == "rows.jsonl"


@pytest.mark.parametrize("over", ["file", "option"])
def test_a_path_takes_the_place_of_a_class_in_an_earlier_file(over, tmp_path, capsys):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    data = of("RLDataModule", train_prompts=PROMPTS, rewards=[FUNCTION])
    first.write_text(yaml.safe_dump({"model": of("PolicyModule", model="base"), "data": data}))
    second.write_text("data: {init_args: {train_prompts: other.jsonl}}")
    given = {"file": ["--config", str(second)], "option": ["--data.train_prompts", "other.jsonl"]}
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(first), *given[over], "--print_config"])
    told = yaml.safe_load(capsys.readouterr().out)
    assert told["data"]["init_args"]["train_prompts"] == "other.jsonl"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rows.xml", "'rows.xml'"),
        ("JSONLPromts", "did you mean JSONLPrompts"),
    ],
)
def test_what_is_no_path_of_prompts_is_told_with_its_place(given, message, tmp_path):
    part = of("RLDataModule", train_prompts=given, rewards=[FUNCTION])
    with pytest.raises(ConfigError, match=rf"train_prompts.*{message}[\s\S]*part.yaml:"):
        require_same_again(LightningDataModule, part, tmp_path / "part.yaml")


THRESHOLD = RewardThreshold(0.7)


class Staged(StagedAlgorithm):
    def training_set(self, trees, agents, iteration, seed): ...


class ByConstant(Staged):
    def __init__(self, selection: Selection = THRESHOLD, share: float = 0.5) -> None:
        self.selection = selection


class WithoutHint(Staged):
    def __init__(self, selection=THRESHOLD, share: float = 0.5) -> None:
        self.selection = selection


@dataclass
class ByFactory(Staged):
    selection: Selection = field(default_factory=lambda: RewardThreshold(0.7))
    share: float = 0.5


@dataclass
class Inside(Staged):
    selections: list[Selection] = field(default_factory=lambda: [RewardThreshold(0.7)])
    share: float = 0.5
    inner: StagedAlgorithm | None = None

    @property
    def selection(self):
        return self.selections[0]


@pytest.mark.parametrize("own", [ByConstant, WithoutHint, ByFactory, Inside])
def test_a_default_that_no_text_can_say_is_left_out_and_the_default_again(own, tmp_path):
    part = f"{HERE}.{own.__name__}"
    if own is Inside:
        part = of(part, inner=f"{HERE}.ByConstant")
    parser, told = require_same_again(StagedAlgorithm, part, tmp_path / "part.yaml")
    assert told["init_args"]["share"] == 0.5
    assert not {"selection", "selections"} & told["init_args"].keys()
    [made] = parser.instantiate(parser.parse_path(tmp_path / "part.yaml")).parts
    assert made.selection.least == 0.7


def test_a_text_that_looks_like_a_number_stays_one():
    parser = RLArgumentParser()
    parser.add_argument("--name", type=str | float)
    parser.add_argument("--table", type=dict[str, str | float])
    texts = ["1e5", "1E-3", "1_0e2", ".5e+1", "1.5", "12", "1e5x", "true", "~", "2024-01-01", ""]
    values = {"name": "1e5", "table": dict(zip(texts, texts, strict=True)) | {"number": 1e-5}}
    dumped = parser.dump(parser.parse_object(values))
    again = parser.parse_string(dumped)
    assert (again.name, again.table) == (values["name"], values["table"])
    assert "1e5x: 1e5x\n" in dumped  # what needs no quotes has none
