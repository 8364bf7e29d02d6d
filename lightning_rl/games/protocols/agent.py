"""ProtocolAgent: a conversation between several roles of a rollout, governed by a protocol."""

import asyncio
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from lightning_rl.agents.base import within
from lightning_rl.config.arguments import configurable
from lightning_rl.engines.sampling import seed_of
from lightning_rl.errors import ConfigError
from lightning_rl.games.protocols.base import Protocol
from lightning_rl.games.protocols.conversation import Conversation
from lightning_rl.games.protocols.scenario import Scenario
from lightning_rl.rollout import Message, Rollout
from lightning_rl.serving.agent import SessionAgent
from lightning_rl.serving.results import Ending
from lightning_rl.serving.session import Session


@configurable
class ProtocolAgent(SessionAgent):
    """Plays a protocol about each row of data; the protocol's agents are roles of the rollout.

    Each role is paid its own reward by the protocol (``role_rewards``). The ``environment_reward``
    is the verifier's (the mean over all deciders, or over all agents if nobody decides); add
    :class:`EnvironmentReward` to use it. ``rollout.completion`` holds who said what, and
    ``rollout.extra`` the ``label`` and the ``class`` that it stands for, the ``decision`` (None if
    none counted), and the numbers of ``rounds``, ``turns``, ``retries`` and ``guesses``. Random
    draws are the same for all rollouts of a group, so that they can be compared.

    Args:
        protocol: who speaks when, and the rewards.
        scenario: what the agents are told, and how their answers are read.
        trained: names of the agents that learn; tokens of others have no loss. None: all.
        max_seconds: limit of a rollout's wall time, in seconds; None: no limit.

    Raises:
        ConfigError: if the protocol has no such agent, if the scenario has no prompt for one of
            them, or if a value is out of range.
    """

    def __init__(
        self,
        protocol: Protocol,
        scenario: Scenario,
        trained: list[str] | None = None,
        max_seconds: float | None = None,
    ) -> None:
        names = list(protocol.agent_names)
        super().__init__(names, None, False, max_seconds)
        if strangers := sorted({*(trained or ())} - {*names}):
            raise ConfigError(
                f"trained={strangers}: {type(protocol).__name__} has no such agent; choose from "
                f"{', '.join(names)}"
            )
        scenario.check(names)
        self.protocol = protocol
        self.scenario = scenario
        self.trained = names if trained is None else trained

    @property
    def name(self) -> str:
        return f"protocol {type(self.protocol).__name__}"

    async def play(self, rollout: Rollout, session: Session) -> Ending:
        own = rollout.prompt.copy()
        columns = {"prompt": own.prompt, **own.columns}
        seed = seed_of(rollout.group_id.encode())
        states = [Conversation.begin(self.protocol, self.scenario, columns, seed)]

        async def talk() -> None:
            while asked := states[-1].asks():
                answers = await asyncio.gather(
                    *(session.chat(chat, model=agent) for agent, chat in asked.items())
                )
                texts = [answer.text for answer in answers]
                states.append(states[-1].after(dict(zip(asked, texts, strict=True))))

        await within(self.max_seconds, talk(), None)
        state = states[-1]
        untrained = {*self.roles} - {*self.trained}
        kind, said = ("done", result(state)) if state.done else ("timeout", {})
        return Ending(kind, said=said, completion=transcript(state), untrained=untrained)


def transcript(conversation: Conversation) -> list[Message]:
    """Return who said what: one message per turn, with the agent's name as its role."""
    return [
        {
            "role": turn.agent,
            "content": turn.answer,
            "round": turn.round,
            "channels": list(turn.said),
            "decision": turn.decision,
        }
        for turn in conversation.turns
    ]


def result(conversation: Conversation) -> Mapping[str, Any]:
    """Return the conversation's outcome, as :func:`note_result` takes it."""
    turns = conversation.turns
    paid = {turn.agent: conversation.rewards[turn.agent] for turn in turns}
    decision, label = conversation.decision, conversation.label
    paying = conversation.protocol.deciders or conversation.protocol.agent_names
    return {
        "reward": fmean(conversation.rewards[agent] for agent in paying),
        "role_rewards": paid,
        "metrics": {
            "right": float(decision == label),
            **{f"reward_{agent}": reward for agent, reward in paid.items()},
        },
        "label": label,
        "class": conversation.scenario.classes[label],
        "decision": decision,
        "rounds": conversation.round,
        "turns": len(turns),
        "retries": sum(turn.retries for turn in turns),
        "guesses": sum(turn.guess for turn in turns),
    }
