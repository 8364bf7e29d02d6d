"""Test expert iteration and MALT on trees made by hand."""

import random
from itertools import product

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.extend import ExponentialSchedule
from lightning_rl.games import Debate, Nip
from lightning_rl.games.protocols.conversation import Conversation
from lightning_rl.games.protocols.text_scenario import Instructions, TextScenario
from lightning_rl.games.staged.chat import ChatAnswer
from lightning_rl.games.staged.expert_iteration import (
    ExpertIteration,
    RewardThreshold,
    RewardWeighted,
)
from lightning_rl.games.staged.interaction import Interaction, expected_reward, value_from
from lightning_rl.games.staged.malt import MALT
from lightning_rl.games.staged.training_sets import Example, Pair

ASKED = [{"role": "user", "content": "You are prover."}]


def begin(protocol, label: int = 1, **options) -> Interaction:
    names = protocol.agent_names
    scenario = TextScenario({name: Instructions(f"You are {name}.") for name in names}, **options)
    return Interaction(Conversation.begin(protocol, scenario, {"label": label}), seed=0)


def say(interaction, number: int = 0, **answers: str) -> Interaction:
    told = {agent: ChatAnswer(text, False) for agent, text in answers.items()}
    return interaction.after(told, number)


def verdicts(prover: str, verifier: str, label: int = 1, places=(0, 0), **options) -> Interaction:
    """Return a proof and a verdict."""
    spoken = say(begin(Nip(2), label, **options), places[0], prover=prover)
    return say(spoken, places[1], verifier=verifier)


def tree(**decisions: tuple[str, str]) -> list[Interaction]:
    """Return two proofs, and two verdicts on each; accepting is right: +1, rejecting -1."""
    return [
        verdicts(proof, verdict, places=(i, j))
        for i, (proof, both) in enumerate(decisions.items())
        for j, verdict in enumerate(both)
    ]


def told(proof: str) -> list[dict]:
    """Render what the verifier is asked once it has heard a proof."""
    return [{"role": "user", "content": f"You are verifier.\nprover: {proof}"}]


# ---------------------------------------------------------------- expert iteration


def learned(algorithm, interactions, *agents, iteration=0, seed=5):
    trees = [[interaction] for interaction in interactions]
    return algorithm.training_set(trees, agents, iteration, seed).examples


def test_what_paid_enough_is_imitated_by_whom_it_paid():
    good, bad = verdicts("a", "accept"), verdicts("b", "accept", label=0)
    # The verifier is right once; the prover is paid whenever it is accepted.
    assert learned(ExpertIteration(), [good, bad], "verifier") == [Example(told("a"), "accept")]
    assert learned(ExpertIteration(), [good, bad], "prover") == [
        Example(ASKED, "a"), Example(ASKED, "b")
    ]  # fmt: skip
    none = ExpertIteration(RewardThreshold(1.1))
    assert learned(none, [good, bad], "prover", "verifier") == []


def test_the_bound_counts_as_enough():
    assert RewardThreshold(0.9).choose([0.9, 0.899, 1.0], random.Random(0)) == [0, 2]


def test_an_answer_that_could_not_be_read_is_not_imitated():
    spoken = say(begin(Nip(2), retries=1), prover="a")
    again = say(spoken, verifier="perhaps")  # asked again
    assert again.taken[-1] == {}
    done = say(again, verifier="accept")
    assert [e.answer for e in learned(ExpertIteration(), [done], "verifier")] == ["accept"]
    # Nor one in an interaction that paid otherwise.
    never = say(say(begin(Nip(2), forced_guess=False), prover="a"), verifier="perhaps")
    assert learned(ExpertIteration(RewardThreshold(-1)), [never], "verifier") == []


def test_weights_are_in_proportion_to_what_is_above_the_lowest():
    # Weights 0, 1 and 3 of 4: 6,000 draws of which none, a quarter and the rest.
    rewards = [-1.0, -0.5, 0.5] * 2000
    chosen = RewardWeighted().choose(rewards, random.Random(1))
    assert len(chosen) == 6000
    counts = [sum(place % 3 == kind for place in chosen) for kind in range(3)]
    assert counts[0] == 0
    assert abs(counts[1] - 1500) < 5 * (6000 * 0.25 * 0.75) ** 0.5
    # From another lowest: 1, 1.5, 2.5 of 5.
    chosen = RewardWeighted(lowest=-2.0).choose(rewards, random.Random(1))
    assert abs(sum(place % 3 == 0 for place in chosen) - 1200) < 5 * (6000 * 0.2 * 0.8) ** 0.5
    assert RewardWeighted().choose([1.0, 1.0], random.Random(0)) == []
    assert RewardWeighted().choose([], random.Random(0)) == []


def test_the_truth_takes_the_place_of_the_verifiers_decision():
    wrong = verdicts("a", "I doubt it.\nreject")
    always = ExpertIteration(truth_share=1.0)
    assert learned(always, [wrong], "verifier") == [Example(told("a"), "I doubt it.\naccept")]
    assert learned(always, [wrong], "prover") == []  # which learns nothing but what it did


def test_so_large_a_share_learns_the_truth_as_the_iteration_says():
    wrong = [verdicts("a", "reject") for _ in range(1000)]
    halving = ExpertIteration(truth_share=ExponentialSchedule(0.8, 0.5))
    for iteration, share in enumerate([0.8, 0.4, 0.2]):
        count = len(learned(halving, wrong, "verifier", iteration=iteration))
        assert abs(count - 1000 * share) < 5 * (1000 * share * (1 - share)) ** 0.5
    assert learned(halving, wrong, "verifier") == learned(halving, wrong, "verifier")


# ---------------------------------------------------------------- MALT


def pairs(leaves, agent, seed=5, **options):
    return MALT(**options).training_set([leaves], [agent], 0, seed).pairs


def test_expected_rewards_of_a_tree_by_hand():
    leaves = tree(a=("accept", "accept"), b=("accept", "reject"))
    assert expected_reward(leaves[:2], "verifier", 1) == 1  # after a: +1, +1
    assert expected_reward(leaves[2:], "verifier", 1) == 0  # after b: +1, -1
    assert expected_reward(leaves, "verifier", 0) == 0.5
    assert [expected_reward(part, "prover", 1) for part in (leaves[:2], leaves[2:])] == [1, 0.5]


def test_a_branch_counts_once_however_many_leaves_it_has():
    # After a one leaf that pays 1, after b two that pay 0: 1/2, not 1/3.
    start = begin(Nip(3, verifier_first=True))
    early = say(start, 0, verifier="accept")
    asked = say(start, 1, verifier="go")
    late = [say(say(asked, i, prover="p"), 0, verifier="reject") for i in range(2)]
    assert expected_reward([early, *late], "prover", 0) == 0.5


def test_of_two_verdicts_the_right_one_is_chosen():
    leaves = tree(a=("accept", "reject"), b=("reject", "accept"))
    assert pairs(leaves, "verifier") == [
        Pair(told("a"), "accept", "reject"), Pair(told("b"), "accept", "reject")
    ]  # fmt: skip


def test_of_two_proofs_the_more_convincing_one_is_chosen():
    # E[r] of the prover: 1 after a, 1/2 after b, which is as good as the threshold is by itself.
    leaves = tree(a=("accept", "accept"), b=("accept", "reject"))
    assert pairs(leaves, "prover", thresholds={"prover": 0.6}) == [Pair(ASKED, "a", "b")]
    assert pairs(leaves, "prover") == []
    # After c it is 0.
    leaves = tree(b=("accept", "reject"), c=("reject", "reject"))
    assert pairs(leaves, "prover") == [Pair(ASKED, "b", "c")]
    # Both are convincing, or neither is.
    for verdict in ("accept", "reject"):
        assert pairs(tree(a=(verdict,) * 2, b=(verdict,) * 2), "prover") == []


def test_what_was_paid_before_an_answer_is_no_part_of_its_worth():
    # The verifier's first turn pays 0.5; of its last ones, +1 and -1, a run pays 1.5 and -0.5.
    start = begin(Nip(4, turn_reward=0.5))
    asked = say(say(say(start, prover="p"), verifier="why?"), prover="so")
    leaves = [say(asked, i, verifier=word) for i, word in enumerate(("accept", "reject"))]
    assert [leaf.conversation.rewards["verifier"] for leaf in leaves] == [1.5, -0.5]
    assert [value_from([leaf], "verifier", 3) for leaf in leaves] == [1, -1]
    assert value_from(leaves, "verifier", 1) == 0.5  # its own 0.5, and (1 - 1) / 2
    [pair] = pairs(leaves, "verifier", thresholds={"verifier": -0.7})
    assert (pair.chosen, pair.rejected) == ("accept", "reject")
    assert pairs(leaves, "verifier", thresholds={"verifier": 1.2}) == []


def test_equal_answers_are_no_pair():
    leaves = [
        *(verdicts("a", "accept", places=(0, j)) for j in range(2)),
        *(verdicts("a", "reject", places=(1, j)) for j in range(2)),
    ]
    assert pairs(leaves, "prover") == []


def test_each_place_gives_one_pair_of_all_that_there_are():
    answers = ("accept", "yes\naccept", "reject", "no\nreject")
    leaves = [verdicts("a", text, places=(0, j)) for j, text in enumerate(answers)]
    found = {
        (pair.chosen, pair.rejected)
        for seed in range(40)
        for [pair] in [pairs(leaves, "verifier", seed=seed, width=4)]
    }
    assert found == set(product(answers[:2], answers[2:]))


def test_those_who_speak_at_once_each_have_a_pair():
    start = begin(Debate(2, sequential=False), label=0)
    first, second = start.conversation.asks()
    leaves = [
        say(say(start, i, **{first: f"{i}", second: f"{10 + i}"}), 0, verifier=verdict)
        for i, verdict in enumerate(("reject", "accept"))
    ]
    # One prover is paid where the verifier rejects, the other where it accepts.
    for agent, chosen, rejected in ((first, "0", "1"), (second, "11", "10")):
        [pair] = pairs(leaves, agent)
        assert (pair.chosen, pair.rejected) == (chosen, rejected)
    assert pairs(leaves, "verifier") == []  # it was asked once in each place


def test_settings_of_malt():
    with pytest.raises(ConfigError, match="width=1 must be >= 2"):
        MALT(width=1)
