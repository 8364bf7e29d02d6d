"""Rewards see the pictures that the model saw."""

import pickle

from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Placed, Prompt, Rollout, RolloutStatus, Row
from lightning_rl.run.loop.background import run_async
from lightning_rl.vision.decoded import DecodedPictures, seen_in
from tests.support.tiny_vision import picture

ONE, OTHER, LATER = picture(1, 32, 48), picture(2), picture(3, 64, 32)


def rollout(pictures, later=(), index=0):
    """Make pictures of a prompt, each a token here, and one in each of the turns after it."""
    chat = [{"role": "user", "content": "?"}]
    places = list(range(len(pictures)))
    prompt = Prompt("p", chat, [7] * (len(pictures) + 1), pictures=pictures, places=places)
    row = Row.of(prompt)
    row.append_written([3], [0.0], [0])
    for shown in later:
        row.append_given([7], [Placed(0, shown)])
        row.append_written([4], [0.0], [0])
    return Rollout(prompt, "g", index, 0, rows=[row], status=RolloutStatus.COMPLETED)


def test_of_a_rollout_first_the_prompts_then_each_later_one_once():
    seen = seen_in(rollout([ONE, OTHER, ONE], later=[LATER, OTHER, LATER]))
    assert seen.pictures == (ONE, OTHER, ONE, LATER)
    assert [image.size for image in seen] == [(32, 48), (32, 32), (32, 48), (64, 32)]
    assert seen[1:3].pictures == (OTHER, ONE)
    assert len(seen_in(rollout([]))) == 0


def test_an_image_is_the_readers_own():
    seen = DecodedPictures([ONE])
    before = seen[0].getpixel((0, 0))
    seen[0].putpixel((0, 0), tuple(255 - value for value in before))
    assert seen[0].getpixel((0, 0)) == before
    assert pickle.loads(pickle.dumps(seen))[0].tobytes() == seen[0].tobytes()


def grade(function, groups):
    run_async(Rewards([function]).grade(groups))
    return [[r.reward for r in group] for group in groups]


def test_a_reward_asks_for_them_by_name():
    def width(pictures):
        return [float(sum(image.width for image in images)) for images in pictures]

    def others(completions, **columns):
        assert "pictures" not in columns
        return [1.0] * len(completions)

    def groups():
        return [[rollout([ONE], [LATER], i) for i in range(2)], [rollout([])]]

    assert grade(width, groups()) == [[96.0, 96.0], [0.0]]
    assert grade(others, groups()) == [[1.0, 1.0], [1.0]]


def test_a_reward_of_trl_gets_the_prompts_images():
    def width(completions, images, **kwargs):
        return [float(sum(image.width for image in shown)) for shown in images]

    def own(images):
        return [float(len(images[0]))]

    assert grade(width, [[rollout([ONE, OTHER], [LATER])]]) == [[64.0]]
    given = rollout([ONE])
    given.prompt.columns["images"] = "four"  # a column of the data set
    assert grade(own, [[given]]) == [[4.0]]


def test_one_that_is_not_looked_at_is_not_decoded(monkeypatch):
    def count(pictures):
        return [float(len(images)) for images in pictures]

    monkeypatch.delattr("lightning_rl.vision.decoded.decode")
    assert grade(count, [[rollout([ONE, OTHER])]]) == [[2.0]]
