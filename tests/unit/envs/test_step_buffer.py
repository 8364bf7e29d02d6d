"""Test single steps of batches, the buffer that keeps them, and how agents explore."""

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from lightning_rl.envs.batches import handed_out
from lightning_rl.envs.networks.distributions import TanhGaussian
from lightning_rl.envs.networks.exploring import EpsilonGreedy, PartlyUniform
from lightning_rl.envs.networks.space import Discrete, Observed, Space
from lightning_rl.envs.replay import StepBuffer, single_steps

WALKER = SimpleNamespace(
    action="move",
    space=Space(
        {"place": Observed((1,)), "picture": Observed((1,), torch.uint8)}, {"move": Discrete(2)}
    ),
)


def batch():
    """Make two environments, three steps; what is seen is 10 e + t, and 100 more after a step.

    Environment 0 is cut after its step 1, environment 1 comes to its end after step 0.
    """
    seen = torch.tensor([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]).unsqueeze(-1)
    done = torch.tensor([[False, True, False], [True, False, False]])
    terminated = torch.tensor([[False, False, False], [True, False, False]])
    own = {
        "observations": {"place": seen, "picture": seen.to(torch.uint8)},
        "actions": {"move": torch.tensor([[0, 1, 0], [1, 1, 0]])},
        "logprobs": torch.zeros(2, 3),
        "rewards": seen.squeeze(-1) / 10,
    }
    last = torch.tensor([[101.0], [102.0], [112.0]])
    after = {"observations": {"place": last, "picture": last.to(torch.uint8)}}
    steps = TensorDict({"done": done, "terminated": terminated, "walker": own}, [2, 3])
    ends = TensorDict({"place": torch.tensor([1, 2, 5]), "walker": after}, [3])
    return handed_out(TensorDict({"steps": steps, "ends": ends}, []), {"walker": WALKER.space})


def rows(*numbers):
    """Return rows that can be told apart."""
    values = torch.tensor(numbers, dtype=torch.float32)
    return TensorDict({"agent": {"observation": values}}, [len(numbers)])


def sampled(buffer, count):
    torch.manual_seed(0)
    return buffer.sample(count)["agent", "observation"].tolist()


def test_each_step_knows_what_followed_it():
    own = single_steps(batch(), {"walker": WALKER})["walker"]
    # The order is by time, then by environment: the oldest first.
    assert own["place"].flatten().tolist() == [0, 10, 1, 11, 2, 12]
    after = own["next", "place"].flatten().tolist()
    # Where it was cut it is what was seen then, not the next episode's begin; nothing follows an
    # end, and the row of environment 1 after step 0 is never looked at.
    assert [after[0], *after[2:]] == [1, 101, 12, 102, 112]
    assert own["next", "terminated"].flatten().tolist() == [False, True] + [False] * 4
    assert own["next", "reward"].flatten().tolist() == pytest.approx([0, 1, 0.1, 1.1, 0.2, 1.2])
    assert own["action"].tolist() == [0, 1, 1, 1, 0, 0]
    assert own["next", "picture"].dtype == torch.uint8
    assert "action_log_prob" not in set(own.keys())


def test_what_ends_an_episode_ends_it_for_each_of_a_group():
    data = batch()
    data["next", "walker", "reward"] = torch.ones(2, 3, 2, 1)  # a group of two
    own = single_steps(data, {"walker": WALKER})["walker"]
    assert own["next", "terminated"].shape == own["next", "done"].shape == (6, 2, 1)
    assert own["next", "terminated"][1].flatten().tolist() == [True, True]


def test_the_newest_stay():
    buffer = StepBuffer(capacity=4)
    for some in ([1, 2, 3], [4, 5], [6]):
        buffer.add(rows(*some))
    assert len(buffer) == 4
    assert buffer.added == 6
    seen = set(sampled(buffer, 200))
    assert seen == {3, 4, 5, 6}


def test_a_batch_that_is_larger_than_the_buffer_leaves_its_end():
    buffer = StepBuffer(capacity=2)
    buffer.add(rows(1, 2, 3, 4, 5))
    assert set(sampled(buffer, 50)) == {4, 5}
    assert buffer.added == 5


@pytest.mark.parametrize("capacity", [8, 4, 3])
def test_a_buffer_that_goes_on_holds_and_draws_the_same(capacity, tmp_path):
    buffer = StepBuffer(capacity)
    buffer.add(rows(1, 2, 3, 4, 5))
    torch.save(buffer.state_dict(), tmp_path / "state")
    buffer.add(rows(9))  # the state is a copy
    again = StepBuffer(capacity)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    again.add(rows(9))
    draws = [sampled(b, 40) for b in (buffer, again)]
    assert draws[0] == draws[1]
    assert again.added == buffer.added == 6


def test_a_smaller_buffer_goes_on_with_the_newest():
    buffer, smaller = StepBuffer(8), StepBuffer(2)
    buffer.add(rows(1, 2, 3))
    smaller.load_state_dict(buffer.state_dict())
    assert set(sampled(smaller, 50)) == {2, 3}
    assert smaller.added == 3


def test_other_ranks_share_what_all_had():
    buffer, one = StepBuffer(8), StepBuffer(8)
    buffer.add(rows(1, 2, 3))
    shares = buffer.state_dict()["ranks"] * 2  # two ranks, and now there is one
    one.load_state_dict({"ranks": shares})
    assert one.added == len(one) == 6
    one.load_state_dict(StepBuffer(8).state_dict())
    assert len(one) == 0


def test_the_steps_alone_are_saved_with_the_bytes_of_the_docs():
    buffer = StepBuffer(1_000_000)
    seen = {"observation": torch.zeros(1, 3)}
    over = torch.zeros(1, 1, dtype=torch.bool)
    after = {**seen, "reward": torch.zeros(1, 1), "done": over, "terminated": over}
    buffer.add(TensorDict({"agent": {**seen, "action": torch.zeros(1, 1), "next": after}}, [1]))
    saved = TensorDict(buffer.state_dict()["ranks"][0]["rows"])
    # 2 x 3 x 4 for what is seen, 4 + 4 for action and reward, and two flags.
    assert sum(t.untyped_storage().nbytes() for t in saved.values(True, True)) == 34


# ---------------------------------------------------------------- exploring


def test_epsilon_greedy_chances():
    made = EpsilonGreedy(torch.tensor([[1.0, 3.0, -torch.inf, 2.0]]), epsilon=0.3)
    # Three are allowed: 0.1 each, and 0.7 more for the best.
    chances = [0.1, 0.8, 0.0, 0.1]
    assert made.probs[0].tolist() == pytest.approx(chances)
    assert float(made.log_prob(torch.tensor([1])).exp()) == pytest.approx(0.8)
    entropy = -sum(p * math.log(p) for p in chances if p)
    assert float(made.entropy()) == pytest.approx(entropy)
    assert made.mode().tolist() == [1]
    torch.manual_seed(0)
    drawn = EpsilonGreedy(made.logits.expand(4000, -1), epsilon=0.3).sample()
    # sqrt(4000 x 0.8 x 0.2) = 25.
    assert abs(int((drawn == 1).sum()) - 3200) < 5 * 25
    assert not bool((drawn == 2).any())


def test_epsilon_greedy_without_epsilon_is_the_best_and_kl_is_known():
    greedy = EpsilonGreedy(torch.tensor([[0.0, 1.0]]))
    assert greedy.sample().tolist() == [1]
    assert float(greedy.entropy()) == 0
    some = EpsilonGreedy(torch.tensor([[0.0, 1.0]]), epsilon=0.5)
    assert float(greedy.kl(some)) == pytest.approx(-math.log(0.75))
    assert EpsilonGreedy(torch.tensor([[0.0, 1.0]]), one_hot=True).mode().tolist() == [[0, 1]]


def test_partly_uniform():
    bounds = torch.tensor([-2.0]), torch.tensor([2.0])
    policy = TanhGaussian(torch.full((6000, 1), 5.0), torch.full((6000, 1), -3.0), *bounds)
    made = PartlyUniform(policy, share=0.5)
    torch.manual_seed(0)
    drawn = made.sample()
    # The policy's own actions are close to 2, so what is below 1 is uniform: 3/4 of the half.
    low = int((drawn < 1).sum())
    assert abs(low - 6000 * 0.375) < 5 * math.sqrt(6000 * 0.375 * 0.625)
    assert torch.equal(made.mode(), policy.mode())
    # Where the policy never goes, the density is share / volume.
    assert float(made.log_prob(torch.zeros(6000, 1))[0].exp()) == pytest.approx(0.5 / 4)
    none = PartlyUniform(policy, share=0.0)
    action = policy.sample()
    torch.testing.assert_close(none.log_prob(action), policy.log_prob(action), rtol=1e-4, atol=0)
