"""A check that packed scoring is exact for an architecture, before anything is learned from it."""

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Prompt, Rollout

MAX_GAP = 1e-3  # nats; rounding reaches 1e-5, a token that sees too much or too little 1e-1
ADVICE = "use another model, such as Qwen, Llama, Mistral, Gemma 3 or GPT-2"


@torch.no_grad()
def require_exact_packing(lm: PreTrainedModel, score: Callable[[TensorDict], Tensor]) -> None:
    """Compare ``score`` (logprobs (M,) of a pack) with the model's own forward, rollout by rollout.

    Some architectures mix tokens outside of attention (state spaces, convolutions), or compute more
    between body and output head than packed scoring knows of. A few tokens show it.

    Raises:
        ConfigError: if packed scoring fails, or is not exact.
    """
    if any(parameter.is_meta for parameter in lm.parameters()):
        return  # a sharded strategy fills it in later
    name = type(lm).__name__
    # Token ids high enough to miss the padding token, whose embedding may be zero.
    rollouts = [
        _rollout([7, 4, 6], [5, 3, 4, 6]),
        _rollout([7, 4, 6], [3, 7]),
        _rollout([4, 6], [5, 7, 3]),
    ]
    try:
        packed = score(pack_rollouts(rollouts).to(lm.device))
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{name} cannot score packed rollouts ({error}); {ADVICE}") from error
    implementation = lm.config._attn_implementation
    lm.set_attn_implementation("eager")
    try:
        alone = torch.cat([_score_alone(lm, rollout) for rollout in rollouts])
    finally:
        lm.set_attn_implementation(implementation)
    gap = float((packed - alone).abs().nan_to_num(torch.inf).max())
    if gap > MAX_GAP:
        raise ConfigError(
            f"{name} scores packed rollouts {gap:.3g} nats (bound {MAX_GAP:g}) away from the same "
            f"rollouts alone: packing is not exact for this architecture; {ADVICE}"
        )


def _rollout(prompt_ids: list[int], token_ids: list[int]) -> Rollout:
    count, prompt = len(token_ids), Prompt("parity", "", prompt_ids)
    return Rollout(prompt, "", 0, 0, 1.0, token_ids, [True] * count, [0.0] * count, [0] * count)


def _score_alone(lm: PreTrainedModel, rollout: Rollout) -> Tensor:
    ids = torch.tensor(rollout.prompt.token_ids + rollout.token_ids, device=lm.device)
    start = len(rollout.prompt.token_ids)
    logits = lm(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[start:, None]).squeeze(-1)
