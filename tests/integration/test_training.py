"""Whole runs in one process: rewards rise, every callback does its part, a resumed run goes on."""

import json

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.algos.advantages import GAE, GRPO
from lightning_rl.callbacks import (
    Evaluate,
    HFExport,
    PreviewTable,
    RunReport,
    StepTimer,
    WeightSync,
)
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.engines import Sampling
from lightning_rl.errors import ConfigError, EngineError, RewardError
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.module import PolicyModule
from lightning_rl.run.clock import STAGES
from tests.support.small_run import data_module, grpo, ppo, share_of_sevens, trainer_of


def column(history, name: str) -> list[float]:
    return [row[name] for row in history if name in row]


@pytest.mark.parametrize("make", [grpo, ppo])
def test_ten_iterations_raise_the_reward_and_every_callback_does_its_part(
    tiny_model, tmp_path, make
):
    report = RunReport()
    callbacks = [
        WeightSync(), Evaluate(every_n_iterations=4), PreviewTable(num_rollouts=3), HFExport(),
        report, StepTimer(),
    ]  # fmt: skip
    trainer = trainer_of(tmp_path, callbacks, logger=TensorBoardLogger(tmp_path, "tb"))
    module = make(tiny_model)
    trainer.fit(module, data_module())
    directory = tmp_path / "tb" / "version_0"

    rewards = column(report.history, "reward/mean")
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.3
    evaluated = [row["iteration"] for row in report.history if "eval/accuracy" in row]
    assert evaluated == [0, 4, 8, 10]
    accuracy = column(report.history, "eval/accuracy")
    assert accuracy[-1] > accuracy[0] + 0.3

    # Engine and trainer agree on policy throughout, and nothing is stale.
    assert max(column(report.history, "sync/probe_gap")) < 1e-4
    assert max(column(report.history, "rollout/logprob_gap_max")) < 1e-4
    assert set(column(report.history, "rollout/staleness_max")) == {0.0}
    for row in report.history:
        if "time/iteration" in row:
            parts = [row[f"time/{stage}"] for stage in (*STAGES, "other")]
            assert sum(parts) == pytest.approx(row["time/iteration"], abs=1e-6)
            assert min(parts) >= 0

    lines = (directory / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [
        i for i in range(1, 11) for _ in "abc"
    ]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["iterations"] == 10
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (accuracy[0], accuracy[-1])
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")
    exported = AutoModelForCausalLM.from_pretrained(directory / "hf")
    for (name, mine), theirs in zip(
        module.policy.lm.named_parameters(), exported.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name
    assert AutoTokenizer.from_pretrained(directory / "hf")("7=").input_ids == [10, 2]


def test_a_failed_run_leaves_a_summary_that_says_so(tiny_model, tmp_path):
    def broken(completions, **columns):
        raise KeyError("answer")

    report = RunReport()
    trainer = trainer_of(tmp_path, [WeightSync(), report])
    with pytest.raises(RewardError, match=r"48 of 48 rollouts .* reward broken: KeyError"):
        trainer.fit(grpo(tiny_model), data_module(rewards=[broken]))
    summary = json.loads((tmp_path / "csv" / "version_0" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "reward broken" in summary["error"]
    assert summary["iterations"] == 0


def test_validate_measures_without_training(tiny_model, tmp_path):
    module = grpo(tiny_model)
    trainer = trainer_of(tmp_path, [WeightSync()])
    (metrics,) = trainer.validate(module, data_module(), verbose=False)
    (tested,) = trainer.test(module, data_module(), verbose=False)
    assert metrics == tested  # the same seeds
    assert 0 <= metrics["eval/accuracy"] <= metrics["eval/pass@2"] <= metrics["eval/pass@4"] <= 1
    assert metrics["eval/tokens_mean"] > 1


def test_rollouts_without_training(tiny_model, tmp_path):
    trainer = trainer_of(tmp_path, [WeightSync()])
    batches = trainer.predict(grpo(tiny_model), data_module(iterations_per_epoch=2))
    assert [len(batch) for batch in batches] == [48, 48]
    for rollout in batches[0] + batches[1]:
        assert rollout.reward == share_of_sevens([rollout.completion], [rollout.token_ids])[0]
        assert rollout.reward_parts == {"share_of_sevens": rollout.reward}


def test_collecting_without_a_weight_sync_says_what_is_missing(tiny_model, tmp_path):
    module = grpo(tiny_model)
    module.configure_callbacks = list  # of one's own, and without those of super()
    with pytest.raises(EngineError, match="add the WeightSync callback"):
        trainer_of(tmp_path, []).fit(module, data_module())


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"group_size": 1}, {}, "group_size=1 must be >= 2 for GRPO"),
        (
            {"groups_per_iteration": 2},
            {"minibatches": 3},
            "minibatches=3 exceeds groups_per_iteration=2",
        ),
        ({"sampling": Sampling(max_tokens=128)}, {}, r"max_tokens=128 leaves no room .* 128"),
    ],
)
def test_contradicting_settings_are_refused_before_training(
    tiny_model, tmp_path, data, model, message
):
    trainer = trainer_of(tmp_path, [WeightSync()])
    with pytest.raises(ConfigError, match=message):
        trainer.fit(grpo(tiny_model, **model), data_module(**data))


def test_a_group_of_one_is_fine_for_gae(tiny_model, tmp_path):
    module = ppo(tiny_model, minibatches=1)
    data = data_module(group_size=1, iterations_per_epoch=1)
    trainer_of(tmp_path, [WeightSync()]).fit(module, data)
    assert module.iteration == 1


def test_one_token_after_prompts_that_leave_room_for_no_more(tiny_model, tmp_path):
    prompts = IterablePrompts([{"prompt": "1" * n} for n in (126, 127, 128)])
    data = data_module(
        train_prompts=prompts, evaluation=None, sampling=Sampling(max_tokens=1),
        iterations_per_epoch=2,
    )  # fmt: skip
    module = grpo(tiny_model)
    trainer_of(tmp_path, [WeightSync()]).fit(module, data)
    assert module.iteration == 2
    assert prompts.dropped == 1  # 128 tokens leave no room for one more


def test_chat_prompts_get_chat_completions(tiny_model, tmp_path):
    model = tmp_path / "chat"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    tokenizer.save_pretrained(model)
    seen = []

    def reward(prompts, completions, **columns):
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(c[0]["content"])) for c in completions]

    message = [{"role": "user", "content": "12"}]
    data = data_module(
        train_prompts=IterablePrompts([{"prompt": message}]),
        rewards=[reward],
        iterations_per_epoch=1,
    )
    trainer_of(tmp_path, [WeightSync()]).fit(grpo(model), data)
    assert len(seen) == 48
    for prompt, completion in seen:
        assert prompt == message
        assert [sorted(m) for m in completion] == [["content", "role"]]
        assert completion[0]["role"] == "assistant"


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """Return a checkpoint of a run with a critic."""
    tmp_path = tmp_path_factory.mktemp("ckpt")
    trainer = trainer_of(tmp_path, [WeightSync(), RunReport(), StepTimer()])
    trainer.fit(ppo(tiny_model), data_module(iterations_per_epoch=1, groups_per_iteration=2))
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    return tmp_path / "run.ckpt"


def test_a_checkpoint_holds_nothing_that_weights_only_refuses(saved, tiny_model):
    kept = torch.load(saved, weights_only=True)["hyper_parameters"]
    assert kept["model"] == str(tiny_model)
    assert (kept["update"]["ppo_epochs"], kept["update"]["minibatches"]) == (2, 2)
    assert "advantage" not in kept  # an object: to be given again


def test_load_from_checkpoint_rebuilds_the_module(saved):
    module = PolicyModule.load_from_checkpoint(saved, advantage=GAE(), critic=SharedValueHead())
    state = torch.load(saved, weights_only=True)["state_dict"]
    assert module.state_dict().keys() == state.keys()
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, state[name]), name
    assert module.iteration == 1


def test_grpo_is_the_default(tiny_model):
    assert PolicyModule(str(tiny_model)).advantage == GRPO()
