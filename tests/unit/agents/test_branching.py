"""Branching: exact forks, of environments and of programs, and what each way to go on is worth."""

import asyncio
import random
from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import branching as benchmark
from lightning_rl import GRPO, RLOO, Branching, MultiTurn, TreeRLOO
from lightning_rl.agents.rows import captured
from lightning_rl.algos.tree import Branched, tree_credits
from lightning_rl.callbacks import WeightSync
from lightning_rl.callbacks.preview import preview_table
from lightning_rl.cli.view.flags import gaps
from lightning_rl.cli.view.page import build_page
from lightning_rl.cli.view.runs import read_run
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.stats import rollout_metrics
from lightning_rl.collect.streamed import StreamedCollector
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.rollouts.rows import rows_of
from lightning_rl.engines import Sampling
from lightning_rl.errors import ConfigError, EngineError, EpisodeError
from lightning_rl.extend import EveryCall, FixedCalls, RandomCalls, forked
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Fork, Prompt, Rollout, RolloutStatus
from lightning_rl.serving import FunctionAgent
from tests.support.agents import Hashing, long_game
from tests.support.lots import LotEngine
from tests.support.planted_run import rollouts_of
from tests.support.small_run import Rows, data_module, grpo, trainer_of
from tests.support.three_calls import ThreeCalls
from tests.support.tiny_models import chatml_tokenizer
from tests.support.turn_rollouts import played, random_episodes

WRITTEN = ("tokens", "loss_mask")
PLAIN = Sampling(max_tokens=4)


def credit(batch) -> list[float]:
    """Return the advantages of the model's tokens."""
    return batch["tokens", "advantages"][batch[WRITTEN]].tolist()


def branch(count: int, reward: float, calls: int, number: int = 0, **fields) -> Rollout:
    """Make a rollout of ``count`` calls of a token, the first ``calls`` of them another's."""
    return played([(None, 1, None)] * count, reward, fork=Fork(calls, number, 9), **fields)


# ---------------------------------------------------------------- credit, by hand


@pytest.fixture
def tree() -> list[Rollout]:
    """Return two rollouts; two branch off from the first after a call, and one after two."""
    return [
        played([(None, 1, None)] * 3, 1.0),
        branch(2, 0.0, 1, 0),
        branch(4, 1.0, 1, 1),
        branch(3, 0.0, 2),
        played([(None, 1, None)] * 2, 0.0, sample_index=1),
    ]


def test_every_way_to_go_on_is_compared_with_the_others_there(tree):
    # After two calls: 1 and 0, so worth 0.5. After one: that, 0 and 1, so worth 0.5. The other: 0.
    assert credit(TreeRLOO()(pack_rollouts(tree))) == pytest.approx(
        [
            *(0.5, (0.5 - 0.5) / 3, (1 - 0) / 3 / 2),
            (0 - 0.75) / 3,
            *[(1 - 0.25) / 3] * 3,
            (0 - 1) / 3 / 2,
            *[-0.5] * 2,
        ]
    )


def test_what_is_shared_is_not_trained_on_again(tree):
    batch = pack_rollouts(tree)
    assert batch["rollouts", "sample"].tolist() == [0, 0, 0, 0, 1]
    assert batch["rollouts", "fork"].tolist() == [0, 1, 1, 2, 0]
    rows = batch[WRITTEN].split(batch["rollouts", "length"].tolist())
    assert [int(row.sum()) for row in rows] == [3, 1, 3, 1, 2]
    assert rows[1].tolist() == [False, False, False, True]  # a prompt, 4, 3 and 4
    assert batch["tokens", "call"][batch[WRITTEN]].tolist() == [0, 1, 2, 1, 1, 2, 3, 2, 0, 1]


def test_the_order_of_rollouts_does_not_matter_nor_do_other_groups(tree):
    others = [replace(r, group_id="other", reward=1 - r.reward) for r in tree]
    together = [*tree, *others]
    wanted = credit(TreeRLOO()(pack_rollouts(together)))
    assert wanted[: len(wanted) // 2] == credit(TreeRLOO()(pack_rollouts(tree)))
    order = list(range(len(together)))
    random.Random(1).shuffle(order)
    shuffled = TreeRLOO()(pack_rollouts([together[i] for i in order]))
    parts = shuffled["tokens", "advantages"].split(shuffled["rollouts", "length"].tolist())
    by_place = dict(zip(order, parts, strict=True))
    masks = shuffled[WRITTEN].split(shuffled["rollouts", "length"].tolist())
    by_mask = dict(zip(order, masks, strict=True))
    found = torch.cat([by_place[i][by_mask[i]] for i in range(len(order))])
    assert found.tolist() == wanted


def test_without_branches_it_is_rloo():
    batch = pack_rollouts(random_episodes(4))
    ours, theirs = TreeRLOO()(batch.copy()), RLOO()(batch.copy())
    assert torch.allclose(ours["tokens", "advantages"], theirs["tokens", "advantages"])


def test_where_all_ends_alike_nothing_is_left_of_rounding(tree):
    for rollout in tree:
        rollout.reward = 0.1
    assert set(credit(TreeRLOO()(pack_rollouts(tree)))) == {0.0}


def test_branches_of_a_rollout_that_could_not_be_graded(tree):
    # After two calls only 0 is left, so worth 0; after one that, 0 and 1, so worth 1/3.
    found = credit(TreeRLOO()(pack_rollouts(tree[1:])))
    wanted = [(0 - 0.5) / 3, *[(1 - 0) / 3] * 3, 0.0, *[-1 / 3] * 2]
    assert found == pytest.approx(wanted)


def test_a_rollout_that_recorded_no_calls_has_those_of_its_mask(make_rollout):
    mask = [True, True, False, True]
    trunk = make_rollout([3], [4, 5, 2, 6], loss_mask=mask, reward=1.0)
    other = make_rollout([3], [4, 5, 2, 7], loss_mask=mask, reward=0.0, fork=Fork(1, 0, 9))
    batch = TreeRLOO()(pack_rollouts([trunk, other]))
    assert "call" not in batch["tokens"]
    assert credit(batch) == [0.0, 0.0, 0.5, -0.5]


def test_the_gradient_of_a_tree_is_unbiased_and_has_less_noise_than_grpos_at_equal_tokens():
    """The first turn decides most in this game. The gradients are known, and the seed is fixed."""
    measured = benchmark.run(groups=600, seed=0)
    assert measured["noise_over_grpo_plan"] < 0.9
    for title in benchmark.GAMES:
        ways = measured[title]["ways"].items()
        found = {name: row["sigmas"] for name, row in ways if name.startswith("TreeRLOO")}
        assert max(found.values()) < 1.6, found


# ---------------------------------------------------------------- where


def chosen(points, calls: int = 8, seed: int = 0) -> list[int]:
    rollout = played([(None, 1, None)] * calls, 1.0, seed=seed)
    return [number for number in range(2, calls + 1) if points.chosen(rollout, number)]


def test_calls_before_which_it_is_forked():
    assert chosen(EveryCall()) == [2, 3, 4, 5, 6, 7, 8]
    assert chosen(EveryCall(first=3, step=3)) == [3, 6]
    assert chosen(FixedCalls([2, 6, 20])) == [2, 6]
    some = [chosen(RandomCalls(0.25), seed=seed) for seed in range(400)]
    assert some[3] == chosen(RandomCalls(0.25), seed=3)
    assert fmean(map(len, some)) == pytest.approx(7 * 0.25, abs=0.25)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedCalls([1, 2]), r"numbers=\[1, 2\]\) must name calls >= 2.*group_size"),
        (lambda: FixedCalls([]), "must name calls >= 2"),
        (lambda: EveryCall(first=1), "first=1 must be >= 2"),
        (lambda: EveryCall(step=0), "step=0 must be >= 1"),
        (lambda: RandomCalls(0.0), r"share=0.0\) must be > 0 and <= 1"),
        (lambda: Branching(k=0), "k=0 must be >= 1"),
    ],
)
def test_impossible_settings_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("calls", [-1, 3])
def test_a_fork_that_is_not_in_the_rollout_is_named(calls):
    with pytest.raises(EpisodeError, match=rf"before call {calls + 1}: it has 3"):
        forked(played([(None, 1, None)] * 3, 1.0), calls, 0)


# ---------------------------------------------------------------- exact forks


async def play(client, prompt):
    """Ask two questions, and a third that depends on what was answered, as a program does."""
    messages = prompt.prompt
    for _ in range(2):
        answer = await client.chat(messages)
        messages = [*messages, answer.message, {"role": "user", "content": "Go on."}]
    await client.chat([{"role": "user", "content": answer.text}])


def pipeline_of(engine, agent, plan, tokenizer) -> RolloutPipeline:
    return RolloutPipeline(engine, agent, Rewards([length_reward]), tokenizer, plan=plan)


def collected(plan, agent, engine, tokenizer, group_size: int = 2, prompt=None) -> list[Rollout]:
    agent.configure(tokenizer)
    pipeline = pipeline_of(engine, agent, plan, tokenizer)
    [group] = groups_of(prompt or Prompt("p", "12=", [4, 5, 2]), group_size)
    asyncio.run(pipeline.generate([group], PLAIN))
    pipeline.grade([group])
    return group


def groups_of(prompt: Prompt, size: int) -> list[list[Rollout]]:
    return [[Rollout(prompt, "g", index, 100 + index) for index in range(size)]]


def length_reward(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


AGENTS = {
    "environment": lambda: MultiTurn(long_game, max_turns=4, max_turn_tokens=3),
    "program": ThreeCalls,
}


@pytest.mark.parametrize("kind", AGENTS)
def test_a_branch_begins_with_the_very_calls_and_goes_on_otherwise(kind, tokenizer):
    engine = Hashing()
    sampling_tokens = collected(Branching(k=2), AGENTS[kind](), engine, tokenizer)
    trunks = {r.sample_index: r for r in sampling_tokens if r.fork is None}
    branches = [r for r in sampling_tokens if r.fork is not None]
    assert len(branches) == sum(2 * (len(r.calls) - 1) for r in trunks.values())
    for one in branches:
        trunk, count = trunks[one.sample_index], one.fork.calls
        for was, now in zip(trunk.calls[:count], one.calls[:count], strict=True):
            assert captured(trunk, was).prompt_ids == captured(one, now).prompt_ids
            assert captured(trunk, was).completion == captured(one, now).completion
            assert was.seed == now.seed
        # The fork asks the very same, with another seed.
        asked, again = trunk.calls[count], one.calls[count]
        assert captured(trunk, asked).prompt_ids == captured(one, again).prompt_ids
        assert asked.seed != again.seed
    seeds = [c.seed for r in branches for c in r.calls[r.fork.calls :]]
    seeds += [c.seed for r in trunks.values() for c in r.calls]
    assert len(set(seeds)) == len(seeds) == len(engine.asked)  # nothing was asked twice
    assert [r.id for r in sampling_tokens] == sorted(r.id for r in sampling_tokens)


def test_a_branch_is_the_same_however_it_came_about(tokenizer):
    agents = ThreeCalls(0), ThreeCalls(0.01)
    groups = [collected(Branching(), agent, Hashing(), tokenizer) for agent in agents]
    assert [r.to_dict() for r in groups[0]] == [r.to_dict() for r in groups[1]]


class Forgetful(ThreeCalls):
    """Asks for something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    async def run(self, rollout, engine, sampling):
        self.times += 1
        return await super().run(rollout, engine, replace(sampling, temperature=self.times))


def test_an_agent_that_asks_for_something_else_loses_its_branches(tokenizer):
    group = collected(Branching(), Forgetful(), Hashing(), tokenizer)
    for rollout in group:
        wanted = RolloutStatus.COMPLETED if rollout.fork is None else RolloutStatus.FAILED
        assert rollout.status is wanted
    assert "did not repeat the 1 calls of g/0" in group[1].error


@pytest.mark.parametrize("stopped_after", range(1, 12))
def test_one_that_is_interrupted_ends_as_if_it_had_not_been(stopped_after, tokenizer):
    class Stops(Hashing):
        async def generate(self, token_ids, sampling, seed):
            if len(self.asked) >= stopped_after:
                raise EngineError("the power is out")
            return await super().generate(token_ids, sampling, seed)

    plan, agent = Branching(), ThreeCalls()
    whole = collected(plan, agent, Hashing(), tokenizer)
    pipeline = pipeline_of(Stops(), agent, plan, tokenizer)
    [group] = groups_of(Prompt("p", "12=", [4, 5, 2]), 2)
    with pytest.raises(ExceptionGroup):
        asyncio.run(pipeline.generate([group], PLAIN))
    group = [Rollout.from_dict(rollout.to_dict()) for rollout in group]
    pipeline.engine = Hashing()
    asyncio.run(pipeline.generate([group], PLAIN))
    pipeline.grade([group])
    assert [r.to_dict() for r in group] == [r.to_dict() for r in whole]


def test_the_agent_may_be_a_function_of_ones_own():
    plan, agent, engine = Branching(at=FixedCalls([3])), FunctionAgent(play), Hashing()
    engine.max_length = 512
    try:
        prompt = Prompt("p", [{"role": "user", "content": "12="}], [4, 5, 2])
        group = collected(plan, agent, engine, chatml_tokenizer(), prompt=prompt)
    finally:
        agent.close()
    assert [r.fork and r.fork.calls for r in group] == [None, 2, None, 2]
    assert all(r.completed and len(r.calls) == 3 for r in group), [r.error for r in group]
    assert len(engine.asked) == 3 + 1 + 3 + 1


# ---------------------------------------------------------------- around it


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "sqlite"])
def test_every_file_gives_the_fork_back(tree, tmp_path, suffix):
    file = open_rollouts(tmp_path / f"rollouts.{suffix}")
    file.append(tree, 7)
    file.close()
    assert [r.rollout for r in open_rollouts(file.path).read()] == tree
    assert tree[2].id == "g/0+1.1"


def test_tokens_that_were_there_are_not_counted_as_generated(tree):
    metrics = rollout_metrics(tree, seconds=2.0, trainer_version=0)
    # With the environment's 3 + 2 + 4 + 3 + 2 - 5 gaps: 5 + 3 + 7 + 5 + 3, of which 1 + 1 + 3.
    assert metrics["rollout/tokens_per_s"] == (23 - 5) / 2
    assert metrics["rollout/branches_per_rollout"] == 3 / 2
    assert metrics["rollout/shared_token_share"] == 5 / 23


def test_previews_and_the_page_say_where_it_branched(tree, tmp_path):
    columns, rows = preview_table(tree)
    ends = [dict(zip(columns, row, strict=True))["end"] for row in rows]
    assert [end.partition("tokens")[2] for end in ends] == [
        "",
        *(f", branched off after {calls} calls" for calls in (1, 1, 2)),
        "",
    ]
    file = open_rollouts(tmp_path / "rollouts.jsonl")
    file.append(tree, 0)
    run = read_run(file.path, 10)
    # What is shared has no logprob of the trainer's, and no gap.
    branch = run.rollouts[1]
    branch["rows"][0]["trainer_logprobs"] = [0.0, 0.0, -1.0]
    assert gaps(rows_of(branch)[0]) == [(2, 0.0)]
    assert len(gaps(rows_of(branch | {"fork": None})[0])) == 2
    page = build_page([run])
    forks = [row["fork"] for row in rollouts_of(page)]
    assert [fork and fork["calls"] for fork in forks] == [None, 1, 1, 2, None]


class Seen(Rows):
    """Records rollouts and rows of metrics of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts = []

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        self.rollouts.append([r.to_dict() for r in rollouts])

    def on_train_end(self, trainer, pl_module) -> None:
        self.evaluated, _ = trainer.datamodule.evaluate()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def trained(tiny_model, where, *extra, module=None, ckpt_path=None, **data):
    seen = Seen()
    module = module or grpo(tiny_model, advantage=TreeRLOO(), ppo_epochs=2)
    options = {
        "agent": ThreeCalls(),
        "plan": Branching(at=FixedCalls([2])),
        "groups_per_iteration": 3,
        "group_size": 3,
        "iterations_per_epoch": 3,
    } | data
    trainer = trainer_of(where, [WeightSync(), seen, *extra], enable_checkpointing=True)
    trainer.fit(module, data_module(**options), ckpt_path=ckpt_path)
    return seen


def test_a_run_learns_from_branches_and_evaluates_without(tiny_model, tmp_path):
    seen = trained(tiny_model, tmp_path)
    assert [len(rollouts) for rollouts in seen.rollouts] == [18] * 3
    assert all(row["rollout/branches_per_rollout"] == 1 for row in seen.rows[1:])
    assert [r.fork for r in seen.evaluated] == [None] * 8 * 4  # prompts, and samples of each


def test_a_streamed_run_is_the_same(tiny_model, tmp_path):
    def run(name, **options):
        # Adam's first step has one size whatever the gradient, of which rounding decides the sign.
        module = grpo(tiny_model, advantage=TreeRLOO(), ppo_epochs=2, optimizer=sgd)
        engine = LotEngine(device="cpu")
        return trained(tiny_model, tmp_path / name, module=module, engine=engine, **options)

    whole = run("whole")
    streamed = run("streamed", collector=StreamedCollector())
    assert whole.rollouts[0] == streamed.rollouts[0]
    assert streamed.rows[1].pop("policy/streamed_share") > 0
    for name in ("policy/loss", "policy/grad_norm", "policy/kl_old", "reward/mean"):
        assert streamed.rows[1][name] == pytest.approx(whole.rows[1][name], rel=1e-4, abs=1e-6)


def test_other_advantages_are_refused(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"plan=Branching.*advantage=GRPO.*TreeRLOO"):
        trained(tiny_model, tmp_path, module=grpo(tiny_model, advantage=GRPO()))


# ---------------------------------------------------------------- the factor of TokenSum


def gradient(stops: float, wins: float, by_all: bool, games: int = 3) -> float:
    """Return d/d(the first turn's logit) of a batch of trees, over all batches there are.

    A game stops (and pays 0.8) or goes on; then it wins 1 or nothing. One that goes on has a branch
    before its second turn. A batch's sum is divided by its games, or by its branches, too.
    """
    ways = [(stops, [0.8], 0)] + [
        ((1 - stops) * p * q, [a, b], 1)
        for a, p in ((1.0, wins), (0.0, 1 - wins))
        for b, q in ((1.0, wins), (0.0, 1 - wins))
    ]
    total = 0.0
    for batch in product(ways, repeat=games):
        chance, rewards, group, trunks = 1.0, [], [], []
        for probability, paid, goes_on in batch:
            chance *= probability
            one = Branched(len(rewards))
            if goes_on:
                one.forks[1].append(len(rewards) + 1)
            trunks.append((len(rewards), goes_on))
            rewards += paid
            group.append(one)
        found = tree_credits(group, rewards)
        # d log p / d logit of the first turn: 1 - p where it stops, -p where it goes on.
        score = sum(found[t][0][1] * (-stops if on else 1 - stops) for t, on in trunks)
        total += chance * score / (len(rewards) if by_all else games)
    return total


def test_the_factor_of_token_sum_is_a_constant_only_where_branches_do_not_hang_on_what_is_written():
    # J = 0.8 p + (1 - p) w, so dJ/dlogit = p (1 - p) (0.8 - w).
    for stops, wins in ((0.2, 0.5), (0.8, 0.9)):
        exact = stops * (1 - stops) * (0.8 - wins)
        assert gradient(stops, wins, by_all=False) == pytest.approx(exact)
    ratios = [
        gradient(p, w, by_all=True) / (p * (1 - p) * (0.8 - w)) for p, w in ((0.2, 0.5), (0.8, 0.9))
    ]
    # 3/4 where one of three games goes on, 3/5 where two do: which, is for the policy to say.
    assert ratios == pytest.approx([0.2 * 3 / 4 + 0.8 * 3 / 5, 0.8 * 3 / 4 + 0.2 * 3 / 5])
