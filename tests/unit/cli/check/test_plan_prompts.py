"""Test what a memory plan keeps of prompts that have pictures."""

from lightning_rl.cli.check.batches import largest_rollouts, with_longest_whole
from lightning_rl.rollout import Prompt
from tests.support.tiny_vision import picture

LENGTHS = (4, 9, 5, 9, 9, 2, 7)


def prompts():
    """Return prompts of these lengths, each with a picture of its own."""
    for number, length in enumerate(LENGTHS):
        ids = list(range(length))
        yield Prompt(str(number), "", ids, pictures=[picture(number)], places=[0])


def test_the_longest_prompts_keep_their_pictures():
    kept = with_longest_whole(prompts(), 2)
    assert [len(p.token_ids) for p in kept] == list(LENGTHS)
    assert [p.id for p in kept if p.pictures] == ["1", "3"]
    assert all(bool(p.places) == bool(p.pictures) for p in kept)
    # The plan is therefore what it was with all of them.
    for groups in (1, 2):
        planned = largest_rollouts(kept, groups, 2, 3)
        expected = largest_rollouts(list(prompts()), groups, 2, 3)
        assert [r.to_dict() for r in planned] == [r.to_dict() for r in expected]
    assert all(p.pictures for p in with_longest_whole(prompts(), 10))
