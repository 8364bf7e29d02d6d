"""Each part of Lightning through ``lightning-rl fit``: the word that docs/api/lightning.md has."""

import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from lightning_rl.cli import main
from tests.support.lightning_cases import CASES, NEEDS, REFUSED, SCHEDULERS, WARNS, WORKS, Case

MORE = """
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LRScheduler, SequentialLR, StepLR

def rollouts(batch):
    return len(batch["rollouts"])

def factor(step: int) -> float:
    return 0.5

def nothing(optimizer: Optimizer) -> LRScheduler:
    return None

def sequential(optimizer: Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [ConstantLR(optimizer), StepLR(optimizer, 1)], milestones=[1])

def chained(optimizer: Optimizer) -> LRScheduler:
    return ChainedScheduler([ConstantLR(optimizer), StepLR(optimizer, 1)])
"""

SFT = {
    "model": {"class_path": "SFTModule", "init_args": {"model": "model"}},
    "data": {
        "class_path": "SFTDataModule",
        "init_args": {
            "train": {"class_path": "JSONLPrompts", "init_args": {"path": "train.jsonl"}},
            "completion_column": "answer",
            "batch_size": 6,
        },
    },
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 1,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "enable_checkpointing": False,
    },
}

EACH = [
    pytest.param(case, id=f"{part}-{name}-{case.word}")
    for part, cases in CASES.items()
    for name, of_name in cases.items()
    for case in of_name
]
FEW = ("WeightAveraging-works", "OnException", "Plateau", "OneCycleLR", "a function")


def unless_few(parameters):
    """Mark the table as slow, but for a few of it, which once were wrong."""
    return [
        p
        if any(few in p.id for few in FEW)
        else pytest.param(*p.values, id=p.id, marks=[pytest.mark.slow])
        for p in parameters
    ]


@pytest.fixture
def place(workplace: Path):
    with (workplace / "my_rewards.py").open("a") as file:
        file.write(MORE)
    (workplace / "sft.yaml").write_text(yaml.safe_dump(SFT))
    # The group may be that of an engine which tests share.
    grouped = torch.distributed.is_initialized()
    yield workplace
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    torch.autograd.set_detect_anomaly(False)
    if "wandb" in sys.modules:  # which goes on recording into the run that it has open
        sys.modules["wandb"].finish()
    if torch.distributed.is_initialized() and not grouped:
        torch.distributed.destroy_process_group()


def word(case: Case, config: str, monitor: str, capsys) -> tuple[str, str]:
    """Return the word that a run deserves, and what it said."""
    options = [option.replace("MONITOR", monitor) for option in case.options]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        status = main(["fit", "--config", config, *options])
    said = capsys.readouterr().err + " ".join(str(one.message) for one in seen)
    assert status in (0, 2), said
    if status == 2 and case.word == NEEDS:
        return NEEDS, said
    if status == 2:
        assert not list(Path().rglob("*.ckpt")), "refused too late"
        return REFUSED, said
    return (WARNS if case.word == WARNS and case.says in said else WORKS), said


@pytest.mark.parametrize("case", unless_few(EACH))
def test_it_deserves_its_word(case, place, capsys):
    """The policy learns from its rollouts."""
    if case.word == NEEDS and find_spec(case.package):
        pytest.skip(f"{case.package} is installed")
    two = "--data.iterations_per_epoch=2"
    got, said = word(
        Case(case.word, (two, *case.options), says=case.says), "good.yaml", "reward/mean", capsys
    )
    assert got == case.word, said
    assert case.says in said
    if case.word not in (REFUSED, NEEDS) and case.iterations is not None:
        [summary] = place.rglob("summary.json")
        assert json.loads(summary.read_text())["iterations"] == case.iterations


ALIKE = {
    "schedulers": SCHEDULERS,
    "callbacks": {
        name: cases
        for name, cases in CASES["callbacks"].items()
        if name in ("WeightAveraging", "EMAWeightAveraging", "OnExceptionCheckpoint", "Timer")
    },
}
SUPERVISED = [
    pytest.param(case, id=f"{name}-{case.word}")
    for cases in ALIKE.values()
    for name, of_name in cases.items()
    for case in of_name
]


@pytest.mark.parametrize("case", unless_few(SUPERVISED))
def test_it_deserves_its_word_in_supervised_training(case, place, capsys):
    """The training takes two steps of six rows."""
    got, said = word(case, "sft.yaml", "sft/loss", capsys)
    assert got == case.word, said
    assert case.says in said


@pytest.mark.parametrize(
    ("config", "monitor"), [("good.yaml", "reward/meen"), ("sft.yaml", "sft/lss")]
)
@pytest.mark.parametrize(
    "follower",
    [
        "--trainer.callbacks={class_path: ModelCheckpoint, init_args: {monitor: M}}",
        "--trainer.callbacks={class_path: IterationCheckpoint, init_args: {monitor: M}}",
        "--trainer.callbacks={class_path: EarlyStopping, init_args: {monitor: M}}",
        "--trainer.callbacks={class_path: HFExport, init_args: {monitor: M}}",
        "--model.lr_scheduler={class_path: lightning.pytorch.cli.ReduceLROnPlateau, "
        "init_args: {monitor: M}}",
    ],
    ids=lambda text: text.split("class_path: ")[1].split(",")[0].rpartition(".")[2],
)
def test_whatever_follows_an_unknown_metric_is_refused(config, monitor, follower, place, capsys):
    options = [follower.replace("M}", f"{monitor}}}"), "--trainer.enable_checkpointing=true"]
    assert main(["fit", "--config", config, *options]) == 2
    said = capsys.readouterr().err
    assert f"(monitor={monitor!r}): no such metric was recorded; did you mean " in said
