"""Test how the tables of two configurations are compared."""

from lightning_rl.config.layers import Change, differences, flatten, with_defaults


def data(**arguments):
    return flatten({"data": {"class_path": "lightning_rl.RLDataModule", **arguments}})


def test_keys_that_only_one_has_differ():
    one, other = data(init_args={"sampling": {"json": {"a": 1}}}), data(init_args={"rewards": []})
    assert differences(one, other) == [
        Change("data.sampling.json.a", 1, None),
        Change("data.rewards", None, []),
    ]
    assert differences(one, other, shared=True) == []
    assert differences(data(dict_kwargs={"a": 1}), data(dict_kwargs={"a": 2})) == [
        Change("data.a", 1, 2)
    ]


def test_what_a_later_release_adds_is_compared_with_its_default():
    then, now = data(), data(init_args={"max_failed_share": 0.1, "sampling": {"temperature": 1.0}})
    assert differences(with_defaults(then, now), now) == []
    now |= {"data.sampling.temperature": 0.5, "data.sampling.json.a": 1}
    assert differences(with_defaults(then, now), now) == [
        Change("data.sampling.temperature", 1.0, 0.5),
        Change("data.sampling.json.a", None, 1),
    ]
