"""Take a training step with nothing but torch: the cost of the same tokens without a library.

A Qwen2 forward written out by hand on unpadded tokens, its gradient and a fused AdamW step. Used as
the floor of `benchmarks/floor.py`, and as an independent check of the library's logprobs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_rl.rollout import Rollout


@dataclass
class Segments:
    """Runs token segments as one unpadded row; each may look at a prefix segment.

    ``index`` (N, L) are the row's positions of a batch of segments, -1 where padded; ``prefix``
    (N, P) those of what they look at besides themselves, or None.
    """

    index: Tensor
    prefix: Tensor | None


class PlainStep:
    """Takes policy-gradient steps on given rollouts, with Hugging Face's Qwen2 weights."""

    def __init__(self, config: object, weights: dict[str, Tensor], lr: float) -> None:
        self.config = config
        self.weights = {
            name: torch.nn.Parameter(weight.detach().clone())
            for name, weight in weights.items()
            if name != "lm_head.weight"  # tied to the embedding
        }
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), lr=lr, weight_decay=0.0, fused=True
        )

    def step(self, rollouts: list[Rollout], advantages: Tensor, share: bool) -> Tensor:
        """Do one forward, backward and AdamW step; return the logprobs (M,) it saw.

        ``advantages`` has one value per completion token, shape (M,). ``share``: run each distinct
        prompt once, instead of once per rollout.
        """
        self.optimizer.zero_grad()
        logprobs = self.logprobs(rollouts, share)
        loss = -((logprobs - logprobs.detach()).exp() * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        return logprobs.detach()

    def logprobs(self, rollouts: list[Rollout], share: bool) -> Tensor:
        """Return logprobs (M,) of all completion tokens, in the rollouts' order."""
        if share:
            tokens, positions, segments, predictors = _shared_layout(rollouts)
        else:
            tokens, positions, segments, predictors = _separate_layout(rollouts)
        w, c = self.weights, self.config
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads  # type: ignore[attr-defined]
        width = c.hidden_size // heads  # type: ignore[attr-defined]
        eps = c.rms_norm_eps  # type: ignore[attr-defined]
        theta = c.rope_parameters["rope_theta"]  # type: ignore[attr-defined]
        angles = positions[:, None] / theta ** (torch.arange(0, width, 2) / width)
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        x = w["model.embed_tokens.weight"][tokens]
        for i in range(c.num_hidden_layers):  # type: ignore[attr-defined]
            p = f"model.layers.{i}."
            h = F.rms_norm(x, x.shape[-1:], w[p + "input_layernorm.weight"], eps)
            q, k, v = (
                F.linear(
                    h,
                    w[f"{p}self_attn.{name}_proj.weight"],
                    w[f"{p}self_attn.{name}_proj.bias"],
                ).unflatten(-1, (count, width))
                for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            )
            attended = _attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v, segments)
            x = x + F.linear(attended.flatten(1), w[p + "self_attn.o_proj.weight"])
            h = F.rms_norm(x, x.shape[-1:], w[p + "post_attention_layernorm.weight"], eps)
            gate = F.silu(F.linear(h, w[p + "mlp.gate_proj.weight"]))
            up = F.linear(h, w[p + "mlp.up_proj.weight"])
            x = x + F.linear(gate * up, w[p + "mlp.down_proj.weight"])
        x = F.rms_norm(x[predictors], x.shape[-1:], w["model.norm.weight"], eps)
        targets = torch.tensor([t for r in rollouts for t in r.token_ids])
        logits = F.linear(x, w["model.embed_tokens.weight"])
        return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def _attend(q: Tensor, k: Tensor, v: Tensor, segments: list[Segments]) -> Tensor:
    """Attend over the row's segments; (S, H, D) in and out."""
    out = torch.zeros_like(q)
    for segment in segments:
        index, real = segment.index.clamp(min=0), segment.index >= 0
        keys, mask = index, None
        if segment.prefix is not None:
            steps = torch.arange(index.shape[1])
            causal = (steps[:, None] >= steps).expand(len(index), -1, -1)
            seen = (segment.prefix >= 0)[:, None].expand(-1, index.shape[1], -1)
            keys = torch.cat([segment.prefix.clamp(min=0), index], 1)
            mask = torch.cat([seen, causal], 2)[:, None]
        repeats = q.shape[1] // k.shape[1]
        attended = F.scaled_dot_product_attention(
            q[index].transpose(1, 2),
            k[keys].transpose(1, 2).repeat_interleave(repeats, 1),
            v[keys].transpose(1, 2).repeat_interleave(repeats, 1),
            attn_mask=mask,
            is_causal=mask is None,
        ).transpose(1, 2)
        out = out.index_put((index[real],), attended[real])
    return out


def _pad(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows])


def _separate_layout(
    rollouts: list[Rollout],
) -> tuple[Tensor, Tensor, list[Segments], Tensor]:
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[list[int]] = []
    predictors: list[int] = []
    for r in rollouts:
        ids = r.prompt.token_ids + r.token_ids[:-1]  # the last token predicts nothing
        first = len(tokens)
        rows.append(list(range(first, first + len(ids))))
        predictors += rows[-1][len(r.prompt.token_ids) - 1 :]
        tokens += ids
        positions += range(len(ids))
    segments = [Segments(_pad(rows), None)]
    return torch.tensor(tokens), torch.tensor(positions), segments, torch.tensor(predictors)


def _shared_layout(
    rollouts: list[Rollout],
) -> tuple[Tensor, Tensor, list[Segments], Tensor]:
    tokens: list[int] = []
    positions: list[int] = []
    prompts: dict[tuple[int, ...], list[int]] = {}
    for r in rollouts:
        key = tuple(r.prompt.token_ids)
        if key not in prompts:
            prompts[key] = list(range(len(tokens), len(tokens) + len(key)))
            tokens += key
            positions += range(len(key))
    rows: list[list[int]] = []
    prefixes: list[list[int]] = []
    predictors: list[int] = []
    for r in rollouts:
        prefix = prompts[tuple(r.prompt.token_ids)]
        row = list(range(len(tokens), len(tokens) + len(r.token_ids) - 1))
        tokens += r.token_ids[:-1]
        positions += range(len(prefix), len(prefix) + len(row))
        predictors += [prefix[-1], *row]
        if row:
            rows.append(row)
            prefixes.append(prefix)
    segments = [Segments(_pad(list(prompts.values())), None)]
    if rows:
        segments.append(Segments(_pad(rows), _pad(prefixes)))
    return torch.tensor(tokens), torch.tensor(positions), segments, torch.tensor(predictors)
