"""Test ToolAgent on real vLLM: its tool-call parsers, and turns that share a cached prefix."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.agents.templates import ParsedCall, TurnTemplate, VLLMParser
from lightning_rl.agents.tools import ToolAgent, tool_schema
from lightning_rl.engines import Sampling, VLLMLocal
from lightning_rl.errors import ConfigError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy, load_tokenizer
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus
from tests.support.agents import AlwaysCalls, ShortTurns, add
from tests.support.engine_checks import own_logprobs
from tests.support.tiny_models import chat_tokenizer, save_chat_model

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


NAMED = {
    "qwen3_coder": ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
    "mimo": ("<tool_call>\n<function=", ">", "</function>\n</tool_call>"),
    "step3p5": ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
    "seed_oss": ("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"),
    "minimax_m2": ('<minimax:tool_call>\n<invoke name="', '">', "</invoke>\n</minimax:tool_call>"),
    "gemma4": ("<|tool_call>call:", "{", "}<tool_call|>"),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="',
        '">\n',
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>{}",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "glm45": ("<tool_call>", "</tool_call>", ""),
    "hermes": ('<tool_call>{"name": "', '", "arguments": {}}', "</tool_call>"),
    "llama3_json": ('{"name": "', '", "parameters": {}}', ""),
    "pythonic": ("[", "()]", ""),
}
"""The text before a tool's name, after it, and at the end of a call without arguments."""


@pytest.mark.parametrize("name", NAMED)
def test_a_name_that_is_not_closed_is_no_call(name):
    """The turn may end within it, or the call's end follow; a tool without arguments would run."""

    def now() -> str:
        """Return the time."""

    parser = VLLMParser(name)
    parser.configure(chat_tokenizer("qwen2_5"), [tool_schema(now)])
    begin, close, end = NAMED[name]
    whole = ParsedCall("now", {})
    assert parser.parse(f"{begin}now{close}{end}")[1] == [whole]
    header = f"{begin}now"
    cut = [header[:length] for length in range(len(begin) + 1, len(header) + 1)]
    unclosed = [f"{header}\n{end}", f"{begin}{end}"] if end else []
    for text in [*cut, *unclosed, f"{header}\n{begin}now{close}{end}"]:
        # The second of two may be read.
        read = [call for call in parser.parse(text)[1] if call.error is None]
        assert read in ([], [whole] if text.count("now") == 2 else []), text


def test_arguments_are_read_as_often_however_many_there_are(monkeypatch):
    """A streaming client makes vLLM read all of a call's arguments anew at each piece."""
    parser = VLLMParser("qwen3_coder")
    parser.configure(chat_tokenizer("qwen2_5"), [tool_schema(add)])
    engine, read = parser._parser._parser_engine, []
    convert = engine._arg_converter

    def noted(args, partial):
        read.append(args)
        return convert(args, partial)

    monkeypatch.setattr(engine, "_arg_converter", noted)
    parser.parse(XML)
    times = len(read)
    more = "".join(f"<parameter=x{n}>\n{n}\n</parameter>\n" for n in range(50))
    _, [call] = parser.parse(XML.replace("</function>", more + "</function>"))
    assert (len(call.arguments), len(read)) == (52, 2 * times)


def test_a_parser_and_a_template_of_one_family_agree():
    for template, parser in (("qwen3", "hermes"), ("llama3_1", "llama3_json")):
        agent = ToolAgent([add], VLLMParser(parser), allow_rewrites=True)
        agent.configure(chat_tokenizer(template))
    with pytest.raises(ConfigError, match="cannot read tool calls as this chat template"):
        ToolAgent([add], VLLMParser("pythonic")).configure(chat_tokenizer("qwen3"))


def test_an_unknown_or_unfit_parser_is_refused():
    with pytest.raises(ConfigError, match=r"no tool parser 'lama'; it has .*llama3_json"):
        VLLMParser("lama").configure(chat_tokenizer("qwen2_5"), [tool_schema(add)])
    with pytest.raises(ConfigError, match="'lfm2' does not work with this tokenizer"):
        VLLMParser("lfm2").configure(chat_tokenizer("qwen2_5"), [tool_schema(add)])


@pytest.mark.slow
def test_many_rollouts_at_once_have_the_models_own_logprobs(tmp_path):
    save_chat_model(tmp_path / "model", "qwen3")
    save_skeleton(str(tmp_path / "model"), tmp_path / "skeleton")
    agent = ToolAgent([add], AlwaysCalls(), max_turns=3)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    agent.configure(tokenizer)
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    text = TurnTemplate(tokenizer, agent.chat_options).render(question)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    rollouts = [Rollout(Prompt("p", question, prompt), "g", i, i) for i in range(6)]
    short = type("Short", (ShortTurns, VLLMLocal), {})
    engine = short(max_model_len=2048, kv_cache_gb=0.1)
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
        own = own_logprobs(plain, prompt, rollout.token_ids)
        mask = torch.tensor(rollout.loss_mask)
        assert sum(rollout.loss_mask) == 36
        assert torch.tensor(rollout.logprobs)[mask] == pytest.approx(own[mask], abs=1e-4)
        assert [v for v, m in zip(rollout.versions, rollout.loss_mask, strict=True) if m] == [
            4
        ] * 36
    assert len({tuple(rollout.token_ids) for rollout in rollouts}) == 6
