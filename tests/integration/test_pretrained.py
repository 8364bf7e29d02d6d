"""Models that bring code, arguments of from_pretrained, processors, variables of chat templates."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from lightning_rl.agents.base import Reply, SingleTurn
from lightning_rl.agents.multi_turn import MultiTurn
from lightning_rl.callbacks import Evaluate, WeightSync
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.errors import ConfigError
from lightning_rl.learn.sft import SFTDataModule, SFTModule
from lightning_rl.models.policy import Policy, load_tokenizer
from lightning_rl.models.pretrained import Loading
from lightning_rl.models.tokenizer import with_chat_variables
from tests.support.small_run import data_module, grpo, trainer_of

CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM


class DoubledConfig(Qwen2Config):
    model_type = "doubled"


class DoubledForCausalLM(Qwen2ForCausalLM):
    '''Its embeddings count twice: what plain Qwen2 code would compute is another model.'''

    config_class = DoubledConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(lambda module, args, output: 2 * output)
"""


@pytest.fixture(scope="module")
def remote_model(tiny_model, tmp_path_factory):
    """Return the tiny model as one that transformers does not know, with its code beside it."""
    directory = tmp_path_factory.mktemp("remote") / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(directory)
    (directory / "modeling_doubled.py").write_text(CODE)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "doubled",
        "architectures": ["DoubledForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_doubled.DoubledConfig",
            "AutoModelForCausalLM": "modeling_doubled.DoubledForCausalLM",
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


TRUSTED = Loading(trust_remote_code=True)


def test_code_of_a_model_is_refused_unless_it_is_trusted(remote_model):
    with pytest.raises(ConfigError, match=r"comes with code of its own.*trust_remote_code: true"):
        Policy(str(remote_model))


def test_a_model_with_code_trains_evaluates_and_is_exported(remote_model, tiny_model, tmp_path):
    module = grpo(remote_model, trust_remote_code=True)
    data = data_module(iterations_per_epoch=1, groups_per_iteration=2, group_size=2)
    # WeightSync's probe compares the engine's logprobs with the trainer's, so both run the code.
    trainer_of(tmp_path, [WeightSync(), Evaluate()]).fit(module, data)
    assert type(module.policy.lm).__name__ == "DoubledForCausalLM"
    module.policy.save_pretrained(tmp_path / "export")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
    assert type(again).__name__ == "DoubledForCausalLM"
    ids = torch.tensor([[3, 4, 5, 2]])
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain.load_state_dict(again.state_dict())
    with torch.no_grad():
        gap = (again(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max()
    assert float(gap) > 1e-2


def test_model_kwargs_change_the_configuration_on_both_sides(tiny_model, tmp_path):
    module = grpo(tiny_model, model_kwargs={"rms_norm_eps": 0.5, "max_position_embeddings": 64})
    data = data_module(iterations_per_epoch=1, groups_per_iteration=2, group_size=2)
    trainer_of(tmp_path, [WeightSync()]).fit(module, data)  # the probe compares logprobs
    assert module.policy.lm.config.rms_norm_eps == 0.5
    batch_of = Policy(str(tiny_model)).lm.config.rms_norm_eps
    assert batch_of != 0.5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("attn_implementation", "an attention of the library's own"),
        ("torch_dtype", "trainer.precision decides"),
        ("device_map", "strategy decides"),
        ("load_in_4bit", "set lora.quantization: NF4"),
        ("trust_remote_code", "a key of its own"),
    ],
)
def test_model_kwargs_that_the_library_decides_are_refused(name, why):
    with pytest.raises(ConfigError, match=rf"model_kwargs\.{name} cannot be set: .*{why}"):
        Loading(model_kwargs={name: "auto"})


TEMPLATE = (
    "{% if tools %}{{ tools[0] }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}0{% else %}1{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tiny_model, tmp_path_factory):
    """Return the tiny model, with a chat template that thinks unless it is told not to."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


ROWS = [{"prompt": [{"role": "user", "content": f"{n}="}], "completion": "7"} for n in range(8)]


class Seen(SingleTurn):
    """Notes how prompts end, by what the group is for."""

    def __init__(self) -> None:
        self.ends: dict[bool, set[int]] = {}

    async def run(self, rollout, engine, sampling):
        is_evaluation = rollout.group_id.startswith("-1/")
        self.ends.setdefault(is_evaluation, set()).add(rollout.prompt.token_ids[-1])
        return await super().run(rollout, engine, sampling)


@pytest.mark.parametrize(("given", "digit"), [(None, "1"), ({"enable_thinking": False}, "0")])
def test_chat_variables_reach_training_evaluation_and_sft(chat_model, tmp_path, given, digit):
    agent = Seen()
    data = data_module(
        train_prompts=IterablePrompts(ROWS), evaluation=IterablePrompts(ROWS), agent=agent,
        chat_template_kwargs=given, iterations_per_epoch=1, groups_per_iteration=2, group_size=2,
        rewards=[lambda completion_ids: [float(len(ids)) for ids in completion_ids]],
    )  # fmt: skip
    trainer_of(tmp_path, [WeightSync(), Evaluate()]).fit(grpo(chat_model), data)
    end = load_tokenizer(str(chat_model))(digit)["input_ids"][-1]
    assert agent.ends == {False: {end}, True: {end}}
    supervised = SFTDataModule(IterablePrompts(ROWS), chat_template_kwargs=given)
    trainer_of(tmp_path, [], logger=False).fit(SFTModule(str(chat_model)), supervised)
    rows = supervised.rows(supervised.train)
    assert {rollout.prompt.token_ids[-1] for rollout in rows} == {end}


def test_chat_variables_reach_what_an_agent_renders_between_turns(chat_model):
    class Echo:
        def __init__(self, prompt):
            pass

        def step(self, turn):
            return Reply("3")

        def close(self):
            pass

    suffixes = []
    for given in ({}, {"enable_thinking": False}):
        tokenizer = with_chat_variables(load_tokenizer(str(chat_model)), given)
        agent = MultiTurn(Echo, allow_rewrites=True)
        agent.configure(tokenizer)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "3"}], tokenize=False, add_generation_prompt=True
        )
        suffixes.append(text)
        told = tokenizer.apply_chat_template(
            [{"role": "user", "content": "3"}], tokenize=False, enable_thinking=True
        )
        assert told == "31"  # what a caller says goes first
    assert suffixes == ["31", "30"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_thinkin": True}, "template never reads it"),
        ({"tools": []}, "is set by the library"),
    ],
)
def test_chat_variables_that_nothing_reads_are_refused(chat_model, given, words):
    given = {"enable_thinkingg" if k == "enable_thinkin" else k: v for k, v in given.items()}
    with pytest.raises(ConfigError, match=words):
        with_chat_variables(load_tokenizer(str(chat_model)), given)


def test_chat_variables_without_a_chat_template_are_refused(tiny_model):
    with pytest.raises(ConfigError, match="enable_thinking: the tokenizer has no chat template"):
        with_chat_variables(load_tokenizer(str(tiny_model)), {"enable_thinking": False})


def test_a_chat_template_that_only_the_processor_has_is_used(tiny_model, tmp_path):
    """Older models with pictures or sound have chat_template.json, for the processor."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    Qwen2AudioProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template is None
    assert load_tokenizer(str(tmp_path)).chat_template == TEMPLATE
