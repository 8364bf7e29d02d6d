"""Test what shrinks a pack: delta debugging, symptoms, and models with fewer layers."""

import json
import math

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from lightning_rl.cli.pack.ddmin import ddmin
from lightning_rl.cli.pack.layers import DecoderLayers
from lightning_rl.cli.pack.observation import BatchRow, Observation, Observer, Update
from lightning_rl.cli.pack.symptoms import Difference, median_norm, own_symptom
from lightning_rl.cli.pack.trees import read_tree, write_tree
from lightning_rl.cli.rerun.compare import IterationRerun
from lightning_rl.cli.rerun.run import KeptWeights
from lightning_rl.data.rollouts.log import Outcome
from lightning_rl.errors import DataError

# ---------------------------------------------------------------- delta debugging


class Counted:
    """A predicate that counts its calls, and that no empty list is tried."""

    def __init__(self, shows) -> None:
        self.shows, self.calls = shows, 0

    def __call__(self, some: list[int]) -> bool:
        assert some
        self.calls += 1
        return self.shows(some)


def test_a_single_culprit_is_found_by_halving():
    shows = Counted(lambda some: 5 in some)
    assert ddmin(range(8), shows) == [5]
    assert shows.calls == 5  # 0-3, 4-7; 4-5; 4, 5


def test_one_item_needs_no_trial():
    shows = Counted(lambda some: True)
    assert ddmin(["only"], shows) == ["only"]
    assert shows.calls == 0


@pytest.mark.parametrize(
    "shows",
    [
        lambda some: {1, 6} <= set(some),
        lambda some: {0, 7} <= set(some) or {3, 4, 5} <= set(some),
        lambda some: sum(some) % 2 == 1,  # of which more may show less
        lambda some: len(some) >= 3,
        lambda some: len(some) == 15,
    ],
)
def test_no_item_of_the_result_can_be_left_out(shows):
    items = [*range(14), 28]  # whose sum is odd
    counted = Counted(shows)
    kept = ddmin(items, counted)
    assert shows(kept)
    assert kept == sorted(kept)
    assert not any(shows([k for k in kept if k != one]) for one in kept if len(kept) > 1)
    assert counted.calls <= 15**2 + 3 * 15  # Zeller and Hildebrandt 2002, section 3


# ---------------------------------------------------------------- symptoms

ROWS = [BatchRow("3/0/0", 1, 3), BatchRow("3/0/1", 1, 3), BatchRow("3/1/0", 1, 2)]


def update(rows=ROWS, norm=1.0, loss=0.5, gradient=2.0, change=0.1, **columns) -> Update:
    """Return an update of these rows; a column's number is given by rollout, for its last token."""
    observer = Observer()
    observer.rows = {"": rows}

    def column(by_rollout: dict[str, float], default: float) -> torch.Tensor:
        parts = [[0.0] * (row.length - 1) + [by_rollout.get(row.rollout, default)] for row in rows]
        return torch.tensor([number for part in parts for number in part])

    observer.seen = Observation(
        {
            "old_logprobs": column(columns.get("old_logprobs", {}), -1.0),
            "advantages": column(columns.get("advantages", {}), 0.5),
        },
        [{"w": gradient}],
        {"w": change},
    )
    made = Outcome(3, {"w": "a"}, {"policy/loss": loss, "policy/grad_norm": norm})
    return Update(observer, IterationRerun(KeptWeights(2, None), made, made, None, None, None, {}))


def test_the_median_is_of_the_finite_norms():
    norms = [math.nan, 4.0, 1.0, math.inf, 3.0]
    assert median_norm(Outcome(n, {}, {"policy/grad_norm": x}) for n, x in enumerate(norms)) == 3.0
    assert median_norm([Outcome(0, {})]) is None


def test_a_sound_update_has_no_symptom():
    assert own_symptom(update(), 1.0) is None
    assert own_symptom(update(norm=10.0), 1.0) is None
    assert own_symptom(update(norm=100.0), None) is None  # nothing to compare with
    with pytest.raises(DataError, match="the update has no symptom"):
        Difference(update().seen, update())


def test_what_is_not_finite_is_named_from_its_origin_on():
    found = own_symptom(
        update(old_logprobs={"3/0/1": math.nan}, loss=math.nan, gradient=math.inf), 1.0
    )
    assert found.text == (
        "not finite: column old_logprobs, rollout 3/0/1, token 1; then metric policy/loss; then "
        "gradient of w in optimizer step 1"
    )
    assert found.shows(update(gradient=math.nan))
    # A NaN that no longer reaches the gradient is not the same symptom.
    assert not found.shows(update(old_logprobs={"3/0/1": math.nan}))


def test_an_exploding_gradient_has_to_stay_as_large():
    found = own_symptom(update(norm=10.5), 1.0)
    assert found.text == "exploding gradient: norm 10.5, while the run's median is 1"
    assert found.shows(update(norm=10.5))
    assert not found.shows(update(norm=10.4))
    assert not found.shows(update(norm=math.nan))
    assert own_symptom(update(norm=10.5), 1.0, factor=11.0) is None


def test_a_difference_is_looked_for_in_the_rollouts_that_are_left():
    packed = update(old_logprobs={"3/0/1": -1.5}).seen
    found = Difference(packed, update())
    assert found.text == "different: column old_logprobs"
    few = update(ROWS[:2])
    assert found.shows(few)
    assert found.expected(few).columns["old_logprobs"].tolist() == [0, 0, -1, 0, 0, -1.5]
    assert not found.shows(update([ROWS[0], ROWS[2]]))
    # Without an advantage it may not have been scored.
    assert not found.shows(update([ROWS[1]], advantages={"3/0/1": 0.0}))


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (update(advantages={"3/0/0": 0.25}), "first differs in column advantages"),
        (update(gradient=3.0), "first differs in gradient of w in optimizer step 1"),
        (update(ROWS[:2]), "first differs in column old_logprobs"),  # of another batch
    ],
)
def test_a_difference_that_depends_on_other_rollouts_is_refused(packed, says):
    with pytest.raises(DataError, match=f"{says}.*send the whole pack"):
        Difference(packed.seen, update())


# ---------------------------------------------------------------- layers


def layered(parts, names: list[str], **config) -> DecoderLayers:
    """Write a pack's model with these parameters, whose values and states are their places."""
    (parts / "models/0").mkdir(parents=True)
    (parts / "models/0/config.json").write_text(json.dumps({"num_hidden_layers": 3, **config}))
    model = {"class_path": "PolicyModule", "init_args": {"model": "models/0", "loading": {}}}
    (parts / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    state = {n: {"exp_avg": torch.tensor([10.0 + n])} for n in range(len(names))}
    groups = [{"lr": 1.0, "params": [0, 1]}, {"lr": 2.0, "params": list(range(2, len(names)))}]
    weights = {name: torch.tensor([float(n)]) for n, name in enumerate(names)}
    weights["reference.lm.layers.2.w"] = torch.tensor([7.0])
    optimizer = {"state": state, "param_groups": groups}
    tree = {"state_dict": weights, "optimizer_states": [optimizer]}
    write_tree(tree, parts / "checkpoint")
    return DecoderLayers(parts, [names])


NAMES = ["lm.embed.w", "lm.layers.0.w", "lm.layers.1.w", "lm.layers.2.w", "lm.norm.w"]


def test_layers_are_renumbered_with_their_weights_and_optimizer_state(tmp_path):
    config = {"layer_types": ["full", "sliding", "full"], "eos_token_id": [1, 2, 3]}
    layers = layered(tmp_path / "parts", [*NAMES, "lm.vision.layers.0.w"], **config)
    assert layers.count == 3
    layers.write(tmp_path / "small", [1, 2])
    tree = read_tree(tmp_path / "small/checkpoint")
    assert {name: weight.item() for name, weight in tree["state_dict"].items()} == {
        "lm.embed.w": 0,
        "lm.layers.0.w": 2,
        "lm.layers.1.w": 3,
        "lm.norm.w": 4,
        "lm.vision.layers.0.w": 5,
        "reference.lm.layers.1.w": 7,  # a copy of the model
    }
    [optimizer] = tree["optimizer_states"]
    assert [group["params"] for group in optimizer["param_groups"]] == [[0], [1, 2, 3, 4]]
    assert [optimizer["state"][n]["exp_avg"].item() for n in range(5)] == [10, 12, 13, 14, 15]
    assert json.loads((tmp_path / "small/models/0/config.json").read_text()) == {
        "num_hidden_layers": 2,
        "layer_types": ["sliding", "full"],
        "eos_token_id": [1, 2, 3],
    }


def test_weights_in_the_models_own_files_are_renumbered(tmp_path):
    parts = tmp_path / "parts"
    (parts / "models/0").mkdir(parents=True)
    for n in range(2):
        own = {f"model.layers.{n}.w": torch.tensor([float(n)])}
        save_file(own, parts / f"models/0/model-0000{n + 1}-of-00002.safetensors")
    (parts / "models/0/model.safetensors.index.json").write_text("{}")
    (parts / "models/0/config.json").write_text('{"text_config": {"num_hidden_layers": 2}}')
    learner = {"model": "models/0", "loading": {}}
    (parts / "config.yaml").write_text(yaml.safe_dump({"model": learner}))
    DecoderLayers(parts, []).write(tmp_path / "small", [1])
    folder = tmp_path / "small/models/0"
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    weights = load_file(folder / "model.safetensors")
    assert {name: weight.item() for name, weight in weights.items()} == {"model.layers.0.w": 1}


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (["transformer.h.0.w"], {}),
        (NAMES[:3], {}),
        (NAMES, {"num_hidden_layers": None}),
        (NAMES, {"num_hidden_layers": "3"}),
    ],
)
def test_layers_that_cannot_be_told_are_said(names, config, tmp_path):
    with pytest.raises(DataError, match=r"are of layers .* has num_hidden_layers="):
        layered(tmp_path / "parts", names, **config)


def test_the_digests_of_a_loras_base_are_renumbered(tmp_path):
    parts = tmp_path / "parts"
    layered(parts, NAMES)
    base = {"lm.layers.0.v": "a", "lm.layers.1.v": "b", "lm.layers.2.v": "c", "lm.head.w": "d"}
    whole = read_tree(parts / "checkpoint")
    write_tree(whole | {"frozen_base": base}, parts / "checkpoint")
    DecoderLayers(parts, [NAMES]).write(tmp_path / "small", [0, 2])
    left = {"lm.layers.0.v": "a", "lm.layers.1.v": "c", "lm.head.w": "d"}
    assert read_tree(tmp_path / "small/checkpoint")["frozen_base"] == left
    write_tree(whole | {"frozen_base": "ab12"}, parts / "checkpoint")  # of an earlier release
    with pytest.raises(DataError, match="identifies the base by a digest of all layers"):
        DecoderLayers(parts, [NAMES])


def test_a_model_outside_the_pack_is_not_touched(tmp_path):
    layered(tmp_path / "parts", NAMES)
    config = {"model": {"model": "../parts/models/0", "loading": {}}}
    (tmp_path / "parts/config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(DataError, match="is no model in the pack"):
        DecoderLayers(tmp_path / "parts", [NAMES])
