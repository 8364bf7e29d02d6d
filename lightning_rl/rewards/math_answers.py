"""MathVerify: whether a worked solution gives the right answer, in any notation."""

import logging
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError
from lightning_rl.rewards.calling import RewardFailure, Score
from lightning_rl.rewards.log import RewardLog
from lightning_rl.rewards.pool import Isolated
from lightning_rl.rollout import Message, answer_in

REASONS = ("wrong", "no_answer", "unreadable", "unfinished_thought", "fault")
"""Reasons for a score of 0.0; each is logged as a share of the completions."""
RIGHT = "right"
_LONGEST = 200
"""Characters of an answer that are recorded."""

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*(.*)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_NUMBER_WITH_WORDS = re.compile(r"([-+]?[\d,]*\.?\d+)\s+[A-Za-z][A-Za-z ]+")


@configurable
class MathVerify(Isolated):
    """1.0 for a completion whose final answer equals the row's, by math-verify; else 0.0.

    Answers with the same meaning are equal: ``1/2``, ``0.5`` and ``\\frac{1}{2}``; ``1,234`` and
    ``1234``; ``42`` and ``42 apples``. The final answer is the last ``\\boxed{...}``,
    ``<answer>...</answer>`` or ``#### ...``; without any of them, whatever math-verify finds, with
    the last number as its last resort. The row's answer is found in the same way, so the column may
    hold whole solutions such as GSM8K's. If there is a thought, only what follows its ``</think>``
    counts, also if the chat template opened it.

    Each completion is graded in its own process, with limits: see :class:`Isolated`. Answers that
    cannot be read, take too long or need too much memory score 0.0. Shares of completions by reason
    are logged as ``logged/math/wrong``, ``no_answer``, ``unreadable``, ``unfinished_thought`` and
    ``fault`` (a limit was broken); ``extra["math"]`` holds the reason of each rollout, and
    ``extra["answer"]`` its answer, by which an evaluation votes (maj@k). A row whose answer is not
    mathematical makes the rollout FAILED.

    Args:
        column: the data set's column of right answers.
        workers: number of completions graded at the same time; None: one per usable core.
        timeout_s: wall-clock seconds per completion.
        memory_mb: MiB per completion.

    Raises:
        ConfigError: without the package math-verify, or for values out of range.
    """

    def __init__(
        self,
        column: str = "answer",
        workers: int | None = None,
        timeout_s: float = 5.0,
        memory_mb: int = 512,
    ) -> None:
        if find_spec("math_verify") is None:
            install = "`pip install 'math-verify>=0.9,<0.10'`"
            raise ConfigError(f"MathVerify needs math-verify: {install}")
        super().__init__(Compare(column), workers, timeout_s, memory_mb)

    def fault(self, sample: dict[str, Any], reason: str) -> Score:
        _log(sample, "fault")
        return 0.0


class Compare:
    """Compares answers without limits of its own, in a process that has limits.

    math-verify's own limits need signals, which only the main thread may use.
    """

    score_range = (0.0, 1.0)

    def __init__(self, column: str) -> None:
        self.column = column
        self.__name__ = "math_verify"

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Run one comparison in the worker, so that forked processes have its imports loaded."""
        self.__dict__ |= state
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # of the limits that it lacks
        judged("\\boxed{x + \\frac{1}{2}}", "\\boxed{0.5 + x}")

    def __call__(
        self,
        completions: list[str | list[Message]],
        log_extra: Any,
        log_metric: Any,
        opened_thoughts: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[Score]:
        if self.column not in columns:
            raise KeyError(f"the data has no column {self.column!r}; it has {sorted(columns)}")
        log = {"log_extra": log_extra, "log_metric": log_metric}
        scores: list[Score] = []
        opened = opened_thoughts or [False] * len(completions)
        for completion, answer, in_thought in zip(
            completions, columns[self.column], opened, strict=True
        ):
            reason, found = judged(answer_in(completion, in_thought), str(answer))
            if reason is None:
                what = f"column {self.column!r} holds {answer!r:.80}, which math-verify cannot read"
                scores.append(RewardFailure(what))
                continue
            _log(log, reason, found)
            scores.append(float(reason == RIGHT))
        return scores


def _log(arguments: dict[str, Any], reason: str, answer: str | None = None) -> None:
    log = RewardLog.of(arguments)
    assert log is not None  # Compare asks for it
    log.log_extra("math", [reason])
    log.log_extra("answer", [answer])
    for name in REASONS:
        log.log_metric(f"math/{name}", float(name == reason))


def judged(said: str | None, answer: str) -> tuple[str | None, str | None]:
    """Return ``RIGHT`` or one of ``REASONS``, and the answer that was found, None if there is none.

    The reason is None if the right answer itself cannot be read. ``said`` is the result of
    :func:`~lightning_rl.rollout.answer_in`.
    """
    from math_verify import verify

    # A row's answer stands alone, unless it has words: then it is the end of a solution.
    stands_alone = marked_answer(answer) is None and not _WORD.search(answer)
    gold = _parsed(f"\\boxed{{{answer}}}" if stands_alone else answer)
    if not _is_read(gold):
        return None, None
    if said is None:
        return "unfinished_thought", None
    found = _parsed(said)
    if not _is_read(found):
        missing = not found and marked_answer(said) is None
        return "no_answer" if missing else "unreadable", None
    try:
        reason = RIGHT if verify(gold, found, timeout_seconds=None) else "wrong"
        return reason, str(found[0])[:_LONGEST]
    except MemoryError:
        raise
    except Exception:  # sympy may raise anything about what a model wrote
        return "unreadable", None


def _parsed(text: str) -> list[Any]:
    """Parse a text by math-verify: an expression and its text, the text alone, or []."""
    from math_verify import parse

    marked = marked_answer(text)
    text = text if marked is None else f"\\boxed{{{_tidied(marked)}}}"
    return list(parse(text, parsing_timeout=None))


def _is_read(parsed: list[Any]) -> bool:
    return any(not isinstance(value, str) for value in parsed)


def marked_answer(text: str) -> str | None:
    """Return the text inside the last answer mark; None if there is no mark."""
    marks = [(m.start(), m[1]) for pattern in (_TAGGED, _HASHES) for m in pattern.finditer(text)]
    for opening in _BOXED.finditer(text):
        end = _closing_brace(text, opening.end())
        if end is not None:  # else it was cut off
            marks.append((opening.start(), text[opening.end() : end]))
    return max(marks)[1] if marks else None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def _tidied(answer: str) -> str:
    """Strip Markdown, a final full stop, currency signs, and words after a number."""
    answer = answer.strip().strip("*").rstrip(".").strip(" $€£¥")
    number = _NUMBER_WITH_WORDS.fullmatch(answer)
    return number[1] if number else answer
