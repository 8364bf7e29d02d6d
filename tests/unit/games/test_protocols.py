"""Test protocols: who speaks when, which decisions count, and what they pay, by hand."""

import pytest
import torch

from lightning_rl.errors import ConfigError
from lightning_rl.games.protocols.base import ACCEPT, GO_ON, REJECT, Protocol, drawn
from lightning_rl.games.protocols.conversation import Conversation
from lightning_rl.games.protocols.single_prover import Adp, Nip, SoloVerifier
from lightning_rl.games.protocols.text_scenario import TextScenario
from lightning_rl.games.protocols.two_provers import Debate, MerlinArthur, Mnip
from lightning_rl.games.protocols.zero_knowledge import ZeroKnowledge
from tests.support.protocols import Panel


def speakers(protocol: Protocol) -> str:
    """Return the initials of who speaks in each round, by the schedule."""
    rounds = torch.arange(protocol.max_message_rounds)
    told = {name: protocol.speaks(name, rounds).tolist() for name in protocol.agent_names}
    return "".join(
        "".join(name[0] for name in told if told[name][r]) or "-" for r in rounds.tolist()
    )


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        (Nip(), "pvpvpvpv"),
        (Nip(5, verifier_first=True), "vpvpv"),
        (Adp(), "pv"),
        (SoloVerifier(), "v"),
    ],
)
def test_who_speaks_when(protocol, expected):
    assert speakers(protocol) == expected
    assert protocol.max_message_rounds == len(expected)
    assert "verifier" in protocol.agent_names
    for agent, channel in protocol.agent_channel_visibility:
        assert agent in protocol.agent_names
        assert channel in protocol.message_channel_names
        assert protocol.visible(agent) == ["main"]


def test_a_round_may_be_one_number_or_many():
    protocol = Nip()
    assert bool(protocol.is_active("prover", "main", 2))
    assert not bool(protocol.is_active("verifier", "main", 2, seed=7))
    rounds = torch.tensor([[0, 1], [2, 3]])
    assert protocol.is_active("verifier", "main", rounds).tolist() == [[False, True]] * 2


def test_a_decision_counts_from_round_min_minus_one_on():
    def deciding(**options):
        protocol = Nip(**options)
        return protocol.can_decide(torch.arange(protocol.max_message_rounds)).nonzero().flatten()

    assert deciding(min_message_rounds=0).tolist() == [1, 3, 5, 7]
    assert deciding(min_message_rounds=4).tolist() == [3, 5, 7]
    assert deciding(min_message_rounds=5).tolist() == [5, 7]
    assert deciding(max_message_rounds=7, min_message_rounds=7, verifier_first=True) == 6


@pytest.mark.parametrize(
    ("decision", "round", "label", "done", "verifier", "prover"),
    [
        (ACCEPT, 3, 1, True, 1, 1),  # right
        (ACCEPT, 3, 0, True, -1, 1),  # wrong, and the prover has what it wants
        (REJECT, 3, 0, True, 1, 0),
        (REJECT, 3, 1, True, -1, 0),
        (GO_ON, 3, 1, False, 0, 0),
        (ACCEPT, 2, 1, False, 0, 0),  # the prover's round: nothing that is said counts
        (ACCEPT, 1, 1, False, 0, 0),  # before round 3 = min_message_rounds - 1
        (GO_ON, 7, 0, True, -1, 0),  # never decided
        (REJECT, 7, 0, True, 1, 0),
    ],
)
def test_rewards_of_nip(decision, round, label, done, verifier, prover):
    over, rewards = Nip(min_message_rounds=4).step({"verifier": decision}, round, label)
    assert bool(over) == done
    assert {n: float(r) for n, r in rewards.items()} == {"verifier": verifier, "prover": prover}


def test_rewards_of_a_batch_are_those_of_each():
    protocol = Nip(4, turn_reward=0.05)
    decisions = torch.tensor([ACCEPT, REJECT, GO_ON, GO_ON, GO_ON])
    rounds, labels = torch.tensor([1, 3, 1, 2, 3]), torch.tensor([1, 1, 0, 1, 1])
    done, rewards = protocol.step({"verifier": decisions}, rounds, labels)
    assert done.tolist() == [True, True, False, False, True]
    # An undecided turn pays 0.05, a round of the prover's nothing, none at all -1.
    assert rewards["verifier"].tolist() == pytest.approx([1, -1, 0.05, 0, -1])
    assert rewards["prover"].tolist() == [1, 0, 0, 0, 0]


def test_rewards_of_adp_and_of_the_verifier_alone():
    adp = Adp()
    assert not bool(adp.step({"verifier": ACCEPT}, 0, 1)[0])
    done, rewards = adp.step({"verifier": ACCEPT}, 1, 0)
    assert (bool(done), float(rewards["verifier"]), float(rewards["prover"])) == (True, -1, 1)
    for decision, expected in ((REJECT, 1.0), (ACCEPT, -1.0), (GO_ON, -1.0)):
        done, rewards = SoloVerifier().step({"verifier": decision}, 0, 0)
        assert bool(done)
        assert {n: float(r) for n, r in rewards.items()} == {"verifier": expected}


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="max_message_rounds=0 must be >= 1"):
        Nip(0)
    with pytest.raises(ConfigError, match=r"min_message_rounds=9\) must be <= .*=8; lower it"):
        Nip(min_message_rounds=9)
    with pytest.raises(ConfigError, match="leaves the verifier no round to decide in"):
        Nip(1)
    with pytest.raises(ConfigError, match="leaves the verifier no round"):
        Nip(4, min_message_rounds=4, verifier_first=True)
    with pytest.raises(ConfigError, match="turn_reward=nan"):
        Nip(turn_reward=float("nan"))


# ---------------------------------------------------------------- two provers

BOTH = ["prover0_channel", "prover1_channel"]
PROVERS = ["prover0", "prover1"]


def places(protocol, seed=0):
    """Return the rounds in which an agent is active, by agent and channel."""
    rounds = torch.arange(protocol.max_message_rounds)
    return {
        (name, channel): protocol.is_active(name, channel, rounds, seed)
        .nonzero()
        .flatten()
        .tolist()
        for name in protocol.agent_names
        for channel in protocol.visible(name)
    }


def test_turns_of_a_debate():
    own0, own1 = ("prover0", BOTH[0]), ("prover1", BOTH[1])
    other0, other1 = ("prover0", BOTH[1]), ("prover1", BOTH[0])
    judge = {("verifier", channel): [2, 5] for channel in BOTH}
    assert places(Debate(sequential=True)) == {
        own0: [0, 3], own1: [1, 4], other0: [], other1: [], **judge,
    }  # fmt: skip
    judge = {("verifier", channel): [1, 3, 5] for channel in BOTH}
    assert places(Debate()) == {own0: [0, 2, 4], own1: [0, 2, 4], other0: [], other1: [], **judge}
    assert places(Mnip()) == {own0: [0, 2, 4], own1: [0, 2, 4], **judge}
    assert places(Mnip(3, sequential=True)) == {
        own0: [0], own1: [1], ("verifier", BOTH[0]): [2], ("verifier", BOTH[1]): [2],
    }  # fmt: skip


def test_who_reads_what():
    for name in Debate.agent_names:
        assert Debate().visible(name) == BOTH
    seen = {name: Mnip().visible(name) for name in Mnip.agent_names}
    assert seen == {"prover0": BOTH[:1], "prover1": BOTH[1:], "verifier": BOTH}
    assert MerlinArthur().visible("prover1") == ["main"]


def test_merlin_or_morgana_speaks_by_the_seed():
    protocol, seeds = MerlinArthur(), torch.arange(64)
    first, second = (protocol.speaks(name, 0, seeds) for name in PROVERS)
    assert torch.equal(first, ~second)
    assert 20 < int(first.sum()) < 44
    for seed in (0, 1, 5):
        assert speakers_by_seed(protocol, seed) == ("1v" if second[seed] else "0v")
    assert protocol.can_decide(torch.tensor([0, 1]), 3).tolist() == [False, True]
    # Rounds and seeds of one shape: each place is what it would be alone.
    rounds = torch.arange(64) % 3
    told = protocol.speaks("prover0", rounds, seeds)
    assert told.tolist() == [bool(first[i]) and int(r) == 0 for i, r in enumerate(rounds)]


def speakers_by_seed(protocol, seed):
    """Return the last letters of who speaks in each round; the verifier is v."""
    names = {"prover0": "0", "prover1": "1", "verifier": "v"}
    return "".join(
        sign
        for round in range(protocol.max_message_rounds)
        for name, sign in names.items()
        if protocol.speaks(name, round, seed)
    )


TABLE = [
    # decision, round, label: done, verifier, first (argues to reject), second (to accept)
    (ACCEPT, 1, 1, True, 1, 0, 1),
    (ACCEPT, 1, 0, True, -1, 0, 1),
    (REJECT, 1, 1, True, -1, 1, 0),
    (REJECT, 1, 0, True, 1, 1, 0),
    (GO_ON, 1, 0, False, 0.05, 0, 0),
    (ACCEPT, 0, 1, False, 0, 0, 0),
    (GO_ON, 3, 1, True, -1, 0, 0),
]


def test_rewards_of_a_debate_one_by_one_and_side_by_side():
    protocol = Debate(4, turn_reward=0.05)
    columns = [torch.tensor(column) for column in zip(*TABLE, strict=True)]
    over, paid = protocol.step({"verifier": columns[0]}, columns[1], columns[2])
    assert over.tolist() == [row[3] for row in TABLE]
    for place, name in enumerate(["verifier", *PROVERS], 4):
        assert paid[name].tolist() == pytest.approx([row[place] for row in TABLE])
    for decision, round, label, done, *expected in TABLE:
        one, rewards = protocol.step({"verifier": decision}, round, label)
        assert bool(one) == done
        found = [float(rewards[name]) for name in ("verifier", *PROVERS)]
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("protocol", "accepted", "rejected"),
    [
        (Debate(), [0, 1], [1, 0]),
        (MerlinArthur(), [0, 1], [1, 0]),
        (Mnip(), [1, 1], [0, 0]),
        (Debate(shared_reward=True), [-1, -1], [1, 1]),
        (Mnip(shared_reward=True), [-1, -1], [1, 1]),
    ],
)
def test_what_two_provers_are_paid(protocol, accepted, rejected):
    for decision, expected in ((ACCEPT, accepted), (REJECT, rejected)):
        _, paid = protocol.step({"verifier": decision}, 1, 0)  # rejecting is right
        assert [float(paid[name]) for name in PROVERS] == expected


def test_a_shared_reward_is_the_verifiers_in_every_round():
    protocol = Nip(4, turn_reward=0.5, shared_reward=True)
    for decision, round, paid in ((GO_ON, 1, 0.5), (ACCEPT, 3, 1), (GO_ON, 3, -1), (GO_ON, 2, 0)):
        _, rewards = protocol.step({"verifier": decision}, round, 1)
        assert {n: float(r) for n, r in rewards.items()} == {"verifier": paid, "prover": paid}


def test_random_stances_turn_all_around_together():
    seeds = torch.arange(64)
    turned = drawn(seeds, 2)
    for protocol, names, plain in (
        (Nip(random_stances=True), ["prover"], [ACCEPT]),
        (Debate(random_stances=True), PROVERS, [REJECT, ACCEPT]),
        (Mnip(random_stances=True), PROVERS, [ACCEPT, ACCEPT]),
        (MerlinArthur(random_stances=True), PROVERS, [REJECT, ACCEPT]),
    ):
        _, paid = protocol.step(
            {"verifier": torch.full((64,), ACCEPT)}, torch.ones(64), seeds % 2, seeds
        )
        for name, stance in zip(names, plain, strict=True):
            argued = protocol.stance(name, seeds)
            assert torch.equal(argued, turned ^ stance)
            assert int(protocol.stance(name, 7)) == int(argued[7])
            assert torch.equal(paid[name], (argued == ACCEPT).float())
    assert Debate().stance("prover0", seeds).tolist() == [REJECT] * 64


# ---------------------------------------------------------------- zero knowledge


def test_beside_zero_knowledge_all_is_as_it_was():
    inner = Debate(4, min_message_rounds=2, turn_reward=0.05, random_stances=True)
    wrapped = ZeroKnowledge(inner)
    assert wrapped.agent_names[-2:] == ("adversarial_verifier", "simulator")
    assert wrapped.prover_names == PROVERS
    seen = places(wrapped)
    assert {key: seen[key] for key in places(inner)} == places(inner)
    copies = {(a, c): r for (a, c), r in seen.items() if c.startswith("adversarial_")}
    played = {"adversarial_verifier": "verifier"}
    assert {
        (played.get(a, a), c.removeprefix("adversarial_")): r for (a, c), r in copies.items()
    } == places(inner)
    assert not any(a == "verifier" for a, _ in copies)
    assert not any(a == "adversarial_verifier" for a, _ in seen.keys() - copies.keys())
    rounds, seeds = torch.arange(4), torch.tensor([0, 1, 2, 3])
    for name in ("adversarial_verifier", "simulator"):
        assert wrapped.speaks(name, rounds).tolist() == [False, True, False, True]
    assert not bool(wrapped.is_active("simulator", "prover0_channel", 1))
    decisions = {"verifier": torch.tensor([ACCEPT, ACCEPT, GO_ON, REJECT])}
    decisions["adversarial_verifier"] = torch.tensor([ACCEPT, REJECT, GO_ON, ACCEPT])
    done, paid = wrapped.step(decisions, rounds, seeds % 2, seeds)
    expected_done, expected = inner.step(decisions, rounds, seeds % 2, seeds)
    assert torch.equal(done, expected_done)
    for name, reward in expected.items():
        assert torch.equal(paid[name], reward)
    assert paid["simulator"].tolist() == paid["adversarial_verifier"].tolist() == [0.0] * 4


def test_a_simulator_is_paid_for_likeness():
    protocol = ZeroKnowledge(Nip(4), simulator_coefficient=0.5, prover_coefficient=0.1)
    messages = torch.tensor([[3.0, 4.0], [1.0, 0.0], [1.0, 0.0]])
    guessed = torch.tensor([[4.0, 3.0], [0.0, 2.0], [1.0, 0.0]])  # cos 24/25, 0 and 1
    decisions = torch.tensor([[1.0, 0.0, 0.0]] * 3)
    said = torch.tensor([[2.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [5.0, 0.0, 0.0]])  # cos 1, -1 and 1
    rounds = torch.tensor([1, 3, 2])  # in round 2 the adversary does not speak
    logits = {"adversarial_verifier": (messages, decisions), "simulator": (guessed, said)}
    paid = protocol.logit_rewards(logits, rounds)
    assert paid["simulator"].tolist() == pytest.approx([0.98, -0.5, 0.0])
    assert paid["adversarial_verifier"].tolist() == pytest.approx([-0.98, 0.5, 0.0])
    assert paid["prover"].tolist() == pytest.approx([0.098, -0.05, 0.0])
    assert paid.keys() == {"prover", "simulator", "adversarial_verifier"}
    with pytest.raises(ConfigError, match="simulator_coefficient=inf"):
        ZeroKnowledge(Nip(), float("inf"))


def test_words_have_no_logits():
    words = TextScenario({"verifier": {"user": "Is it?"}})
    with pytest.raises(
        ConfigError, match=r"ZeroKnowledge pays for agents' logits, which are not known for .*"
    ):
        Conversation.begin(ZeroKnowledge(SoloVerifier()), words, {"label": 1})


@pytest.mark.parametrize(("first", "second"), [
    ("verifier", "adversarial_verifier"), ("adversarial_verifier", "verifier")
])  # fmt: skip
def test_zero_knowledge_is_over_when_both_have_decided(first, second):
    protocol = ZeroKnowledge(Nip(6, turn_reward=0.25))
    decided, paid, ends = {}, [], []
    for round in range(6):
        said = {first: ACCEPT if round == 1 else GO_ON, second: REJECT if round == 3 else GO_ON}
        done, rewards = protocol.step(said, round, 1, earlier=decided)
        decided = protocol.decided(said, round, earlier=decided)
        paid.append([float(rewards[name]) for name in ("verifier", "prover")])
        ends.append(bool(done))
    assert ends[:4] == [False, False, False, True]
    # The verifier is paid once, when it decides; the prover with it; of the adversary nothing.
    accepts = [[0, 0], [1, 1], [0, 0], [0, 0]]
    rejects = [[0, 0], [0.25, 0], [0, 0], [-1, 0]]
    assert paid[:4] == (accepts if first == "verifier" else rejects)


def test_an_adversary_that_has_decided_is_paid_no_more():
    protocol = ZeroKnowledge(Nip(4))
    ones = (torch.ones(1, 2), torch.ones(1, 3))
    logits = {"adversarial_verifier": ones, "simulator": ones}
    for decision, expected in ((GO_ON, 2.0), (ACCEPT, 0.0)):
        earlier = {"adversarial_verifier": torch.tensor([decision])}
        paid = protocol.logit_rewards(logits, torch.tensor([3]), earlier=earlier)
        assert paid["simulator"].tolist() == pytest.approx([expected])


def test_zero_knowledge_is_over_after_the_last_round():
    protocol = ZeroKnowledge(Nip(2))
    assert bool(protocol.step({"verifier": ACCEPT}, 1, 1)[0])
    assert bool(protocol.step({}, 1, 1)[0])


def test_an_adversary_plays_one_that_decides_alone():
    with pytest.raises(ConfigError, match="is decided by first, second, but the adversary"):
        ZeroKnowledge(Panel())


# ---------------------------------------------------------------- others that decide


def test_it_is_over_when_all_have_decided():
    protocol, earlier = Panel(), {}
    told = [({}, 0), ({"first": ACCEPT}, 1), ({}, 2), ({"first": REJECT, "second": ACCEPT}, 3)]
    ends, paid = [], []
    for said, round in told:
        done, rewards = protocol.step(said, round, 1, earlier=earlier)
        earlier = protocol.decided(said, round, earlier=earlier)
        ends.append(bool(done))
        paid.append([float(rewards[name]) for name in protocol.agent_names])
    assert ends == [False, False, False, True]
    # Each judge is paid for its own, once; the advocate for the verdict, in the end.
    assert paid == [[0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 1]]
    assert {name: int(d) for name, d in earlier.items()} == {"first": ACCEPT, "second": ACCEPT}
    assert protocol.prover_names == ["advocate"]


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (ACCEPT, ACCEPT, ACCEPT),
        (REJECT, REJECT, REJECT),
        (ACCEPT, REJECT, GO_ON),
        (ACCEPT, GO_ON, ACCEPT),
        (GO_ON, REJECT, REJECT),
        (GO_ON, GO_ON, GO_ON),
    ],
)
def test_a_verdict_is_that_of_more_judges(first, second, verdict):
    protocol = Panel()
    assert int(protocol.verdict({"first": first, "second": second})) == verdict
    both = {"first": torch.tensor([first] * 2), "second": torch.tensor([second, second])}
    assert protocol.verdict(both).tolist() == [verdict] * 2
    # Both decide in the last round, or have not decided by then; accepting is right.
    done, paid = protocol.step({"first": first, "second": second}, 3, 1)
    assert bool(done)
    assert float(paid["advocate"]) == (verdict == ACCEPT)
    worth = {ACCEPT: 1, REJECT: -1, GO_ON: -1}
    assert [float(paid[n]) for n in ("first", "second")] == [worth[first], worth[second]]
    _, shared = Panel(shared_reward=True).step({"first": first, "second": second}, 3, 1)
    assert float(shared["advocate"]) == (worth[first] + worth[second]) / 2


def test_a_batch_of_panels_is_each_of_them():
    protocol = Panel(turn_reward=0.25)
    said = {"first": torch.tensor([0, 1, 2]), "second": torch.tensor([1, 2, 1])}
    earlier = {"first": torch.tensor([1, 2, 2]), "second": torch.tensor([2, 2, 2])}
    rounds, labels = torch.tensor([3, 1, 3]), torch.tensor([0, 0, 1])
    done, paid = protocol.step(said, rounds, labels, earlier=earlier)
    for place in range(3):
        one = {name: int(d[place]) for name, d in said.items()}
        before = {name: int(d[place]) for name, d in earlier.items()}
        over, alone = protocol.step(one, int(rounds[place]), int(labels[place]), earlier=before)
        assert bool(over) == bool(done[place])
        assert {n: float(r) for n, r in alone.items()} == {
            n: float(r[place]) for n, r in paid.items()
        }


class Chat(Protocol):
    """Lets two talk, and nobody decide."""

    agent_names = ("ann", "bob")
    deciders = ()
    agent_channel_visibility = (("ann", "main"), ("bob", "main"))

    def __init__(self) -> None:
        super().__init__(2, 0)

    def is_active(self, agent, channel, round, seed=0):
        return torch.as_tensor(round) == self.agent_names.index(agent)


def test_a_protocol_may_be_without_a_decision():
    protocol = Chat()
    for round, over in ((0, False), (1, True)):
        done, paid = protocol.step({}, round, 1)
        assert bool(done) == over
        assert {name: float(r) for name, r in paid.items()} == {"ann": 0, "bob": 0}
    done, paid = protocol.step({}, torch.tensor([0, 1]), torch.tensor([1, 1]))
    assert done.tolist() == [False, True]
    assert paid["ann"].tolist() == [0, 0]


def test_who_decides_is_one_of_the_agents():
    class Nobody(Chat):
        deciders = ("verifier",)

    with pytest.raises(
        ConfigError, match=r"Nobody\.deciders names 'verifier', but its agents are ann"
    ):
        Nobody()

    class Late(Panel):
        def is_active(self, agent, channel, round, seed=0):
            return super().is_active(agent, channel, round, seed) & (agent != "second")

    with pytest.raises(ConfigError, match="leaves the second no round to decide in"):
        Late()


# ---------------------------------------------------------------- chance


def test_what_is_drawn_is_splitmix64():
    # The generator's published first numbers for seeds 0 and 1234567, without their highest bits.
    numbers = {0: 0xE220A8397B1DCDAF, 1234567: 6457827717110365317}
    for seed, number in numbers.items():
        for count in (2, 3, 10, 2**62):
            assert int(drawn(seed, count)) == number % 2**63 % count


def test_numbers_and_tensors_draw_alike_and_evenly():
    seeds = torch.arange(-500, 2500).reshape(2, 1500)
    found = drawn(seeds, 3)
    assert found.tolist() == [[int(drawn(seed, 3)) for seed in row] for row in seeds.tolist()]
    assert found.flatten().bincount().tolist() == pytest.approx([1000] * 3, abs=80)
    assert int(drawn(2**63 - 1, 7)) in range(7)
