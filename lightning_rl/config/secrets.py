"""Secrets in configurations and records, recognised by their form.

These are the keys of well-known services, and logins in URLs. A password of any other form looks
like any other text, and is not recognised.
"""

import re
from collections.abc import Iterator
from typing import Any

from lightning_rl.config.layers import Key, name_of

HIDDEN = "***"
"""The text that replaces a secret."""

_FORMS = {
    "a key of an OpenAI-like service": r"\bsk-[A-Za-z0-9_-]{16,}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{16,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,})",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a login in a URL": r"(?<=://)(?!\*\*\*@)[^/@\s]+(?=@)",
}
"""Regular expressions of secrets; what they match is replaced, the rest of the text stays."""


def found_in(tree: Any) -> list[tuple[str, str]]:
    """Find secrets in the texts of a tree of mappings, lists and tuples, keys of mappings included.

    Returns:
        The name of the place and the kind of each secret, such as ``("data.judge.api_key", "a key
        of an OpenAI-like service")``. The names and kinds hold no part of a secret.
    """
    return [
        (name_of(key), kind)
        for key, text in _texts(tree, ())
        for kind, form in _FORMS.items()
        if re.search(form, text)
    ]


def without_secrets(tree: Any) -> Any:
    """Return a copy of a tree in which each secret is replaced by ``***``.

    Mappings and lists are copied, and tuples become lists; other values are shared.
    """
    if isinstance(tree, dict):
        return {without_secrets(key): without_secrets(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [without_secrets(item) for item in tree]
    return _hidden(tree) if isinstance(tree, str) else tree


def _hidden(text: str) -> str:
    for form in _FORMS.values():
        text = re.sub(form, HIDDEN, text)
    return text


def _texts(node: Any, key: Key) -> Iterator[tuple[Key, str]]:
    """Yield each text with its place; keys of mappings are texts too."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, dict):
        for name, value in node.items():
            place = (*key, _hidden(str(name)))
            if isinstance(name, str):
                yield place, name
            yield from _texts(value, place)
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from _texts(item, (*key, index))
