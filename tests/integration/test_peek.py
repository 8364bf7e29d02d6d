"""A batch to look at changes nothing; and what is given in place of a data module is told of."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_rl.callbacks import Evaluate, RLCallback
from lightning_rl.errors import ConfigError
from lightning_rl.extend import Periodic
from lightning_rl.learn.dpo import DPOModule
from lightning_rl.learn.sft import SFTModule
from lightning_rl.run.seeding import gather_random_states
from tests.support.resumed import Trace
from tests.support.small_run import data_module, grpo, trainer_of
from tests.support.tiers import slow
from tests.support.two_roles import roles_data, roles_module


def roles(model):
    return roles_module(model, second={"schedule": Periodic(every=2)})


KINDS = {"grpo": (grpo, data_module), "roles": (roles, roles_data)}


def trained(module, data, tmp_path):
    trace = Trace()
    evaluations = [Evaluate(2)] if data.evaluates else []
    trainer_of(tmp_path, [*evaluations, trace]).fit(module, data)
    policies = module.loaded_policies.items()
    weights = {f"{name}/{n}": w.clone() for name, p in policies for n, w in p.named_weights()}
    return trace.rows, weights


@pytest.mark.parametrize("kind", ["grpo", slow("roles")])
def test_a_run_after_a_look_is_the_same_to_the_bit(tiny_model, tmp_path, kind):
    make, data = KINDS[kind]
    torch.manual_seed(0)  # adapters begin with drawn weights
    rows, weights = trained(make(tiny_model), data(iterations_per_epoch=2), tmp_path / "plain")
    torch.manual_seed(0)
    module, looked_at = make(tiny_model), data(iterations_per_epoch=2)
    random = str(gather_random_states())
    looked_at.peek(module, groups=2)
    assert str(gather_random_states()) == random
    assert looked_at.trainer is None
    assert not list(module.parameters())  # it is not loaded
    assert not looked_at.engine.running
    rows_after, weights_after = trained(module, looked_at, tmp_path / "looked")
    assert rows_after == rows
    assert weights_after.keys() == weights.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in weights_after.items())


def test_a_look_gives_text_a_table_and_tensors(tiny_model):
    found = data_module().peek(grpo(tiny_model), groups=2, group_size=3)
    assert [r.prompt.id for r in found.rollouts] == ["0"] * 3 + ["1"] * 3
    assert all(rollout.graded for rollout in found.rollouts)
    assert found.batch["rollouts", "reward"].shape == (6,)
    assert found.batch["tokens", "loss_mask"].sum() == sum(r.length for r in found.rollouts)
    header, *lines, last = str(found).splitlines()
    assert header.split() == ["prompt", "completion", "reward", "parts", "end"]
    assert [line[:4] for line in lines] == ["108="] * 3 + ["109="] * 3
    assert last.startswith("6 rollouts, packed in ")
    assert found._repr_markdown_().startswith("| prompt | completion |")


def test_between_two_fits_it_shows_the_present_weights_and_leaves_no_trace(tiny_model, tmp_path):
    module, data = grpo(tiny_model), data_module(iterations_per_epoch=2)
    trainer_of(tmp_path).fit(module, data)
    before = dict(vars(module))
    found = data.peek(module)
    assert {v for r in found.rollouts for v in r.versions} == {2}
    assert vars(module).keys() == before.keys()
    same = [name for name, value in before.items() if vars(module)[name] is value]
    assert set(before) - set(same) == {"_modules"}  # a copy of it
    assert dict(module.named_children()) == before["_modules"]
    trainer_of(tmp_path).fit(module, data)
    assert module.iteration == 4


class Looks(RLCallback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        trainer.datamodule.peek(pl_module)


def test_in_a_run_there_is_no_look(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="use the rollouts that on_collect_end gets"):
        trainer_of(tmp_path, [Looks()]).fit(grpo(tiny_model), data_module())


@pytest.mark.parametrize(
    "call",
    [
        lambda data: next(iter(data.train_dataloader())),
        lambda data: data.predict_dataloader() and next(iter(data.predict_dataloader())),
        lambda data: data.setup("fit"),
        lambda data: data.evaluate(),
    ],
)
def test_without_a_run_it_is_said_how_to_look_at_a_batch(call):
    with pytest.raises(ConfigError, match=r"call datamodule\.peek\(module\) to inspect a batch"):
        call(data_module())


@pytest.mark.parametrize("make", [grpo, roles, SFTModule, DPOModule])
def test_rows_in_place_of_a_data_module_are_refused(tiny_model, tmp_path, make):
    loader = DataLoader([{"prompt": "1=", "completion": "7"}])
    module = make(str(tiny_model))
    name = type(module).__name__
    with pytest.raises(ConfigError, match=f"{name} trains on packed rollouts, .* type dict"):
        trainer_of(tmp_path).fit(module, loader)


def test_numbers_in_place_of_an_evaluation_are_refused(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="PolicyModule is evaluated by its data module"):
        trainer_of(tmp_path).validate(grpo(tiny_model), DataLoader([1.0, 2.0]))
