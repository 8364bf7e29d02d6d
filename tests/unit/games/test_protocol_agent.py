"""ProtocolAgent: interactions with an engine, as roles of rollouts that are recorded exactly."""

import asyncio
from copy import deepcopy

import pytest

from lightning_rl import Prompt, Rollout, Sampling, TransformersEngine
from lightning_rl.agents.endings import ending_metrics
from lightning_rl.errors import ConfigError
from lightning_rl.extend import RolloutStatus
from lightning_rl.games import (
    Adp,
    Debate,
    MerlinArthur,
    Nip,
    ProtocolAgent,
    SoloVerifier,
    TextScenario,
    protocol_metrics,
)
from lightning_rl.games.protocols.base import ACCEPT, GO_ON, REJECT, VERIFIER
from lightning_rl.games.protocols.scenario import Reading
from lightning_rl.models.policy import Policy
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rollout import Call
from lightning_rl.run.loop.background import run_async
from tests.support.tiny_models import chatml_tokenizer, save_random_model

SAMPLING = Sampling(max_tokens=5)


class Bytes(TextScenario):
    """The verifier decides by the bytes that it writes: a random model does so at random."""

    def __init__(self, **options):
        names = ("prover", "prover0", "prover1", "verifier")
        super().__init__({name: {"user": "{agent}: {n}?"} for name in names}, **options)

    def read(self, seat, answer):
        decision = sum(answer.encode()) % 3 if seat.agent == VERIFIER else GO_ON
        return Reading(dict.fromkeys(seat.channels, answer), decision)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = chatml_tokenizer()
    sizes = {"max_position_embeddings": 1024, "initializer_range": 0.2}
    save_random_model(directory, tokenizer, vocab_size=len(tokenizer), **sizes)
    return load_tokenizer(str(directory))


class Counting(TransformersEngine):
    """Counts what it generates, and aborts what it is asked for after ``last`` of these."""

    asked, last = 0, 10**9

    async def generate(self, token_ids, sampling, seed):
        completion = await super().generate(token_ids, sampling, seed)
        self.asked += 1
        if self.asked > self.last:
            completion.finish_reason = "abort"
        return completion


@pytest.fixture(scope="module")
def engine(tokenizer):
    made = Counting(device="cpu", max_batch_size=1)  # one at a time rounds always alike
    made.start(tokenizer.name_or_path)
    made.load_weights(Policy(tokenizer.name_or_path).named_weights(), 3)
    yield made
    made.close()


@pytest.fixture
def run(engine, tokenizer):
    """Run an agent for rollouts side by side."""
    agents = []

    def of(agent, *rollouts):
        agents.append(agent)
        agent.configure(tokenizer)

        async def all_of_them():
            await asyncio.gather(*(agent.run(r, engine, SAMPLING) for r in rollouts))

        engine.asked, engine.last = 0, of.last
        run_async(all_of_them())
        return rollouts

    of.last = 10**9
    yield of
    for agent in agents:
        agent.close()


def rollout(index=0, group="0/0/p", **columns):
    return Rollout(Prompt("p", "7", [9], {"n": 7, "label": 1} | columns), group, index, 40 + index)


def test_each_agent_is_a_role_with_a_row_and_a_reward_of_its_own(run, tokenizer):
    made = run(ProtocolAgent(Nip(4), Bytes()), *(rollout(i) for i in range(8)))
    assert {r.status for r in made} == {RolloutStatus.COMPLETED}
    assert {r.extra["decision"] for r in made} >= {REJECT, ACCEPT}
    for one in made:
        names = [message["role"] for message in one.completion]
        assert names == ["prover", "verifier", "prover", "verifier", "verifier"][: len(names)]
        assert [row.role for row in one.rows if row.token_ids] == ["prover", "verifier"]
        decision = one.extra["decision"]
        right = {ACCEPT: 1.0, REJECT: -1.0, None: -1.0}[decision]
        assert one.role_rewards == {"prover": float(decision == ACCEPT), "verifier": right}
        assert (one.environment_reward, one.logged["right"]) == (right, float(right == 1))
        assert one.extra | {"agent_end": "done"} == one.extra
        assert (one.extra["label"], one.extra["class"]) == (1, "accept")
        assert (one.extra["turns"], one.extra["retries"]) == (len(names), 0)
        # What the rows hold is what was said, as tokens that nobody has encoded again.
        for call, message in zip(one.calls, one.completion, strict=True):
            row = one.rows[call.row]
            assert row.role == message["role"]
            wrote = tokenizer.decode(
                row.token_ids[call.start : call.stop], skip_special_tokens=True
            )
            assert wrote == message["content"]
        prover = tokenizer.decode(one.prompt_of(one.calls[0]))
        assert prover.startswith("<|im_start|>user\nprover: 7?<|im_end|>\n")
        heard = tokenizer.decode(one.prompt_of(one.calls[1]))
        assert f"verifier: 7?\nprover: {one.completion[0]['content']}<|im_end|>" in heard
    first = made[0].completion[0]
    assert {key: first[key] for key in ("round", "channels", "decision")} == {
        "round": 0, "channels": ["main"], "decision": None,
    }  # fmt: skip


def test_those_who_speak_at_once_have_not_heard_each_other(run, tokenizer):
    [made] = run(ProtocolAgent(Debate(2), Bytes()), rollout())
    asked = [tokenizer.decode(made.prompt_of(call)) for call in made.calls]
    assert [
        f"{name}: 7?<|im_end|>" in text
        for name, text in zip(["prover0", "prover1"], asked, strict=False)
    ]
    said = [message["content"] for message in made.completion]
    assert f"verifier: 7?\nprover0: {said[0]}\nprover1: {said[1]}<|im_end|>" in asked[2]
    assert made.role_rewards.keys() == {"prover0", "prover1", "verifier"}


def test_a_group_has_one_draw_and_who_is_silent_is_not_paid(run):
    groups = [f"0/{place}/p" for place in range(8)]
    made = run(
        ProtocolAgent(MerlinArthur(), Bytes(forced_guess=False)),
        *(rollout(i, group) for group in groups for i in (0, 1)),
    )
    spoke = [r.completion[0]["role"] for r in made]
    assert spoke[::2] == spoke[1::2]
    assert set(spoke) == {"prover0", "prover1"}
    assert [list(r.role_rewards) for r in made] == [[name, "verifier"] for name in spoke]


def test_who_is_not_trained_has_no_loss(run):
    [plain] = run(ProtocolAgent(Nip(4), Bytes()), rollout())
    [made] = run(ProtocolAgent(Nip(4), Bytes(), trained=["prover"]), rollout())
    for row, twin in zip(made.rows, plain.rows, strict=True):
        assert row.token_ids == twin.token_ids
        assert row.loss_mask == (
            twin.loss_mask if row.role == "prover" else [False] * len(row.token_ids)
        )
    assert made.calls == plain.calls
    with pytest.raises(
        ConfigError, match=r"trained=\['judge'\]: Nip has no such agent; choose from prover, v"
    ):
        ProtocolAgent(Nip(), Bytes(), trained=["judge", "prover"])


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_one_goes_on_with_what_was_said(run, engine, after):
    def agent():
        return ProtocolAgent(
            Debate(6, min_message_rounds=6), Bytes(retries=1), trained=["verifier"]
        )

    [whole] = run(agent(), rollout(3))
    needed = engine.asked
    assert needed >= 9
    run.last = after
    [broken] = run(agent(), rollout(3))
    assert broken.status is RolloutStatus.ABORTED
    answered = sum(call.finish_reason != "abort" for call in broken.calls)
    assert answered == after
    run.last = 10**9
    [resumed] = run(agent(), Rollout.from_dict(deepcopy(broken.to_dict())))
    assert engine.asked == needed - after
    again, first = resumed.to_dict(), whole.to_dict()
    for record in (again, first):
        record.pop("dropped")
    assert again == first


def test_answers_that_cannot_be_read_are_asked_for_again(run):
    class Refuses(Bytes):
        def read(self, seat, answer):
            return None if seat.agent == "prover" else super().read(seat, answer)

    [made] = run(ProtocolAgent(Adp(), Refuses(retries=2)), rollout())
    assert [c.row for c in made.calls][:3] == [1, 2, 3]  # the same question thrice
    assert len({tuple(row.token_ids) for row in made.rows[1:][:3]}) == 3
    assert made.extra["retries"] == 2
    assert made.completion[0]["channels"] == []
    assert protocol_metrics([made])["retry_share"] == 2 / len(made.calls)


def test_a_row_that_cannot_be_told_costs_its_rollout(engine, tokenizer):
    agent = ProtocolAgent(SoloVerifier(), Bytes())
    agent.configure(tokenizer)
    with pytest.raises(ValueError, match="column 'label' is 'maybe'"):
        run_async(agent.run(rollout(label="maybe"), engine, SAMPLING))
    agent.close()


def test_time_that_is_over_ends_it_with_what_was_said(engine, tokenizer):
    class Waits:
        max_length = engine.max_length

        def of_role(self, role):
            return self

        async def generate(self, token_ids, sampling, seed):
            if b"verifier: 7" in tokenizer.decode(token_ids).encode():
                await asyncio.sleep(60)
            return await engine.generate(token_ids, sampling, seed)

    agent = ProtocolAgent(Adp(), Bytes(), max_seconds=0.5)
    agent.configure(tokenizer)
    made = rollout()
    run_async(agent.run(made, Waits(), SAMPLING))
    agent.close()
    assert (made.status, made.finish_reason) == (RolloutStatus.COMPLETED, "max_seconds")
    assert (made.environment_reward, [m["role"] for m in made.completion]) == (0.0, ["prover"])
    assert ending_metrics([made])["agent/timeout_share"] == 1.0


# ---------------------------------------------------------------- measured


def judged(make_rollout, group, decision, label, retries=0, guesses=0, reasons=("stop", "stop")):
    extra = {"decision": decision, "label": label, "class": "ny"[label], "retries": retries}
    made = make_rollout([3], [4], group_id=group, extra=extra | {"guesses": guesses})
    made.calls = [Call(0, 0, 1, finish_reason=reason) for reason in reasons]
    return made


def test_verdicts_are_measured_by_hand(make_rollout):
    rollouts = [
        judged(make_rollout, "a", 1, 1),
        judged(make_rollout, "a", 1, 1, retries=1, reasons=("stop", "length", "stop", "stop")),
        judged(make_rollout, "b", 1, 0),
        judged(make_rollout, "b", 0, 0),
        judged(make_rollout, "c", None, 1, guesses=1),
        judged(make_rollout, "d", 0, 0),
        judged(make_rollout, "d", 0, 0),
        judged(make_rollout, "d", 0, 0),
        make_rollout([3], [4], group_id="e"),  # it failed
    ]
    assert protocol_metrics(rollouts) == pytest.approx(
        {
            "worst_accuracy": 0.0,  # of prompt c
            "accuracy_n": 4 / 5,
            "accuracy_y": 2 / 3,
            "precision": 2 / 3,
            "recall": 2 / 3,
            # 3/8 accepted, 4/8 rejected, 1/8 neither: .36781 + .34657 + .25993
            "decision_entropy": 0.974315,
            "undecided_share": 1 / 8,
            "guess_share": 1 / 8,
            "retry_share": 1 / 18,
            "cut_share": 1 / 18,
        },
        abs=1e-6,
    )


def test_nothing_accepted_is_no_error(make_rollout):
    metrics = protocol_metrics([judged(make_rollout, "a", 0, 0)])
    assert (metrics["precision"], metrics["recall"], metrics["decision_entropy"]) == (0, 0, 0)
    assert protocol_metrics([make_rollout([3], [4])]) == {}
