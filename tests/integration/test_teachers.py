"""A teacher that vLLM serves gives the logprobs that the model has here."""

import asyncio

import pytest

from lightning_rl import ModelTeacher, ServedTeacher
from lightning_rl.data.teacher_logprobs import of_text
from lightning_rl.models.tokenizer import load_tokenizer
from tests.support.served_models import served

pytest.importorskip("vllm")


@pytest.fixture
def url(tiny_model):
    """Yield the address of ``vllm serve`` with the tiny model."""
    with served(tiny_model) as url:
        yield url


def test_a_served_teacher_agrees_with_the_model_here(tiny_model, url, make_rollout):
    def rollouts():
        return [make_rollout([3, 4, 2], [5, 6, 7, 1]), make_rollout([9, 2], [10])]

    one, other = rollouts(), rollouts()
    served = ServedTeacher(url, str(tiny_model), top_k=3)
    here = ModelTeacher(str(tiny_model), top_k=3, device="cpu")
    for teacher in (served, here):
        teacher.configure(load_tokenizer(str(tiny_model)))
    scores = asyncio.run(served(rollouts=one))
    assert scores == pytest.approx(here(other), abs=1e-4)
    for mine, theirs in zip(one, other, strict=True):
        found, expected = (of_text(r.rows[0].teacher_logprobs) for r in (mine, theirs))
        assert (found.logprobs - expected.logprobs).abs().max() < 1e-4
        assert (found.top_logprobs - expected.top_logprobs).abs().max() < 1e-4
        assert found.ids.tolist() == expected.ids.tolist()
