"""Measure what a verifier's accuracy owes to its prover, on graphs that neither was trained on.

    python -m recipes.graph_isomorphism.evaluate runs/graph_isomorphism/nip/version_0

Plays every pair of the test split several times with the verifier of a run, and with these provers:
one that names nodes at random, the run's own before training and after it, and that one trained
further while the verifier stays as it is (``--attack``). The last line is JSON.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from lightning_rl.config.hints import parse
from lightning_rl.envs.datamodule import EnvDataModule
from lightning_rl.envs.maker import TorchRLEnv
from lightning_rl.envs.module import ActorCriticModule
from lightning_rl.envs.networks.actor_critic import ActorCritic, sampled
from lightning_rl.envs.torchrl_space import agents_of
from lightning_rl.games.protocols.base import ACCEPT, GO_ON, VERIFIER
from lightning_rl.games.protocols.single_prover import PROVER
from lightning_rl.games.protocols.zero_knowledge import ADVERSARY, SIMULATOR, likeness
from lightning_rl.learn.update_schedules import Periodic
from recipes.graph_isomorphism.env import GraphIsomorphism

Agents = Mapping[str, ActorCritic]
NEVER = Periodic(first=2**31)


@dataclass(frozen=True)
class Played:
    """Interactions about P pairs, each played C times: ``decisions`` (C, P), ``labels`` (P,).

    ``likeness`` (C, P) is that of simulator and adversary, -1 to 1, where there are both.
    """

    decisions: Tensor
    labels: Tensor
    likeness: Tensor | None = None

    def metrics(self) -> dict[str, float]:
        """Return accuracy, also by class and on the pair on which it is lowest, and likeness."""
        right = (self.decisions == self.labels).float()
        metrics = {
            "accuracy": float(right.mean()),
            "accuracy_isomorphic": float(right[:, self.labels == 1].mean()),
            "accuracy_different": float(right[:, self.labels == 0].mean()),
            "accuracy_worst_pair": float(right.mean(0).min()),
            "accepted": float((self.decisions == ACCEPT).float().mean()),
            "undecided": float((self.decisions == GO_ON).float().mean()),
        }
        if self.likeness is not None:
            metrics["likeness"] = float(self.likeness.mean())
            metrics["likeness_isomorphic"] = float(self.likeness[:, self.labels == 1].mean())
            metrics["likeness_different"] = float(self.likeness[:, self.labels == 0].mean())
        return metrics


@torch.no_grad()
def play(env: GraphIsomorphism, agents: Agents, times: int, seed: int = 0) -> Played:
    """Play all pairs of an environment with as many places; who is not in ``agents`` is random."""
    env.pairs = torch.arange(env.num_pairs)
    env.set_seed(seed)
    torch.manual_seed(seed)
    simulated = agents.keys() >= {ADVERSARY, SIMULATOR}
    decisions, likenesses = [], []
    for _ in range(times):
        data = env.reset()
        decided = torch.full((env.num_pairs,), GO_ON)
        alike, turns = torch.zeros(2, env.num_pairs).unbind()
        for round in range(env.protocol.max_message_rounds):
            env.rand_action(data)
            for name, agent in agents.items():
                made, _ = agent.act(dict(data[name].items()))
                for action, value in sampled(made, False).items():
                    data[name, action] = value
                if name in env.protocol.logits_read:
                    for action, distribution in made.items():
                        data[name, f"{action}_logits"] = distribution.logits  # type: ignore[attr-defined]
            if simulated:
                undecided = env.decided[ADVERSARY] == GO_ON
                spoke = undecided & env.protocol.speaks(ADVERSARY, round, env.seeds)
                logits = [env.logits_of(data[name]) for name in (ADVERSARY, SIMULATOR)]
                alike, turns = alike + spoke * likeness(*logits) / 2, turns + spoke
            said = data[VERIFIER, "decision"].squeeze(1)
            counts = (decided == GO_ON) & env.protocol.can_decide(round)
            decided = torch.where(counts, said, decided)
            data = env.step(data)["next"].exclude("reward")
        decisions.append(decided)
        likenesses.append(alike / turns)
    told = torch.stack(likenesses) if simulated else None
    return Played(torch.stack(decisions), env.label.clone(), told)


class _Run:
    """A run's agents and environment, built again from what it wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: dict[str, Any] = yaml.safe_load(
            (directory / "config.yaml").read_text(encoding="utf-8")
        )
        self.arguments: dict[str, Any] = self._part("data", "env")["init_args"]["arguments"]
        checkpoint = directory / "checkpoints" / "last.ckpt"
        loaded = torch.load(checkpoint, weights_only=True, map_location="cpu")
        self.weights: dict[str, Tensor] = loaded["state_dict"]

    def _part(self, name: str, key: str) -> Any:
        return self.config[name]["init_args"][key]

    def env(self, **further: Any) -> GraphIsomorphism:
        return GraphIsomorphism(**(self.arguments | further))

    def agents(self, trained: bool = True) -> dict[str, ActorCritic]:
        """Build all agents, ``trained`` or as they began."""
        given = parse(dict[str, ActorCritic], self._part("model", "agents"))
        seed_everything(self.config["seed_everything"], verbose=False)
        spaces = agents_of(self.env(num_envs=1))
        for name, (space, _) in spaces.items():
            agent = given.setdefault(name, ActorCritic())
            agent.build(space)
            prefix = f"agents.{name}."
            own = {n: w for n, w in self.weights.items() if n.startswith(prefix)}
            if trained:
                agent.load_state_dict({n.removeprefix(prefix): w for n, w in own.items()})
        return {name: given[name] for name in spaces}

    def attacked(self, iterations: int) -> dict[str, ActorCritic]:
        """Train the prover further while the verifier does not learn; return the agents."""
        given = parse(dict[str, ActorCritic], self._part("model", "agents"))
        given.setdefault(VERIFIER, ActorCritic()).schedule = NEVER
        options = {n: v for n, v in self.config["model"]["init_args"].items() if n != "agents"}
        module = _GoesOn(self.weights, agents=given, **options)
        make = self._part("data", "env")["init_args"]["make"]
        data = EnvDataModule(
            TorchRLEnv(make, self.arguments),
            num_envs=self._part("data", "num_envs"),
            frames_per_iteration=self._part("data", "frames_per_iteration"),
            iterations_per_epoch=iterations,
            eval_episodes=0,
        )
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=self.directory / "attack",
        )  # fmt: skip
        trainer.fit(module, data)
        return {name: module.agents[name] for name in given}


class _GoesOn(ActorCriticModule):
    """Begins with the weights of a run, and nothing else of it."""

    def __init__(self, weights: Mapping[str, Tensor], **options: Any) -> None:
        super().__init__(**options)
        self._weights = (weights,)

    def configure_model(self) -> None:
        super().configure_model()
        self.load_state_dict(self._weights[0])


def evaluate(directory: Path, times: int, attack: int, twins: int) -> dict[str, dict[str, float]]:
    """Return metrics by prover."""
    run = _Run(directory)
    env = run.env(split="test", twins=twins, num_envs=4 * twins)
    trained, fresh = run.agents(), run.agents(trained=False)
    provers: dict[str, Agents] = {"trained": trained}
    if PROVER in trained:
        others = {name: agent for name, agent in trained.items() if name != PROVER}
        provers["random"] = others
        provers["untrained"] = others | {PROVER: fresh[PROVER]}
        if attack:
            provers[f"attack_{attack}"] = run.attacked(attack)
    return {name: play(env, agents, times).metrics() for name, agents in provers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="A verifier's accuracy with several provers.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--times", type=int, default=10, help="that each pair is played")
    parser.add_argument("--twins", type=int, default=100, help="of the test split; 4 pairs each")
    parser.add_argument("--attack", type=int, default=0, help="iterations")
    options = parser.parse_args()
    found = evaluate(options.run, options.times, options.attack, options.twins)
    for name, metrics in found.items():
        print(f"{name}: " + ", ".join(f"{n} {value:.3f}" for n, value in metrics.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
