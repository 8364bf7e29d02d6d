"""Define GraphIsomorphism: two agents talk about whether two graphs are the same."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.games.protocols.base import GO_ON, Protocol
from lightning_rl.games.protocols.single_prover import Nip
from lightning_rl.games.protocols.zero_knowledge import ADVERSARY, SIMULATOR
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
    """Runs many interactions side by side, each about a pair of graphs (:mod:`.data`).

    A message names a node; one beyond a smaller graph's nodes counts on from its first, and an
    answer is always in the graph that was not asked about. The prover sees both graphs, and all
    messages. The verifier sees of messages only degrees, and of a question of its own and the
    answer what :func:`.views.claims` says. Label 1: isomorphic.

    Of :class:`ZeroKnowledge` the adversary sees its own channel as the verifier does, and the
    simulator the same without the answers. Prover's actions and observations of this channel have
    its name before theirs: ``adversarial_main_message``.

    Args:
        protocol: who speaks when, and what it pays.
        num_envs: E, interactions side by side.
        split: ``train`` or ``test``.
        twins: how many pairs of twins; four times as many pairs of graphs.
        nodes: fewest and most nodes of a graph.
        kind: ``random`` or ``regular`` graphs.
        data_seed: of the graphs.

    Raises:
        ConfigError: for values out of range, and a protocol whose verifier reads several channels,
            or with stances that nobody could see.
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
        channels = self.protocol.message_channel_names
        self.messages = {channel: self._silence() for channel in channels}
        """The messages by channel, (E, R)."""
        undecided = torch.full((num_envs,), GO_ON)
        self.decided = {name: undecided.clone() for name in self.protocol.deciders}
        """The decision that counted, by agent that decides, (E,); 2: none yet."""
        self._set_seed(0)

    def _silence(self) -> Tensor:
        return torch.full((self.num_envs, self.protocol.max_message_rounds), -1)

    def _take(self, split: str, count: int, nodes: tuple[int, int], kind: Kind, seed: int) -> None:
        found = twins(split, count, (int(nodes[0]), int(nodes[1])), kind, seed)
        self._all = torch.from_numpy(found.graphs).float()
        self._features = node_features(self._all)
        self._sizes = torch.from_numpy(found.sizes)
        self.nodes = self._all.shape[-1]
        self.num_pairs = 4 * len(self._all)

    def _asked(self) -> Tensor:
        """Return rounds in which the verifier asks, and a prover answers in the next."""
        rounds = torch.arange(self.protocol.max_message_rounds)
        asks, answers = self.protocol.has_turn(rounds), torch.zeros(len(rounds), dtype=torch.bool)
        for name in self.protocol.prover_names:
            answers |= self.protocol.speaks(name, rounds)
        return (asks[:-1] & answers[1:]).nonzero().squeeze(1)

    # ---------------------------------------------------------------- specs

    def _make_specs(self) -> None:
        envs, nodes, rounds = self.num_envs, 2 * self.nodes, self.protocol.max_message_rounds
        questions = max(len(self._questions), 1)
        verifiers = [n for n in self.protocol.agent_names if n not in self.protocol.prover_names]
        shapes = {
            "round": (rounds,),
            "said": (rounds, 2),
            "claimed": (questions,),
            "facts": (questions, questions, FACTS),
        }
        seen = dict.fromkeys(verifiers, shapes)
        for name in self.protocol.prover_names:
            places = self._places(name)
            seen[name] = {
                "adjacency": (nodes, nodes),
                "nodes": (nodes, NODE_FEATURES),
                "exists": (nodes,),
                "marks": (nodes, len(places) * rounds),
                "round": (rounds,),
                **{prefix + what: (nodes,) for prefix in places for what in ("last", "choices")},
            }
        observed = {name: self._group(own) for name, own in seen.items()}
        for group in observed.values():
            group["mask"] = Categorical(2, shape=(envs, 1), dtype=torch.bool)
        number = Unbounded(shape=(envs, 1), dtype=torch.long)
        self.observation_spec = Composite(
            **observed, label=number, pair=number.clone(), shape=(envs,)
        )
        acts = {}
        for name in self.protocol.agent_names:
            sizes = {f"{prefix}message": nodes for prefix in self._places(name)}
            if name in verifiers:
                sizes["decision"] = 3
            own = {action: Categorical(n, shape=(envs, 1)) for action, n in sizes.items()}
            acts[name] = Composite(**own, shape=(envs, 1))
        self.action_spec = Composite(**acts, shape=(envs,))
        logits = {"message_logits": (nodes,), "decision_logits": (3,)}
        read = {name: self._group(logits) for name in self.protocol.logits_read}
        self.state_spec = Composite(**read, shape=(envs,))
        paid = {name: self._group({"reward": (1,)}) for name in self.protocol.agent_names}
        self.reward_spec = Composite(**paid, shape=(envs,))

    def _places(self, name: str) -> dict[str, str]:
        """Return an agent's channels, by what comes before the names of what is of them."""
        first, *others = self.protocol.visible(ADVERSARY if name == SIMULATOR else name)
        return {"": first} | {f"{channel}_": channel for channel in others}

    def _group(self, shapes: Mapping[str, tuple[int, ...]]) -> Composite:
        lead = (self.num_envs, 1)
        return Composite(
            {name: Unbounded(shape=lead + shape) for name, shape in shapes.items()}, shape=lead
        )

    @property
    def num_envs(self) -> int:
        """Return E, the number of environments."""
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
        # What has not been acted on has no logits.
        return self._observed().update(self.full_state_spec.zero())

    def _deal(self, anew: Tensor) -> None:
        """Deal new pairs of graphs, with their nodes in new orders, where an interaction begins."""
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
        fresh = {
            "pair": pair,
            "label": label,
            "size": size,
            "graphs": graphs,
            "features": features,
            "round": torch.zeros_like(pair),
            "seeds": torch.randint(2**62, (self.num_envs,), generator=self._seeds),
        }
        for name, value in fresh.items():
            if bool(anew.all()):
                setattr(self, name, value)
            else:
                places = anew.reshape(-1, *[1] * (value.ndim - 1))
                setattr(self, name, torch.where(places, value, getattr(self, name)))
        for channel, messages in self.messages.items():
            self.messages[channel] = messages.masked_fill(anew.unsqueeze(1), -1)
        for name, decided in self.decided.items():
            self.decided[name] = decided.masked_fill(anew, GO_ON)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        now = self.round.clamp(max=self.protocol.max_message_rounds - 1)
        for name in self.protocol.agent_names:
            for prefix, channel in self._places(name).items():
                speaks = self.protocol.is_active(name, channel, now, self.seeds)
                message = tensordict[name, f"{prefix}message"].reshape(-1)
                self._say(channel, now, message, speaks)
        said = {name: tensordict[name, "decision"].reshape(-1) for name in self.protocol.deciders}
        done, rewards = self.protocol.step(said, now, self.label, self.seeds, self.decided)
        logits = {name: self.logits_of(tensordict[name]) for name in self.protocol.logits_read}
        for name, paid in self._paid_for(logits, now).items():
            rewards[name] = rewards[name] + paid
        self.decided = self.protocol.decided(said, now, self.seeds, self.decided)
        self.round = now + 1
        after = self._observed()
        for name, paid in rewards.items():
            after[name, "reward"] = paid.reshape(-1, 1, 1)
        after["done"] = after["terminated"] = done.unsqueeze(-1)
        return after

    def _paid_for(self, logits: Mapping[str, Any], now: Tensor) -> dict[str, Tensor]:
        return self.protocol.logit_rewards(logits, now, self.seeds, self.decided)

    def _say(self, channel: str, round: Tensor, message: Tensor, speaks: Tensor) -> None:
        """Write down the messages (E,) of those who speak."""
        before = self.messages[channel]
        answer = 1 - self._side(channel, round - 1)
        side = torch.where(self._answering(round), answer, message // self.nodes)
        node = message % self.nodes % self.size + side * self.nodes
        now = round.unsqueeze(1)
        kept = torch.where(speaks.unsqueeze(1), node.unsqueeze(1), before.gather(1, now))
        self.messages[channel] = before.scatter(1, now, kept)

    def _answering(self, round: Tensor) -> Tensor:
        """Tell whether a round's message answers a question, (E,)."""
        return torch.isin(round, self._questions + 1)

    def _side(self, channel: str, round: Tensor) -> Tensor:
        """Return which graph a round's message is in, (E,); 0 before the first."""
        said = self.messages[channel].gather(1, round.clamp(min=0).unsqueeze(1)).squeeze(1)
        return said.clamp(min=0) // self.nodes

    @staticmethod
    def logits_of(acted: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the logits (E, 2N) of an agent's message, and (E, 3) of its decision."""
        return acted["message_logits"].squeeze(1), acted["decision_logits"].squeeze(1)

    # ---------------------------------------------------------------- what is seen

    def _observed(self) -> TensorDictBase:
        rounds = self.protocol.max_message_rounds
        at_round = (torch.arange(rounds) == self.round.unsqueeze(1)).float()
        provers = self.protocol.prover_names
        seen = {
            name: self._prover_sees(name) if name in provers else self._verifier_sees(name)
            for name in self.protocol.agent_names
        }
        lead = [self.num_envs, 1]
        groups = {}
        for name, own in seen.items():
            own["round"] = at_round
            own["mask"] = self.protocol.speaks(name, self.round, self.seeds) & self._goes_on(name)
            groups[name] = TensorDict({n: value.unsqueeze(1) for n, value in own.items()}, lead)
        told = {"label": self.label.unsqueeze(1), "pair": self.pair.unsqueeze(1)}
        return TensorDict(groups | told, self.batch_size)

    def _goes_on(self, name: str) -> Tensor:
        """Tell whether an agent is undecided, (E,); the simulator goes on while there is one."""
        waits = self.decided.get(ADVERSARY if name == SIMULATOR else name)
        return torch.ones_like(self.round) > 0 if waits is None else waits == GO_ON

    def _prover_sees(self, name: str) -> dict[str, Tensor]:
        exists = (torch.arange(self.nodes) < self.size.unsqueeze(1)).float().repeat(1, 2)
        sides = torch.arange(2 * self.nodes) // self.nodes
        before = (self.round - 1).clamp(min=0).reshape(-1, 1, 1)
        every, seen = [], {}
        for prefix, channel in self._places(name).items():
            marks = pointed_at(self.messages[channel], self.nodes)
            barred = self._answering(self.round).unsqueeze(1)
            barred = barred & (sides == self._side(channel, self.round - 1).unsqueeze(1))
            every.append(marks)
            seen[f"{prefix}last"] = marks.gather(2, before.expand_as(marks))[..., 0]
            seen[f"{prefix}choices"] = exists.masked_fill(barred, 0.0)
        return seen | {
            "adjacency": union(self.graphs),
            "nodes": self.features.flatten(1, 2),
            "exists": exists,
            "marks": torch.cat(every, -1),
        }

    def _verifier_sees(self, name: str) -> dict[str, Tensor]:
        [channel] = self._places(name).values()
        messages = self.messages[channel]
        if name == SIMULATOR:
            rounds = torch.arange(self.protocol.max_message_rounds)
            told = self.protocol.speaks(ADVERSARY, rounds, self.seeds.unsqueeze(1))
            messages = messages.masked_fill(~told, -1)
        asked = self._questions
        if len(asked):
            questions, answers = messages[:, asked], messages[:, asked + 1]
        else:
            questions = answers = torch.full((self.num_envs, 1), -1)
        claimed, facts = claims(questions, answers, self.graphs)
        return {"said": said(messages, self.graphs), "claimed": claimed, "facts": facts}


def _require_one_channel(protocol: Protocol) -> None:
    channels = max((protocol.visible(name) for name in protocol.deciders), key=len, default=[])
    if len(channels) != 1 or protocol.random_stances:
        raise ConfigError(
            f"GraphIsomorphism has one message a round for a verifier, and that of "
            f"{type(protocol).__name__} has the channels {', '.join(channels)}, random_stances="
            f"{protocol.random_stances}; take a protocol with one channel and fixed stances"
        )


def _wide(order: Tensor, width: int) -> Tensor:
    return order.unsqueeze(-1).expand(*order.shape, width)
