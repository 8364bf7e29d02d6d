"""The recipe graph_isomorphism from its files: two iterations of each, and what is made of them."""

import json
from math import isfinite
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightning_rl.cli import main
from recipes.graph_isomorphism.evaluate import NEVER, Played, evaluate

pytestmark = pytest.mark.slow

RECIPE = Path("recipes/graph_isomorphism")


class Seen(Callback):
    """Counts the steps that go through each agent's actor while it learns."""

    steps: ClassVar[dict[str, set[int]]] = {}

    def on_train_start(self, trainer, pl_module):
        for name, agent in pl_module.agents.items():
            of_one = self.steps[name] = set()
            agent.body.register_forward_hook(
                lambda _, __, made, of_one=of_one: self.note(made, of_one)
            )

    def note(self, made, of_one):
        if torch.is_grad_enabled():
            of_one.add(len(made))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Return the run of a recipe's file, with few and small environments."""

    def fit(name: str, iterations: int = 2, still: str | None = None, **model: object) -> Path:
        config = yaml.safe_load((RECIPE / name).read_text())
        data, trainer = config["data"]["init_args"], config["trainer"]
        directory = tmp_path_factory.mktemp(name)
        rounds = data["frames_per_iteration"] // data["num_envs"]
        data["env"]["init_args"]["arguments"] |= {"num_envs": 8, "twins": 5, "nodes": [8, 9]}
        data |= {"num_envs": 8, "frames_per_iteration": 8 * rounds, "eval_episodes": 8}
        data["iterations_per_epoch"] = iterations
        config["model"]["init_args"] |= model
        if model:
            trainer["callbacks"].append({"class_path": f"{__name__}.Seen"})
        if still is not None:
            config["model"]["init_args"]["agents"][still] |= {"body_lr": 0.0, "actor_lr": 0.0}
        trainer["logger"]["init_args"]["save_dir"] = str(directory)
        path = directory / name
        path.write_text(yaml.safe_dump(config))
        assert main(["fit", "--config", str(path)]) == 0
        return directory / Path(name).stem / "version_0"

    return fit


@pytest.mark.parametrize("name", ["nip.yaml", "spg.yaml", "adp.yaml", "solo.yaml"])
def test_a_run_of_each_file(fitted, name):
    run = fitted(name)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(row["policy/nonfinite_skipped"] == 0 for row in rows[1:])
    found = evaluate(run, times=2, attack=1 if name == "nip.yaml" else 0, twins=5)
    alone = {"trained"}
    with_provers = {"trained", "random", "untrained"}
    attacked = {"attack_1"} if name == "nip.yaml" else set()
    assert set(found) == (alone if name == "solo.yaml" else with_provers | attacked)
    for metrics in found.values():
        classes = metrics["accuracy_isomorphic"] + metrics["accuracy_different"]
        assert metrics["accuracy"] == pytest.approx(classes / 2)
        assert metrics["accuracy_worst_pair"] <= metrics["accuracy"]


def test_in_a_game_only_the_steps_in_which_an_agent_acts_go_through_its_actor(fitted):
    run = fitted("spg.yaml", iterations=1, epochs=1, minibatches=1)
    # In each half, four interactions: four turns of the verifier, and three of the prover.
    assert Seen.steps == {"verifier": {16}, "prover": {12}}
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    # What was drawn is as likely as it was, so each step has what was seen and done in it.
    for name in Seen.steps:
        assert abs(row[f"policy/{name}/kl_old"]) < 1e-6
        assert row[f"policy/{name}/clip_frac"] == 0


@pytest.mark.parametrize(
    ("still", "sign"), [("adversarial_verifier", 1), ("simulator", -1)], ids=["up", "down"]
)
def test_a_simulator_comes_to_be_like_its_adversary_who_avoids_it(fitted, still, sign):
    """Each where the other stands still: together they pull likeness both ways."""
    run = fitted("zero_knowledge.yaml", iterations=12, still=still)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    begin = rows.pop(0)["eval/simulator/reward_mean"] / 8  # of four turns, two cosines each
    for name in ("adversarial_verifier", "simulator", "prover", "verifier"):
        assert all(isfinite(row[f"policy/{name}/loss"]) for row in rows)
    assert all(-1 <= row["policy/likeness"] <= 1 for row in rows)
    assert sign * (rows[-1]["policy/likeness"] - begin) > 0.2
    for row in rows:
        r = row["reward/simulator/mean"]
        assert row["reward/adversarial_verifier/mean"] == pytest.approx(-r)
        believed = row["reward/prover/mean"] - r  # pays 1
        assert -1e-5 <= believed <= 1 + 1e-5  # a difference of means of float32 numbers
    found = evaluate(run, times=2, attack=0, twins=5)["trained"]
    classes = found["likeness_isomorphic"] + found["likeness_different"]
    assert found["likeness"] == pytest.approx(classes / 2)


def test_metrics_by_hand():
    # Four pairs, played twice: 0 and 1 differ, 2 and 3 are isomorphic; 2 is "go on" to the last.
    decisions = torch.tensor([[0, 1, 1, 2], [0, 0, 1, 0]])
    metrics = Played(decisions, torch.tensor([0, 0, 1, 1])).metrics()
    assert metrics == {
        "accuracy": 5 / 8,
        "accuracy_isomorphic": 1 / 2,
        "accuracy_different": 3 / 4,
        "accuracy_worst_pair": 0,
        "accepted": 3 / 8,
        "undecided": 1 / 8,
    }


def test_an_agent_that_never_learns():
    assert not any(NEVER.due(iteration) for iteration in (0, 1, 10**6))
