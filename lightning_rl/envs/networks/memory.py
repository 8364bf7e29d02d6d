"""Bodies with a memory of the episode."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.bodies import Body, MLPBody
from lightning_rl.envs.networks.space import Space
from lightning_rl.errors import ConfigError, require_at_least


class RecurrentBody(Body):
    """A body with a memory, which is empty at the beginning of an episode.

    ``state_size``: size of its memory per environment.
    """

    state_size: int

    @abstractmethod
    def step(self, observations: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (*B, F) of one step, and the memory (*B, S) after it."""

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError("a recurrent body needs its memory; call step or unroll")

    def unroll(self, observations: Mapping[str, Tensor], state: Tensor, begins: Tensor) -> Tensor:
        """Return features (L, N, *A, F) of clips of L steps, from initial memories (N, *A, S).

        ``begins`` (L, N): True where an episode begins, which empties the memory.
        """
        features = []
        for step in range(begins.shape[0]):
            fresh = begins[step].reshape(-1, *[1] * (state.ndim - 1))
            own = {name: value[step] for name, value in observations.items()}
            made, state = self.step(own, torch.where(fresh, torch.zeros_like(state), state))
            features.append(made)
        return torch.stack(features)


@configurable
class GRUBody(RecurrentBody):
    """A gated recurrent unit on top of another body (Cho et al. 2014).

    Args:
        body: computes the features that the unit reads.
        hidden: size of its memory, and number of its features.

    Raises:
        ConfigError: for a size below 1, or a recurrent ``body``.
    """

    def __init__(self, body: Body | None = None, hidden: int = 64) -> None:
        super().__init__()
        require_at_least(1, hidden=hidden)
        if isinstance(body, RecurrentBody):
            raise ConfigError(
                "GRUBody(body=...): the inner body must not have a memory; use MLPBody"
            )
        self.body = body if body is not None else MLPBody([64])
        self.hidden = self.state_size = hidden

    def build(self, space: Space) -> int:
        self.cell = nn.GRUCell(self.body.build(space), self.hidden)
        return self.hidden

    def step(self, observations: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(observations)
        after = self.cell(features.flatten(0, -2), state.flatten(0, -2)).reshape(state.shape)
        return after, after
