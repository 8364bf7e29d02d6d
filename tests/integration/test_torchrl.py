"""Test torchrl's MCAdvantage, whose import takes seconds, on a view of the packed batch."""

import pytest
from torchrl.data import ListStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from lightning_rl.algos.advantages import GRPO
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.views import as_torchrl


def test_mc_advantage_agrees_with_grpo(random_rollouts):
    rollouts = random_rollouts(3)
    for i, rollout in enumerate(rollouts):
        rollout.completion = f"answer {i}"
    batch = pack_rollouts(rollouts)
    buffer = ReplayBuffer(
        storage=ListStorage(12), transform=MCAdvantage(grpo_size=3, prompt_key="group_id")
    )
    buffer.extend(as_torchrl(batch, rollouts))
    assert len(buffer) == 12
    theirs = {row["response"]: row["advantage"].item() for row in buffer[:]}
    ours = GRPO()(batch)["tokens"]
    place = 0
    for rollout in rollouts:
        place += len(rollout.prompt.token_ids) + len(rollout.token_ids)
        own = ours["advantages"][:place][-len(rollout.token_ids) :][rollout.loss_mask]
        # Theirs is a / max(std, 1e-6), ours a / (std + 1e-6); both in float32.
        assert own.tolist() == pytest.approx([theirs[rollout.completion]] * len(own), abs=1e-5)
    assert any(abs(value) > 0.5 for value in theirs.values())
