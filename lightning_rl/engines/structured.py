"""What a completion must look like: a choice, a pattern, a schema or a grammar."""

from dataclasses import asdict, dataclass
from typing import Any

from lightning_rl.arguments import configurable
from lightning_rl.errors import ConfigError


@configurable
@dataclass(frozen=True)
class StructuredOutputs:
    """A form that completions are held to, token by token; one of these, as vLLM names them.

    Args:
        choice: one of these texts.
        regex: what matches this regular expression.
        json: a JSON value that fits this JSON schema (a mapping, or its text).
        grammar: a word of this context-free grammar, in EBNF.

    Raises:
        ConfigError: unless exactly one is given.
    """

    choice: list[str] | None = None
    regex: str | None = None
    json: dict[str, Any] | str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = self.as_dict()
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs has {sorted(given) or 'nothing'}; give exactly one of choice, "
                "regex, json and grammar"
            )
        if self.choice == []:
            raise ConfigError("structured_outputs.choice=[] allows nothing; list the choices")

    def as_dict(self) -> dict[str, Any]:
        """What is given, under the names of vLLM's ``StructuredOutputsParams``."""
        return {name: value for name, value in asdict(self).items() if value is not None}
