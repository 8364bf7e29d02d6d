"""Test ModelTeacher and ServedTeacher: what they think of tokens, and what becomes of faults."""

import asyncio
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl import Distillation, ModelTeacher, PPOClip, ServedTeacher, TeacherDivergence
from lightning_rl.collect.checks import check_teachers
from lightning_rl.data import teacher_logprobs
from lightning_rl.errors import ConfigError, RewardError
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rewards import teachers
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import RewardFailure
from lightning_rl.rollout import RolloutStatus, Row
from tests.support.serving import Loopback, Quiet, serving


def graded(teacher, tokenizer_of, rollouts):
    rewards = Rewards([teacher])
    rewards.configure(load_tokenizer(str(tokenizer_of)))
    for rollout in rollouts:
        rollout.reward = None
    rewards.grade_here([rollouts])
    return rewards


def own_logprobs(model, text: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return all logprobs (n - 1, V) of a text's tokens but the first, without packing."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        return (lm(torch.tensor([text])).logits[0, :-1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("budget", [1, 64])  # each text in a micro-batch of its own, and all in one
def test_logprobs_are_those_of_the_model(tiny_model, make_rollout, budget):
    mask = [True, False, True]
    texts = {(3, 4): [5, 6, 7], (8,): [9, 10, 1]}
    rollouts = [
        make_rollout(list(prompt), tokens, loss_mask=mask, temperature=0.5, sample_index=place)
        for prompt, tokens in texts.items()
        for place in range(2)
    ]
    teacher = ModelTeacher(
        str(tiny_model), top_k=2, max_tokens_per_micro_batch=budget, device="cpu"
    )
    graded(teacher, tiny_model, rollouts)
    for rollout in rollouts:
        [row] = rollout.rows
        begin = len(row.prompt_ids)
        expected = own_logprobs(tiny_model, row.prompt_ids + row.token_ids, 0.5)[begin - 1 :]
        of_tokens = expected.gather(-1, torch.tensor(row.token_ids)[:, None]).squeeze(-1)
        found = teacher_logprobs.of_text(row.teacher_logprobs)
        assert found.logprobs.isnan().tolist() == [False, True, False]
        known = torch.tensor(mask)
        gap = found.logprobs[known] - of_tokens[known]
        assert gap.abs().max() < 1e-4
        top = expected[known].topk(2)
        assert (found.top_logprobs[known] - top.values).abs().max() < 1e-4
        assert torch.equal(found.ids[known], top.indices)
        assert found.ids[~known].unique().tolist() == [-1]
        # The writer's logprobs are -1 where the mask is set.
        assert rollout.reward == pytest.approx(float(of_tokens[known].mean()) + 1, abs=1e-4)
        assert rollout.reward_parts == {"teacher": rollout.reward}


def test_equal_texts_are_read_once(tiny_model, make_rollout, monkeypatch):
    teacher, read = ModelTeacher(str(tiny_model), device="cpu"), []
    pack = teachers.pack_rollouts
    monkeypatch.setattr(teachers, "pack_rollouts", lambda r: read.append(len(r)) or pack(r))
    one = [make_rollout([3], [4], sample_index=i) for i in range(3)]
    graded(teacher, tiny_model, one)
    two = [make_rollout([3], [4]), make_rollout([3], [4, 5]), make_rollout([3], [4], temperature=2)]
    graded(teacher, tiny_model, two)
    graded(teacher, tiny_model, [make_rollout([3], [4])])
    assert read == [1, 2]
    assert two[0].rows[0].teacher_logprobs == one[0].rows[0].teacher_logprobs
    # It forgets the oldest.
    monkeypatch.setattr(teachers, "KEPT", 1)
    graded(teacher, tiny_model, [make_rollout([3], [7])])
    assert len(teacher._known) == 3  # of four, the first is gone
    assert one[0].rows[0].teacher_logprobs not in teacher._known.values()


def test_a_hint_is_read_by_the_teacher_alone(tiny_model, make_rollout):
    """'1=' is 4, 2 (after which comes the completion), and the hint '{answer}' has tokens 5, 6."""
    rollout = make_rollout([4, 2], [7, 1], columns={"answer": 23}, logprobs=[-1.0, -1.0])
    rollout.prompt.prompt = "1="
    hinted = load_tokenizer(str(tiny_model))("1=\n23\n")["input_ids"]
    assert {4, 2, 5, 6} <= set(hinted)
    later = Row([9, 9], [5], [True], [-1.0], [0])  # begins with something else
    rollout.rows.append(later)
    graded(ModelTeacher(str(tiny_model), hint="{answer}", device="cpu"), tiny_model, [rollout])
    expected = own_logprobs(tiny_model, [*hinted, 7, 1])[len(hinted) - 1 :]
    wanted = expected.gather(-1, torch.tensor([[7], [1]])).squeeze(-1)
    found = teacher_logprobs.of_text(rollout.rows[0].teacher_logprobs).logprobs
    assert (found - wanted).abs().max() < 1e-4
    plain = own_logprobs(tiny_model, [9, 9, 5])[1, 5]
    assert teacher_logprobs.of_text(later.teacher_logprobs).logprobs[0] == pytest.approx(
        float(plain), abs=1e-4
    )
    assert rollout.rows[0].prompt_ids == [4, 2]


@pytest.mark.parametrize(
    ("prompt", "columns", "told"),
    [
        (
            "1=",
            {},
            "prompt 'p' has no column 'answer', which the teacher's hint names; it has none",
        ),
        ("2=", {"answer": 1}, "has pictures, tools or other options of its chat template"),
    ],
)
def test_a_hint_without_a_place_costs_the_rollout(tiny_model, make_rollout, prompt, columns, told):
    rollout = make_rollout([4, 2], [7], columns=columns)
    rollout.prompt.prompt = prompt
    graded(ModelTeacher(str(tiny_model), hint="{answer}", device="cpu"), tiny_model, [rollout])
    assert rollout.status is RolloutStatus.FAILED
    assert told in rollout.error


def test_nan_is_told_once_and_loses_nothing(tiny_model, make_rollout):
    teacher = ModelTeacher(str(tiny_model), device="cpu")
    teacher._policy = teacher._loaded()
    teacher._policy.lm.model.norm.weight.data.fill_(float("nan"))
    rollouts = [make_rollout([3], [4]), make_rollout([3], [5])]
    rewards = graded(teacher, tiny_model, rollouts)
    with pytest.raises(RewardError, match=r"2 of 2 .* the teacher's logprobs are NaN") as caught:
        rewards.require_graded(rollouts)
    assert caught.value.rollouts == rollouts


def test_another_tokenizer_is_refused_by_name(tiny_model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_model.iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer.json":
            text = text.replace(b'"5"', b'"five"')
        (other / file.name).write_bytes(text)
    rewards = Rewards([ModelTeacher(str(other))])
    with pytest.raises(ConfigError, match=r"has another tokenizer .* 'five' there"):
        rewards.configure(load_tokenizer(str(tiny_model)))


@pytest.fixture
def resized(tiny_model, tmp_path):
    """Return the tiny model with so many rows, of which the first are as they were."""

    def save(rows: int):
        folder = tmp_path / f"rows_{rows}"
        lm = AutoModelForCausalLM.from_pretrained(tiny_model)
        lm.resize_token_embeddings(rows, mean_resizing=False)
        with torch.no_grad():
            lm.get_input_embeddings().weight[16:] = 3.0  # far likelier than a token
        lm.save_pretrained(folder)
        load_tokenizer(str(tiny_model)).save_pretrained(folder)
        return folder

    return save


def test_rows_that_the_policy_lacks_are_left_out(tiny_model, resized, make_rollout):
    wide, plain = make_rollout([3], [4, 5]), make_rollout([3], [4, 5])
    graded(ModelTeacher(str(resized(24)), top_k=16, device="cpu"), tiny_model, [wide])
    graded(ModelTeacher(str(tiny_model), top_k=16, device="cpu"), tiny_model, [plain])
    found, expected = (teacher_logprobs.of_text(r.rows[0].teacher_logprobs) for r in (wide, plain))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_rows_that_the_teacher_lacks_are_refused_where_they_are_used(
    tiny_model, resized, make_rollout
):
    """Tokens 13 to 15 are no text's, so that a teacher without them reads all other rollouts."""
    good, odd = make_rollout([3], [4]), make_rollout([3], [14])
    graded(ModelTeacher(str(resized(13)), device="cpu"), tiny_model, [good, odd])
    assert good.reward is not None
    assert odd.status is RolloutStatus.FAILED
    assert "the rollout has token 14, but the teacher has 13 tokens" in odd.error
    with pytest.raises(ConfigError, match=r"has 12 tokens, but .* writes '9', its token 12"):
        graded(ModelTeacher(str(resized(12)), device="cpu"), tiny_model, [good])
    with pytest.raises(ConfigError, match=r"top_k=14\) must be <= 13"):
        graded(ModelTeacher(str(resized(13)), top_k=14, device="cpu"), tiny_model, [good])


def test_a_run_without_the_teacher_it_needs_is_refused(tiny_model):
    rewards = [Rewards([len])]
    with pytest.raises(ConfigError, match="advantage=Distillation learns from a teacher, but"):
        check_teachers(Distillation(), PPOClip(), rewards)
    with_one = [Rewards([ModelTeacher(str(tiny_model))])]
    check_teachers(Distillation(), PPOClip(), with_one)
    with pytest.raises(ConfigError, match=r"the teachers in data\.rewards have top_k=0"):
        check_teachers(Distillation(), TeacherDivergence(), with_one)


class Server(Quiet):
    """Answers like vLLM: each token t has logprob -t / 10, and tokens 3 and 4 are the likeliest."""

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.server.asked.append((self.path, body))
        each = [None]
        for token in body["prompt"][1:]:
            told = {token: token, **dict.fromkeys(range(3, 3 + body["prompt_logprobs"]))}
            each.append({str(t): {"logprob": -t / 10, "rank": 1} for t in told})
        answer = {"choices": [{"text": "", "prompt_logprobs": each}]}
        status = 200
        if 12 in body["prompt"]:
            status, answer = 503, {"error": "overloaded"}
        if 11 in body["prompt"]:
            answer["choices"][0]["prompt_logprobs"] = None
        self.send(status, json.dumps(answer).encode())


def test_a_server_gets_tokens_and_tells_their_logprobs(tiny_model, make_rollout):
    server = Loopback(Server)
    rollouts = [
        make_rollout([7, 2], [5, 4]),
        make_rollout([7, 2], [12]),
        make_rollout([7, 2], [11]),
        make_rollout([7, 2], [5], temperature=0.5),
    ]
    options = {"tokenizer": str(tiny_model), "retries": 1, "first_wait_s": 0.0}

    def ask(url: str, rollouts):
        teacher = ServedTeacher(url, "big", top_k=2, **options)
        teacher.configure(load_tokenizer(str(tiny_model)))
        return asyncio.run(teacher(rollouts=rollouts))

    with serving(server):
        url = server.url + "/v1"
        right, dead, other, hot = ask(url, rollouts)
    assert right == pytest.approx((0.5 + 0.6) / 2)  # each less the writer's -1
    found = teacher_logprobs.of_text(rollouts[0].rows[0].teacher_logprobs)
    assert found.logprobs.tolist() == pytest.approx([-0.5, -0.4])
    assert found.ids.tolist() == [[3, 4], [3, 4]]
    expected = torch.tensor([[-0.3, -0.4]] * 2)
    torch.testing.assert_close(found.top_logprobs, expected, rtol=1e-6, atol=0)
    body = {
        "model": "big", "prompt": [7, 2, 5, 4], "prompt_logprobs": 2, "max_tokens": 1,
        "temperature": 0,
    }  # fmt: skip
    assert server.asked.count(("/v1/completions", body)) == 1
    failures = (dead, other, hot)
    assert all(isinstance(one, RewardFailure) for one in failures)
    assert "503" in dead.reason
    assert dead.reason.endswith("(after 2 attempts)")
    assert "sent no prompt_logprobs of the 3 tokens" in other.reason
    assert "sampling.temperature=0.5, but a served teacher's logprobs are those at 1" in hot.reason
    [gone] = ask(url, rollouts[:1])  # nobody listens any more
    assert "gave no answer" in gone.reason
