"""RoundPlan: what one seed makes of a protocol, in plain numbers."""

from dataclasses import dataclass

import torch

from lightning_rl.games.protocols.base import GO_ON, Protocol


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Who speaks where in each round of one interaction, and what each agent argues for.

    ``channels[agent][round]`` are those that an agent speaks on, ``stances`` are 2 for agents that
    decide, ``deciding[agent]`` are the rounds in which a decision of such an agent counts.
    """

    channels: dict[str, list[list[str]]]
    stances: dict[str, int]
    deciding: dict[str, list[int]]

    @classmethod
    def of(cls, protocol: Protocol, seed: int) -> "RoundPlan":
        """All rounds at once."""
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
        """Tell whether an agent's decision counts, and none of it will in a later round."""
        return self.deciding.get(agent, [])[-1:] == [round]

    def speakers(self, round: int) -> list[str]:
        """Agents whose turn it is, in the protocol's order."""
        return [name for name, rounds in self.channels.items() if rounds[round]]
