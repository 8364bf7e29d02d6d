"""Sampling settings of a request: the client's, and otherwise the run's."""

from dataclasses import replace
from typing import Any

from lightning_rl.engines.sampling import Sampling, StructuredOutputs
from lightning_rl.errors import ConfigError
from lightning_rl.serving.ask import Terms
from lightning_rl.serving.errors import RequestError
from lightning_rl.serving.fields import Fields, wrong_value

_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_ANYTHING = {"type": "object"}
_MOST_ENDS, _LONGEST_END = 64, 1000


def asked_sampling(
    fields: Fields, terms: Terms, limit: str, stop: str = "stop", **given: Any
) -> Sampling:
    """Return a request's sampling settings.

    Args:
        fields: the request's fields.
        terms: the session's terms.
        limit: the name of the field with the maximum number of tokens.
        stop: the name of the field with the stop strings.
        given: settings read elsewhere.

    Raises:
        RequestError: for a value out of range.
    """
    run = terms.sampling
    changes = {name: value for name, value in given.items() if value is not None}
    if terms.client_sampling:
        for name in _NUMBERS:
            if (number := fields.get(name, float)) is not None:
                changes[name] = number
        if (top_k := fields.get("top_k", int)) is not None:
            # vLLM's clients write -1 for all; it holds the number in 32 bits.
            changes["top_k"] = min(max(0, top_k), 2**31 - 1)
    if (longest := fields.get(limit, int)) is not None:
        changes["max_tokens"] = longest
        changes["min_tokens"] = min(run.min_tokens, longest)
    if strings := fields.texts(stop):
        if len(strings) > _MOST_ENDS or not all(0 < len(one) <= _LONGEST_END for one in strings):
            allowed = f"up to {_MOST_ENDS} strings of 1 to {_LONGEST_END} characters"
            raise wrong_value(fields.path + stop, strings, allowed)
        changes["stop"] = strings
    try:
        return replace(run, **changes) if changes else run
    except ConfigError as error:
        names = {"max_tokens": limit, "stop": stop}
        param = str(error).removeprefix("sampling.").partition("=")[0]
        raise RequestError(str(error), param=names.get(param, param)) from error


def answer_form(
    fields: Fields, name: str = "response_format", within: str = "json_schema"
) -> StructuredOutputs | None:
    """Return the structured output that a field asks for, if any.

    Args:
        fields: the fields of which it is one.
        name: its name.
        within: the field of it that has the schema; empty: it has the schema itself.

    Raises:
        RequestError: if it is invalid.
    """
    given = fields.get(name, dict)
    if given is None:
        return None
    form = Fields(given, f"{fields.path}{name}.")
    kind = form.need("type", str)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json=_ANYTHING)
    if kind == "json_schema":
        if within:
            form = Fields(form.need(within, dict), f"{form.path}{within}.")
        return StructuredOutputs(json=form.get("schema", dict) or _ANYTHING)
    raise wrong_value(f"{form.path}type", kind, "'json_object', 'json_schema', and 'text'")
