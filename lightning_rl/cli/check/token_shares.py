"""What one of several processes has of the activations of a pack that they compute together."""

from math import ceil
from typing import NamedTuple

from tensordict import TensorDict

from lightning_rl.cli.check.allocations import Held
from lightning_rl.models.attention import build_layout
from lightning_rl.models.policy import Policy
from lightning_rl.models.query_shares import most_keys
from lightning_rl.models.recompute import layers_of
from lightning_rl.models.sharing import head_counts, head_ranks


class TokenShare(NamedTuple):
    """The share of one of so many ``ranks``, of which those in different ``places`` share queries.

    ``again`` are bytes that it has beside its share.
    """

    ranks: int = 1
    places: int = 1
    again: float = 0.0

    def of(self, held: Held) -> Held:
        """Of what one has that computes the pack alone. Masks are of all queries of a place."""
        states = held.states / self.ranks + held.masks / self.places + self.again
        return held._replace(states=ceil(states), masks=0)


def token_share(policy: Policy, pack: TensorDict, ranks: int, width: int) -> TokenShare:
    """The share of each of the ranks that compute a pack together.

    Where ranks share queries, a layer keeps the keys and values that its kernel reads of all tokens
    (with gradient checkpointing, one layer).

    Args:
        policy: what computes.
        pack: what is computed.
        ranks: how many they are; 1: it is computed alone.
        width: bytes of a number.
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
