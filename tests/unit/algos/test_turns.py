"""Test credit per turn: by hand, in float64, and the same in however many rows and in any order."""

import random
from statistics import fmean, stdev

import pytest
import torch

from benchmarks import turns as benchmark
from benchmarks.support.games import WALK
from lightning_rl import GAE, GRPO, RLOO, GiGPO, ReinforcePlusPlus, RewardToGo, TurnGAE
from lightning_rl.algos.turns import call_rewards
from lightning_rl.data.batch import select
from lightning_rl.data.episodes import calls_of, received
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.rollout import Call, Rollout, Row
from tests.support.tolerances import rounding
from tests.support.turn_rollouts import played, random_episodes, with_values

WRITTEN = ("tokens", "loss_mask")


def credit(batch) -> list[float]:
    """Return the advantages of the model's tokens."""
    return batch["tokens", "advantages"][batch[WRITTEN]].tolist()


@pytest.fixture
def group() -> list[Rollout]:
    """Make three rollouts of two, three and two calls.

    a: paid 0.5 and 0.25, in the states s and t. b: paid 0, 1 and nothing in s, t and s, and 0.5
    beyond. c: paid only as a whole, 0.25, in s and u.
    """
    return [
        played([("s", 2, 0.5), ("t", 1, 0.25)], 0.75, sample_index=0),
        played([("s", 1, 0.0), ("t", 1, 1.0), ("s", 2, None)], 1.5, sample_index=1),
        played([("s", 1, None), ("u", 2, None)], 0.25, sample_index=2),
    ]


# ---------------------------------------------------------------- what falls where


def test_calls_and_what_they_were_paid_by_token(group):
    tokens = pack_rollouts(group)["tokens"]
    # A prompt of one token; after each turn but the last one of the environment's.
    assert tokens["call"].tolist() == [-1, 0, 0, -1, 1, -1, 0, -1, 1, -1, 2, 2, -1, 0, -1, 1, 1]
    assert tokens["call_reward"].tolist() == [0, 0, 0.5, 0, 0.25, *[0] * 3, 1.0, *[0] * 8]
    s, t, u = 0, 1, 2
    assert tokens["state"].tolist() == [
        *(-1, s, s, -1, t),
        *(-1, s, -1, t, -1, s, s),
        *(-1, s, -1, u, u),
    ]


def test_what_no_call_was_paid_falls_on_the_last(group):
    batch = pack_rollouts(group)
    calls = calls_of(batch)
    assert call_rewards(batch, calls).tolist() == [0.5, 0.25, 0, 1, 0.5, 0, 0.25]
    assert calls.episode.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert calls.place.tolist() == [0, 1, 0, 1, 2, 0, 1]


def test_states_of_other_groups_have_other_numbers():
    batch = pack_rollouts([played([("s", 1, None)], 1.0, group_id=g) for g in "aba"])
    assert batch["tokens", "state"].tolist() == [-1, 0, -1, 1, -1, 0]


def test_without_recorded_calls_there_are_no_columns_and_turns_are_calls(make_rollout):
    mask = [True, True, False, True]
    two = [make_rollout([3], [4, 5, 6, 1], loss_mask=mask, reward=1.0) for _ in range(2)]
    batch = pack_rollouts(two)
    assert not {"call", "call_reward", "state"} & set(batch["tokens"].keys())
    assert call_rewards(batch, calls_of(batch)).tolist() == [0, 1] * 2


def test_a_rollout_without_calls_beside_one_with_them(make_rollout, group):
    mask = [True, True, False, True]
    plain = make_rollout([3], [4, 5, 6, 1], loss_mask=mask, reward=2.0, group_id="other")
    batch = pack_rollouts([plain, group[0]])
    assert batch["tokens", "call"].tolist() == [-1, 0, 0, -1, 1, -1, 0, 0, -1, 1]
    assert call_rewards(batch, calls_of(batch)).tolist() == [0, 2, 0.5, 0.25]


@pytest.mark.parametrize(
    ("calls", "place", "where"),
    [([Call(0, 0, 1)], 1, "none"), ([Call(0, 0, 2), Call(0, 1, 2)], 1, "two")],
)
def test_calls_that_are_not_what_was_written_are_refused(make_rollout, calls, place, where):
    rollout = make_rollout([3], [4, 1], calls=calls)
    with pytest.raises(DataError, match=rf"'g/0' recorded .* token {place} .* is in {where} of"):
        pack_rollouts([rollout])


def test_a_reward_on_a_call_that_is_not_trained_on_falls_on_the_last(make_rollout):
    """An opponent that does not learn wrote the second call."""
    calls = [Call(0, 0, 1, reward=0.25), Call(0, 1, 2, reward=0.5), Call(0, 2, 3)]
    rollout = make_rollout([3], [4, 5, 1], loss_mask=[True, False, True], reward=1.0, calls=calls)
    batch = pack_rollouts([rollout])
    assert batch["tokens", "call"].tolist() == [-1, 0, -1, 2]
    assert received(batch, calls_of(batch)).tolist() == [0, 0.25, 0, 0.75]


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0, -2.0])
@pytest.mark.parametrize("token_rewards", [False, True])
def test_an_episode_is_paid_its_reward_whatever_its_calls_were(weight, token_rewards):
    """Reward functions may weigh what the environment paid, and add something else."""
    rollouts = random_episodes(3)
    for rollout in rollouts:
        paid = sum(call.reward or 0.0 for call in rollout.calls)
        rollout.reward = weight * paid + rollout.sample_index / 4
    batch = pack_rollouts(rollouts)
    own = torch.zeros(len(batch["tokens"]))
    if token_rewards:
        own = torch.linspace(-1, 1, len(own)) * batch[WRITTEN]
        batch["tokens", "token_rewards"] = own
    calls = calls_of(batch)
    sums = torch.zeros(len(rollouts)).index_add(0, calls.episode, call_rewards(batch, calls))
    of_episode = calls.episode[calls.of_token]
    penalties = torch.zeros(len(rollouts)).index_add(0, of_episode, own[calls.tokens])
    expected = torch.tensor([rollout.reward for rollout in rollouts]) + penalties
    bound = rounding(len(own), float(expected.abs().max()))
    torch.testing.assert_close(sums, expected, rtol=0, atol=bound)


def test_rounding_is_no_reward():
    """0.1 + 0.2 is not 0.3, in float32 neither: nothing is left over all the same."""
    rollout = played([("s", 1, 0.1), ("s", 1, 0.2), ("s", 1, None)], 0.1 + 0.2)
    batch = pack_rollouts([rollout])
    assert call_rewards(batch, calls_of(batch))[-1] == 0


# ---------------------------------------------------------------- GAE over the tokens of calls


def test_gae_with_rewards_on_calls_by_hand():
    batch = pack_rollouts([played([("s", 2, 0.5), ("t", 1, 0.25)], 1.0)])
    batch["tokens", "values"] = torch.tensor([9, 0.5, 1.0, 9, 0.25])
    batch = GAE(gamma=0.5, lam=0.5, whiten=False)(batch)
    # 0.25 of the 1.0 is beyond what calls were paid. Deltas: 0 + 0.5 * 1 - 0.5 = 0;
    # 0.5 + 0.5 * 0.25 - 1 = -0.375; 0.25 + 0.25 - 0.25 = 0.25. Then -0.375 + 0.25 * 0.25 =
    # -0.3125, and 0 + 0.25 * -0.3125.
    assert batch["tokens", "advantages"].tolist() == [0, -0.078125, -0.3125, 0, 0.25]
    assert batch["tokens", "returns"].tolist() == [0, 0.421875, 0.6875, 0, 0.5]


def in_two_rows(reward: float) -> Rollout:
    """Make calls 0 and 2 in one row, call 1 in another, of a token each; paid 0, 0.5 and rest."""
    rollout = played([("s", 1, 0.0), ("t", 1, None)], reward)
    rollout.rows.append(Row([6, 7], [8], [True], [-1.0], [0]))
    first, last = rollout.calls
    rollout.calls = [first, Call(1, 0, 1, reward=0.5, state="u"), last]
    return rollout


def test_gae_goes_from_call_to_call_and_not_row_by_row():
    batch = pack_rollouts([in_two_rows(1.0)])
    assert batch["tokens", "call"].tolist() == [-1, 0, -1, 2, -1, -1, 1]
    batch["tokens", "values"] = torch.tensor([9, 0.5, 9, 0.25, 9, 9, 1.0])
    tokens = GAE(gamma=0.5, lam=0.5, whiten=False)(batch)["tokens"]
    # Call 2: 0.5 - 0.25 = 0.25. Call 1: 0.5 + 0.5 * 0.25 - 1 = -0.375, and 0.25 * 0.25 more.
    # Call 0: 0 + 0.5 * 1 - 0.5 = 0, and 0.25 * -0.3125.
    assert tokens["advantages"].tolist() == [0, -0.078125, 0, 0.25, 0, 0, -0.3125]


def test_penalties_to_go_are_those_of_later_calls_in_any_row():
    batch = pack_rollouts([in_two_rows(0.0), played([("s", 1, None)], 0.0, group_id="b")])
    batch["tokens", "token_rewards"] = torch.tensor([0, 1.0, 0, 2.0, 0, 0, 4.0, 0, 1.0])
    tokens = ReinforcePlusPlus()(batch)["tokens"]["advantages"]
    ours = tokens[batch[WRITTEN]]
    plain = torch.tensor([7.0, 2.0, 6.0, 1.0])  # call 0: 1 + 4 + 2; call 2; call 1: 4 + 2
    torch.testing.assert_close(ours, (plain - 4.0) / plain.std(correction=0))


# ---------------------------------------------------------------- TurnGAE


def test_turn_gae_by_hand(group):
    batch = pack_rollouts(group[1:2])
    # Values where calls begin: 0.5, 1 and 0.25. Inside a call they are not looked at.
    batch["tokens", "values"] = torch.tensor([9, 0.5, 9, 1.0, 9, 0.25, 7])
    batch = TurnGAE(gamma=0.5, lam=0.5, whiten=False)(batch)
    # 0.5 - 0.25 = 0.25; 1 + 0.125 - 1 = 0.125, and 0.25 * 0.25; 0.5 - 0.5 = 0, and 0.25 * 0.1875
    assert batch["tokens", "advantages"].tolist() == [0, 0.046875, 0, 0.1875, 0, 0.25, 0.25]
    assert batch["tokens", "returns"].tolist() == [0, 0.546875, 0, 1.1875, 0, 0.5, 0.5]


def test_turn_gae_is_gae_where_each_call_is_a_token():
    rollouts = [played([("s", 1, k / 4)] * (k + 1), k / 2, sample_index=k) for k in range(4)]
    ours, theirs = (
        kind(0.9, 0.8, whiten=True)(with_values(pack_rollouts(rollouts)))["tokens"]
        for kind in (TurnGAE, GAE)
    )
    for name in ("advantages", "returns"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_whitened_advantages_of_turns_have_mean_0_and_deviation_1_over_tokens():
    batch = TurnGAE()(with_values(pack_rollouts(random_episodes(5))))
    found = batch["tokens", "advantages"][batch[WRITTEN]]
    assert float(found.mean()) == pytest.approx(0, abs=1e-6)
    assert float(found.std(correction=0)) == pytest.approx(1, abs=1e-5)


# ---------------------------------------------------------------- RewardToGo


def test_reward_to_go_by_hand(group):
    batch = RewardToGo()(pack_rollouts(group))
    # Returns 0.75, 0.25 | 1.5, 1.5, 0.5 | 0.25, 0.25. First calls: less the others' means 0.875,
    # 0.5 and 1.125; second: 0.875, 0.25 and 0.875. Nobody else made a third call, so the others'
    # last ones count: 0.25 and 0.25.
    assert credit(batch) == [-0.125, -0.125, -0.625, 1.0, 1.25, 0.25, 0.25, -0.875, *[-0.625] * 2]


def test_reward_to_go_discounts_from_call_to_call():
    two = [[("s", 3, 0.5), ("t", 2, 1.0)], [("s", 1, 0.25), ("t", 1, 0.0)]]
    rewards = [1.5, 0.25]
    rollouts = [
        played(turns, reward, sample_index=n)
        for n, (turns, reward) in enumerate(zip(two, rewards, strict=True))
    ]
    # Returns 0.5 + 0.5 * 1 = 1 and 1; 0.25 and 0.
    expected = [*[0.75] * 3, 1.0, 1.0, -0.75, -1.0]
    assert credit(RewardToGo(gamma=0.5)(pack_rollouts(rollouts))) == expected


def test_reward_to_go_of_one_reward_at_the_end_is_rloo():
    rollouts = [
        played([("s", 2, None)] * 3, reward, sample_index=n)
        for n, reward in enumerate([1.0, 0.0, 0.25, 0.75])
    ]
    ours, theirs = (credit(kind(pack_rollouts(rollouts))) for kind in (RewardToGo(), RLOO()))
    assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("advantage", [RewardToGo(), RewardToGo(0.9), GiGPO(), GiGPO(2.0)])
def test_a_group_of_one_or_of_equals_has_no_credit(advantage):
    equal = [played([("s", 2, 0.1), ("t", 1, 0.2)], 0.7, sample_index=n) for n in range(7)]
    assert not any(credit(advantage(pack_rollouts(equal[:1]))))
    assert not any(credit(advantage(pack_rollouts(equal))))


# ---------------------------------------------------------------- GiGPO


def test_gigpo_by_hand(group):
    batch = GiGPO(omega=0.5, gamma=0.5, normalize_std=False)(pack_rollouts(group))
    # Rewards 0.75, 1.5 and 0.25, less 5/6.
    episodes = [0.75 - 5 / 6, 1.5 - 5 / 6, 0.25 - 5 / 6]
    # Returns: a 0.625, 0.25; b 0.625, 1.25, 0.5; c 0.125, 0.25. In s: 0.625, 0.625, 0.5, 0.125 with
    # mean 0.46875; in t: 0.25 and 1.25 with mean 0.75; in u nobody else was.
    in_s = [value - 0.46875 for value in (0.625, 0.625, 0.5, 0.125)]
    a = [episodes[0] + 0.5 * in_s[0], episodes[0] + 0.5 * -0.5]
    b = [episodes[1] + 0.5 * part for part in (in_s[1], 0.5, in_s[2])]
    c = [episodes[2] + 0.5 * in_s[3], episodes[2]]
    expected = [a[0], a[0], a[1], b[0], b[1], b[2], b[2], c[0], c[1], c[1]]
    assert credit(batch) == pytest.approx(expected, abs=1e-6)


def test_gigpo_with_standard_deviations_by_hand():
    """The unbiased deviation of two numbers x and -x is sqrt(2) x: each is 1/sqrt(2) away."""
    rollouts = [
        played([("s", 1, 1.0), ("t", 1, 0.0)], 1.0),
        played([("s", 1, 0.0), ("t", 1, 0.5)], 0.5, sample_index=1),
    ]
    found = credit(GiGPO(gamma=1.0)(pack_rollouts(rollouts)))
    up = 2**-0.5
    assert found == pytest.approx([up + up, up - up, -up - up, -up + up], abs=1e-5)


def test_gigpo_without_the_states_is_grpo(group):
    for normalize in (True, False):
        ours = credit(GiGPO(omega=0.0, normalize_std=normalize)(pack_rollouts(group)))
        assert ours == credit(GRPO(normalize)(pack_rollouts(group)))


def test_states_that_nobody_named_are_refused(make_rollout, group):
    group[0].calls[1].state = None
    message = r"states of 1 of 7 calls have no name; .* Reply\(state=\.\.\.\)"
    with pytest.raises(ConfigError, match=message):
        GiGPO()(pack_rollouts(group))
    with pytest.raises(ConfigError, match="states of 2 of 2 calls have no name"):
        GiGPO()(pack_rollouts([make_rollout([3], [4, 1])] * 2))


# ---------------------------------------------------------------- in float64


def reference(rollouts: list[Rollout], gamma: float) -> dict[str, list[tuple[float, str | None]]]:
    """Return and state of each call, by rollout."""
    found = {}
    for rollout in rollouts:
        paid = [call.reward or 0.0 for call in rollout.calls]
        paid[-1] += rollout.reward - sum(paid)
        returns = [
            sum(gamma ** (j - k) * paid[j] for j in range(k, len(paid))) for k in range(len(paid))
        ]
        states = [call.state for call in rollout.calls]
        found[rollout.id] = list(zip(returns, states, strict=True))
    return found


def by_call(batch, rollouts) -> dict[str, list[float]]:
    """Return the advantage of each call, by rollout; all of a call's tokens must have it."""
    rows = batch["tokens", "advantages"].split(batch["rollouts", "length"].tolist())
    sources = [(r, place, row) for r in rollouts for place, row in enumerate(r.rows)]
    found = {r.id: [0.0] * len(r.calls) for r in rollouts}
    for (rollout, place, row), values in zip(sources, rows, strict=True):
        own = values[len(row.prompt_ids) :]
        for number, call in enumerate(rollout.calls):
            if call.row == place:
                [value] = set(own[call.start : call.stop].tolist())
                found[rollout.id][number] = value
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_reward_to_go_in_float64(seed, gamma):
    rollouts = random_episodes(seed)
    returns = reference(rollouts, gamma)
    found = by_call(RewardToGo(gamma)(pack_rollouts(rollouts)), rollouts)
    for rollout in rollouts:
        others = [r for r in rollouts if r.group_id == rollout.group_id and r is not rollout]
        for k, (value, _) in enumerate(returns[rollout.id]):
            like = [returns[r.id][k][0] for r in others if len(r.calls) > k]
            baseline = fmean(like or [returns[r.id][-1][0] for r in others])
            assert found[rollout.id][k] == pytest.approx(value - baseline, rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_gigpo_in_float64(seed, normalize):
    rollouts = random_episodes(seed)
    returns = reference(rollouts, 0.9)
    found = by_call(GiGPO(0.5, 0.9, normalize)(pack_rollouts(rollouts)), rollouts)

    def compared(value: float, peers: list[float]) -> float:
        spread = (stdev(peers) if len(peers) > 1 else 0.0) + 1e-6 if normalize else 1.0
        return (value - fmean(peers)) / spread

    for rollout in rollouts:
        group = [r for r in rollouts if r.group_id == rollout.group_id]
        episode = compared(rollout.reward, [r.reward for r in group])
        for k, (value, state) in enumerate(returns[rollout.id]):
            peers = [v for r in group for v, s in returns[r.id] if s == state]
            # A deviation of rounding alone, of which an eps of 1e-6 leaves up to a tenth.
            slack = 0.2 if max(peers) - min(peers) < 1e-5 and normalize else 2e-5
            expected = episode + 0.5 * compared(value, peers)
            assert found[rollout.id][k] == pytest.approx(expected, rel=1e-4, abs=slack)


@pytest.mark.parametrize("seed", range(3))
def test_turn_gae_in_float64(seed):
    rollouts, gamma, lam = random_episodes(seed), 0.9, 0.6
    batch = with_values(pack_rollouts(rollouts))
    calls = calls_of(batch)
    values = iter(batch["tokens", "values"][calls.tokens[calls.first]].double().tolist())
    found = by_call(TurnGAE(gamma, lam, whiten=False)(batch), rollouts)
    for rollout in rollouts:
        paid = [call.reward or 0.0 for call in rollout.calls]
        paid[-1] += rollout.reward - sum(paid)
        own = [*(next(values) for _ in paid), 0.0]
        delta = [r + gamma * own[k + 1] - own[k] for k, r in enumerate(paid)]
        for k in range(len(paid)):  # the sum itself instead of its recursion
            expected = sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(paid)))
            assert found[rollout.id][k] == pytest.approx(expected, rel=1e-5, abs=2e-6)


# ---------------------------------------------------------------- invariances

ALL = [
    GAE(0.9, 0.8, whiten=False),
    TurnGAE(0.9, 0.8, whiten=False),
    RewardToGo(0.9),
    GiGPO(0.5, 0.9),
    ReinforcePlusPlus(),
]


@pytest.mark.parametrize("advantage", ALL)
def test_the_order_of_packing_does_not_matter(advantage):
    rollouts = random_episodes(7)
    straight = advantage(with_values(pack_rollouts(rollouts)))
    places = list(range(len(straight["rollouts"])))
    random.Random(1).shuffle(places)  # rows of an episode are no neighbours any more
    order = torch.tensor(places)
    whole = with_values(pack_rollouts(rollouts))
    mixed = advantage(select(whole, order))["tokens", "advantages"]
    expected = select(straight, order)["tokens", "advantages"]
    torch.testing.assert_close(mixed, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("advantage", ALL)
def test_calls_have_the_same_credit_in_however_many_rows(advantage):
    """Each call in a row of its own, after a prompt that says all before it."""

    def apart(rollout: Rollout) -> Rollout:
        cut = Rollout.from_dict(rollout.to_dict())
        rows = []
        for call in rollout.calls:
            row, span = rollout.rows[call.row], slice(call.start, call.stop)
            before = row.prompt_ids + row.token_ids[: call.start]
            columns = row.token_ids, row.loss_mask, row.logprobs, row.versions
            rows.append(Row(before, *(column[span] for column in columns)))
        cut.calls = [
            Call(n, 0, c.stop - c.start, reward=c.reward, state=c.state)
            for n, c in enumerate(rollout.calls, 1)
        ]
        cut.rows = [Row(cut.prompt.token_ids), *rows]
        return cut

    def found(rollouts):
        batch = pack_rollouts(rollouts)
        batch["tokens", "values"] = torch.zeros(len(batch["tokens"]))
        calls = calls_of(batch)
        batch["tokens", "values"][calls.tokens] = torch.linspace(-1, 1, len(calls.tokens))
        return advantage(batch)["tokens", "advantages"][calls.tokens]

    rollouts = random_episodes(8)
    whole, parts = found(rollouts), found([apart(r) for r in rollouts])
    torch.testing.assert_close(parts, whole, rtol=0, atol=2e-6)


@pytest.mark.parametrize("advantage", ALL[:4])
def test_a_groups_credit_is_the_same_alone(advantage):
    assert advantage.per_group
    rollouts = random_episodes(9)
    whole = advantage(with_values(pack_rollouts(rollouts)))
    groups = whole["rollouts", "group"]
    for number in groups.unique():
        rows = (groups == number).nonzero().squeeze(1)
        by_group = advantage(select(with_values(pack_rollouts(rollouts)), rows))
        expected = select(whole, rows)["tokens", "advantages"]
        torch.testing.assert_close(by_group["tokens", "advantages"], expected)


def test_what_each_needs():
    assert [a.min_group_size for a in (TurnGAE(), RewardToGo(), GiGPO())] == [1, 2, 2]
    assert [a.needs_values for a in (TurnGAE(), RewardToGo(), GiGPO())] == [True, False, False]
    assert not TurnGAE().per_group


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TurnGAE(gamma=1.5), r"TurnGAE\(gamma=1.5\) must be in \[0, 1\]"),
        (lambda: TurnGAE(lam=-1.0), r"TurnGAE\(lam=-1.0\) must be in"),
        (lambda: RewardToGo(-0.1), r"RewardToGo\(gamma=-0.1\) must be in"),
        (lambda: GiGPO(gamma=2.0), r"GiGPO\(gamma=2.0\) must be in"),
        (lambda: GiGPO(omega=-1.0), "omega=-1.0 must be"),
        (lambda: GiGPO(omega=float("nan")), "omega=nan must be"),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# ---------------------------------------------------------------- on a game with known values


def test_credit_of_turns_is_unbiased_and_has_less_noise_at_equal_tokens():
    """A game of up to six turns gives the exact gradient.

    The distance in standard errors is a mean over the policy's weights, about one without a bias;
    that it is twice as much has a probability below one in a thousand, whatever is drawn.
    """
    measured = benchmark.run(groups=600, seed=0)["turns"]
    for name in benchmark.UNBIASED:
        assert measured[name]["sigmas"] < 2
    noise = {name: row["noise"] for name, row in measured.items()}
    assert noise["TurnGAE, exact critic"] < noise["RewardToGo"] < noise["RLOO"] < noise["GRPO"]


def test_exact_values_by_hand():
    """Left pays -0.3 before the last turn at even odds, right 0.1 (at the end 1.1), else -0.1."""
    values = WALK.values(torch.zeros(WALK.states, 3, dtype=torch.double))
    assert values[-2].tolist() == pytest.approx([0, -0.1, -0.1, 0.7 / 3, 0])
