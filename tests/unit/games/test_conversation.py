"""Conversations: what each agent is asked, how answers are read, what comes of them, by hand."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from lightning_rl.errors import ConfigError, DataError
from lightning_rl.games.protocols.agent import result
from lightning_rl.games.protocols.base import ACCEPT, GO_ON, REJECT, Protocol
from lightning_rl.games.protocols.conversation import Conversation
from lightning_rl.games.protocols.single_prover import Adp, Nip, SoloVerifier
from lightning_rl.games.protocols.text_scenario import Instructions, TextScenario
from lightning_rl.games.protocols.two_provers import Debate, Mnip
from tests.support.protocols import Panel

ROW = {"n": 3, "label": 0}


def scenario(**options):
    prompts = {
        "prover": Instructions(user="Argue for {stance}: {n} is even.", system="You prove."),
        "verifier": Instructions(user="Is {n} even?", turn="Round {round} of {rounds}."),
    }
    return TextScenario(prompts, **options)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def played(conversation, *answers):
    """Play one answer for each turn, whose speaker is alone."""
    for answer in answers:
        [agent] = conversation.asks()
        conversation = conversation.after({agent: answer})
    return conversation


def test_each_agent_is_asked_in_its_turn_in_a_chat_of_its_own():
    first = Conversation.begin(Nip(4), scenario(), ROW)
    opening = [
        {"role": "system", "content": "You prove."},
        user("Argue for accept: 3 is even."),
    ]
    assert first.asks() == {"prover": opening}
    second = first.after({"prover": "It is."})
    assert second.asks() == {"verifier": [user("Is 3 even?\nprover: It is.\nRound 2 of 4.")]}
    third = second.after({"verifier": "Why?"})
    assert third.asks() == {"prover": [*opening, assistant("It is."), user("verifier: Why?")]}
    fourth = third.after({"prover": "So."})
    # What was said before stands as it was: a row of tokens goes on.
    assert fourth.asks()["verifier"] == [
        *second.asks()["verifier"],
        assistant("Why?"),
        user("prover: So.\nRound 4 of 4."),
    ]
    last = fourth.after({"verifier": "I see.\nReject"})
    assert (last.done, last.asks(), last.decision, last.label) == (True, {}, REJECT, 0)
    assert last.rewards == {"prover": 0, "verifier": 1}
    assert [(t.agent, t.round, t.decision) for t in last.turns] == [
        ("prover", 0, None), ("verifier", 1, GO_ON), ("prover", 2, None), ("verifier", 3, REJECT),
    ]  # fmt: skip
    assert last.turns[-1].said == {"main": "I see."}
    assert last.turns[2].messages == third.asks()["prover"]


def test_a_conversation_is_a_value_that_may_be_gone_on_with_twice():
    asked = played(Conversation.begin(Adp(), scenario(), ROW), "It is.")
    accepted, rejected = (asked.after({"verifier": word}) for word in ("accept", "reject"))
    assert (accepted.rewards, rejected.rewards) == (
        {"prover": 1, "verifier": -1},
        {"prover": 0, "verifier": 1},
    )
    assert (asked.done, len(asked.turns), asked.rewards["verifier"]) == (False, 1, 0)
    with pytest.raises(FrozenInstanceError):
        asked.round = 5
    asked.asks()["verifier"].clear()
    assert asked.asks()["verifier"]


@pytest.mark.parametrize(
    ("answer", "decision", "message"),
    [
        ("accept", ACCEPT, ""),
        (" **Reject**. ", REJECT, ""),
        ("Decision: ACCEPT", ACCEPT, ""),
        ("It holds.\n\nDecision: accept\n", ACCEPT, "It holds."),
        ("I would accept it.", GO_ON, "I would accept it."),
        ("accept\nOr not?", GO_ON, "accept\nOr not?"),
    ],
)
def test_what_the_verifiers_answer_says(answer, decision, message):
    after = played(Conversation.begin(Nip(4), scenario(), ROW), "p", answer)
    assert after.turns[-1].decision == decision
    assert after.turns[-1].said == ({"main": message} if message else {})
    assert after.done == (decision != GO_ON)


def test_provers_decide_nothing():
    after = Conversation.begin(Adp(), scenario(), ROW).after({"prover": "accept"})
    assert (after.turns[0].decision, after.turns[0].said) == (None, {"main": "accept"})


def test_what_cannot_be_read_is_asked_again_and_counted():
    begun = Conversation.begin(Nip(4), scenario(retries=2), ROW)
    again = begun.after({"prover": " \n"}).after({"prover": ""})
    assert (again.round, again.turns, again.unread) == (0, (), {"prover": 2})
    assert again.asks() == begun.asks()
    heard = again.after({"prover": "p"})
    assert (heard.turns[0].retries, heard.unread) == (2, {})
    silent = again.after({"prover": ""})  # no more tries: it said nothing, and others hear nothing
    assert (silent.turns[0].retries, silent.turns[0].said) == (2, {})
    assert silent.asks() == {"verifier": [user("Is 3 even?\nRound 2 of 4.")]}


def test_who_has_not_decided_in_its_last_turn_must_guess():
    undecided = played(Conversation.begin(Adp(), scenario(), ROW), "p", "Hm.")
    question = "Decide now. Answer with one word: accept or reject."
    said = [user("Is 3 even?\nprover: p\nRound 2 of 2."), assistant("Hm."), user(question)]
    assert undecided.asks() == {"verifier": said}
    guessed = undecided.after({"verifier": "reject"})
    assert (guessed.decision, guessed.rewards) == (REJECT, {"prover": 0, "verifier": 1})
    assert [t.guess for t in guessed.turns] == [False, False, True]
    never = undecided.after({"verifier": "Hm!"})
    assert (never.done, never.decision) == (True, None)
    assert never.rewards == {"prover": 0, "verifier": -1}
    plain = played(Conversation.begin(Adp(), scenario(forced_guess=False), ROW), "p", "Hm.")
    assert (plain.done, plain.decision, plain.rewards["verifier"]) == (True, None, -1)


def test_the_last_turn_may_come_before_the_last_round():
    # The verifier speaks in rounds 1 and 3 of 5, so 3 is its last.
    conversation = played(Conversation.begin(Nip(5), scenario(), ROW), "p", "Hm.", "p", "Hm.")
    assert list(conversation.asks()) == ["verifier"]
    assert conversation.asks()["verifier"][-1]["content"].startswith("Decide now")
    never = played(conversation, "Hm.", "p")
    assert (never.done, never.round, never.rewards) == (True, 5, {"prover": 0, "verifier": -1})


def two_provers(protocol, seed=0, **options):
    prompts = {name: {"user": "Go."} for name in protocol.agent_names}
    words = TextScenario(prompts, message="{channel}={text}", **options)
    return Conversation.begin(protocol, words, {"label": 1}, seed)


def test_those_who_speak_at_once_read_each_other_in_the_next_round():
    begun = two_provers(Debate(4))
    assert begun.asks() == {"prover0": [user("Go.")], "prover1": [user("Go.")]}
    half = begun.after({"prover1": "b"})
    assert half.asks() == {"prover0": [user("Go.")]}
    both = half.after({"prover0": "a"})
    assert both.turns == begun.after({"prover1": "b", "prover0": "a"}).turns
    assert [turn.agent for turn in both.turns] == ["prover0", "prover1"]
    assert both.asks() == {"verifier": [user("Go.\nprover0_channel=a\nprover1_channel=b")]}
    asked = both.after({"verifier": "c"}).asks()
    said = "prover0_channel=c\nprover1_channel=c"  # the verifier's, on both channels
    assert asked["prover0"] == [user("Go."), assistant("a"), user(f"prover1_channel=b\n{said}")]
    assert asked["prover1"] == [user("Go."), assistant("b"), user(f"prover0_channel=a\n{said}")]


def test_who_cannot_read_a_channel_is_told_nothing_of_it():
    told = two_provers(Mnip(4)).after({"prover0": "a", "prover1": "b"}).after({"verifier": "c"})
    assert told.asks() == {
        "prover0": [user("Go."), assistant("a"), user("prover0_channel=c")],
        "prover1": [user("Go."), assistant("b"), user("prover1_channel=c")],
    }


def test_the_order_of_channels_is_drawn_once():
    orders = {}
    for seed in range(16):
        told = two_provers(Debate(4), seed, shuffle_channels=True)
        told = told.after({"prover0": "a", "prover1": "b"})
        asked = told.asks()["verifier"]
        orders[seed] = asked[0]["content"].split("\n")[1:]
        assert sorted(orders[seed]) == ["prover0_channel=a", "prover1_channel=b"]
        later = told.after({"verifier": "c"}).after({"prover0": "d", "prover1": "e"})
        assert later.asks()["verifier"][:1] == asked
    first = [order[0] for order in orders.values()]
    assert 3 < first.count("prover0_channel=a") < 13
    assert (
        two_provers(Debate(4), 3, shuffle_channels=True)
        .after({"prover0": "a", "prover1": "b"})
        .asks()["verifier"][0]["content"]
        .split("\n")[1:]
        == orders[3]
    )


def test_a_decision_that_comes_too_early_does_not_count():
    early = played(Conversation.begin(Nip(4, min_message_rounds=4), scenario(), ROW), "p", "accept")
    assert (early.done, early.decision, early.round) == (False, None, 2)
    assert early.rewards == {"prover": 0, "verifier": 0}


def test_turns_without_a_decision_pay():
    paid = played(Conversation.begin(Nip(4, turn_reward=0.25), scenario(), ROW), "p", "Hm.", "p")
    assert paid.rewards == {"prover": 0, "verifier": 0.25}
    assert played(paid, "reject").rewards == {"prover": 0, "verifier": 1.25}


def test_a_stance_is_told_and_paid_for():
    by_seed = {}
    for seed in range(32):
        begun = Conversation.begin(Adp(random_stances=True), scenario(), ROW, seed)
        stance = begun.asks()["prover"][1]["content"].split()[2].strip(":")
        paid = {w: played(begun, "p", w).rewards["prover"] for w in ("accept", "reject")}
        assert paid == {w: float(w == stance) for w in ("accept", "reject")}
        by_seed[seed] = stance
    assert 8 < list(by_seed.values()).count("accept") < 24


def test_an_answer_may_have_to_have_a_form():
    prompts = {"prover": Instructions(form="[0-9]"), "verifier": Instructions(form="[yn]")}
    words = TextScenario(prompts, accept="y", reject="n", guess="y or n?")
    begun = Conversation.begin(Adp(), words, ROW)
    assert begun.after({"prover": " 7\n"}).turns[0].said == {"main": "7"}
    assert begun.after({"prover": "77"}).turns[0].said == {}
    guess = played(begun, "7", "yes")
    assert guess.asks()["verifier"][-1] == user("y or n?")
    assert played(guess, "y").decision == ACCEPT


def test_who_was_not_asked_cannot_answer():
    begun = Conversation.begin(Adp(), scenario(), ROW)
    with pytest.raises(ValueError, match=r"\['verifier'\] answered, but .* turn of \['prover'\]"):
        begun.after({"verifier": "accept"})
    assert begun.after({}).asks() == begun.asks()


@pytest.mark.parametrize(
    ("told", "label"), [(0, 0), (1, 1), (True, 1), ("accept", 1), ("Reject", 0)]
)
def test_labels(told, label):
    assert Conversation.begin(SoloVerifier(), scenario(), {"n": 1, "label": told}).label == label


def test_what_cannot_be_is_refused():
    with pytest.raises(DataError, match=r"column 'label' is 'even'; it must be 0 or 1, or one of"):
        scenario().label({"label": "even"})
    with pytest.raises(DataError, match="column 'label' is None"):
        scenario().label({})
    with pytest.raises(ConfigError, match=r"accept and reject are both 'Yes'"):
        scenario(accept="Yes", reject="yes")
    with pytest.raises(ConfigError, match="retries=-1"):
        scenario(retries=-1)
    with pytest.raises(ConfigError, match="prompts="):
        TextScenario({})
    with pytest.raises(ConfigError, match=r"form='\[' is not a regular expression"):
        Instructions(form="[")
    alone = TextScenario({"verifier": {"user": "Is it?"}})  # as YAML says it
    with pytest.raises(ConfigError, match="has prompts for verifier, but none for 'prover'"):
        Conversation.begin(Nip(), alone, ROW)
    missing = TextScenario({"verifier": {"user": "Is {m} even?"}})
    with pytest.raises(
        ConfigError, match=r"Is \{m\} even\?' cannot be filled: 'm'; it may name 'n'"
    ):
        Conversation.begin(SoloVerifier(), missing, ROW).asks()
    told = Conversation.begin(Adp(), scenario(message="{who}: {text}"), ROW).after({"prover": "p"})
    with pytest.raises(ConfigError, match="cannot be filled: 'who'; it may name 'speaker', 'chan"):
        told.asks()


# ---------------------------------------------------------------- others that decide


def test_a_judge_that_has_decided_is_asked_no_more():
    names = Panel.agent_names
    words = TextScenario({name: Instructions(user=f"You are {name}.") for name in names})
    begun = Conversation.begin(Panel(), words, {"label": 1})
    early = played(begun, "It is so.", "accept", "Really.")
    assert list(early.asks()) == ["second"]
    assert (early.done, early.decision, early.decided["first"]) == (False, None, ACCEPT)
    ended = early.after({"second": "reject"})
    assert (ended.done, ended.decision) == (True, None)  # they do not agree
    assert ended.rewards == {"advocate": 0, "first": 1, "second": -1}

    late = played(begun, "It is so.", "Hm.", "Really.")
    assert list(late.asks()) == ["first", "second"]
    ended = late.after({"first": "accept", "second": "accept"})
    assert (ended.done, ended.decision) == (True, ACCEPT)
    assert ended.rewards == {"advocate": 1, "first": 1, "second": 1}
    assert [turn.decision for turn in ended.turns] == [None, GO_ON, None, ACCEPT, ACCEPT]
    # Each that has not decided in its last turn must guess, and they are asked together.
    guessing = late.after({"first": "Hm.", "second": "Hm."})
    assert list(guessing.asks()) == ["first", "second"]
    told = result(ended)
    assert (told["reward"], told["role_rewards"]) == (1, {"advocate": 1, "first": 1, "second": 1})


def test_where_nobody_decides_it_ends_with_the_rounds():
    class Chat(Protocol):
        agent_names = ("ann", "bob")
        deciders = ()
        agent_channel_visibility = (("ann", "main"), ("bob", "main"))

        def is_active(self, agent, channel, round, seed=0):
            return torch.as_tensor(round) == self.agent_names.index(agent)

        def prover_rewards(self, decided, paid, seed=0):
            return {"ann": torch.tensor(1.0), "bob": torch.tensor(0.5)}

    words = TextScenario({name: Instructions(user=f"You are {name}.") for name in ("ann", "bob")})
    ended = played(Conversation.begin(Chat(2, 0), words, {"label": 1}), "Hi.", "accept")
    assert (ended.done, ended.decision) == (True, None)
    assert ended.turns[-1].said == {"main": "accept"}  # whoever does not decide just says it
    assert result(ended)["reward"] == 1.5  # the mean of (1 + 1, 0.5 + 0.5)
