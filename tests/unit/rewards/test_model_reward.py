"""Test ModelReward and ServedReward: scores of reward models, and what becomes of those without."""

import asyncio
import json

import pytest
import torch
from torch import nn
from transformers import Qwen2ForSequenceClassification

from lightning_rl import ModelReward, ServedReward
from lightning_rl.errors import ConfigError, RewardError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import RewardFailure
from lightning_rl.rollout import RolloutStatus
from tests.support.serving import Loopback, Quiet, serving


@pytest.fixture
def scorer(tiny_model, tmp_path):
    """Return a reward model in a directory; its head weighs the last token's state."""

    def save(labels: int = 1, weight: float = 1.0) -> str:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = Qwen2ForSequenceClassification.from_pretrained(
                tiny_model, num_labels=labels, dtype=torch.float32
            )
            nn.init.normal_(model.score.weight, std=weight)
        model.save_pretrained(tmp_path / "scorer")
        for file in tiny_model.glob("*token*"):
            (tmp_path / "scorer" / file.name).write_bytes(file.read_bytes())
        return str(tmp_path / "scorer")

    return save


def expected(path: str, *texts: list[int]) -> list[float]:
    """Score one by one, without padding."""
    model = Qwen2ForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    return [float(model(torch.tensor([text])).logits[0, 0]) for text in texts]


def graded(reward, make_rollout, *said: str, **fields):
    group = [make_rollout([4, 2], [5], completion=text, reward=None, **fields) for text in said]
    for rollout in group:
        rollout.prompt.prompt = "1="
    Rewards([reward]).grade_here([group])
    return group


def test_scores_are_those_of_transformers_text_by_text(scorer, make_rollout):
    path = scorer()
    group = graded(ModelReward(path, device="cpu", batch_size=2), make_rollout, "234", "2", "99")
    # "1=" is 4, 2; digits are 3 to 12, and 1 ends a text.
    wanted = expected(path, [4, 2, 5, 6, 7, 1], [4, 2, 5, 1], [4, 2, 12, 12, 1])
    assert [r.reward for r in group] == pytest.approx(wanted, abs=1e-4)
    assert list(group[0].reward_parts) == ["reward_model"]
    # One that was cut off has no end.
    [cut] = graded(ModelReward(path, device="cpu"), make_rollout, "2", finish_reason="length")
    assert cut.reward == pytest.approx(expected(path, [4, 2, 5])[0], abs=1e-4)


def test_a_text_that_is_too_long_costs_one_rollout(scorer, make_rollout):
    group = graded(ModelReward(scorer(), device="cpu"), make_rollout, "1" * 126, "1" * 125)
    assert [r.status for r in group] == [RolloutStatus.FAILED, RolloutStatus.COMPLETED]
    told = "reward reward_model: its text of 129 tokens exceeds the model's 128; prompt '1=', "
    assert group[0].error.startswith(told)


def test_nan_costs_the_rollout_and_is_told_once(scorer, make_rollout):
    reward = ModelReward(scorer(), device="cpu", name="taste")
    loaded = reward._loaded()
    loaded.lm.score.weight.fill_(float("nan"))
    reward._scorer = loaded
    group = graded(reward, make_rollout, "1", "2")
    assert {r.error for r in group} == {
        "reward taste: returned nan; a score must be a finite number or None; "
        f"prompt '1=', completion '{said}'"
        for said in "12"
    }
    with pytest.raises(RewardError, match=r"2 of 2 rollouts could not be graded.*returned nan"):
        Rewards([reward]).require_graded(group)


def test_what_is_no_reward_model_is_named(scorer, tiny_model, make_rollout, tmp_path):
    [failed] = graded(ModelReward(str(tiny_model), device="cpu"), make_rollout, "1")
    assert "has architectures=['Qwen2ForCausalLM'] in its config.json" in failed.error
    [failed] = graded(ModelReward(scorer(labels=2), device="cpu"), make_rollout, "1")
    assert "has 2 labels in its config.json, but a reward model is a" in failed.error
    assert "train one with RewardModelModule" in failed.error
    [failed] = graded(ModelReward(scorer(weight=float("inf")), device="cpu"), make_rollout, "1")
    assert "numbers that are NaN or infinite" in failed.error
    with pytest.raises(ConfigError, match="there is no such directory"):
        ModelReward(str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="dtype='int8'\\) must be one of float32"):
        ModelReward(str(tiny_model), dtype="int8")


class Classifier(Quiet):
    """Scores a text by its number of tokens, as vLLM's ``/classify`` answers."""

    def do_POST(self) -> None:
        body = json.loads(self.body())
        self.server.asked.append((self.path, body))
        count = len(body["input"])
        found = {3: (200, "<html>"), 4: (400, '{"error": "too long"}')}
        status, text = found.get(count, (200, json.dumps({"data": [{"probs": [count / 2]}]})))
        self.send(status, text.encode())


def ask(reward, *completions: str):
    count = len(completions)
    columns = {"prompts": ["1="] * count, "finish_reasons": ["stop"] * count}
    return asyncio.run(reward(completions=list(completions), **columns))


def test_a_server_gets_the_tokens_and_says_the_score(tiny_model):
    server = Loopback(Classifier)
    options = {"tokenizer": str(tiny_model), "retries": 1, "first_wait_s": 0.0}
    with serving(server):
        url = server.url
        long, refused, broken = ask(ServedReward(url, "taste", **options), "234", "2", "")
    assert long == 3.0
    assert isinstance(refused, RewardFailure)
    assert f'{url}/classify answered 400: {{"error": "too long"}}' in refused.reason
    assert "(after" not in refused.reason  # asking again would not help
    assert isinstance(broken, RewardFailure)
    assert broken.reason.endswith("(after 2 attempts)")
    body = {"model": "taste", "input": [4, 2, 5, 6, 7, 1], "use_activation": False}
    assert ("/classify", body) in server.asked
    # Nobody listens any more.
    [failed] = ask(ServedReward(url, "taste", **options), "2")
    assert f"{url}/classify gave no answer" in failed.reason
