"""Protocols: who speaks when, which decisions count, and what they pay, by hand."""

import pytest
import torch

from lightning_rl.errors import ConfigError
from lightning_rl.protocols.base import ACCEPT, GO_ON, REJECT, Protocol
from lightning_rl.protocols.chance import drawn
from lightning_rl.protocols.single_prover import Adp, Nip, SoloVerifier


def speakers(protocol: Protocol) -> str:
    """The initials of who speaks in each round, by the schedule."""
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
