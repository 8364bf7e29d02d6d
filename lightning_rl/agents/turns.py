"""How a rollout grows turn by turn, token by token, within its limits; shared by all agents."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby

from lightning_rl.engines.base import Completion, Engine, Sampling
from lightning_rl.rollout import Rollout


def continuation_seed(seed: int, position: int) -> int:
    """The seed of a request that goes on after ``position`` tokens of a completion; 63 bits.

    At 0 it is the rollout's own, so that a first turn is what a single turn would have been. It
    depends on nothing else, so a rollout that was interrupted between two turns ends as if it had
    not been.
    """
    if position == 0:
        return seed
    key = f"{seed}/{position}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


def room(rollout: Rollout, engine: Engine, sampling: Sampling) -> int:
    """Tokens that may still follow; ``max_tokens`` counts all after the prompt, whoever's."""
    budget = min(sampling.max_tokens, engine.max_length - len(rollout.prompt.token_ids))
    return budget - len(rollout.token_ids)


async def generate_turn(
    rollout: Rollout, engine: Engine, sampling: Sampling, max_tokens: int, begun: int = 0
) -> Completion:
    """Let the model go on for at most ``max_tokens`` tokens, and append them as they come.

    ``begun`` is the number of tokens that this turn has already, which count for ``min_tokens``.
    """
    least = min(max_tokens, max(0, sampling.min_tokens - begun))
    completion = await engine.generate(
        rollout.prompt.token_ids + rollout.token_ids,
        replace(sampling, max_tokens=max_tokens, min_tokens=least),
        continuation_seed(rollout.seed, len(rollout.token_ids)),
    )
    rollout.token_ids += completion.token_ids
    rollout.loss_mask += [True] * len(completion.token_ids)
    rollout.logprobs += completion.logprobs
    rollout.versions += completion.versions
    return completion


def append_given(rollout: Rollout, token_ids: Sequence[int]) -> None:
    """Append tokens that the model reads and did not write: no loss, no logprob, no version."""
    rollout.token_ids += token_ids
    rollout.loss_mask += [False] * len(token_ids)
    rollout.logprobs += [0.0] * len(token_ids)
    rollout.versions += [-1] * len(token_ids)


def recorded_turns(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """The turns that a rollout holds: the model's tokens, and the given ones after them.

    Only the last turn's second list may be empty.
    """
    runs = [
        [token for token, _ in run]
        for _, run in groupby(
            zip(rollout.token_ids, rollout.loss_mask, strict=True), key=lambda pair: pair[1]
        )
    ]
    answers = runs[1::2] + [[]] * (len(runs) % 2)
    return list(zip(runs[0::2], answers, strict=True))
