"""TorchRLPolicy: agents in the form that torchrl's collectors call."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.envs.collector import Agents, Deadline
from lightning_rl.envs.networks.actor_critic import joint_log_prob, sampled
from lightning_rl.envs.networks.space import Space, within
from lightning_rl.envs.torchrl_space import Places


def own_key(name: str) -> tuple[str, str]:
    """Return the key of an agent's entries that are not the environment's."""
    return "lightning_rl", name


class TorchRLPolicy(nn.Module):
    """Writes the agents' actions into a TensorDict."""

    def __init__(
        self,
        agents: Agents,
        spaces: Mapping[str, Space],
        places: Mapping[str, Places],
        deadline: Deadline,
    ) -> None:
        super().__init__()
        self._spaces = spaces
        self._agents = (agents,)  # a tuple hides them: they are the module's
        self._places = places
        self._deadline = deadline
        self.begin(0, greedy=False)

    def begin(self, environments: int, greedy: bool) -> None:
        """Reset; the next call is the first step after an environment reset."""
        self.step = 0
        self._greedy = greedy
        self._states: dict[str, Tensor] = {
            name: agent.begin(environments)
            for name, agent in self._agents[0].items()
            if agent.state_size and environments
        }

    def forward(self, tensordict: Any) -> Any:
        self._deadline.again()
        self.step += 1
        for name, places in self._places.items():
            agent = self._agents[0][name]
            device = agent.device
            seen = {n: value.to(device) for n, value in places.seen(tensordict).items()}
            state = self._states.get(name)
            if state is not None:
                fresh = tensordict.get("is_init").reshape(-1, *[1] * (state.ndim - 1)).to(device)
                state = torch.where(fresh, torch.zeros_like(state), state)
                tensordict.set((*own_key(name), "state"), state.cpu())
            made, after = agent.act(seen, state)
            if after is not None:
                self._states[name] = after
            actions = sampled(made, self._greedy)
            for action, key in places.actions.items():
                drawn = actions[action].cpu()
                tensordict.set((*own_key(name), "actions", action), drawn)
                tensordict.set(key, within(self._spaces[name].actions[action], drawn))
            for action, key in places.logits.items():
                tensordict.set(key, made[action].logits.cpu())  # type: ignore[attr-defined]
            tensordict.set((*own_key(name), "logprobs"), joint_log_prob(made, actions).cpu())
        return tensordict
