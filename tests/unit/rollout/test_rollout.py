"""Rollouts survive every way in which they are stored."""

import io
import json

import torch

from lightning_rl.rollout import Prompt, Rollout, RolloutStatus, Row, SamplingDistribution


def example() -> Rollout:
    return Rollout(
        prompt=Prompt("7", [{"role": "user", "content": "ab"}], [4, 5], {"answer": "ba", "n": 2}),
        group_id="3/0/7",
        sample_index=1,
        seed=2**62 + 1,  # beyond float's exact integers
        sampling=SamplingDistribution(temperature=0.7),
        rows=[Row([4, 5], [6, 7, 1], [True, False, True], [-0.1, 0.0, -2.5], [4, -1, 5])],
        completion=[{"role": "assistant", "content": "ba"}],
        status=RolloutStatus.FAILED,
        finish_reason="stop",
        reward=None,
        reward_parts={"exact": 1.0, "style": None},
        error="reward style: KeyError: 'x'",
    )


def test_a_rollout_survives_json():
    assert Rollout.from_dict(json.loads(json.dumps(example().to_dict()))) == example()


def test_a_rollout_survives_a_weights_only_checkpoint():
    buffer = io.BytesIO()
    torch.save([example().to_dict()], buffer)
    buffer.seek(0)
    (record,) = torch.load(buffer, weights_only=True)
    assert Rollout.from_dict(record) == example()
    assert isinstance(Rollout.from_dict(record).status, RolloutStatus)


def test_unknown_fields_of_a_record_are_left_out():
    record = {"id": "3/0/7/1", "iteration": 3} | example().to_dict()  # as PreviewTable writes it
    assert Rollout.from_dict(record) == example()


def test_the_id_names_group_and_sample():
    assert example().id == "3/0/7/1"
