"""Test SoloModule: a body learns from labels, and agents in environments begin with it."""

import json

import pytest
import torch

from lightning_rl.cli import main
from lightning_rl.envs import (
    ActorCritic,
    ActorCriticModule,
    CNNBody,
    EnvDataModule,
    GRUBody,
    Gym,
    MLPBody,
    QAgent,
)
from lightning_rl.envs.networks.pretrained import LAYERS
from lightning_rl.envs.networks.space import Discrete, Observed, Space
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.games import (
    ClassHead,
    FunctionData,
    LabelledData,
    NumberHead,
    SoloDataModule,
    SoloModule,
)
from lightning_rl.games.labelled import rows_of, space_of
from tests.support.labelled_poles import falling
from tests.support.small_run import trainer_of

CARTPOLE = Space({"observation": Observed((4,))}, {"action": Discrete(2)})


class Given(LabelledData):
    def __init__(self, **rows):
        self.rows = rows

    def load(self):
        return self.rows


def poles(seed=0):
    return FunctionData("tests.support.labelled_poles.falling", {"seed": seed})


def fit(module, data, tmp_path, **options):
    torch.manual_seed(0)
    trainer = trainer_of(tmp_path, logger=False, **options)
    trainer.fit(module, data)
    return trainer


def trained(tmp_path, body=None, **options):
    """Train and return a checkpoint."""
    module = SoloModule(ClassHead(3), body if body is not None else MLPBody([16], "relu"))
    trainer = fit(module, SoloDataModule(poles(), seed=0), tmp_path, **options)
    trainer.save_checkpoint(tmp_path / "solo.ckpt")
    return module, tmp_path / "solo.ckpt"


# ---------------------------------------------------------------- training


def test_it_learns_labels_and_tells_of_each_class(tmp_path):
    module = SoloModule(
        ClassHead(3), MLPBody([32], "relu"), optimizer=lambda p: torch.optim.Adam(p, lr=1e-2)
    )
    data = SoloDataModule(poles(), val=poles(seed=1), batch_size=32, seed=0)
    trainer = fit(module, data, tmp_path, max_epochs=15)
    told = {key: float(value) for key, value in trainer.callback_metrics.items()}
    assert told["solo/val_accuracy"] > 0.85  # the most frequent class is 0.34 of all
    assert told["solo/val_loss"] < 0.5
    own = [told[f"solo/val_accuracy_class_{c}"] for c in range(3)]
    assert told["solo/val_accuracy_worst"] == min(own)
    assert told["solo/accuracy"] > 0.85
    assert {"solo/loss", "solo/accuracy_worst", "solo/accuracy_class_0"} <= set(told)


def test_metrics_are_of_all_rows_of_an_epoch(tmp_path):
    """The batches have 100 and 56 rows: means are over rows, not over batches."""
    module = SoloModule(ClassHead(3), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    data = SoloDataModule(poles(), val=poles(), batch_size=100)
    told = fit(module, data, tmp_path).callback_metrics
    rows = falling()
    with torch.no_grad():
        outputs = module.agent(rows)
    right = (outputs.argmax(-1) == rows["label"]).float()
    for name in ("solo/accuracy", "solo/val_accuracy"):
        assert float(told[name]) == pytest.approx(float(right.mean()), abs=1e-6)
    first = float(right[rows["label"] == 0].mean())
    assert float(told["solo/accuracy_class_0"]) == pytest.approx(first, abs=1e-6)
    loss = torch.nn.functional.cross_entropy(outputs, rows["label"])
    assert float(told["solo/val_loss"]) == pytest.approx(float(loss), abs=1e-6)


def test_numbers_are_learned_too(tmp_path):
    seen = torch.linspace(-1, 1, 64).unsqueeze(-1)
    data = SoloDataModule(Given(x=seen, label=3 * seen.squeeze(-1) + 1), batch_size=16, seed=0)
    module = SoloModule(NumberHead(), MLPBody([]), optimizer=lambda p: torch.optim.Adam(p, lr=0.1))
    trainer = fit(module, data, tmp_path, max_epochs=40)
    assert float(trainer.callback_metrics["solo/absolute_error"]) < 0.01
    assert module.agent.head.layer.weight.item() == pytest.approx(3, abs=0.05)


def test_losses_by_hand():
    numbers = NumberHead(2)
    outputs, labels = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert numbers.loss(outputs, labels).tolist() == [2.5]
    assert numbers.measure(outputs, labels)["absolute_error"].tolist() == [1.5]
    classes = ClassHead(2)
    logits = torch.tensor([[0.0, 0.0], [2.0, 1.0]])
    measured = classes.measure(logits, torch.tensor([0, 1]))
    assert measured["accuracy_class_0"].tolist() == [1.0]
    assert measured["accuracy_class_1"].tolist() == [0.0]
    assert classes.loss(logits, torch.tensor([0, 1])).tolist() == pytest.approx(
        [0.693147, 1.313262]
    )
    assert classes.summarize({"accuracy": 0.5, "accuracy_class_0": 1.0, "accuracy_class_1": 0.0})[
        "accuracy_worst"
    ] == pytest.approx(0.0)


def test_the_same_seed_gives_the_same_order(tmp_path):
    def order(seed):
        data = SoloDataModule(poles(), seed=seed, batch_size=256)
        data.setup("fit")
        return next(iter(data.train_dataloader()))["label"]

    assert torch.equal(order(0), order(0))
    assert not torch.equal(order(0), order(1))


# ---------------------------------------------------------------- agents that begin with it


def test_an_agent_begins_with_the_trained_body(tmp_path):
    solo, path = trained(tmp_path, max_epochs=2)
    for agent in (
        ActorCritic(MLPBody([16], "relu"), pretrained=str(path)),
        QAgent(MLPBody([16], "relu"), pretrained=str(path)),
    ):
        agent.build(CARTPOLE)
        seen = {"observation": torch.randn(5, 4)}
        assert torch.equal(agent.body(seen), solo.agent.body(seen))


def test_a_run_in_an_environment_begins_with_it(tmp_path):
    solo, path = trained(tmp_path)
    agent = ActorCritic(MLPBody([16], "relu"), pretrained=str(path))
    module = ActorCriticModule(
        {"agent": agent}, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), epochs=1
    )
    data = EnvDataModule(
        Gym("CartPole-v1"), num_envs=2, frames_per_iteration=32, iterations_per_epoch=2
    )
    fit(module, data, tmp_path)
    theirs, ours = solo.agent.body.state_dict(), module.agents["agent"].body.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)
    assert module.iteration == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (MLPBody([8], "relu"), r"its layers.0.weight is \(16, 4\), not \(8, 4\)"),
        (MLPBody([16, 16], "relu"), "it has no layers.2.weight"),
        (MLPBody([16], "tanh"), "consists of MLPBody, .*ReLU, but this one of MLPBody, .*Tanh"),
        (MLPBody([], "relu"), "it also has layers.0.weight"),
    ],
)
def test_a_checkpoint_of_another_body_is_refused(tmp_path, body, message):
    _, path = trained(tmp_path)
    with pytest.raises(
        ConfigError, match=f"solo.ckpt' holds MLPBody that differs from MLPBody.*{message}"
    ):
        ActorCritic(body, pretrained=str(path)).build(CARTPOLE)


def test_a_body_of_another_class_is_named(tmp_path):
    _, path = trained(tmp_path)
    pictures = Space({"picture": Observed((36, 36, 3), torch.uint8)}, {"action": Discrete(2)})
    with pytest.raises(ConfigError, match="holds MLPBody that differs from CNNBody"):
        ActorCritic(CNNBody(), pretrained=str(path)).build(pictures)


def test_files_that_are_no_such_checkpoint_are_refused(tmp_path):
    agent = ActorCritic(pretrained=str(tmp_path / "none.ckpt"))
    with pytest.raises(ConfigError, match=r"none.ckpt' does not exist"):
        agent.build(CARTPOLE)
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    with pytest.raises(ConfigError, match=r"text.ckpt' is not a checkpoint of SoloModule"):
        ActorCritic(pretrained=str(tmp_path / "text.ckpt")).build(CARTPOLE)
    torch.save({"state_dict": {"other": torch.ones(1)}}, tmp_path / "other.ckpt")
    with pytest.raises(
        ConfigError, match=r"other.ckpt' contains no body; train one with SoloModule"
    ):
        ActorCritic(pretrained=str(tmp_path / "other.ckpt")).build(CARTPOLE)


def test_its_checkpoint_says_of_what_the_body_is_made(tmp_path):
    _, path = trained(tmp_path)
    told = torch.load(path, weights_only=True)
    assert told[LAYERS] == ["MLPBody", "Sequential", "Linear", "ReLU"]


# ---------------------------------------------------------------- data


def test_rows_are_bytes_or_floats():
    rows = rows_of(
        Given(
            picture=torch.zeros(2, 4, 4, 3, dtype=torch.uint8),
            speed=torch.zeros(2, 3).double(),
            count=torch.tensor([[1], [2]]),
            label=[0, 1],
        )
    )
    assert rows["label"].dtype == torch.long
    assert space_of(rows).observations == {
        "picture": Observed((4, 4, 3), torch.uint8),
        "speed": Observed((3,)),
        "count": Observed((1,)),
    }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"x": torch.ones(2, 1)}, "returned x; return observations by name and 'label'"),
        ({"label": [0, 1]}, "returned label; return observations"),
        ({"x": torch.ones(3, 1), "label": [0, 1]}, "returned 3 rows of x, 2 rows of label"),
        ({"x": torch.ones(0, 1), "label": []}, "return at least one row"),
        ({"x": torch.tensor([[1.0], [float("nan")]]), "label": [0, 1]}, "x of row 1 is NaN"),
        ({"x": torch.ones(2, 1), "label": 1}, "label is the single number 1"),
    ],
)
def test_rows_that_cannot_be_learned(rows, message):
    with pytest.raises(DataError, match=message):
        rows_of(Given(**rows))


@pytest.mark.parametrize(
    ("head", "label", "message"),
    [
        (ClassHead(2), [0, 1, 2], r"train: the label of row 2 is 2, but with classes=2.*\[0, 2\)"),
        (ClassHead(2), [0.0, 1.0, 1.0], "float32.* use NumberHead"),
        (NumberHead(), [0, 1, 1], "int64.* use ClassHead"),
        (NumberHead(2), [0.0, 1.0, 1.0], "with size=2 they must be floats, 2 per row"),
    ],
)
def test_labels_that_the_head_cannot_learn(head, label, message, tmp_path):
    data = SoloDataModule(Given(x=torch.ones(3, 1), label=torch.tensor(label)))
    with pytest.raises(DataError, match=message):
        fit(SoloModule(head), data, tmp_path)


def test_what_does_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="body=GRUBody has a memory"):
        SoloModule(ClassHead(2), GRUBody())
    with pytest.raises(ConfigError, match="classes=1 must be >= 2"):
        ClassHead(1)
    with pytest.raises(ConfigError, match="batch_size=0 must be >= 1"):
        SoloDataModule(poles(), batch_size=0)
    with pytest.raises(ConfigError, match=r"make: .*nothing_like_it"):
        rows_of(FunctionData("tests.support.small_run.nothing_like_it"))
    data = SoloDataModule(poles(), val=Given(other=torch.ones(1, 1), label=[0]))
    with pytest.raises(DataError, match=r"data.val \(Given\) has the observations .*other"):
        data.setup("fit")


# ---------------------------------------------------------------- the command line

CONFIG = """
seed_everything: 0
model:
  class_path: SoloModule
  init_args:
    head: {{class_path: ClassHead, init_args: {{classes: 3}}}}
    body: {{class_path: MLPBody, init_args: {{hidden: [16], activation: relu}}}}
data:
  class_path: SoloDataModule
  init_args:
    train: {{class_path: FunctionData, init_args: {{make: tests.support.labelled_poles.falling}}}}
    val:
      class_path: FunctionData
      init_args: {{make: tests.support.labelled_poles.falling, arguments: {{seed: 1}}}}
trainer:
  max_epochs: 2
  accelerator: cpu
  enable_progress_bar: false
  logger:
    class_path: CSVLogger
    init_args: {{save_dir: {directory}, name: solo}}
"""


def test_it_runs_from_the_command_line(tmp_path):
    config = tmp_path / "solo.yaml"
    config.write_text(CONFIG.format(directory=json.dumps(str(tmp_path))))
    assert main(["fit", "--config", str(config)]) in (0, None)
    [path] = tmp_path.rglob("*.ckpt")
    agent = ActorCritic(MLPBody([16], "relu"), pretrained=str(path))
    agent.build(CARTPOLE)
