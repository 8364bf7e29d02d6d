"""Tokenizers: how one is loaded, and which variables its chat template gets."""

import datetime
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import (
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from lightning_rl.data.chats import NO_TEMPLATE, SET_BY_US
from lightning_rl.data.end_tokens import find_end_tokens
from lightning_rl.errors import ConfigError
from lightning_rl.models.generation_config import stated_ends
from lightning_rl.models.model_checks import of_other_modality
from lightning_rl.models.pretrained import (
    Loading,
    has_code_of_its_own,
    load_config,
    not_found,
    require_local,
)
from lightning_rl.vision.reader import load_reader, reader_of


def load_tokenizer(model: str, loading: Loading = Loading()) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub name.

    It may be a processor's, and so may its chat template. It brings the tokens that end a turn
    (:func:`~lightning_rl.data.end_tokens.end_tokens_of`) and, of a model that reads pictures, what
    prepares them (:func:`~lightning_rl.vision.reader.reader_of`).

    Raises:
        ConfigError: if there is none, it needs code that is not trusted, or no token of the model
            ends a turn.
    """
    require_local(model)
    try:
        tokenizer = _read_tokenizer(model, loading)
    except (OSError, ValueError) as error:
        raise ConfigError(not_found(model, "tokenizer", error)) from error
    config = _read_config(model, loading)
    of_model = () if config is None else stated_ends(model, config, loading.of_files)
    tokenizer.ends = find_end_tokens(tokenizer, of_model)
    tokenizer.picture_reader = None
    if config is not None:
        tokenizer.picture_reader = load_reader(model, config, loading.of_files)
    return tokenizer


def require_same_tokens(other: str, model: str, loading: Loading = Loading()) -> None:
    """Refuse another model that reads the policy's tokens otherwise.

    What lies without a tokenizer is not compared, and tokens that only one of them has are ignored.

    Args:
        other: directory or hub name of the other model.
        model: that of the policy.
        loading: how both are loaded.

    Raises:
        ConfigError: names the token with the lowest number that means another one.
    """
    try:
        theirs, ours = (_read_tokenizer(name, loading).get_vocab() for name in (other, model))
    except (OSError, ValueError):
        return
    names = {number: token for token, number in theirs.items()}
    apart = [(n, token) for token, n in ours.items() if names.get(n, token) != token]
    if apart:
        number, token = min(apart)
        raise ConfigError(
            f"model={other!r} has another tokenizer than the policy's {model!r}: token {number} is "
            f"{names[number]!r} there and {token!r} here; use a model with the same tokenizer"
        )


def vocabulary_rows(model: str) -> int | None:
    """Return how many rows a model's vocabulary has, unused ones included; None if unknown."""
    config = _read_config(model, Loading())
    rows = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    return rows


def require_rows(model: str, rows: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model whose vocabulary ends before a token that a policy may write.

    Raises:
        ConfigError: names the first such token.
    """
    beyond = [
        (number, token)
        for token, number in tokenizer.get_vocab().items()
        if number >= rows and token != tokenizer.pad_token and not of_other_modality(token)
    ]
    if beyond:
        number, token = min(beyond)
        raise ConfigError(
            f"model={model!r} has {rows} tokens, but the policy's {tokenizer.name_or_path!r} also "
            f"writes {token!r}, its token {number}; resize the model's embedding "
            "(resize_token_embeddings) and train the new rows, or use a model that has that token"
        )


def _read_config(model: str, loading: Loading) -> PretrainedConfig | None:
    try:
        return load_config(model, loading)
    except ConfigError:
        return None  # a tokenizer may lie by itself


def _read_tokenizer(model: str, loading: Loading) -> PreTrainedTokenizerBase:
    """The tokenizer, of a processor if it must be; a processor's chat template if it has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **loading.of_files)
    except (OSError, ValueError) as error:
        processor = None if has_code_of_its_own(error) else _read_processor(model, loading)
        tokenizer = getattr(processor, "tokenizer", None)
        if tokenizer is None:
            raise
    if tokenizer.chat_template is None:
        processor = _read_processor(model, loading)
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    return tokenizer


def _read_processor(model: str, loading: Loading) -> Any:
    """The text part of the processor, which reads more than text; or None."""
    hub = {name: value for name, value in loading.of_files.items() if name != "trust_remote_code"}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if cached_file(model, name, _raise_exceptions_for_missing_entries=False, **hub) is None:
            continue
        try:
            return AutoProcessor.from_pretrained(model, **loading.of_files)
        except ImportError as error:  # for images, sound or video, which are not read here
            raise ConfigError(
                f"model={model!r} has its tokenizer or chat template in a processor, which cannot "
                f"be loaded: {str(error).strip().splitlines()[0]}; save both with the tokenizer"
            ) from error
    return None


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> None:
    """Write a tokenizer, and the image processor beside it where its model reads pictures."""
    tokenizer.save_pretrained(directory)
    if (reader := reader_of(tokenizer)) is not None:
        reader.family.processor.save_pretrained(directory)


class RunDay:
    """The day that chat templates tell (``strftime_now``): the one on which a run began.

    It is today, or the recorded date when a run is resumed or rerun.
    """

    def __init__(self) -> None:
        self.date = datetime.date.today().isoformat()

    def told(self) -> dict[str, str]:
        """Return the values of the directives of ``strftime``, such as ``%d``."""
        date = datetime.date.fromisoformat(self.date)
        directives = (f"%{dash}{letter}" for dash in ("", "-") for letter in _DIRECTIVES)
        return {directive: date.strftime(directive) for directive in directives}

    def __repr__(self) -> str:
        return f"RunDay({self.date})"

    def __deepcopy__(self, memo: Any) -> "RunDay":
        return self  # a tokenizer that was copied is of the same run


_DIRECTIVES = "aAbBcdFHIjmMpSuUwWxXyYZ"
_TELLS_DAY = """\
{%- macro strftime_now(form) -%}
{%- set told = namespace(text=form) -%}
{%- for directive, text in run_day.items() -%}
{%- set told.text = told.text.replace(directive, text) -%}
{%- endfor -%}
{{- told.text -}}
{%- endmacro %}
"""
"""A beginning for templates that tell a day: from transformers 5.22 on they get no functions."""


def _render_on(
    tokenizer: PreTrainedTokenizerBase,
    render: Callable[..., Any],
    conversation: Any,
    tools: Any = None,
    documents: Any = None,
    chat_template: str | None = None,
    *,
    run_day: RunDay,
    **options: Any,
) -> Any:
    """Render a chat, like ``apply_chat_template``, on the day that ``run_day`` tells."""
    template = _TELLS_DAY + tokenizer.get_chat_template(chat_template, tools)
    return render(conversation, tools, documents, template, run_day=run_day.told(), **options)


def with_chat_variables(
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any],
    day: RunDay | None = None,
) -> PreTrainedTokenizerBase:
    """Let a tokenizer give its chat template these variables whenever it renders a chat.

    A template that tells the date is given ``day``; None: it tells today's.

    Raises:
        ConfigError: if there is no chat template, or it never reads one of them.
    """
    for name in chat_template_kwargs:
        if name in SET_BY_US:
            raise ConfigError(f"chat_template_kwargs.{name} is set by the library; leave it out")
        if tokenizer.chat_template is None:
            raise ConfigError(f"chat_template_kwargs.{name}: {NO_TEMPLATE}")
        if name != "chat_template" and name not in str(tokenizer.chat_template):
            raise ConfigError(
                f"chat_template_kwargs.{name}: the tokenizer's chat template never reads it; is it "
                "spelled as there?"
            )
    variables = dict(chat_template_kwargs)
    given = variables.get("chat_template")
    if given is not None and not (isinstance(given, str) and given):
        raise ConfigError(
            f"chat_template_kwargs.chat_template={given!r:.80} must be a template's text, or the "
            "name of one that the tokenizer has; leave it out for its own"
        )
    template = variables.get("chat_template", tokenizer.chat_template)
    render = tokenizer.apply_chat_template
    if day is not None and "strftime_now" in str(template):
        variables["run_day"] = day
        render = partial(_render_on, tokenizer, render)
    if variables:  # a caller's variables take precedence
        tokenizer.apply_chat_template = partial(render, **variables)
    return tokenizer
