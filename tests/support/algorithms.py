"""One of every public advantage, loss and correction, and a batch with all that they read."""

import inspect
from typing import Any

import torch
from tensordict import TensorDict

from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.correction import Correction
from lightning_rl.algos.kl import EntropyBonus, KLPenalty
from lightning_rl.algos.losses import PolicyLoss, PPOClip, ValueLoss
from lightning_rl.algos.objective import Aggregation, Objective
from lightning_rl.config import names
from lightning_rl.data.episodes import call_numbers
from lightning_rl.models.policy import Scores

OPTIONS: dict[str, dict[str, Any]] = {"TokenSum": {"max_tokens": 8}}
KINDS = (Advantage, Aggregation, Correction, EntropyBonus, KLPenalty, PolicyLoss, ValueLoss)


def parts_of(*kinds: type) -> dict[str, Any]:
    """Return one of every public class of these kinds by its name, as it is by default."""
    public = {name: names.public(name) for name in names.MODULE_OF}
    return {
        name: c(**OPTIONS.get(name, {}))
        for name, c in public.items()
        if inspect.isclass(c) and issubclass(c, kinds) and not inspect.isabstract(c)
    }


def objectives() -> dict[str, Objective]:
    """Return an objective with each loss, correction, KL, bonus and critic's loss, by its name."""
    loss = PPOClip()
    made = {
        PolicyLoss: lambda part: Objective(part),
        Correction: lambda part: Objective(loss, correction=part),
        KLPenalty: lambda part: Objective(loss, kl=part),
        EntropyBonus: lambda part: Objective(loss, entropy=part),
        ValueLoss: lambda part: Objective(loss, value_loss=part),
    }
    return {
        name: make(part) for kind, make in made.items() for name, part in parts_of(kind).items()
    }


def with_all_columns(made: TensorDict) -> TensorDict:
    """Return a batch of at least four rollouts, with all that an advantage or a loss reads."""
    tokens, generator = made["tokens"], torch.Generator().manual_seed(0)
    names = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "token_rewards")
    for name in names:
        noise = 0.3 * torch.randn(len(tokens), generator=generator)
        tokens[name] = (noise - (1 if "logprobs" in name else 0)) * tokens["loss_mask"]
    made["rollouts", "demonstration"][3] = True
    made["rollouts", "baseline"] = torch.rand(len(made["rollouts"]), generator=generator)
    call = tokens["call"] = call_numbers(made)
    tokens["call_reward"] = torch.zeros(len(tokens))
    tokens["state"] = torch.where(call < 0, -1, call % 2)
    of_teacher = torch.randn(len(tokens), 3, generator=generator).log_softmax(-1)
    tokens["teacher_logprobs"] = of_teacher[:, 0].where(tokens["loss_mask"], torch.nan)
    tokens["teacher_ids"] = torch.tensor([[5, 6]]).expand(len(tokens), 2).contiguous()
    tokens["teacher_top"] = of_teacher[:, 1:].contiguous()
    return made


def imagined(batch: TensorDict) -> Scores:
    """Return scores of an imaginary policy, as leaves."""
    live = batch["tokens", "loss_mask"].nonzero().squeeze(1)
    logprobs, values = (
        (batch["tokens", name][live] + 0.1).requires_grad_() for name in ("ref_logprobs", "values")
    )
    likeliest = None
    if "teacher_ids" in batch["tokens"]:
        likeliest = torch.full_like(batch["tokens", "teacher_top"][live], -1.5)
    entropy = (-logprobs.detach()).requires_grad_()
    return Scores(live, logprobs, entropy, values, likeliest=likeliest)
