"""Form: a JSON object of whole numbers that a judge fills in."""

import json
from collections.abc import Mapping
from typing import Any

from lightning_rl.rewards.judge_models import JudgeError

WORDS = {"yes": 1, "true": 1, "no": 0, "false": 0}
"""How a judge may also write 1 and 0."""


class Form:
    """Named whole numbers with bounds.

    Args:
        bounds: the lowest and the highest allowed number, by name.
    """

    def __init__(self, bounds: Mapping[str, tuple[int, int]]) -> None:
        self.bounds = bounds

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the object, in the subset that OpenAI's ``strict`` allows."""
        return {
            "type": "object",
            "properties": {
                name: {"type": "integer", "enum": [*range(low, high + 1)]}
                for name, (low, high) in self.bounds.items()
            },
            "required": [*self.bounds],
            "additionalProperties": False,
        }

    @property
    def example(self) -> str:
        """The object, with what may stand for each number."""
        fields = (f'"{name}": {low} to {high}' for name, (low, high) in self.bounds.items())
        return f"{{{', '.join(fields)}}}"

    def read(self, answer: str) -> list[int]:
        """Return the numbers of the last object in an answer that has all names.

        Numbers may also be texts, and 1 and 0 words, such as ``true`` or ``"yes"``.

        Raises:
            JudgeError: if there is no such object, or a number is not allowed.
        """
        found = next((o for o in _objects(answer) if self.bounds.keys() <= o.keys()), None)
        if found is None:
            raise JudgeError(
                f"no JSON object with {', '.join(map(repr, self.bounds))} in the judge's answer "
                f"{answer[-200:]!r}"
            )
        return [self._number(name, found[name]) for name in self.bounds]

    def _number(self, name: str, value: Any) -> int:
        low, high = self.bounds[name]
        text = str(value).strip().lower()
        try:
            number = float(WORDS.get(text, text))
        except ValueError:
            number = float("nan")
        if not (low <= number <= high and number.is_integer()):
            raise JudgeError(
                f"the judge's number {value!r:.80} for {name!r} is not a whole number from {low} "
                f"to {high}"
            )
        return int(number)


def _objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a text, the last one first."""
    decoder, found = json.JSONDecoder(), list[dict[str, Any]]()
    for start in (i for i in reversed(range(len(text))) if text[i] == "{"):
        try:
            value, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        found.append(value)
    return found
