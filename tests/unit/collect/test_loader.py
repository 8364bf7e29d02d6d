"""Test RolloutLoader: lazy, sized, and exact after an interruption at any point."""

import json
from itertools import islice

import pytest

from lightning_rl.collect.loader import RolloutLoader, trainable
from lightning_rl.collect.pipeline import GroupSource
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import RewardError
from lightning_rl.models.policy import load_tokenizer
from lightning_rl.rollout import RolloutStatus


class Run:
    """A loader over ten prompts, two per iteration, with everything it does on record."""

    def __init__(self, tiny_model, make_rollout, length: int = 3, trained: int = 0) -> None:
        prompts = IterablePrompts([{"prompt": f"{n}="} for n in range(10)], seed=5)
        prompts.load(load_tokenizer(str(tiny_model)))
        self.trained = trained
        self.collected: list[int] = []

        def collect(iteration):
            self.collected.append(iteration)
            return [
                make_rollout(p.token_ids, [3, 1], group_id=f"{iteration}/{p.id}", reward=1.0)
                for p in prompts.draw(2)
            ]

        source = GroupSource(prompts, 2, 1, Sampling())
        self.loader = RolloutLoader(collect, source, length, lambda: self.trained)

    def train(self, iterations: int, rest_of_epoch: int | None = None) -> list[list[int]]:
        """Return tokens of each batch that was trained on, over epoch ends.

        As Lightning does: each epoch takes its number of batches, and drops the iterator without
        asking it for one more.
        """
        seen: list[list[int]] = []
        batches = len(self.loader) if rest_of_epoch is None else rest_of_epoch
        while True:
            for batch in islice(self.loader, batches):
                seen.append(batch["tokens", "input_ids"].tolist())
                self.trained += 1
                if len(seen) == iterations:
                    return seen
            batches = len(self.loader)

    def state(self):
        return json.loads(json.dumps(self.loader.state_dict()))


@pytest.fixture
def run(tiny_model, make_rollout):
    return lambda **options: Run(tiny_model, make_rollout, **options)


def test_the_length_is_constant_and_nothing_is_collected_early(run):
    started = run()
    assert len(started.loader) == 3
    iterator = iter(started.loader)
    assert started.collected == []
    next(iterator)
    assert started.collected == [0]
    assert len(started.loader) == 3
    assert len(list(iterator)) == 2
    assert started.collected == [0, 1, 2]


def test_a_second_fit_goes_on_counting(run):
    started = run(trained=5)
    started.train(2)
    assert started.collected == [5, 6]


def test_iterations_are_numbered_through_epochs(run):
    started = run()
    started.train(7)
    assert started.collected == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("stopped", [1, 2, 3, 4, 6])
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(run, stopped):
    whole = run()
    expected = whole.train(8)
    first = run()
    assert first.train(stopped) == expected[:stopped]
    second = run(trained=stopped)
    second.loader.load_state_dict(first.state())
    assert second.train(8 - stopped, rest_of_epoch=3 - stopped % 3) == expected[stopped:]
    assert second.collected == list(range(stopped, 8))


@pytest.mark.parametrize("stopped", [1, 2, 3, 4])
def test_a_resumed_epoch_has_only_its_rest(run, stopped):
    first = run()
    first.train(stopped)
    second = run(trained=stopped)
    second.loader.load_state_dict(first.state())
    assert len(list(second.loader)) == {1: 2, 2: 1, 3: 3, 4: 2}[stopped]
    assert len(list(second.loader)) == 3


def test_a_batch_whose_training_was_interrupted_is_kept_and_comes_first(run):
    first = run()
    iterator = iter(first.loader)
    next(iterator)
    first.trained = 1
    interrupted = next(iterator)  # collected and handed out, but never trained on
    state = first.state()
    assert len(state["ranks"][0]["pending"]) == 2
    second = run(trained=1)
    second.loader.load_state_dict(state)
    batches = list(second.loader)
    assert len(batches) == 2  # the rest of the epoch: the interrupted iteration and one more
    for part in ("tokens", "rollouts"):
        assert (batches[0][part] == interrupted[part]).all()
    assert second.collected == [2]


def test_a_batch_of_several_ranks_that_was_not_trained_on_is_put_together(run, make_rollout):
    """Group by group, in the order that it has on one process."""
    first = run()
    next(iter(first.loader))
    state = first.state()

    def pending(*groups):
        rollouts = [
            make_rollout([3], [4, 1], group_id=f"0/{g}/p", sample_index=i, reward=float(i))
            for g in groups
            for i in range(2)
        ]
        return [rollout.to_dict() for rollout in rollouts]

    two = [state["ranks"][0] | {"pending": pending(*groups)} for groups in ((0, 2), (1, 3))]
    second = run()
    second.loader.load_state_dict({"ranks": two})
    next(iter(second.loader))
    ids = [rollout.id for rollout in second.loader.current]
    assert ids == [f"0/{group}/p/{i}" for group in range(4) for i in range(2)]


def test_a_restored_batch_is_kept_until_it_is_trained_on(run):
    first = run()
    next(iter(first.loader))
    state = first.state()
    second = run()
    second.loader.load_state_dict(state)
    assert second.state() == state  # saved again before it went on
    iterator = iter(second.loader)
    next(iterator)
    assert second.state() == state
    second.trained = 1
    next(iterator)
    assert second.collected == [1]


def test_a_trained_batch_is_not_in_the_state(run):
    started = run()
    next(iter(started.loader))
    assert len(started.state()["ranks"][0]["pending"]) == 2
    started.trained = 1
    assert started.state()["ranks"][0]["pending"] == []


def test_only_completed_and_graded_rollouts_are_trained_on(make_rollout):
    good = make_rollout([3], [1], reward=0.0)
    failed = make_rollout([3], [1], reward=None, status=RolloutStatus.FAILED, error="boom")
    aborted = make_rollout([3], [], reward=None, status=RolloutStatus.ABORTED)
    assert trainable([failed, good, aborted]) == [good]
    with pytest.raises(RewardError, match=r"none of 2 rollouts .* first error: boom"):
        trainable([aborted, failed])
