"""RoundPlan: a protocol's schedule for one seed, in plain numbers."""

from dataclasses import dataclass

import torch

from lightning_rl.games.protocols.base import GO_ON, Protocol


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The schedule of one interaction: who speaks where in each round, and what agents argue for.

    ``channels[agent][round]`` are those that an agent speaks on, ``stances`` are 2 for deciders,
    and ``deciding[agent]`` are the rounds in which a decider's decision counts.
    """

    channels: dict[str, list[list[str]]]
    stances: dict[str, int]
    deciding: dict[str, list[int]]

    @classmethod
    def of(cls, protocol: Protocol, seed: int) -> "RoundPlan":
        """Return the plan of all rounds for this seed."""
        rounds = torch.arange(protocol.max_message_rounds)
        active = {
            (name, channel): protocol.is_active(name, channel, rounds, seed).tolist()
            for name in protocol.agent_names
            for channel in protocol.visible(name)
        }
        channels = {
            name: [[c for c in protocol.visible(name) if active[name, c][r]] for r in rounds]
            for name in protocol.agent_names
        }
        stances = {name: int(protocol.stance(name, seed)) for name in protocol.prover_names}
        deciding = {
            name: protocol.can_decide(rounds, seed, name).nonzero().flatten().tolist()
            for name in protocol.deciders
        }
        return cls(channels, stances | dict.fromkeys(protocol.deciders, GO_ON), deciding)

    def is_last(self, agent: str, round: int) -> bool:
        """Tell whether this is the last round in which an agent's decision counts."""
        return self.deciding.get(agent, [])[-1:] == [round]

    def speakers(self, round: int) -> list[str]:
        """Return the agents whose turn it is, in the protocol's order."""
        return [name for name, rounds in self.channels.items() if rounds[round]]
