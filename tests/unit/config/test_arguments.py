"""Test constructors in Python: what is convenient is taken, what is wrong refused as in YAML."""

import gc
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from lightning_rl import (
    GRPO,
    RLOO,
    AsyncCollector,
    Evaluation,
    HFDatasetPrompts,
    IterablePrompts,
    IterationCheckpoint,
    JSONLPrompts,
    LoRA,
    MultiTurn,
    OneStepOffCollector,
    ParquetPrompts,
    PolicyModule,
    PPOClip,
    PythonTests,
    RewardSpread,
    RLDataModule,
    Sampling,
    SFTDataModule,
    SingleTurn,
    TokenSum,
    TransformersEngine,
    UpdateSettings,
    VLLMServer,
    WeightSync,
)
from lightning_rl.callbacks import KLGuard, StopRun
from lightning_rl.config import names
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.extend import GroupFilter
from lightning_rl.games import Instructions, TextScenario
from tests.support.bad_configs import complaint

# Records that a run makes in great numbers, and what only code puts together.
NO_CONFIGURATION = {
    "AgentClient",
    "AgentServer",
    "Answer",
    "Call",
    "CollectorStatus",
    "Completion",
    "Conversation",
    "CrossFitted",
    "Decision",
    "Demonstrations",
    "BufferEntry",
    "EnvEpisode",
    "Environment",
    "Episode",
    "Example",
    "Finding",
    "Game",
    "GroupSource",
    "HeldDigests",
    "Interaction",
    "JobReport",
    "JobRequest",
    "Learner",
    "MasterWeights",
    "Move",
    "OwnLoop",
    "PackLayout",
    "Pair",
    "ParsedCall",
    "Peek",
    "Preferences",
    "Prompt",
    "Push",
    "Reading",
    "ReplicaStatus",
    "Reply",
    "RewardFailure",
    "Rollout",
    "RolloutFile",
    "RolloutPipeline",
    "RolloutStore",
    "Row",
    "SamplingDistribution",
    "Seat",
    "Session",
    "Space",
    "StagedRun",
    "StagedState",
    "StagedTransport",
    "Steps",
    "SyncState",
    "TorchBackend",
    "TrainerState",
    "Turn",
    "TurnTemplate",
    "WeightReceiver",
    "WeightPart",
}  # fmt: skip


def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]


def data_module(**arguments) -> RLDataModule:
    engine = TransformersEngine(device="cpu")
    return RLDataModule(
        **({"train_prompts": ["3="], "rewards": [length], "engine": engine} | arguments)
    )


def test_every_class_that_a_configuration_may_name_checks_its_arguments():
    public = {name: names.public(name) for name in names.MODULE_OF}
    classes = {
        name: cls
        for name, cls in public.items()
        if inspect.isclass(cls)
        and not issubclass(cls, Exception)
        and "__init__" in vars(cls)
        and len(inspect.signature(cls.__init__).parameters) > 1
    }
    unchecked = {name for name, cls in classes.items() if not hasattr(cls.__init__, "__wrapped__")}
    assert unchecked == NO_CONFIGURATION


SAME_WORDS = {
    "--data.group_size eight": lambda: data_module(group_size="eight"),
    "--data.group_sizes 8": lambda: data_module(group_sizes=8),
    "--data.sampling.max_token 4": lambda: data_module(sampling={"max_token": 4}),
    "--data.engine VLLMLocl": lambda: data_module(engine="VLLMLocl"),
    "--data.engine GRPO": lambda: data_module(engine="GRPO"),
    "--data.agent MultiTurn": lambda: data_module(agent=MultiTurn),
    "--data.rewards my_rewards.length": lambda: data_module(rewards="my_rewards.length"),
    "--data.rewards [my_rewards.lenght]": lambda: data_module(rewards=["my_rewards.lenght"]),
    "--data.train_prompts 3": lambda: data_module(train_prompts=3),
    "--data.train_prompts JSONLPromts": lambda: data_module(train_prompts="JSONLPromts"),
    "--data.reward_weights [a]": lambda: data_module(reward_weights=["a"]),
    "--data.selection.filters [RewardSpred]": lambda: data_module(
        selection={"filters": ["RewardSpred"]}
    ),
    "--model.advantage GPRO": lambda: PolicyModule("model", advantage="GPRO"),
    "--model.loss torch.nn.MSELoss": lambda: PolicyModule("model", loss="torch.nn.MSELoss"),
    "--model.kl 0.1": lambda: PolicyModule("model", kl=0.1),
    "--model.update.ppo_epoch 2": lambda: PolicyModule("model", update={"ppo_epoch": 2}),
    "--model.aggregation TokenSum": lambda: TokenSum(),
    "--model.advantage GRPO --model.advantage.eps tiny": lambda: GRPO(eps="tiny"),
    "--data.collector AsyncCollector --data.collector.max_staleness one": lambda: AsyncCollector(
        max_staleness="one"
    ),
    "--data.train_prompts.max_prompt_token 3": lambda: JSONLPrompts("x", max_prompt_token=3),
    "--data.engine VLLMServer --data.engine.urls http://x": lambda: VLLMServer(urls="http://x"),
    "--trainer.callbacks [{class_path: WeightSync, init_args: {schedule: 3}}]": lambda: WeightSync(
        schedule=3
    ),
    "--trainer.callbacks+=KLGuard --trainer.callbacks.action Stop": lambda: KLGuard(action="Stop"),
}


def without_key(message: str) -> str:
    """Strip the key from a message; in YAML it has ``data.init_args`` in front."""
    first = message.splitlines()[0].removeprefix("lightning-rl: config error: ")
    return re.sub(r"^[\w.]+(\[\d\])?[\w.]*: ", "", first)


@pytest.mark.parametrize("option", SAME_WORDS)
def test_python_refuses_in_the_words_of_the_command_line(option, furnished, monkeypatch):
    monkeypatch.chdir(furnished)
    monkeypatch.syspath_prepend(furnished)
    said = complaint(option.replace("[{", "'[{").replace("}]", "}]'"))[1]
    with pytest.raises(ConfigError) as refused:
        SAME_WORDS[option]()
    assert without_key(str(refused.value)) == without_key(said)


def test_what_yaml_cannot_say_is_refused_too():
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for call, words in (
        (lambda: data_module(engine=SingleTurn()), "RLDataModule.engine: expected Engine or null"),
        (lambda: PolicyModule("model", advantage=PPOClip()), "advantage: expected Advantage, got"),
        (lambda: PolicyModule("model", optimizer=made), "such as SGD, got an instance"),
        (lambda: PolicyModule(torch.nn.Linear(1, 1)), "PreTrainedModel, got Linear"),
        (
            lambda: data_module(rewards=[PythonTests]),
            "reward PythonTests is a class; pass an instance",
        ),
        (lambda: data_module(group_size=True), "group_size: expected int, got True"),
        (lambda: RLDataModule(["3="]), "RLDataModule.rewards: is missing"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            call()
    with pytest.raises(DataError, match=r"'x.txt': expected a folder or a file \(\.jsonl, "):
        data_module(train_prompts=Path("x.txt"))
    with pytest.raises(TypeError, match="too many positional"):
        GRPO(True, 1e-6, 3)


def test_what_is_convenient_is_taken(furnished, monkeypatch):
    monkeypatch.syspath_prepend(furnished)
    data = data_module(
        rewards=length,
        engine="TransformersEngine",
        sampling={"max_tokens": 4},
        agent=SingleTurn,
        collector="OneStepOffCollector",
        selection=RewardSpread(),
        group_size=np.int64(4),
        evaluation=Evaluation(["3="], success_reward=np.float32(0.5)),
        reward_weights=(torch.tensor(2.0),),
    )
    assert list(data.rewards.functions.values()) == [length]
    assert isinstance(data.engine, TransformersEngine)
    assert data.sampling == Sampling(max_tokens=4)
    assert isinstance(data.agent, SingleTurn)
    assert isinstance(data.collector, OneStepOffCollector)
    assert [type(f) for f in data.selection.filters] == [RewardSpread]
    assert (type(data.group_size), type(data.evaluation.success_reward)) == (int, float)
    assert data.rewards.weights == {"length": 2.0}
    assert list(data_module(rewards=["my_rewards.too_few", length]).rewards.functions) == [
        "too_few",
        "length",
    ]
    module = PolicyModule(Path("model"), advantage=RLOO, lora={"rank": 4}, optimizer="SGD")
    assert (module.model, module.advantage, module.lora) == ("model", RLOO(), LoRA(rank=4))
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert isinstance(module.optimizer([parameter]), torch.optim.SGD)
    assert TransformersEngine(torch.bfloat16, device="cpu").dtype == "bfloat16"
    assert KLGuard(action=StopRun).action == StopRun()
    assert isinstance(IterationCheckpoint(dirpath=Path("here")).dirpath, str)


def test_what_is_named_is_taken_like_what_is_listed():
    told = {"prover": {"user": "Hi."}, "verifier": Instructions(user="Ho.")}
    taken = TextScenario(told).prompts
    assert taken == {"prover": Instructions(user="Hi."), "verifier": told["verifier"]}
    with pytest.raises(ConfigError, match=re.escape("TextScenario.prompts.prover.usr")):
        TextScenario({"prover": {"usr": "Hi."}})


def test_prompts_are_rows_or_a_path(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "3=", "answer": "3"}, {"prompt": "4=", "answer": "4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    chat = [{"role": "user", "content": "3="}]
    for given, kind, read in (
        (rows, IterablePrompts, rows),
        (dataset, IterablePrompts, rows),
        (["3=", "4="], IterablePrompts, [{"prompt": "3="}, {"prompt": "4="}]),
        ([chat], IterablePrompts, [{"prompt": chat}]),
        (tmp_path / "rows.jsonl", JSONLPrompts, rows),
        (str(tmp_path / "rows.jsonl"), JSONLPrompts, rows),
        (tmp_path / "rows.parquet", ParquetPrompts, rows),
        (tmp_path / "saved", HFDatasetPrompts, rows),
    ):
        data = data_module(train_prompts=given, evaluation=given)
        assert isinstance(data.train_prompts, kind)
        assert [row for _, row in data.train_prompts.read()] == read
        assert isinstance(data.evaluation.prompts, kind)
        assert isinstance(SFTDataModule(given).train, kind)


def test_a_class_of_ones_own_is_checked_as_ours_are():
    @configurable
    class Shortest(GroupFilter):
        def __init__(self, tokens: int, only: list[str] | None = None) -> None:
            self.tokens, self.only = tokens, only

        def keep(self, group):
            return True

    assert Shortest(np.int32(3), only=["a"]).tokens == 3
    with pytest.raises(ConfigError, match=r"Shortest\.only\[1\]: expected str, got 2"):
        Shortest(3, only=["a", 2])
    with pytest.raises(
        ConfigError, match=r"Shortest\.token: no such key in Shortest; did you mean"
    ):
        Shortest(token=3)


def test_hyper_parameters_of_a_subclass_are_kept():
    class Mine(PolicyModule):
        def __init__(self, extra: int, **options) -> None:
            super().__init__(**options)
            self.extra = extra

    hparams = Mine(extra=3, model="model", update={"ppo_epochs": 2}).hparams
    assert (hparams["extra"], hparams["model"], hparams["update"]["ppo_epochs"]) == (3, "model", 2)
    update = UpdateSettings(ppo_epochs=np.int64(2))
    assert type(PolicyModule("model", update=update).hparams["update"]["ppo_epochs"]) is int


def test_a_model_object_is_copied_and_the_copy_goes_with_the_module(tiny_model):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        lm.model.norm.weight += 1
    module = PolicyModule(lm)
    module.configure_model()
    weights = dict(module.policy.named_weights())
    torch.testing.assert_close(weights["model.norm.weight"], lm.model.norm.weight)
    assert "model" not in module.hparams  # the copy will be gone when a checkpoint is loaded
    copy = Path(module.model)
    assert (copy / "tokenizer.json").exists()
    del module
    gc.collect()
    assert not copy.exists()


def test_a_model_object_that_would_not_come_back_the_same_is_refused(tiny_model):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    fresh = Qwen2ForCausalLM(Qwen2ForCausalLM.config_class(**lm.config.to_diff_dict()))
    fresh.config.name_or_path = ""
    with pytest.raises(ConfigError, match=r"no tokenizer for this Qwen2ForCausalLM.*model=\(model"):
        PolicyModule(fresh)
    assert (Path(PolicyModule((fresh, tokenizer)).model) / "config.json").exists()

    class Other(Qwen2ForCausalLM):
        pass

    with pytest.raises(ConfigError, match="Other is not what AutoModelForCausalLM makes of a Qwen"):
        PolicyModule((Other(lm.config), tokenizer))
    LoRA(rank=2).attach(lm)
    with pytest.raises(ConfigError, match="has an adapter"):
        PolicyModule(lm)
