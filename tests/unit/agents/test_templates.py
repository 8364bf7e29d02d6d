"""Test TurnTemplate on real chat templates: exact where they keep the past, refused where not."""

import json

import pytest

from lightning_rl.agents.templates import TurnTemplate, tool_reply
from lightning_rl.agents.tools import ToolAgent
from lightning_rl.data.end_tokens import find_end_tokens
from lightning_rl.errors import ConfigError
from lightning_rl.models.policy import load_tokenizer
from lightning_rl.models.tokenizer import RunDay, with_chat_variables
from tests.support.agents import add
from tests.support.chats import TOOL
from tests.support.pages import ROOT
from tests.support.tiny_models import chat_tokenizer

MORE = [{"role": "user", "content": "More."}]


def calls(*arguments):
    return [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": "add", "arguments": a}}
        for i, a in enumerate(arguments)
    ]


def results(asked):
    return [tool_reply(call, f"result {i}") for i, call in enumerate(asked)]


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def refusal(name, reply, asked=(), tools=None, **options):
    template = TurnTemplate(chat_tokenizer(name, **options), {"tools": tools})
    with pytest.raises(ConfigError) as refused:
        template.check(reply, asked)
    return str(refused.value)


# ---------------------------------------------------------------- exact


def test_only_what_follows_the_turn_is_rendered():
    tokenizer = chat_tokenizer("qwen2_5")
    template = TurnTemplate(tokenizer)
    template.check(MORE)
    follows = "\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"
    wrote = encoded(tokenizer, "Five.<|im_end|>")
    assert template.suffix(wrote, MORE) == encoded(tokenizer, follows)
    # A turn without its end token (a stop string ended it) is closed.
    assert template.suffix(wrote[:-1], MORE) == encoded(tokenizer, "<|im_end|>" + follows)


def test_tool_results_follow_in_their_order():
    tokenizer = chat_tokenizer("qwen3")
    template = TurnTemplate(tokenizer, {"tools": [TOOL]})
    asked = calls({"a": 1}, {"a": 2})
    template.check(results(asked), asked)
    assert template.suffix([tokenizer.eos_token_id], results(asked), asked) == encoded(
        tokenizer,
        "\n<|im_start|>user\n<tool_response>\nresult 0\n</tool_response>\n<tool_response>\n"
        "result 1\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    )


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_tokens_grown_turn_by_turn_are_those_of_the_whole_chat(name):
    """A server will show the model what it lived through."""
    tokenizer = chat_tokenizer(name)
    template = TurnTemplate(tokenizer, {"tools": [TOOL]})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    grown = encoded(tokenizer, template.render(messages))
    for text, asked in (("", calls({"a": 2})), ("Again.", calls({"a": 3}, {"a": 4}))):
        written = [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in asked]
        wrote = "\n".join([text] * bool(text) + written)
        tokens = encoded(tokenizer, wrote + "<|im_end|>")
        grown += tokens + template.suffix(tokens, results(asked), asked)
        messages += [{"role": "assistant", "content": text, "tool_calls": asked}, *results(asked)]
    assert grown == encoded(tokenizer, template.render(messages))


def test_chats_of_qwen2_5_are_grown_exactly_too():
    tokenizer = chat_tokenizer("qwen2_5")
    template = TurnTemplate(tokenizer)
    messages = [{"role": "user", "content": "Hi!"}]
    grown = encoded(tokenizer, template.render(messages))
    for text in ("One.", " <think>\ntwo ", ""):  # whatever the model writes
        tokens = encoded(tokenizer, text + "<|im_end|>")
        grown += tokens + template.suffix(tokens, MORE)
        messages += [{"role": "assistant", "content": text}, *MORE]
    assert grown == encoded(tokenizer, template.render(messages))


def with_ends(name, eos, *ends, **options):
    """Return a tokenizer of the named template that has these ends beside its own."""
    tokenizer = chat_tokenizer(name, eos=eos, **options)
    tokenizer.add_special_tokens({"additional_special_tokens": list(ends)})
    numbers = tokenizer.convert_tokens_to_ids([eos, *ends])
    tokenizer.ends = find_end_tokens(tokenizer, numbers)
    return tokenizer, numbers


def test_a_turn_ends_by_the_templates_token_whatever_the_tokenizers_is():
    tokenizer, (_, turn) = with_ends("gemma", "<eos>", "<end_of_turn>")
    template = TurnTemplate(tokenizer)
    template.check(MORE, allow_rewrites=True)  # it trims white space
    follows = encoded(
        tokenizer, "\n<start_of_turn>user\nMore.<end_of_turn>\n<start_of_turn>model\n"
    )
    said = encoded(tokenizer, "Five.")
    assert template.suffix([*said, turn], MORE) == follows
    assert template.suffix(said, MORE) == [turn, *follows]


def test_no_second_end_follows_one_that_the_template_does_not_write():
    """Llama 3.1 ends a call by <|eom_id|>, where its template has <|eot_id|>."""
    tokenizer, ends = with_ends("llama3_1", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    template = TurnTemplate(tokenizer, {"tools": [TOOL]})
    asked = calls({"a": 1})
    follows = template.suffix([ends[0]], results(asked), asked)
    assert not set(follows[:1]) & set(ends)
    assert [template.suffix([end], results(asked), asked) for end in ends] == [follows] * 3
    assert template.suffix([], results(asked), asked) == [ends[0], *follows]


def test_a_turn_may_end_by_the_token_that_opens_the_next_message():
    """GLM-4: the template closes no turn, and the model writes <|user|> or <|endoftext|>."""
    opening = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer, (text, user) = with_ends("qwen2_5", "<|eos|>", "<|user|>", template=opening)
    template = TurnTemplate(tokenizer)
    template.check(MORE)
    follows = encoded(tokenizer, "More.<|assistant|>")
    assert template.suffix([user], MORE) == follows
    # Another end is in the place of nothing: the message keeps its opening.
    for wrote in ([], [text]):
        assert template.suffix(wrote, MORE) == [user, *follows]


# ---------------------------------------------------------------- refused


def test_dropped_thoughts_are_refused():
    text = refusal("qwen3", MORE)
    assert "written as '<think>\\nFirst.\\n</think>\\n\\nSecond.' becomes 'Second.'" in text
    assert "allow_rewrites: true" in text
    # Plain turns are kept, and so is white space.
    assert text.count("a turn written as") == 1


@pytest.mark.parametrize("name", ["llama3_1", "gemma", "mistral"])
def test_trimmed_white_space_is_refused(name):
    assert "a turn written as '  Padded.\\n' becomes" in refusal(name, MORE)


def test_an_opening_that_later_disappears_is_refused():
    text = refusal("deepseek_r1_distill", MORE)
    assert "before a turn, '<think>\\n' becomes 'Plain.<｜end▁of▁sentence｜>" in text


def test_tools_that_move_are_refused():
    text = refusal("mistral", MORE, tools=[TOOL])
    assert """before a turn, 'AVAILABLE_TOOLS] [{"type": "function",""" in text
    assert "becomes 'INST] Question?[/INST] Plain.</s>" in text


def test_text_dropped_beside_a_call_is_refused():
    asked = calls({"a": 1})
    text = refusal("llama3_1", results(asked), asked, tools=[TOOL])
    assert """written as 'Plain.' becomes '{"name": "add", "parameters": {"a": 1}}'""" in text
    text = refusal("mistral", results(asked), asked, tools=[TOOL])
    assert """written as 'Plain.' becomes '[TOOL_CALLS] [{"name": "add", "arguments":""" in text


def test_a_template_without_room_for_tool_results_is_refused():
    asked = calls({"a": 1})
    for name, reason in (
        ("gemma", "Conversation roles must alternate"),
        ("deepseek_r1_distill", "does not render the model's tool calls"),
    ):
        assert reason in refusal(name, results(asked), asked)


def test_a_turn_that_ends_otherwise_than_the_tokenizer_is_refused():
    text = refusal("qwen2_5", MORE, eos="<|end|>")
    assert "closes the model's turns with '<|im_end|>\\n" in text
    assert "set tokenizer.eos_token" in text


@pytest.mark.parametrize("given", [3, "", ["a"]])
def test_a_template_that_is_no_text_is_refused_by_its_argument(given):
    with pytest.raises(
        ConfigError, match=r"chat_template_kwargs\.chat_template=.* must be a templ"
    ):
        with_chat_variables(chat_tokenizer("qwen2_5"), {"chat_template": given})


def test_a_text_that_tells_the_day_of_the_run_may_go_on():
    dated = (
        "{{ strftime_now('%d %b') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    day = RunDay()
    day.date = "2024-05-01"
    template = TurnTemplate(with_chat_variables(chat_tokenizer("qwen2_5", template=dated), {}, day))
    template.check(MORE)
    assert template.render(MORE).startswith("01 May[")


def test_a_reply_that_depends_on_its_place_is_refused():
    numbered = (
        "{% for m in messages %}{{ loop.index }}{{ m.role }}:{{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ messages | length + 1 }}assistant:{% endif %}"
    )
    text = refusal("qwen2_5", MORE, template=numbered)
    assert "'<|im_end|>3user:More.<|im_end|>4assistant:', becomes" in text


def test_rewrites_may_be_allowed_but_not_what_cannot_go_on():
    asked = calls({"a": 1})
    llama = TurnTemplate(chat_tokenizer("llama3_1"), {"tools": [TOOL]})
    llama.check(results(asked), asked, allow_rewrites=True)
    assert llama.suffix([llama.tokenizer.eos_token_id], results(asked), asked) == encoded(
        llama.tokenizer,
        '<|start_header_id|>ipython<|end_header_id|>\n\n"result 0"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    )
    with pytest.raises(ConfigError, match="only supports single tool-calls"):
        llama.suffix([], results(calls({}, {})), calls({}, {}))
    with pytest.raises(ConfigError, match=r"set tokenizer\.eos_token"):
        TurnTemplate(chat_tokenizer("gemma", eos="<eos>")).check(MORE, allow_rewrites=True)


def test_a_tokenizer_without_a_chat_template_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="continues chats needs a chat template"):
        TurnTemplate(load_tokenizer(str(tiny_model)))


def test_the_pages_template_works_with_tools(tmp_path):
    """Verbatim, as the file that it says."""
    page = (ROOT / "docs" / "prompts.md").read_text(encoding="utf-8")
    _, _, rest = page.partition('```text title="chat_template.jinja"\n')
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.jinja").write_text(rest.partition("```\n")[0], encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    ToolAgent([add]).configure(tokenizer)  # which checks turns, calls and results
    system = {"role": "system", "content": "Be brief."}
    text = TurnTemplate(tokenizer, {"tools": [TOOL]}).render([system, *MORE])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call these functions:")
    assert text.count("<|im_start|>system") == 1
    plain = TurnTemplate(tokenizer).render([system, *MORE])
    start, end = "<|im_start|>", "<|im_end|>\n"
    assert plain == f"{start}system\nBe brief.{end}{start}user\nMore.{end}{start}assistant\n"
