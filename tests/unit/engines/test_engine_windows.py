"""Engine and trainer agree on rollouts that are longer than a model's sliding window."""

import asyncio

import pytest
import torch
from transformers import Gemma3TextConfig, MistralConfig

from lightning_rl.agents.base import append_written
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.tiny_models import save_random_model
from tests.support.tolerances import scores_rounding

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
KINDS = {
    "mistral": (MistralConfig, {"sliding_window": 6}),
    "gemma3": (
        Gemma3TextConfig,
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_logprobs_through_windows(tmp_path, make_rollout, name):
    kind, options = KINDS[name]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.2}
    save_random_model(tmp_path / "model", make_tokenizer(), kind, **sizes, **HEADS, **options)
    save_skeleton(str(tmp_path / "model"), tmp_path / "skeleton")
    policy, engine = Policy(str(tmp_path / "model")), TransformersEngine(device="cpu")
    engine.start(tmp_path / "skeleton")
    engine.load_weights(policy.named_weights(), 0)
    prompts = [[3, 4, 5], [5, 6] * 9, [7, 8] * 3]
    sampling = Sampling(max_tokens=20)

    async def write():
        return await asyncio.gather(
            *(engine.generate(prompt, sampling, seed) for seed, prompt in enumerate(prompts))
        )

    rollouts = []
    for group, (prompt, completion) in enumerate(zip(prompts, asyncio.run(write()), strict=True)):
        rollout = make_rollout(prompt, [], group_id=str(group))
        append_written(rollout, completion)
        rollouts.append(rollout)
    engine.close()
    batch = pack_rollouts(rollouts)
    scores = policy(batch)
    written = batch["tokens", "rollout_logprobs"][scores.live]
    assert len(written) > 20
    bound = scores_rounding(policy.lm.config, written)
    torch.testing.assert_close(scores.logprobs.detach(), written, rtol=0, atol=bound)
