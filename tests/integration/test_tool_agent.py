"""ToolAgent on real vLLM: its tool-call parsers, and turns that share a cached prefix."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.agents.templates import HermesParser, ParsedCall, TurnTemplate, VLLMParser
from lightning_rl.agents.tools import ToolAgent, tool_schema
from lightning_rl.engines import Sampling, VLLMLocal
from lightning_rl.errors import ConfigError
from lightning_rl.models.policy import Policy, load_tokenizer, save_skeleton
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from tests.unit.chat_tokenizers import chat_tokenizer, save_chat_model


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", "Well. " + HERMES, "Well. "),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}', ""),
        ("pythonic", "[add(a=1, b=2)]", ""),
        ("qwen3_coder", XML, ""),
    ],
)
def test_vllms_parsers_read_their_formats(name, text, content):
    parser = VLLMParser(name)
    parser.configure(chat_tokenizer("qwen2_5"), [tool_schema(add)])
    assert parser.parse(text) == (content, [ParsedCall("add", {"a": 1, "b": 2})])
    assert parser.parse("Plain text.") == ("Plain text.", [])


def test_a_parser_and_a_template_of_one_family_agree():
    for template, parser in (("qwen3", "hermes"), ("llama3_1", "llama3_json")):
        agent = ToolAgent([add], VLLMParser(parser), allow_rewrites=True)
        agent.configure(chat_tokenizer(template))
    with pytest.raises(ConfigError, match="does not read tool calls as this chat template"):
        ToolAgent([add], VLLMParser("pythonic")).configure(chat_tokenizer("qwen3"))


def test_an_unknown_or_unfit_parser_is_refused():
    with pytest.raises(ConfigError, match=r"no tool parser 'lama'; it has .*llama3_json"):
        VLLMParser("lama").configure(chat_tokenizer("qwen2_5"), [tool_schema(add)])
    with pytest.raises(ConfigError, match="'lfm2' does not work with this tokenizer"):
        VLLMParser("lfm2").configure(chat_tokenizer("qwen2_5"), [tool_schema(add)])


class AlwaysCalls(HermesParser):
    """Reads a call into whatever a random model writes."""

    def parse(self, text):
        _, calls = super().parse(text)
        return text, calls or [ParsedCall("add", {"a": 12, "b": 1})]


class ShortTurns(VLLMLocal):
    """A random model hardly ever ends a turn: after 12 tokens it is over."""

    async def generate(self, token_ids, sampling, seed):
        completion = await super().generate(token_ids, replace(sampling, max_tokens=12), seed)
        completion.finish_reason = "stop"
        return completion


def test_many_rollouts_at_once_have_the_models_own_logprobs(tmp_path):
    save_chat_model(tmp_path / "model", "qwen3")
    save_skeleton(str(tmp_path / "model"), tmp_path / "skeleton")
    agent = ToolAgent([add], AlwaysCalls(), max_turns=3)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    agent.configure(tokenizer)
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    text = TurnTemplate(tokenizer, agent.chat_options).render(question)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    rollouts = [Rollout(Prompt("p", question, prompt), "g", i, i, 1.0) for i in range(6)]
    engine = ShortTurns(max_model_len=2048, kv_cache_gb=0.1)
    engine.start(tmp_path / "skeleton")

    async def run():
        await asyncio.gather(*(agent.run(r, engine, Sampling(max_tokens=900)) for r in rollouts))

    try:
        engine.load_weights(Policy(str(tmp_path / "model")).named_weights(), 4)
        asyncio.run(run())
    finally:
        engine.close()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    for rollout in rollouts:
        assert (rollout.status, rollout.finish_reason) == (RolloutStatus.COMPLETED, "max_turns")
        ids = torch.tensor([prompt + rollout.token_ids])
        with torch.no_grad():
            logprobs = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        mask = torch.tensor(rollout.loss_mask)
        assert sum(rollout.loss_mask) == 36
        assert torch.tensor(rollout.logprobs)[mask] == pytest.approx(own[mask], abs=1e-4)
        assert [v for v, m in zip(rollout.versions, rollout.loss_mask, strict=True) if m] == [
            4
        ] * 36
    assert len({tuple(rollout.token_ids) for rollout in rollouts}) == 6
