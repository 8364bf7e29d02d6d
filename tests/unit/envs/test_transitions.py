"""Transitions of batches, the buffer that keeps them, and what draws from it and explores."""

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from lightning_rl.envs import CopyEvery, Polyak, TransitionBuffer
from lightning_rl.envs.batches import handed_out
from lightning_rl.envs.networks.distributions import TanhGaussian
from lightning_rl.envs.networks.exploring import EpsilonGreedy, PartlyUniform
from lightning_rl.envs.networks.space import Discrete, Observed, Space
from lightning_rl.envs.transitions import Transitions, transitions_of
from lightning_rl.errors import ConfigError

WALKER = SimpleNamespace(
    space=Space(
        {"place": Observed((1,)), "picture": Observed((1,), torch.uint8)}, {"move": Discrete(2)}
    )
)


def batch():
    """Two environments, three steps; what is seen is 10 e + t, and 100 more after a step.

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
    """Rows that can be told apart."""
    values = torch.tensor(numbers, dtype=torch.float32)
    own = {"observations": {"observation": values}, "rewards": values}
    return TensorDict({"terminated": values > 0, "agent": own}, [len(numbers)])


def numbers(some):
    return some["agent", "rewards"].tolist()


def test_each_step_knows_what_followed_it():
    found = transitions_of(batch(), {"walker": WALKER})
    own = found["walker"]
    # By time, then by environment: the oldest first.
    assert own["observations", "place"].flatten().tolist() == [0, 10, 1, 11, 2, 12]
    after = own["following", "place"].flatten().tolist()
    # Where it was cut it is what was seen then, not the next episode's begin; nothing follows an
    # end, and the row of environment 1 after step 0 is never looked at.
    assert [after[0], *after[2:]] == [1, 101, 12, 102, 112]
    assert found["terminated"].tolist() == [False, True, False, False, False, False]
    assert own["actions", "move"].tolist() == [0, 1, 1, 1, 0, 0]
    assert own["following", "picture"].dtype == torch.uint8
    assert "logprobs" not in set(own.keys())


def test_an_agents_transitions_have_its_own_shape():
    data = transitions_of(batch(), {"walker": WALKER})
    data["walker", "rewards"] = torch.ones(6, 2)  # a group of two
    steps = Transitions.of(data, "walker", "move")
    assert steps.terminated.shape == steps.rewards.shape
    assert steps.terminated[1].tolist() == [True, True]
    assert set(steps.observations) == set(steps.following) == {"place", "picture"}


def test_the_newest_stay():
    buffer = TransitionBuffer(capacity=4)
    for some in ([1, 2, 3], [4, 5], [6]):
        buffer.add(rows(*some))
    assert len(buffer) == 4
    assert buffer.added == 6
    seen = set(numbers(buffer.sample(200, torch.Generator().manual_seed(0))))
    assert seen == {3, 4, 5, 6}


def test_a_batch_that_is_larger_than_the_buffer_leaves_its_end():
    buffer = TransitionBuffer(capacity=2)
    buffer.add(rows(1, 2, 3, 4, 5))
    assert set(numbers(buffer.sample(50))) == {4, 5}
    assert buffer.added == 5


def test_drawing_is_uniform_and_seeded():
    buffer = TransitionBuffer(capacity=10)
    buffer.add(rows(*range(5)))
    drawn = numbers(buffer.sample(5000, torch.Generator().manual_seed(1)))
    assert drawn == numbers(buffer.sample(5000, torch.Generator().manual_seed(1)))
    # Of 5000 draws with p = 1/5, the standard deviation of a count is 28.
    assert all(abs(drawn.count(n) - 1000) < 5 * 28.3 for n in range(5))


def test_its_bytes_are_those_of_the_docs():
    buffer = TransitionBuffer(capacity=100)
    seen = {"observation": torch.zeros(1, 3)}
    own = {"observations": seen, "following": seen, "actions": {"action": torch.zeros(1, 1)}}
    own["rewards"] = torch.zeros(1)
    buffer.add(TensorDict({"terminated": torch.zeros(1, dtype=torch.bool), "agent": own}, [1]))
    assert buffer.nbytes == 33 * 100  # 2 x 3 x 4 + 4 + 4 + 1


@pytest.mark.parametrize("capacity", [8, 4, 3])
def test_a_buffer_that_goes_on_holds_and_draws_the_same(capacity, tmp_path):
    buffer = TransitionBuffer(capacity)
    buffer.add(rows(1, 2, 3, 4, 5))
    torch.save(buffer.state_dict(), tmp_path / "state")
    buffer.add(rows(9))  # the state is a copy
    again = TransitionBuffer(capacity)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    again.add(rows(9))
    draws = [numbers(b.sample(40, torch.Generator().manual_seed(0))) for b in (buffer, again)]
    assert draws[0] == draws[1]
    assert again.added == buffer.added == 6


def test_a_smaller_buffer_goes_on_with_the_newest():
    buffer, smaller = TransitionBuffer(8), TransitionBuffer(2)
    buffer.add(rows(1, 2, 3))
    smaller.load_state_dict(buffer.state_dict())
    assert set(numbers(smaller.sample(50))) == {2, 3}
    assert smaller.added == 3


def test_other_ranks_share_what_all_had():
    buffer, one = TransitionBuffer(8), TransitionBuffer(8)
    buffer.add(rows(1, 2, 3))
    shares = buffer.state_dict()["ranks"] * 2  # two ranks, and now there is one
    one.load_state_dict({"ranks": shares})
    assert one.added == len(one) == 6
    one.load_state_dict(TransitionBuffer(8).state_dict())
    assert len(one) == 0


def test_only_what_is_needed_is_saved():
    buffer = TransitionBuffer(1_000_000)
    buffer.add(rows(1, 2))
    saved = buffer.state_dict()["ranks"][0]["rows"]["agent"]["rewards"]
    assert saved.untyped_storage().nbytes() == 8


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (rows(1).double(), r"torch.bool \(\) as terminated, but was given torch.float64"),
        (TensorDict({"terminated": torch.ones(1).bool()}, [1]), "was given nothing"),
    ],
)
def test_rows_of_another_environment_are_refused(other, message):
    buffer = TransitionBuffer(4)
    buffer.add(rows(1))
    with pytest.raises(ConfigError, match=message):
        buffer.add(other)


def test_impossible_buffers():
    with pytest.raises(ConfigError, match="capacity=0 must be >= 1"):
        TransitionBuffer(0)
    with pytest.raises(ConfigError, match="empty; add steps before"):
        TransitionBuffer(1).sample(1)


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


# ---------------------------------------------------------------- target networks


def test_target_networks_follow():
    target, source = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for layer, value in ((target, 0.0), (source, 1.0)):
        for parameter in layer.parameters():
            torch.nn.init.constant_(parameter, value)
    Polyak(0.25)(target, source, 1)
    Polyak(0.25)(target, source, 2)
    assert target.weight.item() == pytest.approx(1 - 0.75**2)
    CopyEvery(3)(target, source, 4)
    assert target.bias.item() == pytest.approx(1 - 0.75**2)
    CopyEvery(3)(target, source, 6)
    assert target.bias.item() == 1.0


def test_buffers_of_a_network_follow_too():
    target, source = torch.nn.BatchNorm1d(1), torch.nn.BatchNorm1d(1)
    source(torch.tensor([[1.0], [3.0]]))
    Polyak(0.1)(target, source, 1)
    assert torch.equal(target.running_mean, source.running_mean)


def test_impossible_target_updates():
    with pytest.raises(ConfigError, match=r"Polyak\(tau=0.0\) must be in \(0, 1\]"):
        Polyak(0.0)
    with pytest.raises(ConfigError, match="updates=0 must be >= 1"):
        CopyEvery(0)
