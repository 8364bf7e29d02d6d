"""Test RubricJudge against a planted judge on a server: scores by hand, and every fault."""

import asyncio

import pytest

from benchmarks.support.planted_judge import PlantedJudge, judging
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import RewardFailure
from lightning_rl.rewards.judge_models import EngineJudge, JudgeModel, OpenAIJudge
from lightning_rl.rewards.rubric import Criterion, RubricJudge, scored
from lightning_rl.rollout import RolloutStatus
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.tiny_models import save_chat_model

RUBRIC = [
    "holds if it has source",
    Criterion("holds if it has step 4 times", weight=3.0, most=4, name="steps"),
    Criterion("holds if it has insult", weight=-2.0, name="insult"),
]


def rubric(judge, *criteria, **options):
    options = {"first_wait_s": 0.0, "timeout_s": 30.0} | options
    model = options.pop("model", None) or OpenAIJudge(judge.url, "planted")
    return RubricJudge(model, criteria, **options)


def grade(reward, *completions, **columns):
    count = len(completions)
    lists = {name: [value] * count for name, value in columns.items()}
    return asyncio.run(reward(prompts=["p"] * count, completions=list(completions), **lists))


@pytest.fixture
def judge():
    with judging(PlantedJudge()) as judge:
        yield judge


# ---------------------------------------------------------------- scores


def test_the_score_is_the_weighted_share_of_points_and_clipped(judge):
    scores = grade(
        rubric(judge, *RUBRIC), "source step step", "source step step step step insult", "insult"
    )
    assert scores == [
        {"score": (1 + 3 * 2 / 4) / 4, "1": 1.0, "steps": 0.5, "insult": 0.0},
        {"score": (1 + 3 - 2) / 4, "1": 1.0, "steps": 1.0, "insult": 1.0},
        {"score": 0.0, "1": 0.0, "steps": 0.0, "insult": 1.0},  # -2/4 is clipped
    ]
    assert len(judge.bodies) == 3


def test_one_request_per_criterion_finds_the_same(judge):
    completions = "source step step", "step insult"
    together = grade(rubric(judge, *RUBRIC), *completions)
    judge.bodies.clear()
    assert grade(rubric(judge, *RUBRIC, together=False), *completions) == together
    assert len(judge.bodies) == 2 * 3


def test_a_row_adds_criteria_in_several_forms(judge):
    row = [
        "holds if it has source",
        {"criterion": "holds if it has step", "points": 5, "tags": ["axis:accuracy"]},
        {"text": "holds if it has insult", "weight": -3, "most": None, "name": "insult"},
    ]
    # (1 + 5 - 3)/6, and beside a criterion of the run with weight 2: (2 + 1 + 5 - 3)/8
    own = rubric(judge, column="rubric")
    assert grade(own, "source step insult", rubric=row) == [{"score": 0.5, "insult": 1.0}]
    both = rubric(judge, Criterion("holds if it has end", weight=2.0, name="end"), column="rubric")
    (score,) = grade(both, "source step insult end", rubric=row)
    assert score == {"score": 5 / 8, "end": 1.0, "insult": 1.0}
    (score,) = grade(both, "end", rubric=[])  # the run's own suffice
    assert score == {"score": 1.0, "end": 1.0}


def test_parts_and_points_are_kept_and_a_failure_costs_one_rollout(judge, make_rollout):
    texts = "source step", "step step step"
    group = [make_rollout([2], [3], completion=c, reward=None) for c in texts]
    asyncio.run(Rewards([rubric(judge, *RUBRIC)]).grade([group]))
    assert group[0].reward == (1 + 3 / 4) / 4
    assert group[0].reward_parts["rubric/steps"] == 0.25
    assert [r.extra["rubric_points"] for r in group] == [[1, 1, 0], [0, 3, 0]]


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_the_score_does_not_depend_on_the_scale_of_weights(scale):
    criteria = [Criterion("a", 2.0), Criterion("b", 1.0, most=4), Criterion("c", -1.0)]
    scaled = [Criterion(c.text, scale * c.weight, c.most) for c in criteria]
    for points in ([1, 3, 1], [0, 4, 0], [1, 4, 0]):
        expected = scored(criteria, points)["score"]
        assert scored(scaled, points)["score"] == pytest.approx(expected, abs=1e-15)


# ---------------------------------------------------------------- what is asked


def test_a_server_is_held_to_a_schema_unless_it_cannot(judge):
    grade(rubric(judge, *RUBRIC), "source")
    schema = judge.bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["1", "2", "3"]
    assert schema["properties"]["2"] == {"type": "integer", "enum": [0, 1, 2, 3, 4]}
    free = OpenAIJudge(judge.url, "planted", structured=False)
    # It answers in prose with a brace, then a fenced block of JSON.
    (score,) = grade(rubric(judge, *RUBRIC, model=free), "source")
    assert score["score"] == 1 / 4
    assert "response_format" not in judge.bodies[1]


def test_an_answer_that_was_cut_off_in_its_thought_scores_0_without_a_request(judge):
    assert grade(rubric(judge, *RUBRIC), "<think>\nsource") == [0.0]
    (score,) = grade(rubric(judge, *RUBRIC), "<think>\nsource</think>step")
    assert (score["1"], score["steps"]) == (0.0, 0.25)
    assert len(judge.bodies) == 1


class Says(JudgeModel):
    """Always answers the same."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    async def ask(self, question: str) -> str:
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        '{"1": true, "2": "3", "3": "No"}',
        'First {"1": 0, "2": 0, "3": 0}, no: {"1": 1, "2": 3.0, "3": 0}.',
        '{"1": 1, "2": 3, "3": 0, "why": "it has {braces}"}',
        '```json\n{"1": "yes", "2": 3, "3": false}\n```\n{"done": true}',
    ],
)
def test_prose_around_an_object_is_read(answer):
    (score,) = grade(rubric(None, *RUBRIC, model=Says(answer)), "any")
    assert score["score"] == (1 + 3 * 3 / 4) / 4


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('{"1": 1}', """no JSON object with '1', '2', '3' in the judge's answer '{"1": 1}'"""),
        ("All good.", "no JSON object with '1', '2', '3' in the judge's answer 'All good.'"),
        (
            '{"1": 1, "2": 5, "3": 0}',
            "the judge's number 5 for '2' is not a whole number from 0 to 4",
        ),
        (
            '{"1": 0.5, "2": 4, "3": 0}',
            "the judge's number 0.5 for '1' is not a whole number from 0 to 1",
        ),
        (
            '{"1": {"met": true}, "2": 4, "3": 0}',
            "the judge's number {'met': True} for '1' is not a whole number from 0 to 1",
        ),
        ("{" * 5000, "no JSON object with '1', '2', '3' in the judge's answer " + repr("{" * 200)),
    ],
)
def test_other_answers_fail_with_one_message(answer, reason):
    assert grade(rubric(None, *RUBRIC, model=Says(answer)), "any") == [RewardFailure(reason)]


def test_a_model_in_this_process_judges_too(tmp_path):
    save_chat_model(tmp_path / "judge", "qwen2_5")
    sampling = Sampling(max_tokens=4, temperature=0.0)
    model = EngineJudge(str(tmp_path / "judge"), TransformersEngine(device="cpu"), sampling)
    reward = rubric(None, *RUBRIC, model=model)
    (failure,) = grade(reward, "source")  # a random model fills in nothing
    assert "no JSON object with '1', '2', '3' in the judge's answer" in failure.reason
    reward.close()
    assert not model.engine.running


# ---------------------------------------------------------------- faults


def test_a_judge_that_answers_in_prose_is_not_asked_again():
    with judging(PlantedJudge(prose=True)) as judge:
        failures = grade(rubric(judge, *RUBRIC), "source", "step")
        assert len(judge.bodies) == 2
    assert {failure.reason for failure in failures} == {
        "no JSON object with '1', '2', '3' in the judge's answer 'They are all quite good.'"
    }


def test_a_server_without_structured_outputs_is_refused_with_the_fix():
    with judging(PlantedJudge(structured=False)) as judge:
        (failure,) = grade(rubric(judge, *RUBRIC), "source")
        assert len(judge.bodies) == 1
    assert "answered 400" in failure.reason
    assert failure.reason.endswith("if it does not know response_format, set structured: false")


def test_of_a_server_that_goes_in_the_middle_what_it_graded_is_kept(make_rollout):
    group = [make_rollout([2], [3], completion="source", reward=None) for _ in range(4)]
    with judging(PlantedJudge(gone_after=1)) as judge:
        reward = rubric(judge, *RUBRIC, retries=1, max_concurrency=1)
        asyncio.run(Rewards([reward]).grade([group]))
        assert len(judge.bodies) == 1 + 2 * 3
    assert sorted(r.status for r in group) == [RolloutStatus.COMPLETED, *3 * ["failed"]]
    errors = {r.error for r in group if r.error}
    assert len(errors) == 1
    assert "gave no answer" in (error := errors.pop())
    assert "(after 2 attempts); prompt 'text'" in error


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "the row has no column 'rubric', which should hold its rubric; add it"),
        ({"rubric": None}, "the row's rubric (column 'rubric') is None; give the row at least one"),
        ({"rubric": "polite"}, "the row's rubric (column 'rubric') is 'polite'; it must be a list"),
        ({"rubric": [3]}, "a criterion is 3; it must be a text or a mapping"),
        ({"rubric": [{"weight": 1}]}, "Criterion.text: is missing"),
        (
            {"rubric": [{"text": "a", "weigth": 1}]},
            "weigth: no such key in Criterion; did you mean weight?",
        ),
        ({"rubric": [{"text": "a", "weight": "much"}]}, "weight: expected float, got 'much'"),
        (
            {"rubric": [{"text": "a", "weight": -1}, {"text": "b", "weight": 0}]},
            "the positive weights of 2 criteria sum to 0, so no answer could score",
        ),
        (
            {"rubric": [{"text": "a", "name": "x"}, {"text": "b", "name": "x"}]},
            "two criteria have the name 'x'",
        ),
    ],
)
def test_a_row_without_a_sound_rubric_fails_and_is_named(judge, make_rollout, row, told):
    group = [make_rollout([2], [3], completion="a", columns=row, reward=None) for _ in range(2)]
    asyncio.run(Rewards([rubric(judge, column="rubric")]).grade([group]))
    (error,) = {r.error for r in group}
    assert told in error
    assert "; prompt 'text'" in error
    assert not judge.bodies


@pytest.mark.parametrize(
    ("criteria", "options", "message"),
    [
        ([], {}, "the positive weights of 0 criteria sum to 0"),
        ([Criterion("a", -1.0)], {}, "the positive weights of 1 criteria sum to 0"),
        ([{"text": "a", "name": "b"}, {"text": "c", "name": "b"}], {}, "have the name 'b'"),
        (["a", {"text": "b", "name": "1"}], {}, "have the name '1'"),
        (["a"], {"question": "{completion} {form}"}, "must show {criteria}"),
        (["a"], {"max_concurrency": 0}, "max_concurrency=0 must be >= 1"),
        ([{"text": " "}], {}, "empty text"),
        ([{"text": "a", "most": 0}], {}, "most=0 must be >= 1"),
        ([{"text": "a", "weight": float("inf")}], {}, "weight=inf must be finite"),
        ([{"text": "a", "name": "score"}], {}, "has the name 'score'; rename it"),
    ],
)
def test_impossible_settings_are_refused(criteria, options, message):
    with pytest.raises(ConfigError, match=message):
        RubricJudge(Says(""), criteria, **options)


@pytest.mark.parametrize(("together", "requests", "lines"), [(True, 4, 3), (False, 12, 1)])
def test_a_group_is_known_to_ask_for_as_many_requests(together, requests, lines):
    tokenizer = make_tokenizer()
    judge = RubricJudge(OpenAIJudge("http://127.0.0.1:9/v1", "judge"), ["1", "2", "3"],
                        together=together)  # fmt: skip
    text = judge.question.text + "\n".join(["1 (0 or 1)", "2 (0 or 1)", "3 (0 or 1)"][:lines])
    asked = len(tokenizer.encode(text)) + 3 + 10
    used = judge.usage(tokenizer, 3, 10, 4)
    assert used == (requests, requests * asked, requests * 512)
