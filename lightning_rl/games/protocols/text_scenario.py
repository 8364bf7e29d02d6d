"""TextScenario: a scenario made of templates, for tasks that need no code."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.games.protocols.base import ACCEPT, GO_ON, REJECT
from lightning_rl.games.protocols.scenario import Reading, Scenario, Seat
from lightning_rl.rollout import Message


@configurable
@dataclass(frozen=True)
class Instructions:
    """The prompts of an agent; ``{name}`` stands for a column, or for a field of its seat.

    Fields of the seat are ``{agent}``, ``{stance}`` (the word for it), and in ``turn`` ``{round}``
    (from 1) and ``{rounds}``.

    Args:
        user: the task, told before anything was said.
        system: the system prompt; empty: none.
        turn: what it reads last before each answer.
        form: a regular expression that the whole answer must match; empty: any text.
    """

    user: str = ""
    system: str = ""
    turn: str = ""
    form: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.form)
        except re.error as error:
            raise ConfigError(
                f"form={self.form!r} is not a regular expression: {error}; correct it"
            ) from error


@configurable
class TextScenario(Scenario):
    """A scenario made of templates: a new task needs no code.

    A decider decides by the last line of its answer: one of the two words and nothing else, perhaps
    after ``Decision:``. The text before that line, or an answer without one, is its message. In its
    last turn an answer without a decision counts as unreadable.

    Args:
        prompts: each agent's instructions.
        label: the column with the right decision: 0 or 1, a truth value, or one of the words.
        accept: the word to accept.
        reject: the word to reject.
        guess: the prompt for a decider that must decide.
        message: how others read a message; ``{speaker}``, ``{channel}`` and ``{text}`` are filled
            in.
        options: arguments of :class:`Scenario`.

    Raises:
        ConfigError: if there are no prompts, if the two words are equal, or if a number is
            negative.
    """

    def __init__(
        self,
        prompts: dict[str, Instructions],
        label: str = "label",
        accept: str = "accept",
        reject: str = "reject",
        guess: str = "Decide now. Answer with one word: {accept} or {reject}.",
        message: str = "{speaker}: {text}",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not prompts:
            raise ConfigError("prompts={} is empty; give each agent its Instructions")
        if accept.casefold() == reject.casefold():
            raise ConfigError(f"accept and reject are both {accept!r}; give them different words")
        self.prompts = prompts
        self.label_column = label
        self.words = {REJECT: reject, ACCEPT: accept}
        self.classes = (reject, accept)
        self.guess = guess
        self.message = message

    def check(self, agents: Sequence[str]) -> None:
        if missing := [name for name in agents if name not in self.prompts]:
            raise ConfigError(
                f"TextScenario.prompts has prompts for {', '.join(self.prompts)}, but none for "
                f"{missing[0]!r}; add it"
            )

    def label(self, columns: Mapping[str, Any]) -> int:
        value = columns.get(self.label_column)
        meant = {word.casefold(): decision for decision, word in self.words.items()}
        found = meant.get(value.casefold()) if isinstance(value, str) else value
        if found not in (REJECT, ACCEPT):
            raise DataError(
                f"column {self.label_column!r} is {value!r}; it must be 0 or 1, or one of "
                f"{list(self.words.values())}"
            )
        return int(found)

    def opening(self, seat: Seat) -> list[Message]:
        prompts = self.prompts[seat.agent]
        parts = {"system": prompts.system, "user": prompts.user}
        return [
            {"role": role, "content": self._filled(text, seat)}
            for role, text in parts.items()
            if text
        ]

    def cue(self, seat: Seat) -> str:
        if seat.guess:
            return self._filled(self.guess, seat)
        cue_text = self.prompts[seat.agent].turn
        return self._filled(cue_text, seat, round=seat.round + 1, rounds=seat.rounds)

    def fields(self, seat: Seat) -> dict[str, Any]:
        """Return what prompts may name; override it to add fields computed from the row."""
        words = {"accept": self.words[ACCEPT], "reject": self.words[REJECT]}
        fields = {**seat.columns, **words, "agent": seat.agent}
        return fields | ({} if seat.decides else {"stance": self.words[seat.stance]})

    def heard(self, seat: Seat, speaker: str, channel: str, text: str) -> str:
        return _formatted(self.message, {"speaker": speaker, "channel": channel, "text": text})

    def read(self, seat: Seat, answer: str) -> Reading | None:
        text, form = answer.strip(), self.prompts[seat.agent].form
        if form and not seat.guess and not re.fullmatch(form, text, re.DOTALL):
            return None
        decision = GO_ON
        if seat.decides:
            text, decision = self._decided(text)
            if decision == GO_ON and (seat.last or seat.guess):
                return None
        if not text and decision == GO_ON:
            return None
        return Reading(dict.fromkeys(seat.channels, text) if text else {}, decision)

    def deciding(self, answer: str, decision: int) -> str:
        before, _ = self._decided(answer.strip())
        return "\n".join(filter(None, [before, self.words[decision]]))

    def _decided(self, text: str) -> tuple[str, int]:
        """Return the text before the decision, and the decision."""
        before, _, line = text.rpartition("\n")
        word = line.strip(" \t.!*\"'").casefold().removeprefix("decision:").strip(" \t*\"'")
        for decision, known in self.words.items():
            if word == known.casefold():
                return before.strip(), decision
        return text, GO_ON

    def _filled(self, template: str, seat: Seat, **places: Any) -> str:
        return _formatted(template, {**self.fields(seat), **places})


def _formatted(template: str, fields: Mapping[str, Any]) -> str:
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the prompt {template!r:.80} cannot be filled: {error}; it may name "
            f"{', '.join(map(repr, fields))}, and literal braces must be doubled"
        ) from error
