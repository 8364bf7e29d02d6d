"""Test prompt sets and rewards in configurations: each argument's mistakes, each public name."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from lightning_rl.config import names
from lightning_rl.config.hints import accepts, import_object, named_class, parameters, subclasses
from lightning_rl.config.mistakes import check_value
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.sources import AnyPrompts
from lightning_rl.errors import ConfigError
from tests.support.bad_configs import complaint

names.load_all()
OURS = {name: names.public(name) for name in names.MODULE_OF}
PROMPTS = sorted(
    (k for k in subclasses(PromptDataset) if k.__name__ in OURS), key=lambda kind: kind.__name__
)
REWARDS = list[Callable[..., list[float]]]
KEY = ("data", "init_args", "train_prompts")
WRONG: list[Any] = [{"nonsense": {"x": 1}}, 3, "no such value", [["z"]], 1.5]


def alone(prompts: Any) -> tuple[Any, str]:
    return prompts, ""


def in_a_mixture(prompts: Any) -> tuple[Any, str]:
    sets = [{"name": "a", "prompts": "a.jsonl"}, {"name": "b", "prompts": prompts}]
    spec = {"class_path": "Mixture", "init_args": {"sets": sets}}
    return spec, ".init_args.sets[1].prompts"


def in_a_curriculum(prompts: Any) -> tuple[Any, str]:
    spec = {"class_path": "PassRateCurriculum", "init_args": {"prompts": prompts}}
    return spec, ".init_args.prompts"


def refusal(value: Any, hint: Any = AnyPrompts) -> str:
    with pytest.raises(ConfigError) as refused:
        check_value(value, hint, None, KEY)
    said = str(refused.value)
    assert "PromptPath" not in said
    assert "Namespace" not in said
    return said


@pytest.mark.parametrize("nested", [alone, in_a_mixture, in_a_curriculum])
@pytest.mark.parametrize("kind", PROMPTS, ids=lambda kind: kind.__name__)
def test_a_mistake_in_any_argument_of_any_prompts_names_its_key(kind, nested):
    for name, parameter in parameters(kind).items():
        wrong = [value for value in WRONG if not accepts(parameter.annotation, value)]
        for key, value in [(name, value) for value in wrong[:2]] + [(f"{name}_x", 1)]:
            spec, place = nested({"class_path": kind.__name__, "init_args": {key: value}})
            said = refusal(spec)
            assert said.startswith(f"data.init_args.train_prompts{place}.init_args.{key}"), said
            words = ("expected", "import path", "no such key", "needs a class_path", "is missing")
            assert any(word in said for word in words), said


def test_a_path_that_names_no_prompts_is_told_as_a_path():
    assert "'nope.txt' is neither a folder nor a file (.jsonl" in refusal("nope.txt")
    spec = {"class_path": "rows.jsonl", "init_args": {"template": "{{ x }}"}}
    assert "'rows.jsonl' has no arguments; name a class" in refusal(spec)
    assert "path of a file of prompts, or of a folder" in refusal(3)


REFUSED_WHEN_BUILT = {
    "--data.train_prompts.template '{{ a'": "template='{{ a' cannot be read as Jinja",
    "--data.evaluation.prompts.template text": "template='text' names no column",
    "--data.train_prompts ReasoningGymPrompts --data.train_prompts.task sum "
    "--data.train_prompts.template text": "template='text' names no column",
    "--data.train_prompts.picture_limits.max_pixels 0": "max_pixels=0",
    "--data.train_prompts '{class_path: Mixture, init_args: {sets: []}}'": "Mixture(sets=[])",
    "--data.train_prompts '{class_path: Mixture, init_args: {sets: [{name: a, prompts: "
    "train.jsonl, weight: -1}]}}'": "weight=-1.0 must be > 0",
    "--data.train_prompts '{class_path: PassRateCurriculum, init_args: {prompts: train.jsonl, "
    "floor: 0}}'": "floor=0.0",
}


@pytest.mark.parametrize("case", REFUSED_WHEN_BUILT)
def test_what_prompts_refuse_themselves_is_said_and_not_what_they_are_no(
    case, furnished, monkeypatch
):
    monkeypatch.chdir(furnished)
    status, said = complaint(case)
    assert status == 2
    assert REFUSED_WHEN_BUILT[case] in said


@pytest.mark.parametrize("name", sorted(k for k, v in OURS.items() if inspect.isclass(v)))
def test_each_public_class_may_be_named_without_its_module(name):
    kind = OURS[name]
    for base in kind.__mro__[:-1]:
        if name in {known.__name__ for known in subclasses(base)}:
            assert named_class(name, [base]) is kind
    if "__call__" not in vars(kind):
        return
    needed = [p for p in parameters(kind).values() if p.default is inspect.Parameter.empty]
    for one in (name, {"class_path": name}):
        if needed:
            assert f"{needed[0].name}: is missing; {name} needs it" in refusal([one], REWARDS)
        else:
            [read] = check_value([one], REWARDS, None, KEY)
            assert import_object(read["class_path"]) is kind


@pytest.mark.parametrize(
    "rewards",
    [
        "[MathVerify]",
        "[{class_path: MathVerify}, my_rewards.length]",
        "[{class_path: Remote, init_args: {function: MathVerify, retries: 1}}]",
        "[{class_path: LLMJudge, init_args: {judge: {class_path: OpenAIJudge, "
        "init_args: {model: m, base_url: http://a}}}}]",
    ],
)
def test_rewards_by_bare_names_reach_the_run(rewards, furnished, monkeypatch):
    monkeypatch.chdir(furnished)
    for option in (
        f"--data.rewards '{rewards}'",
        "--data.train_prompts '{class_path: Mixture, init_args: {sets: [{name: a, prompts: "
        f"train.jsonl, rewards: {rewards}}}]}}}}'",
    ):
        assert "group_size=0 must be >= 1" in complaint(f"{option} --data.group_size 0")[1]
