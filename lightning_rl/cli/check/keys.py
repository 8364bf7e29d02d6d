"""One process's share of the activations of a pack that several compute together."""

from tensordict import TensorDict

from lightning_rl.models.attention.packed import build_layout
from lightning_rl.models.parallel.queries import most_keys
from lightning_rl.models.parallel.sharing import head_counts, head_ranks
from lightning_rl.models.policy import Policy
from lightning_rl.models.recompute import layers_of


def bytes_of_all_keys(policy: Policy, pack: TensorDict, ranks: int, width: int) -> float:
    """Return the bytes that each of ``ranks`` ranks that compute a pack together has in addition to
    its share.

    If they split queries, a layer keeps the keys and values of all tokens that its kernel reads
    (with gradient checkpointing, those of one layer). ``width``: bytes per number.
    """
    if ranks == 1:
        return 0.0
    text, layers = policy.lm.config.get_text_config(), layers_of(policy)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keeping = sum(not layer.gradient_checkpointing for layer in layers) or 1
    heads = head_counts(text, 1 if policy.tensor is None else policy.tensor.size)
    together = head_ranks(ranks, *heads)
    places = ranks // together
    segments = build_layout(pack).segments
    seen = most_keys(segments, places) - most_keys(segments, 1) / places
    # What is measured has keys once for each query head.
    extra: float = keeping * width * 2 * seen * heads[0] // together * size
    return extra
