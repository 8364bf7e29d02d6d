"""GraphIsomorphism: two agents talk about whether two graphs are the same, as torchrl sees it."""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.protocols.base import VERIFIER, Protocol
from lightning_rl.protocols.single_prover import Nip
from recipes.graph_isomorphism.data import Kind, twins
from recipes.graph_isomorphism.views import (
    FACTS,
    NODE_FEATURES,
    claims,
    node_features,
    pointed_at,
    said,
    union,
)


@configurable
class GraphIsomorphism(EnvBase):
    """Many interactions side by side, each about a pair of graphs (:mod:`.data`).

    A message names a node; one beyond a smaller graph's nodes counts on from its first, and an
    answer is always in the graph that was not asked about. The prover sees both graphs, and all
    messages. The verifier sees of messages only degrees, and of a question of its own and the
    answer what :func:`.views.claims` says. Label 1: isomorphic.

    Args:
        protocol: who speaks when, and what it pays.
        num_envs: E, interactions side by side.
        split: ``train`` or ``test``.
        twins: how many pairs of twins; four times as many pairs of graphs.
        nodes: fewest and most nodes of a graph.
        kind: ``random`` or ``regular`` graphs.
        data_seed: of the graphs.

    Raises:
        ConfigError: for values out of range, and a protocol with several channels, or stances that
            nobody could see.
    """

    batch_locked = True

    def __init__(
        self,
        protocol: Protocol | None = None,
        num_envs: int = 256,
        split: str = "train",
        twins: int = 1000,
        nodes: tuple[int, int] = (8, 12),
        kind: Kind = "random",
        data_seed: int = 0,
    ) -> None:
        require_at_least(1, num_envs=num_envs)
        super().__init__(batch_size=[num_envs])
        self.protocol = protocol if protocol is not None else Nip()
        _require_one_channel(self.protocol)
        self.group_map = {name: [name] for name in self.protocol.agent_names}
        self._take(split, twins, nodes, kind, data_seed)
        self.pairs: Tensor | None = None
        """The numbers (E,) of the pairs that each reset deals; None: they are drawn."""
        self._generator, self._seeds = torch.Generator(), torch.Generator()
        self._questions = self._asked()
        self._make_specs()
        self.round = torch.zeros(num_envs, dtype=torch.long)
        self.messages = torch.full((num_envs, self.protocol.max_message_rounds), -1)
        self._set_seed(0)

    def _take(self, split: str, count: int, nodes: tuple[int, int], kind: Kind, seed: int) -> None:
        found = twins(split, count, (int(nodes[0]), int(nodes[1])), kind, seed)
        self._all = torch.from_numpy(found.graphs).float()
        self._features = node_features(self._all)
        self._sizes = torch.from_numpy(found.sizes)
        self.nodes = self._all.shape[-1]
        self.num_pairs = 4 * len(self._all)

    def _asked(self) -> Tensor:
        """Rounds in which the verifier asks, and a prover answers in the next."""
        rounds = torch.arange(self.protocol.max_message_rounds)
        asks, answers = self.protocol.has_turn(rounds), torch.zeros(len(rounds), dtype=torch.bool)
        for name in self.protocol.prover_names:
            answers |= self.protocol.speaks(name, rounds)
        return (asks[:-1] & answers[1:]).nonzero().squeeze(1)

    # ---------------------------------------------------------------- specs

    def _make_specs(self) -> None:
        envs, nodes, rounds = self.num_envs, 2 * self.nodes, self.protocol.max_message_rounds
        questions = max(len(self._questions), 1)
        shapes = {
            "adjacency": (nodes, nodes),
            "nodes": (nodes, NODE_FEATURES),
            "exists": (nodes,),
            "marks": (nodes, rounds),
            "last": (nodes,),
            "choices": (nodes,),
            "round": (rounds,),
        }
        seen = dict.fromkeys(self.protocol.prover_names, shapes)
        seen[VERIFIER] = {
            "round": (rounds,),
            "said": (rounds, 2),
            "claimed": (questions,),
            "facts": (questions, questions, FACTS),
        }
        observed = {name: self._group(own) for name, own in seen.items()}
        for group in observed.values():
            group["mask"] = Categorical(2, shape=(envs, 1), dtype=torch.bool)
        number = Unbounded(shape=(envs, 1), dtype=torch.long)
        self.observation_spec = Composite(
            **observed, label=number, pair=number.clone(), shape=(envs,)
        )
        message = Categorical(nodes, shape=(envs, 1))
        acts = {
            name: Composite(message=message.clone(), shape=(envs, 1))
            for name in self.protocol.agent_names
        }
        acts[VERIFIER]["decision"] = Categorical(3, shape=(envs, 1))
        self.action_spec = Composite(**acts, shape=(envs,))
        paid = {name: self._group({"reward": (1,)}) for name in self.protocol.agent_names}
        self.reward_spec = Composite(**paid, shape=(envs,))

    def _group(self, shapes: dict[str, tuple[int, ...]]) -> Composite:
        lead = (self.num_envs, 1)
        return Composite(
            {name: Unbounded(shape=lead + shape) for name, shape in shapes.items()}, shape=lead
        )

    @property
    def num_envs(self) -> int:
        """E."""
        return int(self.batch_size[0])

    # ---------------------------------------------------------------- torchrl's methods

    def _set_seed(self, seed: int | None) -> None:
        # The protocol's draws have a generator of their own: graphs are dealt as without them.
        for generator in (self._generator, self._seeds):
            generator.manual_seed(0 if seed is None else seed)

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        anew = torch.ones(self.num_envs, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict:
            anew = tensordict["_reset"].reshape(self.num_envs)
        self._deal(anew)
        return self._observed()

    def _deal(self, anew: Tensor) -> None:
        """New pairs of graphs, with their nodes in new orders, where an interaction begins."""
        # As many are drawn whoever begins, so that what one is dealt does not hang on the others.
        drawn = torch.randint(self.num_pairs, (self.num_envs,), generator=self._generator)
        pair = drawn if self.pairs is None else self.pairs
        twin, first, label = pair // 4, pair // 2 % 2, pair % 2
        which = torch.stack([first, torch.where(label == 1, first, 1 - first)], 1)
        size = self._sizes[twin]
        keys = torch.rand(self.num_envs, 2, self.nodes, generator=self._generator)
        padded = torch.arange(self.nodes) >= size.reshape(-1, 1, 1)
        order = keys.masked_fill(padded, 2.0).argsort(-1)
        rows = self._all[twin.unsqueeze(1), which].gather(2, _wide(order, self.nodes))
        graphs = rows.gather(3, order.unsqueeze(2).expand_as(rows))
        features = self._features[twin.unsqueeze(1), which].gather(2, _wide(order, NODE_FEATURES))
        rounds = self.protocol.max_message_rounds
        fresh = {
            "pair": pair,
            "label": label,
            "size": size,
            "graphs": graphs,
            "features": features,
            "round": torch.zeros_like(pair),
            "seeds": torch.randint(2**62, (self.num_envs,), generator=self._seeds),
            "messages": torch.full((self.num_envs, rounds), -1),
        }
        for name, value in fresh.items():
            if bool(anew.all()):
                setattr(self, name, value)
            else:
                places = anew.reshape(-1, *[1] * (value.ndim - 1))
                setattr(self, name, torch.where(places, value, getattr(self, name)))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        now = self.round.clamp(max=self.protocol.max_message_rounds - 1)
        for name in self.protocol.agent_names:
            message = tensordict[name, "message"].reshape(-1)
            side = torch.where(self._answering(now), 1 - self._side(now - 1), message // self.nodes)
            node = message % self.nodes % self.size + side * self.nodes
            heard = torch.where(self.protocol.speaks(name, now, self.seeds), node, -1)
            old = self.messages.gather(1, now.unsqueeze(1)).squeeze(1)
            kept = torch.where(heard >= 0, heard, old)
            self.messages = self.messages.scatter(1, now.unsqueeze(1), kept.unsqueeze(1))
        decision = tensordict[VERIFIER, "decision"].reshape(-1)
        done, rewards = self.protocol.step({VERIFIER: decision}, now, self.label, self.seeds)
        self.round = now + 1
        after = self._observed()
        for name, paid in rewards.items():
            after[name, "reward"] = paid.reshape(-1, 1, 1)
        after["done"] = after["terminated"] = done.unsqueeze(-1)
        return after

    def _answering(self, round: Tensor) -> Tensor:
        """Whether a round's message answers a question, (E,)."""
        return torch.isin(round, self._questions + 1)

    def _side(self, round: Tensor) -> Tensor:
        """Which graph a round's message is in, (E,); 0 before the first."""
        said = self.messages.gather(1, round.clamp(min=0).unsqueeze(1)).squeeze(1)
        return said.clamp(min=0) // self.nodes

    # ---------------------------------------------------------------- what is seen

    def _observed(self) -> TensorDictBase:
        rounds = self.protocol.max_message_rounds
        at_round = (torch.arange(rounds) == self.round.unsqueeze(1)).float()
        seen: dict[str, Any] = {VERIFIER: self._verifier_sees()}
        if self.protocol.prover_names:
            view = self._prover_sees()
            seen |= {name: dict(view) for name in self.protocol.prover_names}
        lead = [self.num_envs, 1]
        groups = {}
        for name, own in seen.items():
            own["round"] = at_round
            own["mask"] = self.protocol.speaks(name, self.round, self.seeds)
            groups[name] = TensorDict({n: value.unsqueeze(1) for n, value in own.items()}, lead)
        told = {"label": self.label.unsqueeze(1), "pair": self.pair.unsqueeze(1)}
        return TensorDict(groups | told, self.batch_size)

    def _prover_sees(self) -> dict[str, Tensor]:
        marks = pointed_at(self.messages, self.nodes)
        last = marks.gather(2, (self.round - 1).clamp(min=0).reshape(-1, 1, 1).expand_as(marks))
        exists = (torch.arange(self.nodes) < self.size.unsqueeze(1)).float().repeat(1, 2)
        sides = torch.arange(2 * self.nodes) // self.nodes
        barred = self._answering(self.round).unsqueeze(1)
        barred = barred & (sides == self._side(self.round - 1).unsqueeze(1))
        return {
            "adjacency": union(self.graphs),
            "nodes": self.features.flatten(1, 2),
            "exists": exists,
            "marks": marks,
            "last": last[..., 0],
            "choices": exists.masked_fill(barred, 0.0),
        }

    def _verifier_sees(self) -> dict[str, Tensor]:
        asked = self._questions
        if len(asked):
            questions, answers = self.messages[:, asked], self.messages[:, asked + 1]
        else:
            questions = answers = torch.full((self.num_envs, 1), -1)
        claimed, facts = claims(questions, answers, self.graphs)
        return {"said": said(self.messages, self.graphs), "claimed": claimed, "facts": facts}


def _require_one_channel(protocol: Protocol) -> None:
    if len(protocol.message_channel_names) > 1 or protocol.random_stances:
        raise ConfigError(
            f"GraphIsomorphism has one message a round, and {type(protocol).__name__} has the "
            f"channels {', '.join(protocol.message_channel_names)}, random_stances="
            f"{protocol.random_stances}; take a protocol with one channel and fixed stances"
        )


def _wide(order: Tensor, width: int) -> Tensor:
    return order.unsqueeze(-1).expand(*order.shape, width)
