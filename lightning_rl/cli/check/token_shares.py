"""One process's share of the activations of a pack that several compute together."""

from math import ceil
from typing import NamedTuple

from tensordict import TensorDict

from lightning_rl.cli.check.allocations import Held
from lightning_rl.models.attention.packed import build_layout
from lightning_rl.models.parallel.queries import most_keys
from lightning_rl.models.parallel.sharing import head_counts, head_ranks
from lightning_rl.models.policy import Policy
from lightning_rl.models.recompute import layers_of


class TokenShare(NamedTuple):
    """The share of one of ``ranks`` processes, whose queries are split over ``places``.

    ``again`` are the bytes that it has in addition to its share.
    """

    ranks: int = 1
    places: int = 1
    again: float = 0.0

    def of(self, held: Held) -> Held:
        """Scale the usage of a process that computes the pack alone; masks cover the queries of a
        place.
        """
        states = held.states / self.ranks + held.masks / self.places + self.again
        return held._replace(states=ceil(states), masks=0)


def token_share(policy: Policy, pack: TensorDict, ranks: int, width: int) -> TokenShare:
    """Return the share of each rank of those that compute a pack together.

    If ranks split queries, a layer keeps the keys and values of all tokens that its kernel reads
    (with gradient checkpointing, those of one layer).

    Args:
        policy: the policy that computes.
        pack: the pack that is computed.
        ranks: the number of ranks; 1: no sharing.
        width: bytes per number.
    """
    if ranks == 1:
        return TokenShare()
    text, layers = policy.lm.config.get_text_config(), layers_of(policy)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keeping = sum(not layer.gradient_checkpointing for layer in layers) or 1
    heads = head_counts(text, 1 if policy.tensor is None else policy.tensor.size)
    together = head_ranks(ranks, *heads)
    places, query = ranks // together, heads[0]
    segments = build_layout(pack).segments
    seen = most_keys(segments, places) - most_keys(segments, 1) / places
    # What is measured has keys once for each query head.
    again = keeping * width * 2 * seen * query // together * size
    return TokenShare(ranks, places, again)
