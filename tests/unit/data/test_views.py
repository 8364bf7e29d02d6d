"""Test views of the packed batch, taken by torchrl itself: its buffers and its GAE."""

import pytest
import torch
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.objectives.value import GAE as TorchRLGAE

from lightning_rl.algos.advantages import GAE
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.views import as_padded, as_steps, as_torchrl
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import RolloutStatus


@pytest.fixture
def rollouts(random_rollouts):
    """Return four groups of three, with holes in their masks."""
    rollouts = random_rollouts(3)
    for i, rollout in enumerate(rollouts):
        rollout.completion = f"answer {i}"
        rollout.reward_parts = {"right": rollout.reward, "seldom": None if i else 2.0}
        rollout.rows[0].versions = [i % 3 if mask else -1 for mask in rollout.loss_mask]
    return rollouts


def test_padding_keeps_every_token_in_its_row(make_rollout):
    batch = pack_rollouts(
        [make_rollout([3, 4], [5]), make_rollout([6], [7, 8, 1], versions=[2, 2, 3])]
    )
    batch["tokens", "advantages"] = torch.arange(7.0)
    padded = as_padded(batch, pad_token_id=9)
    assert padded.batch_size == (2, 4)
    assert padded["input_ids"].tolist() == [[3, 4, 5, 9], [6, 7, 8, 1]]
    assert padded["attention_mask"].tolist() == [[True, True, True, False], [True] * 4]
    assert padded["versions"].tolist() == [[-1, -1, 0, -1], [-1, 2, 2, 3]]
    assert padded["advantages"].tolist() == [[0, 1, 2, 0], [3, 4, 5, 6]]
    assert as_padded(batch, length=6).batch_size == (2, 6)
    with pytest.raises(ConfigError, match=r"length=3 is less than the 4 tokens"):
        as_padded(batch, length=3)


def test_a_row_per_rollout_has_its_numbers_and_its_text(rollouts):
    rollouts[4].status, rollouts[4].finish_reason = RolloutStatus.COMPLETED, None
    rollouts[5].prompt.prompt = [{"role": "user", "content": "2+2"}]
    view = as_torchrl(pack_rollouts(rollouts), rollouts)
    assert len(view) == len(rollouts) == 12
    for row, rollout in zip(view, rollouts, strict=True):
        own = [v for v in rollout.versions if v >= 0]
        assert row["response"] == rollout.completion
        assert row["group_id"] == rollout.group_id
        assert row["status"] == "completed"
        assert row["next", "reward"].item() == pytest.approx(rollout.reward)
        assert (row["version_min"], row["version_max"]) == (min(own), max(own))
        assert row["reward_parts", "right"] == pytest.approx(rollout.reward)
        there = row["tokens"][row["tokens", "attention_mask"]]
        assert there["input_ids"].tolist() == rollout.prompt.token_ids + rollout.token_ids
    assert view["next", "done"].all()
    assert view["next", "terminated"].all()
    assert view["reward_parts", "seldom"].isnan().tolist() == [False] + [True] * 11
    assert (view[4]["finish_reason"], view[5]["query"]) == ("", "user: 2+2")
    assert as_torchrl(pack_rollouts(rollouts))[2:4].batch_size == (2,)
    with pytest.raises(ConfigError, match="11 rollouts do not match a batch of 12"):
        as_torchrl(pack_rollouts(rollouts), rollouts[1:])


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage])
def test_a_replay_buffer_takes_batches_and_gives_rows_back(rollouts, storage):
    buffer = ReplayBuffer(storage=storage(24), sampler=SamplerWithoutReplacement(), batch_size=12)
    for part in (rollouts[:6], rollouts[6:]):
        buffer.extend(as_torchrl(pack_rollouts(part), part, length=32))
    assert len(buffer) == 12
    sample = buffer.sample()
    assert sorted(sample["response"]) == sorted(r.completion for r in rollouts)
    by_text = {r.completion: r for r in rollouts}
    for row in sample:
        rollout = by_text[row["response"]]
        assert row["reward"].item() == pytest.approx(rollout.reward)
        there = row["tokens"][row["tokens", "attention_mask"]]
        assert there["input_ids"].tolist() == rollout.prompt.token_ids + rollout.token_ids


def test_a_buffer_on_disk_takes_the_numbers(rollouts):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(12), batch_size=12)
    buffer.extend(as_torchrl(pack_rollouts(rollouts)))
    assert buffer[:]["next", "reward"].squeeze(1).tolist() == [r.reward for r in rollouts]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5)])
def test_gae_agrees_with_torchrl(random_batch, gamma, lam):
    batch = random_batch(5, groups=6, longest=30)
    generator = torch.Generator().manual_seed(0)
    for name in ("values", "token_rewards"):
        values = torch.randn(len(batch["tokens"]), generator=generator, dtype=torch.double)
        batch["tokens", name] = values * batch["tokens", "loss_mask"]
    batch["rollouts", "reward"] = batch["rollouts", "reward"].double()
    batch["tokens", "rollout_logprobs"] = batch["tokens", "rollout_logprobs"].double()
    theirs = TorchRLGAE(
        gamma=torch.tensor(gamma, dtype=torch.double),
        lmbda=torch.tensor(lam, dtype=torch.double),
        value_network=None,
        vectorized=False,
    )(as_steps(batch))
    ours = as_steps(GAE(gamma, lam, whiten=False)(batch))
    mask = ours["mask"]
    assert mask.sum() == batch["tokens", "loss_mask"].sum() > 100
    for name in ("advantage", "value_target"):
        # float64: a few roundings per step of the recursion.
        torch.testing.assert_close(theirs[name][mask], ours[name][mask], rtol=1e-12, atol=1e-12)
    assert ours["action"].shape == ours["action_log_prob"].shape == mask.shape


def test_a_rollout_without_steps_is_refused(make_rollout):
    batch = pack_rollouts([make_rollout([3], [4]), make_rollout([3], [4], loss_mask=[False])])
    with pytest.raises(ConfigError, match="rollout 1 has no token that the model wrote"):
        as_steps(batch)
