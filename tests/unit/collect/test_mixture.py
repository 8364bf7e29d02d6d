"""Test several prompt sets: what is drawn, who answers and grades it, on ranks and when resumed."""

import asyncio
import json
from collections import Counter
from itertools import chain

import pytest

from lightning_rl.agents.base import Agent, SingleTurn
from lightning_rl.callbacks import Evaluate, PreviewTable, RLCallback, RunReport, WeightSync
from lightning_rl.callbacks.preview import preview_table
from lightning_rl.callbacks.rules import duplicate_shares
from lightning_rl.collect.collection import Collection
from lightning_rl.collect.collector import RewardSpread, SyncCollector
from lightning_rl.collect.mixture import Mixture, PromptSet
from lightning_rl.collect.partial import TailBatchingCollector
from lightning_rl.collect.pipeline import GroupSource, RolloutPipeline
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.collect.selection import GroupSelection
from lightning_rl.collect.stats import evaluation_metrics, rollout_metrics, set_metrics
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.collect.tasks import grader_of, tasks_of
from lightning_rl.data.mixing import ByPassRate, FixedWeights, RoundRobin
from lightning_rl.data.plans import GroupPlan
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import AgentError, ConfigError, DataError, RewardError
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import batch_reward
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from tests.support.engine_checks import FakeEngine
from tests.support.small_run import (
    data_module,
    grpo,
    numbers,
    share_of_sevens,
    trainer_of,
)


def of_all(*rewards):
    """Return the agent, plan and rewards of sets that have none of their own."""
    return SingleTurn(), GroupPlan(), Rewards(list(rewards))


def rows(first: int, count: int) -> IterablePrompts:
    return IterablePrompts([{"prompt": f"{n}="} for n in range(first, first + count)], seed=3)


@pytest.fixture
def tokenizer(tiny_model):
    return load_tokenizer(str(tiny_model))


@pytest.fixture
def mixture(tokenizer):
    """Set a has 10 to 14, b 50 to 56."""

    def make(mixing=None, a=None, b=None) -> Mixture:
        sets = [PromptSet("a", rows(10, 5), **(a or {})), PromptSet("b", rows(50, 7), **(b or {}))]
        made = Mixture(sets, mixing, seed=4)
        made.load(tokenizer)
        return made

    return make


def drawn(prompts, count) -> list[tuple[str, str]]:
    return [(p.set, p.prompt) for p in prompts.draw(count)]


# ---------------------------------------------------------------- drawing


def test_each_set_keeps_its_own_order(mixture, tokenizer):
    found = drawn(mixture(RoundRobin(), b={"weight": 2.0}), 12)
    assert [name for name, _ in found] == list("bab" * 4)
    for name, alone in (("a", rows(10, 5)), ("b", rows(50, 7))):
        alone.load(tokenizer)
        mine = [prompt for where, prompt in found if where == name]
        assert mine == [p.prompt for p in alone.draw(len(mine))]


def test_a_mixture_looks_like_its_sets_one_after_the_other(mixture):
    made = mixture()
    assert len(made) == 12
    assert (made[4].set, made[4].prompt, made[5].set, made[5].prompt) == ("a", "14=", "b", "50=")
    assert [p.prompt for p in made.first(3)] == ["10=", "50=", "11="]
    assert len(made.first()) == 12
    assert made.shares() == {"a": 0.5, "b": 0.5}
    with pytest.raises(IndexError):
        made[12]


@pytest.mark.parametrize("mixing", [FixedWeights, RoundRobin, ByPassRate])
def test_a_resumed_mixture_draws_and_learns_the_same(mixture, make_rollout, mixing):
    def step(made, number):
        prompts = made.draw(3)
        groups = [graded(make_rollout, p, [0, (number + i) % 2]) for i, p in enumerate(prompts)]
        made.observe(groups)
        return [(p.set, p.id) for p in prompts]

    whole = mixture(mixing())
    expected = [step(whole, number) for number in range(20)]
    for stopped in (0, 1, 7):
        first = mixture(mixing())
        assert [step(first, number) for number in range(stopped)] == expected[:stopped]
        second = mixture(mixing())
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [step(second, number) for number in range(stopped, 20)] == expected[stopped:]
        assert second.state_dict() == whole.state_dict()


def graded(make_rollout, prompt, rewards, **fields):
    rollouts = [make_rollout(prompt.token_ids, [3, 1], reward=r, **fields) for r in rewards]
    for rollout in rollouts:
        rollout.prompt, rollout.group_id = prompt, f"0/{prompt.key}"
    return rollouts


def test_sets_hear_of_their_own_groups(mixture, make_rollout):
    made = mixture(ByPassRate(memory=0.0, floor=0.5))
    a, b = made[0], made[5]
    heard = {}
    for one in made.sets:
        one.prompts.observe = lambda groups, name=one.name: heard.update({name: groups})
    of_a, of_b = graded(make_rollout, a, [0, 0]), graded(make_rollout, b, [1, 0])
    of_none = graded(make_rollout, a, [None])
    made.observe([of_a, of_b, of_none])
    assert heard == {"a": [of_a, of_none], "b": [of_b]}
    # a: none of one group is mixed; b: all are. Weights 0.5 and 1.
    assert made.shares() == pytest.approx({"a": 1 / 3, "b": 2 / 3})


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_issue_what_one_process_does(mixture, ranks):
    def source(rank=0, count=1):
        made = mixture(b={"group_size": 3, "sampling": Sampling(temperature=0.5)})
        tasks = tasks_of(made, *of_all(share_of_sevens), Sampling(), 2, 1.0)
        return GroupSource(made, 6 // count, 2, Sampling(), 5, rank=rank, ranks=count, tasks=tasks)

    def issued(one, count):
        return [(r.id, r.seed, r.sampling.temperature) for _ in range(count) for r in one.next()]

    alone, sources = source(), [source(rank, ranks) for rank in range(ranks)]
    for iteration in range(3):
        for one in (alone, *sources):
            one.begin(iteration)
        expected = issued(alone, 6)
        assert {len(i.split("/")) for i, *_ in expected} == {5}  # 0/0/a/3/1
        assert sorted(chain(*(issued(one, 6 // ranks) for one in sources))) == sorted(expected)
        assert len({str(one.prompts.state_dict()) for one in (alone, *sources)}) == 1
    sizes = Counter(i.rpartition("/")[0] for i, *_ in expected)
    assert {size for i, size in sizes.items() if "/b/" in i} == {3}
    assert {t for i, _, t in expected if "/b/" in i} == {0.5}


# ---------------------------------------------------------------- answering and grading


class Says(Agent):
    """Writes one token, and keeps what it was asked."""

    def __init__(self, token: int) -> None:
        self.token, self.asked = token, []

    async def run(self, rollout, engine, sampling):
        self.asked.append((rollout.prompt.set, sampling.max_tokens))
        rollout.rows[0].append_written([self.token, 1], [-1.0, -1.0], [0, 0])
        rollout.status, rollout.finish_reason = RolloutStatus.COMPLETED, "stop"
        return rollout


class Unasked(FakeEngine):
    """A set whose agent asks it for no tokens."""

    async def generate(self, token_ids, sampling, seed):
        raise AssertionError("asked")


def grader(*sets: PromptSet):
    """Return the grader of these sets; it rewards sevens in those without rewards of their own."""
    return grader_of(tasks_of(Mixture(sets), *of_all(sevens), Sampling(), 2, 1.0))


def sevens(completions, **_):
    return [float("7" in completion) for completion in completions]


def odd_first(completions, **_):
    return [float(i == 0 and "3" in c) for i, c in enumerate(completions)]


def collected(mixture, tokenizer, collector, filters=(), count=4):
    """Collect two iterations' batches: a is answered by one agent and b by another."""
    agents = Says(10), Says(6)
    made = mixture(
        RoundRobin(),
        a={"agent": agents[0], "rewards": [sevens]},
        b={"agent": agents[1], "sampling": Sampling(max_tokens=9), "group_size": 3},
    )
    tasks = tasks_of(made, *of_all(odd_first), Sampling(max_tokens=5), 2, 1.0)
    engine = Unasked()
    pipeline = RolloutPipeline(engine, SingleTurn(), grader_of(tasks), tokenizer, tasks=tasks)
    source = GroupSource(made, count, 2, Sampling(max_tokens=5), 4, tasks=tasks)
    batches = Collection(pipeline, collector, source, GroupSelection(list(filters), 10))
    found = []
    for iteration in range(2):
        found.append((batches.collect(iteration), batches.of_all_ranks(0)[0]))
        batches.ack()
    batches.close()
    return found, agents


@pytest.mark.parametrize(
    "collector",
    [SyncCollector, AsyncCollector, StreamedCollector, lambda: TailBatchingCollector(1.5)],
)
def test_every_collector_dispatches_by_set(mixture, tokenizer, collector):
    found, (of_a, of_b) = collected(mixture, tokenizer, collector())
    # The queue may hand out any two groups first, so this looks at both batches together.
    assert {(g[0].prompt.set, len(g)) for _, groups in found for g in groups} == {
        ("a", 2),
        ("b", 3),
    }
    for rollouts, _ in found:
        for rollout in rollouts:
            assert rollout.completion == {"a": "7", "b": "3"}[rollout.prompt.set]
            assert (
                list(rollout.reward_parts)
                == {"a": ["sevens"], "b": ["odd_first"]}[rollout.prompt.set]
            )
    assert set(of_a.asked) == {("a", 5)}
    assert set(of_b.asked) == {("b", 9)}


def test_rejected_groups_are_replaced_from_the_mixture(mixture, tokenizer):
    # a is always right, so only b's groups are kept.
    found, _ = collected(mixture, tokenizer, SyncCollector(), [RewardSpread()])
    for rollouts, groups in found:
        assert [r.prompt.set for r in rollouts] == ["b"] * 12
        # Of 4 drawn in turn, 2 are kept; of 2 more, 1; then a (rejected), and b.
        assert [g[0].prompt.set for g in groups] == ["a", "b"] * 4
        rejected = [r for g in groups for r in g if r.prompt.set == "a"]
        assert {r.status for r in rejected} == {RolloutStatus.SKIPPED}


def test_a_batch_reward_sees_its_own_set(make_rollout):
    seen = []

    @batch_reward
    def whole(completions, **_):
        seen.append(len(completions))
        return [0.0] * len(completions)

    rewards = grader(PromptSet("a", ["1="], rewards=[whole]), PromptSet("b", ["2="]))
    assert rewards.of_batch == ["whole"]
    groups = [
        graded(make_rollout, Prompt(str(i), "1=", [3], set=name), [None, None])
        for i, name in enumerate("abab")
    ]
    asyncio.run(rewards.grade(groups))
    assert seen == [4]
    assert all(r.reward == 0.0 for group in groups for r in group)


def test_failures_are_counted_set_by_set(make_rollout):
    of_a = PromptSet("a", ["1="], rewards=[sevens], max_failed_share=0.5)
    rewards = grader(of_a, PromptSet("b", ["2="]))

    def rollouts(name, failed, reason="stop"):
        made = graded(make_rollout, Prompt("0", "1=", [3], set=name), [1.0] * 10)
        for rollout in made[:failed]:
            rollout.status, rollout.finish_reason = RolloutStatus.FAILED, reason
        return made

    rewards.require_graded([*rollouts("a", 5), *rollouts("b", 1)])
    with pytest.raises(RewardError, match="2 of 10 rollouts of prompt set 'b' could not be graded"):
        rewards.require_graded([*rollouts("a", 0), *rollouts("b", 2)])  # of 20 only a tenth
    with pytest.raises(AgentError, match="6 of 10 rollouts of prompt set 'a' failed"):
        rewards.require_graded([*rollouts("b", 0), *rollouts("a", 6, None)])


def test_a_group_of_an_unknown_set_is_refused(make_rollout):
    rewards = grader(PromptSet("a", ["1="]))
    group = graded(make_rollout, Prompt("0", "1=", [3], set="c"), [None])
    with pytest.raises(ConfigError, match=r"prompt set 'c', which has no rewards \(known: a\)"):
        rewards.grade_here([group])


# ---------------------------------------------------------------- numbers and records


def test_metrics_of_sets_by_hand(make_rollout):
    a, b = Prompt("0", "1=", [3], set="a"), Prompt("0", "2=", [3], set="b")
    first = graded(make_rollout, a, [0.0, 1.0], reward_parts={"x": 1.0})
    second = graded(make_rollout, b, [0.5, 0.5], reward_parts={"y": 3.0})
    third = graded(make_rollout, Prompt("1", "3=", [3], set="b"), [0.0, None])
    third[1].status, third[1].rows[0].token_ids = RolloutStatus.FAILED, [3] * 6
    third[0].finish_reason = "length"
    groups = [first, second, third]
    assert set_metrics(groups, {"a": 0.25, "b": 0.75, "c": 0.0}) == pytest.approx(
        {
            "data/a/share": 0.25,
            "data/b/share": 0.75,
            "data/c/share": 0.0,
            "rollout/a/share": 1 / 3,
            "rollout/b/share": 2 / 3,
            "rollout/c/share": 0.0,
            "rollout/a/tokens_mean": 2.0,
            "rollout/b/tokens_mean": (2 + 2 + 2 + 6) / 4,
            "rollout/a/truncated_share": 0.0,
            "rollout/b/truncated_share": 0.25,
            "rollout/a/failed_share": 0.0,
            "rollout/b/failed_share": 0.25,
            "reward/a/mean": 0.5,
            "reward/a/std": 0.5,
            "reward/a/zero_spread_share": 0.0,
            "reward/b/mean": 1 / 3,
            "reward/b/std": (((1 / 6) ** 2 * 2 + (1 / 3) ** 2) / 3) ** 0.5,
            "reward/b/zero_spread_share": 1.0,
        }
    )
    assert set_metrics(groups, {}) == {}
    whole = rollout_metrics([r for group in groups for r in group], 1.0, 0)
    assert (whole["reward/x"], whole["reward/y"]) == (1.0, 3.0)
    assert whole["reward/mean"] == pytest.approx(2.0 / 5)


def test_evaluations_of_sets_by_hand(make_rollout):
    a, b = Prompt("0", "1=", [3], set="a"), Prompt("0", "2=", [3], set="b")
    rollouts = graded(make_rollout, a, [0.0, 1.0]) + graded(make_rollout, b, [0.5, 0.5, 0.5, 0.4])
    row = evaluation_metrics(rollouts, {"a": 1.0, "b": 0.5})
    assert row["eval/accuracy"] == pytest.approx(4 / 6)
    assert (row["eval/a/accuracy"], row["eval/b/accuracy"]) == (0.5, 0.75)
    assert row["eval/a/pass@2"] == 1.0
    assert row["eval/b/pass@4"] == 1.0
    assert "eval/a/pass@4" not in row
    assert "eval/pass@4" not in row  # not all prompts have four
    assert row["eval/b/reward_mean"] == pytest.approx(0.475)


def test_two_prompts_of_one_id_are_different_ones(make_rollout):
    same = [graded(make_rollout, Prompt("0", "1=", [3], set=name), [0.0])[0] for name in ("a", "b")]
    assert duplicate_shares(same) == (0.0, 1.0)


def test_a_rollout_keeps_its_set(make_rollout):
    [rollout] = graded(make_rollout, Prompt("7", "1=", [3], {"n": 1}, "a"), [1.0])
    again = Rollout.from_dict(json.loads(json.dumps(rollout.to_dict())))
    assert again == rollout
    columns, [row] = preview_table([rollout])
    assert (columns[:2], row[:2]) == (["set", "prompt"], ("a", "1="))


# ---------------------------------------------------------------- runs


class Kept(RLCallback):
    """Records ids, tokens and rewards of what was trained on."""

    def __init__(self) -> None:
        self.seen = []

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        self.seen.append([(r.prompt.id, r.seed, r.token_ids, r.reward) for r in rollouts])


def fit(tiny_model, place, callbacks=(), **data):
    kept, report, module = Kept(), RunReport(), grpo(tiny_model)
    trainer = trainer_of(place, [WeightSync(), kept, report, *callbacks])
    options = {"iterations_per_epoch": 3, "group_size": 3, "groups_per_iteration": 4} | data
    trainer.fit(module, data_module(**options))
    weights = [p.detach().clone() for p in module.policy.parameters()]
    return kept.seen, report.history, weights


def test_one_set_is_trained_on_bit_for_bit_as_without_a_mixture(tiny_model, tmp_path):
    plain = fit(tiny_model, tmp_path / "plain")
    one = Mixture([PromptSet("only", numbers(108, 140, seed=1))], seed=2)
    mixed = fit(tiny_model, tmp_path / "mixed", train_prompts=one)
    assert mixed[0] == plain[0]
    assert all(map(lambda a, b: a.equal(b), mixed[2], plain[2]))
    for row, expected in zip(mixed[1][1:], plain[1][1:], strict=True):
        same = [n for n in expected if n.startswith(("reward/", "rollout/completed", "policy/"))]
        assert same
        assert {n: row[n] for n in same} == {n: expected[n] for n in same}


def sets(**of_b) -> list[PromptSet]:
    return [
        PromptSet("a", numbers(108, 140, seed=1), rewards=[share_of_sevens], success_reward=0.9),
        PromptSet("b", numbers(200, 210, seed=1), **of_b),
    ]


def test_evaluation_sets_have_their_own_names_and_seeds(tiny_model, tmp_path):
    held_out = [
        PromptSet("easy", numbers(8), success_reward=0.1, group_size=2),
        PromptSet("hard", numbers(8), sampling=Sampling(max_tokens=3, temperature=0.0)),
    ]
    options = {"evaluation": {"prompts": Mixture(held_out), "limit": 5}, "rewards": None,
               "train_prompts": Mixture(sets(rewards=[share_of_sevens]))}  # fmt: skip
    with pytest.raises(ConfigError, match="prompt set 'easy' has no rewards; set its rewards"):
        data_module(**options)
    options["rewards"] = [share_of_sevens]
    preview = PreviewTable(2)
    _, history, _ = fit(tiny_model, tmp_path, callbacks=[Evaluate(), preview], **options)
    first = history[0]
    assert {n.split("/")[1] for n in first if n.startswith("eval/") and n.count("/") == 2} == {
        "easy", "hard",
    }  # fmt: skip
    assert first["eval/hard/tokens_mean"] <= 3.0
    assert "eval/easy/pass@2" in first
    assert "eval/hard/pass@2" in first  # the evaluation's samples
    assert history[-1]["reward/a/mean"] > 0
    lines = next(tmp_path.rglob("rollouts.jsonl")).read_text().splitlines()
    assert {json.loads(line)["prompt"]["set"] for line in lines} == {"a", "b"}


def test_held_out_seeds_do_not_depend_on_the_other_sets(tokenizer):
    def seeds(*names):
        data = data_module(evaluation=Mixture([PromptSet(name, ["1=", "2="]) for name in names]))
        data.evaluation.prompts.load(tokenizer)
        return {r.id: r.seed for group in data.held_out.groups() for r in group}

    two, one = seeds("a", "b"), seeds("b")
    assert len(two) == 16
    assert {i: s for i, s in two.items() if "/b/" in i} == one


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Mixture([]), r"Mixture\(sets=\[\]\) has nothing to draw"),
        (
            lambda: Mixture([PromptSet("a", ["1="]), PromptSet("a", ["2="])]),
            "two prompt sets have the name 'a'; rename one",
        ),
        (lambda: PromptSet("a", ["1="], weight=0.0), r"'a': weight=0.0 must be > 0; remove the"),
        (lambda: PromptSet("a", ["1="], weight=float("inf")), "weight=inf"),
        (lambda: PromptSet("a/b", ["1="]), "name='a/b' is used in the names of metrics"),
        (lambda: PromptSet("a", ["1="], group_size=0), "group_size=0 must be >= 1"),
        (
            lambda: PromptSet("a", ["1="], rewards=[]),
            r"prompt set 'a': rewards=\[\] must have at least one",
        ),
        (
            lambda: PromptSet("a", ["1="], reward_weights=[1.0]),
            "reward_weights=.* apply to its own rewards",
        ),
        (
            lambda: PromptSet("a", Mixture([PromptSet("b", ["1="])])),
            "is itself a Mixture; list its sets beside the others",
        ),
        (lambda: data_module(rewards=None), "RLDataModule.rewards: is missing; name at"),
        (
            lambda: data_module(
                rewards=None,
                reward_weights=[1.0],
                train_prompts=Mixture(sets(rewards=[share_of_sevens])),
                evaluation=None,
            ),
            "reward_weights=.* apply to rewards, which is null",
        ),
    ],
)
def test_mistakes_are_named(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


def test_a_misspelt_key_is_named():
    prompts = {"class_path": "JSONLPrompts", "init_args": {"path": "x.jsonl"}}
    with pytest.raises(ConfigError, match=r"sets\[0\].wieght: .*did you mean weight\?"):
        Mixture([{"name": "a", "prompts": prompts, "wieght": 2}])
    with pytest.raises(ConfigError, match=r"sets\[0\].prompts"):
        Mixture([{"name": "a"}])


def test_another_mixture_does_not_go_on(mixture, tokenizer):
    state = mixture().state_dict()
    other = Mixture([PromptSet("a", rows(10, 5)), PromptSet("c", rows(50, 7))], seed=4)
    other.load(tokenizer)
    with pytest.raises(ConfigError, match="the checkpoint's prompts were a, b, now they are a, c"):
        other.load_state_dict(state)
    plain = rows(10, 12)
    plain.load(tokenizer)
    with pytest.raises(ConfigError, match="were rows without a set, now they are a, b"):
        mixture().load_state_dict(plain.state_dict())
    with pytest.raises(ConfigError, match="were a Mixture of a, b, now they are IterablePrompts"):
        plain.load_state_dict(state)
    reseeded = Mixture(mixture().sets, seed=5)
    with pytest.raises(ConfigError, match="mixed with seed=4, but now seed=5"):
        reseeded.load_state_dict(state)


def test_a_set_without_a_prompt_that_fits_is_named(tokenizer):
    short = IterablePrompts([{"prompt": "123="}], max_prompt_tokens=1)
    made = Mixture([PromptSet("a", rows(1, 2)), PromptSet("long", short)], RoundRobin())
    made.load(tokenizer)
    with pytest.raises(DataError, match=r"prompt set 'long': .* longer than max_prompt_tokens=1"):
        made.draw(2)
    [_, task] = tasks_of(made, *of_all(sevens), Sampling(), 2, 1.0)
    with pytest.raises(DataError, match="all of its 1 prompts are too long"):
        task.new_groups(None, 0, 0)


def test_another_mixing_has_learned_nothing_yet(mixture, make_rollout):
    first, second = mixture(RoundRobin()), mixture(ByPassRate())
    first.draw(3)
    second.load_state_dict(first.state_dict())
    assert (second.drawn, second.shares()) == ([2, 1], {"a": 0.5, "b": 0.5})
