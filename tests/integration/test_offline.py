"""Training from recorded rollouts alone, and `lightning-rl rollout` that records them, resumed."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_rl.algos.advantages import GAE, GRPO
from lightning_rl.algos.correction import TokenTIS
from lightning_rl.algos.distillation import Distillation, TeacherDivergence
from lightning_rl.callbacks import RLCallback, RunReport, WeightSync
from lightning_rl.callbacks.recorder import collected_rollouts
from lightning_rl.cli import main
from lightning_rl.cli.app import RLTrainer
from lightning_rl.collect.collector import RewardSpread
from lightning_rl.data.curriculum import PassRateCurriculum
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Sampling, TransformersEngine
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.learn.offline import OfflineDataModule
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.models.policy import Policy
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.teachers import ModelTeacher
from lightning_rl.rollout import RolloutStatus
from tests.support.engine_checks import ROUNDING
from tests.support.grouped import grouped
from tests.support.small_run import SaveAfter, trainer_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_seed_left_behind(monkeypatch):
    """Restore the variable that `seed_everything` sets, from which later tests would be seeded."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


@pytest.fixture(scope="module")
def recorded(tiny_model, make_rollout):
    """Record six groups of four with the model's own logprobs; a 7 as the first token earns 1."""

    def rollout(group, index):
        first = 10 if index % 2 else 4 + group  # token 10 is the digit 7
        tokens = [first, 3 + group, 1]
        made = make_rollout(
            [3 + group, 2], tokens, group_id=f"0/{group}/p", sample_index=index,
            reward=float(first == 10),
        )  # fmt: skip
        made.prompt.id = str(group)
        return made

    rollouts = [rollout(group, index) for group in range(6) for index in range(4)]
    logprobs = token_logprobs(Policy(str(tiny_model)), rollouts)
    for made, values in zip(rollouts, logprobs, strict=True):
        made.rows[0].logprobs = values.tolist()
    return rollouts


def token_logprobs(policy, rollouts) -> list[torch.Tensor]:
    """Return the logprob of each completion token, per rollout."""
    batch = policy.score(pack_rollouts(rollouts), "scored", 4096)
    parts = batch["tokens", "scored"].split(batch["rollouts", "length"].tolist())
    return [part[len(r.prompt.token_ids) :] for part, r in zip(parts, rollouts, strict=True)]


@pytest.fixture
def path(tmp_path, recorded):
    file = open_rollouts(tmp_path / "recorded.sqlite")
    file.append(recorded, 0)
    file.close()
    return str(file.path)


def policy_module(tiny_model, **options) -> PolicyModule:
    options = {
        "optimizer": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.0),
        "use_rollout_logprobs": True,
        "seed": 7,
    } | options
    return PolicyModule(str(tiny_model), **grouped(**options))


def fit(module, data, tmp_path, *callbacks, epochs=1, **options):
    trainer = trainer_of(tmp_path, callbacks, logger=False, max_epochs=epochs)
    trainer.fit(module, data, **options)
    return trainer


def mean_logprobs(module, recorded) -> tuple[float, float]:
    """Return mean log-probability of the rewarded completions' tokens, and of the others'."""
    per_rollout = [float(lp.mean()) for lp in token_logprobs(module.policy, recorded)]
    good = [lp for lp, r in zip(per_rollout, recorded, strict=True) if r.reward == 1.0]
    bad = [lp for lp, r in zip(per_rollout, recorded, strict=True) if r.reward == 0.0]
    return sum(good) / len(good), sum(bad) / len(bad)


# ---------------------------------------------------------------- learning


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "sqlite"])
def test_rewarded_completions_become_likelier(tiny_model, tmp_path, recorded, suffix):
    file = open_rollouts(tmp_path / f"recorded.{suffix}")
    file.append(recorded, 0)
    file.close()
    module = policy_module(tiny_model)
    module.configure_model()
    before = mean_logprobs(module, recorded)
    report = RunReport()
    data = OfflineDataModule(str(file.path), groups_per_iteration=3)
    trainer = fit(module, data, tmp_path, report, epochs=3)
    # Six groups are two batches of three; three passes.
    assert module.iteration == 6
    assert [row["iteration"] for row in report.history] == [1, 2, 3, 4, 5, 6]
    after = mean_logprobs(module, recorded)
    assert after[0] > before[0] + 0.1
    assert after[0] - after[1] > before[0] - before[1] + 0.2
    # Half of all completions earned 1, and each has three tokens.
    assert trainer.callback_metrics["reward/mean"] == 0.5
    assert trainer.callback_metrics["rollout/tokens_mean"] == 3.0


def test_the_first_step_is_grpo_on_what_was_recorded(tiny_model, tmp_path, path, recorded):
    """The rewards give A = +-1/2 without std, and the ratio is 1, so the loss is -mean A = 0."""
    module = policy_module(tiny_model, advantage=GRPO(normalize_std=False))
    data = OfflineDataModule(path, groups_per_iteration=6, shuffle=False)
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            learner = pl_module.learner
            seen.append(learner.compute_advantages(learner.compute_old_logprobs(batch.clone())))

    trainer = fit(module, data, tmp_path, Look())
    tokens = seen[0]["tokens"]
    flat = [token for r in recorded for token in r.prompt.token_ids + r.token_ids]
    assert tokens["input_ids"].tolist() == flat
    expected = [0.5 if r.reward else -0.5 for r in recorded for _ in range(3)]
    assert tokens["advantages"][tokens["loss_mask"]].tolist() == expected
    kept = [lp for r in recorded for lp in r.logprobs]
    assert tokens["old_logprobs"][tokens["loss_mask"]].tolist() == pytest.approx(kept, abs=ROUNDING)
    assert float(trainer.callback_metrics["policy/loss"]) == pytest.approx(0.0, abs=ROUNDING)


def test_a_critic_needs_no_groups(tiny_model, tmp_path, recorded):
    file = open_rollouts(tmp_path / "single.jsonl")
    file.append(recorded[::4], 0)
    module = policy_module(
        tiny_model, advantage=GAE(), critic=SharedValueHead(), use_rollout_logprobs=False,
        correction=TokenTIS(),
    )  # fmt: skip
    fit(module, OfflineDataModule(str(file.path), 6), tmp_path)
    assert module.iteration == 1


# ---------------------------------------------------------------- what is used


def test_a_student_learns_from_texts_that_a_teacher_has_read(tiny_model, tmp_path, recorded):
    """The forward KL to the teacher falls, here to one that prefers other tokens."""
    teacher = Policy(str(tiny_model))
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    teacher.save_pretrained(tmp_path / "teacher")
    load_tokenizer(str(tiny_model)).save_pretrained(tmp_path / "teacher")
    rollouts = deepcopy(recorded)

    def trained(top_k, epochs):
        reader = ModelTeacher(str(tmp_path / "teacher"), top_k=top_k)
        reader.configure(load_tokenizer(str(tiny_model)))
        reader(rollouts)
        file = open_rollouts(tmp_path / f"read_{top_k}.jsonl")
        file.append(rollouts, 0)
        file.close()
        told = RunReport()
        options = {"advantage": Distillation(), "loss": TeacherDivergence(beta=0.0)}
        data = OfflineDataModule(str(file.path), groups_per_iteration=6)
        fit(policy_module(tiny_model, **options), data, tmp_path, told, epochs=epochs)
        return [row["policy/teacher_divergence"] for row in told.history]

    apart = trained(top_k=4, epochs=8)
    assert apart[-1] < 0.5 * apart[0]
    with pytest.raises(DataError, match=r"recorded without its teacher's likeliest tokens, which"):
        trained(top_k=0, epochs=1)


def drawn(path, module, tmp_path, epochs=1, **options) -> list[list[tuple[str, float]]]:
    """Return group and reward of each rollout of each batch."""
    data = OfflineDataModule(path, **options)
    batches = []
    collect = data.collect
    data.collect = lambda i: batches.append(collect(i)) or batches[-1]
    fit(module, data, tmp_path, epochs=epochs)
    return [[(r.group_id.split("/")[2], r.reward) for r in batch] for batch in batches]


def test_each_pass_uses_every_group_once_in_a_new_order(tiny_model, tmp_path, path):
    module = policy_module(tiny_model)
    batches = drawn(path, module, tmp_path, epochs=4, groups_per_iteration=3, seed=1)
    orders = [
        [name for name, _ in a + b][::4] for a, b in zip(batches[::2], batches[1::2], strict=True)
    ]
    assert [sorted(order) for order in orders] == [list("012345")] * 4
    assert len({tuple(order) for order in orders}) > 1


def test_a_group_drawn_twice_in_a_batch_stays_two_groups(tiny_model, tmp_path, path):
    module = policy_module(tiny_model)
    data = OfflineDataModule(path, groups_per_iteration=4, shuffle=False)
    fit(module, data, tmp_path)
    rollouts = data.collect(1)  # groups 4 and 5, and from the beginning 0 and 1
    assert [r.prompt.id for r in rollouts] == list("4444555500001111")
    batch = pack_rollouts(rollouts + data.collect(2) + data.collect(3))
    assert batch["rollouts", "group"].unique(return_counts=True)[1].tolist() == [4] * 12


def test_what_cannot_be_trained_on_is_left_out(tiny_model, tmp_path, recorded, make_rollout):
    failed = make_rollout([3], [4], group_id="0/0/p", reward=None, status=RolloutStatus.FAILED)
    failed.prompt = recorded[0].prompt
    even = [make_rollout([3], [4], group_id="even", sample_index=i, reward=1.0) for i in range(4)]
    alone = make_rollout([3], [4], group_id="alone", reward=1.0)
    file = open_rollouts(tmp_path / "mixed.jsonl")
    file.append([*recorded[:8], failed, *even, alone], 0)
    module = policy_module(tiny_model)
    options = {"filters": [RewardSpread()], "groups_per_iteration": 2, "shuffle": False}
    (batch,) = drawn(str(file.path), module, tmp_path, **options)
    assert [name for name, _ in batch] == ["0"] * 4 + ["1"] * 4
    assert [reward for _, reward in batch] == [0.0, 1.0] * 4


@pytest.mark.parametrize(
    ("data", "model", "error", "message"),
    [
        ({"groups_per_iteration": 0}, {}, ConfigError, "groups_per_iteration=0 must be >= 1"),
        ({"groups_per_iteration": 7}, {}, ConfigError, "=7 exceeds the 6 usable groups of"),
        ({"path": "nope.jsonl"}, {}, DataError, "'nope.jsonl' does not exist"),
        (
            {"groups_per_iteration": 2}, {"minibatches": 3}, ConfigError,
            "minibatches=3 exceeds groups_per_iteration=2",
        ),
        (
            {"filters": [RewardSpread(min_spread=2.0)]}, {}, DataError,
            r"none of its 6 groups has at least 2 completed and graded rollouts, as GRPO requires",
        ),
        (
            {}, {"advantage": Distillation()}, DataError,
            "no teacher has read its rollouts, but model.advantage=Distillation learns from one",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said(tiny_model, tmp_path, path, data, model, error, message):
    with pytest.raises(error, match=message):
        fit(
            policy_module(tiny_model, **model),
            OfflineDataModule(**({"path": path, "groups_per_iteration": 6} | data)),
            tmp_path,
        )


def test_rollouts_of_another_tokenizer_are_refused(tiny_model, tmp_path, make_rollout):
    file = open_rollouts(tmp_path / "other.jsonl")
    file.append([make_rollout([3], [16], sample_index=i) for i in range(2)], 0)
    with pytest.raises(DataError, match=r"'g/0' contains token 16, but model.model has only 16"):
        fit(policy_module(tiny_model), OfflineDataModule(str(file.path)), tmp_path)


def test_uncorrected_training_warns(tiny_model, tmp_path, path):
    module = policy_module(tiny_model, use_rollout_logprobs=False)
    with pytest.warns(UserWarning, match="off-policy, but nothing corrects for it"):
        fit(module, OfflineDataModule(path, groups_per_iteration=6), tmp_path)


# ---------------------------------------------------------------- resume


def offline_run(tiny_model, path, tmp_path, *callbacks, **options) -> None:
    module = policy_module(tiny_model, ppo_epochs=2, minibatches=2)
    data = OfflineDataModule(path, groups_per_iteration=2, iterations_per_epoch=4, seed=2)
    fit(module, data, tmp_path, *callbacks, epochs=2, **options)


def test_resuming_on_other_rollouts_is_refused(tiny_model, path, tmp_path, recorded):
    saved = tmp_path / "mid.ckpt"
    offline_run(tiny_model, path, tmp_path, SaveAfter(2, saved))
    other = tmp_path / "other.jsonl"
    open_rollouts(other).append(recorded[:8], 0)
    with pytest.raises(ConfigError, match="had groups=6, but now it is 2; use the same file"):
        offline_run(tiny_model, str(other), tmp_path, ckpt_path=saved)
    same_number = tmp_path / "same_number.jsonl"
    open_rollouts(same_number).append([*recorded[4:], *recorded[:4]], 0)
    with pytest.raises(ConfigError, match=r"had content=\w+, but now it is"):
        offline_run(tiny_model, str(same_number), tmp_path, ckpt_path=saved)


# ---------------------------------------------------------------- lightning-rl rollout, and fit


def starts_right(completions, answer, **columns):
    return [float(c[:1] == a[:1]) for c, a in zip(completions, answer, strict=True)]


@pytest.fixture
def record(tiny_model, tmp_path, monkeypatch):
    """Record as `lightning-rl rollout` does: three groups of two per iteration."""
    monkeypatch.chdir(tmp_path)

    def run(output, iterations, curriculum=False, **options) -> None:
        rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(30, 42)]
        prompts = IterablePrompts(rows)
        settings = {"group_size": 2, "groups_per_iteration": 3} | options
        data = RLDataModule(
            PassRateCurriculum(prompts) if curriculum else prompts,
            [starts_right],
            TransformersEngine(device="cpu"),
            sampling=Sampling(max_tokens=4),
            **settings,
        )
        trainer = RLTrainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[WeightSync()],
        )  # fmt: skip
        trainer.rollout(PolicyModule(str(tiny_model)), data, output, iterations)

    return run


def contents(path) -> list[tuple]:
    return [(r.iteration, r.rollout) for r in open_rollouts(path).read()]


def test_recording_goes_on_where_it_stopped(record, capsys):
    record("whole.jsonl", 3)
    whole = contents("whole.jsonl")
    assert [iteration for iteration, _ in whole] == [i for i in (1, 2, 3) for _ in range(6)]
    assert len({rollout.prompt.id for _, rollout in whole}) == 9  # no prompt was done twice
    for name in ("parts.jsonl", "parts.parquet", "parts.sqlite"):
        record(name, 1)
        assert contents(name) == whole[:6]
        capsys.readouterr()
        record(name, 3)
        assert f"12 rollouts written to {name}, which holds 3" in capsys.readouterr().out
        assert contents(name) == whole
        record(name, 3)
        assert "already holds 3 iterations; raise --iterations" in capsys.readouterr().out
        assert contents(name) == whole


def test_a_recording_that_was_killed_is_repaired(record):
    record("whole.jsonl", 2, curriculum=True)  # which prompts come next depends on the rewards
    whole = Path("whole.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    # In the second iteration's second group: three whole lines of it and half of the next.
    Path("cut.jsonl").write_bytes(b"".join(lines[:9]) + lines[9][:100])
    record("cut.jsonl", 2, curriculum=True)
    assert Path("cut.jsonl").read_bytes() == whole


def test_recording_into_a_file_of_another_run_is_refused(record):
    record("a.jsonl", 1)
    before = Path("a.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"a\.jsonl was written with seed=0, but now it is 5"):
        record("a.jsonl", 2, seed=5)
    assert Path("a.jsonl").read_bytes() == before
    Path("other.jsonl").write_text('{"prompt": "1="}\n')
    with pytest.raises(DataError, match=r"other\.jsonl:1 was not written by `lightning-rl"):
        record("other.jsonl", 1)
    assert Path("other.jsonl").read_text() == '{"prompt": "1="}\n'


@pytest.mark.slow
def test_the_offline_recipe_trains_on_what_was_recorded(record, tiny_model, tmp_path):
    """The files that the variant names lead from `rollout` to `fit`."""
    record("recorded.sqlite", 4, group_size=32)  # so that most groups have something to teach
    recipes = ROOT / "recipes" / "sort_digits"
    configs = ["--config", recipes / "grpo.yaml", "--config", recipes / "variants" / "offline.yaml"]
    options = {
        "model.model": tiny_model,
        "data.path": "recorded.sqlite",
        "data.groups_per_iteration": 2,
        "trainer.accelerator": "cpu",
        "trainer.logger.save_dir": tmp_path,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    assert main(["fit", *map(str, configs), *arguments]) == 0
    summary = json.loads((tmp_path / "offline" / "version_0" / "summary.json").read_text())
    groups = open_rollouts("recorded.sqlite").groups()
    spread = [group for group in groups if len({r.reward for r in group}) > 1]
    assert summary["status"] == "completed"
    assert summary["iterations"] == 2 * (len(spread) // 2) > 0  # two epochs
    assert (tmp_path / "runs/sort_digits/offline/hf/model.safetensors").exists()


def test_overfitting_repeats_the_same_groups(tiny_model, path, tmp_path):
    class Seen(RLCallback):
        groups: list[list[str]] = []  # noqa: RUF012

        def on_update_start(self, trainer, pl_module, batch):
            rollouts = collected_rollouts(trainer)
            self.groups.append(sorted({rollout.prompt.id for rollout in rollouts}))

    seen = Seen()
    trainer = trainer_of(tmp_path, [seen], logger=False, max_epochs=2, overfit_batches=2)
    trainer.fit(policy_module(tiny_model), OfflineDataModule(path, 2, seed=3))
    assert seen.groups == [["0", "1"], ["2", "3"]] * 2  # of six groups, as they were written
