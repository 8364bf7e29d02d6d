"""One line of what ``lightning-rl doctor`` reports."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; ``problem`` is None if all is well, else ``fix`` says what to do."""

    name: str
    value: str
    problem: str | None = None
    fix: str | None = None
    serious: bool = False
