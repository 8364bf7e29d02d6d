"""The pages on parts of one's own: their code runs, all of it together, on public names alone."""

import ast
import re
from pathlib import Path

import pytest
import torch

from lightning_rl import SFTMix, WeightSync, errors
from lightning_rl.callbacks import Evaluate, RLCallback
from lightning_rl.collect.pipeline import in_groups
from lightning_rl.config.names import HOME, SURFACES
from lightning_rl.envs import ActorCritic, ActorCriticModule, EnvDataModule, Gym, MLPBody
from lightning_rl.extend import pack_rollouts
from lightning_rl.games import Game
from tests.support.pages import as_modules
from tests.support.small_run import adamw, data_module, grpo, trainer_of

PAGES = sorted((Path(__file__).parents[3] / "docs" / "extend").glob("*.md"))
FILE = re.compile(r'```python title="(\w+)\.py"\n(.*?)```', re.DOTALL)
FILES = {
    name: code for page in PAGES for name, code in FILE.findall(page.read_text(encoding="utf-8"))
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Yield the pages' files, as modules by the part they are about."""
    with as_modules(FILES, tmp_path_factory.mktemp("mine")) as modules:
        yield {name.removeprefix("my_"): module for name, module in modules.items()}


def test_there_is_a_page_for_each_part_on_public_names_alone():
    parts = {"loss", "advantage", "aggregation", "correction", "agent", "prompts", "filter"}
    parts |= {"episode", "collector", "engine", "transport", "metered", "schedule", "guard"}
    parts |= {"drift", "folder", "update", "env", "head", "turns", "loop", "count", "group"}
    parts |= {"learner"}
    assert {name.removeprefix("my_") for name in FILES} == parts
    for name, code in FILES.items():
        for node in ast.walk(ast.parse(code)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is not None and module.startswith("lightning_rl"):
                shown = {"lightning_rl.errors": vars(errors), **SURFACES}[module]
                assert {alias.name for alias in node.names} <= set(shown), name
            if isinstance(node, ast.Attribute):  # nor what is private, by any name
                assert not re.match(r"_[^_]", node.attr), f"{name}: {node.attr}"


def test_a_run_on_nothing_but_parts_of_ones_own(mine, tiny_model, tmp_path):
    transport = mine["metered"].Metered()
    guard = mine["guard"].LongRollouts(bound=0.01, action=mine["guard"].SlowDown(0.25))
    data = data_module(
        train_prompts=mine["prompts"].Sums(limit=5, seed=1),
        evaluation=None,
        engine=mine["engine"].OneByOne(),
        agent=mine["agent"].Prefilled("77"),
        plan=mine["group"].Temperatures([0.8, 1.0]),
        collector=mine["collector"].Waves(size=2),
        selection=[mine["filter"].NotAllCut(most=1.0)],
        group_size=4,
        groups_per_iteration=3,
        iterations_per_epoch=3,
    )
    schedule = mine["schedule"].OftenThenRarely(until=1, then_every=2)
    sync = WeightSync(transport, schedule)
    trainer = trainer_of(tmp_path, [sync, guard])
    module = grpo(
        tiny_model,
        advantage=mine["advantage"].Squashed(0.5),
        loss=mine["loss"].SquaredRatio(),
        aggregation=mine["aggregation"].RootLength(),
        correction=mine["correction"].Tempered(0.5),
        optimizer=adamw(1e-3),
        minibatches=3,
        learner="my_learner.Scaled",
    )
    trainer.fit(module, data)

    metrics = trainer.callback_metrics
    assert type(module.learner) is mine["learner"].Scaled
    assert metrics["rollout/completed"] == 12
    assert all(r.token_ids[:2] == [10, 10] for r in data.generated)  # "77", which no loss sees
    assert not any(m for r in data.generated for m in r.loss_mask[:2])
    assert [r.sampling.temperature for r in data.generated] == [0.8, 1.0] * 6
    assert metrics["sync/probe_gap"] < 1e-4
    assert "policy/ratio_far" in metrics
    # Synced before training and after iterations 1 and 3, each time with all weights.
    weights = sum(w.numel() for _, w in module.policy.named_weights())
    assert transport.sent_mb == pytest.approx(3 * 4 * weights / 2**20)
    assert metrics["guard/truncated"] == 1
    assert metrics["policy/lr"] == pytest.approx(1e-3 * 0.25**3)


def length(completion_ids, **columns):
    return [len(ids) / 10 for ids in completion_ids]


def test_rollouts_are_scored_at_the_temperature_they_were_sampled_at(mine, tiny_model, tmp_path):
    plan = mine["group"].Temperatures([0.5, 1.5])
    data = data_module(plan=plan, evaluation=None, iterations_per_epoch=1)
    trainer = trainer_of(tmp_path, [WeightSync()])
    trainer.fit(grpo(tiny_model), data)
    assert trainer.callback_metrics["rollout/logprob_gap_max"] < 1e-4


@pytest.mark.parametrize("name", ["BestOf", "Demonstrated"])
def test_plans_that_imitate(mine, tiny_model, tmp_path, name):
    rows = [{"prompt": f"{digit}=", "solution": "77"} for digit in range(3)]
    data = data_module(
        train_prompts=rows,
        evaluation=None,
        rewards=length,
        plan=getattr(mine["group"], name)(),
        group_size=4,
        groups_per_iteration=3,
        iterations_per_epoch=1,
    )
    trainer = trainer_of(tmp_path, [WeightSync()])
    trainer.fit(grpo(tiny_model, loss=SFTMix(coef=1.0)), data)
    assert trainer.callback_metrics["rollout/completed"] == 12
    assert trainer.callback_metrics["policy/demonstration_nll"] > 0
    for before, after in zip(
        in_groups(data.generated), in_groups(data._loader.current), strict=True
    ):
        rewards = [rollout.reward for rollout in before]
        given = [rollout for rollout in after if rollout.demonstration]
        assert (len(given), len(after)) == (1, 4)
        if name == "BestOf":
            assert given[0].reward == max(rewards)
            assert [r for r in after if r.graded] == given
        else:  # of ten tokens none succeeds
            assert (given[0].completion, given[0].reward) == ("77", 1.0)
            others = sorted(r.reward for r in after if not r.demonstration)
            assert others == sorted(rewards)[1:]


def test_an_agent_of_ones_own_calls_a_model_as_it_likes(mine, tiny_model, tmp_path):
    data = data_module(
        agent=mine["episode"].Compacting(),
        evaluation=None,
        group_size=2,
        groups_per_iteration=2,
        iterations_per_epoch=1,
    )
    trainer = trainer_of(tmp_path, [WeightSync()])
    trainer.fit(grpo(tiny_model, optimizer=adamw(1e-2)), data)
    metrics = trainer.callback_metrics
    assert metrics["rollout/calls_per_episode"] == 2
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    # An answer that reads the whole of a short draft goes on from it, others begin a row.
    assert 1 < metrics["rollout/rows_per_episode"] <= 2


def in_env(place, env, module, iterations):
    """Return the mean reward of held-out episodes, before and after a run."""
    data = EnvDataModule(
        env, num_envs=8, frames_per_iteration=320, iterations_per_epoch=iterations, eval_episodes=20
    )
    trainer = trainer_of(place, [Evaluate(every_n_iterations=iterations)])
    seen = []
    module.record = lambda metrics, record=module.record: (seen.append(metrics), record(metrics))
    trainer.fit(module, data)
    rewards = [metrics["eval/reward_mean"] for metrics in seen if "eval/reward_mean" in metrics]
    return rewards[0], rewards[-1]


def test_an_environment_a_head_and_a_turn_of_ones_own(mine, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    late = mine["turns"].Late(first=2)
    agent = ActorCritic(policy=mine["head"].Open(0.2), schedule=late, body=MLPBody([8]))
    module = ActorCriticModule(agents={"agent": agent}, optimizer=adamw(0.01))
    in_env(tmp_path, Gym("my_env:Thermostat-v0"), module, iterations=2)
    taught = module.agents["agent"]
    # Each of two actions keeps a chance of a tenth, whatever is seen.
    chances = taught.act({"observation": torch.linspace(-9, 9, 7).unsqueeze(1)})[0]["action"].logits
    assert float(chances.exp().min()) >= 0.1
    torch.testing.assert_close(chances.exp().sum(1), torch.ones(7))
    assert not module.trainer.optimizers[0].state  # nothing was learned in iterations 0 and 1


def test_a_loop_of_ones_own_learns(mine, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    before, after = in_env(
        tmp_path, Gym("my_env:Thermostat-v0"), mine["loop"].ImitateBest(share=0.3), iterations=12
    )
    # This holds whatever weights it begins with: some are at -18 already, most at -299.
    assert before < after
    assert after > -16


def test_an_update_in_games_of_ones_own(mine):
    x, y = (torch.tensor([value], requires_grad=True) for value in (0.5, 0.25))
    game = Game([(x * y).sum(), -(x * y).sum()], [[x], [y]], [0.1, 0.1])
    # xi = (y, -x), so nabla |xi|^2 / 2 = (x, y): 0.25 + 0.5 * 0.5 and -0.5 + 0.5 * 0.25
    found = mine["update"].Consensus(0.5)(game, torch.Generator())
    assert [float(v) for v in found] == pytest.approx([0.5, -0.375])


def test_a_transport_of_ones_own_brings_the_trainers_weights(mine, tiny_model, tmp_path):
    """The page's class, which is short, into a real engine, whose logprobs the probe compares."""
    [definition] = ast.parse(FILES["my_transport"]).body[-1:]
    assert definition.end_lineno - definition.lineno + 1 <= 30
    transport = mine["transport"].CompressedFiles(str(tmp_path / "weights"))
    data = data_module(group_size=2, groups_per_iteration=2, iterations_per_epoch=2)
    trainer = trainer_of(tmp_path, [WeightSync(transport)])
    module = grpo(tiny_model, optimizer=adamw(1e-2))
    trainer.fit(module, data)
    metrics = trainer.callback_metrics
    assert metrics["sync/version"] == 2
    assert metrics["sync/probe_gap"] < 1e-4
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    names = {name for name, _ in module.policy.named_weights()}
    files = (tmp_path / "weights").iterdir()
    assert {name for path in files for name, _ in transport.fetch({"path": path})} == names


class Drift(RLCallback):
    """Notes versions, and for each iteration the KL, as measured and by hand.

    With d the change of a token's logprob since it was written: the mean of exp(d) - 1 - d.
    """

    def __init__(self):
        self.synced, self.measured, self.by_hand = [], [], []

    def on_weights_synced(self, trainer, pl_module, version):
        self.synced.append(version)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        tokens = batch["tokens"].copy()
        copied = batch.copy()
        copied["tokens"] = tokens
        pl_module.policy.score(copied, "now", 4096)
        d = (tokens["now"] - tokens["rollout_logprobs"])[tokens["loss_mask"]].double()
        self.by_hand.append(float((d.exp() - 1 - d).mean()))

    def on_iteration_end(self, trainer, pl_module, metrics):
        if "sync/kl" in metrics:
            self.measured.append(metrics["sync/kl"])


@pytest.mark.parametrize(("max_kl", "synced"), [(1e9, [0, 3]), (1e-9, [0, 1, 2, 3])])
def test_a_sync_by_kl_through_a_folder_of_versions(mine, tiny_model, tmp_path, max_kl, synced):
    transport = mine["folder"].Versions(str(tmp_path / "weights"), keep=2)
    drift = Drift()
    sync = WeightSync(transport, mine["drift"].WhenFar(max_kl, at_most=3))
    data = data_module(
        evaluation=None, group_size=4, groups_per_iteration=3, iterations_per_epoch=3
    )
    trainer = trainer_of(tmp_path, [sync, drift])
    trainer.fit(grpo(tiny_model, optimizer=adamw(1e-3)), data)
    assert drift.synced == synced
    asked = 2  # after the third iteration it is due in any case
    assert drift.measured[:asked] == pytest.approx(drift.by_hand[:asked], rel=1e-3)
    assert min(drift.measured) > 1e-8
    kept = {path.name for path in (tmp_path / "weights").iterdir()}
    assert kept == {f"version_{version}" for version in synced[-2:]}
    assert trainer.callback_metrics["sync/probe_gap"] < 1e-4


def test_the_formulas_are_what_their_docstrings_say(mine, make_rollout):
    loss, metrics = mine["loss"].SquaredRatio(2.0)(
        torch.tensor([0.5, 0.0]).log1p(),
        {"old_logprobs": torch.zeros(2), "advantages": torch.tensor([1.0, -1.0])},
    )
    # w = 1.5 and 1: -1.5 + (0.5)^2 and 1
    assert loss.tolist() == pytest.approx([-1.25, 1.0])
    assert metrics["ratio_far"].tolist() == [1, 0]

    rewards, groups = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0, 0, 1])
    compared = mine["advantage"].Squashed(0.5).compare(rewards, groups)
    assert compared.tolist() == pytest.approx([-0.76159, 0.76159, 0], abs=1e-5)  # tanh(1)

    batch = pack_rollouts([make_rollout([2], [3] * n, group_id=str(n)) for n in (1, 4)])
    weights = mine["aggregation"].RootLength()(batch)
    # 1 and 4 x 1/2, divided by their sum
    expected = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5]) / 3
    torch.testing.assert_close(weights[batch["tokens", "loss_mask"]], expected)

    log_weight = torch.tensor([0.0, 2.0])
    assert mine["correction"].Tempered(0.5).weights(log_weight, None).tolist() == pytest.approx(
        [1.0, 2.71828], abs=1e-5
    )


def test_the_reference_has_every_public_name_once():
    pages = sorted((PAGES[0].parents[1] / "api").glob("*.md"))
    shown = [
        n
        for p in pages
        for n in re.findall(r"^::: lightning_rl\.([\w.]+)$", p.read_text(), re.M)
        if f"lightning_rl.{n}".rpartition(".")[0] in SURFACES
    ]
    assert sorted(shown) == sorted(set(shown))
    names = {f"{home}.{name}".removeprefix("lightning_rl.") for name, home in HOME.items()}
    missing = names - set(shown)
    assert not missing, (
        f"add `::: lightning_rl.{min(missing)}` to the page in docs/api it belongs to"
    )
    assert set(shown) <= names
