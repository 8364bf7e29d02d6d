"""``lightning-rl check --rewards``: try rewards on texts that a random model would never write."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from inspect import Parameter, signature
from statistics import median
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.collect.tasks import Task
from lightning_rl.config.schema import one_line
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import DataError
from lightning_rl.rewards.calling import RewardFunction
from lightning_rl.rollout import Prompt, Rollout, RolloutStatus, as_text, of_whole_characters

ROWS = 6
"""Rows of each prompt set that are tried, besides those whose columns have other types."""
_KNOWN = 1000
"""Rows of a prompt set that these are chosen from, and whose answers are known."""
RIGHT_FORMS = {
    "alone": "{}",
    "in a sentence": "The answer is {}.",
    "in \\boxed": "So the answer is $\\boxed{{{}}}$.",
    "after ####": "#### {}",
    "in <answer>": "<answer>{}</answer>",
    "after a thought": "<think>\nLet me see.\n</think>\n\n{}",
}
"""How people and models write an answer."""
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target", "label", "expected", "reference")
"""Columns that are taken for the answer first; else the first one that a reward has by name."""
OTHER, CUT, ALL = "another row's answer", "cut off in its middle", "every answer in turn"
EMPTY, REPEATED, MEGABYTE = "nothing", "the prompt repeated", "a megabyte"
WRONG = (OTHER, CUT, ALL, EMPTY, REPEATED, MEGABYTE)
"""Texts that should earn less than a right answer."""
_OTHER_DIGITS = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


@dataclass(frozen=True)
class Graded:
    """A text with the reward that it got; ``error`` is why it could not be graded.

    ``cut``: sampling settings end a completion before the text does, so less was graded.
    """

    name: str
    text: str
    reward: float
    error: str | None
    seconds: float
    cut: bool = False


@dataclass(frozen=True)
class RewardVerdict:
    """The findings on rewards: ``faults`` would harm a run, and ``notes`` are to be known.

    ``seconds`` is what grading an iteration takes, one completion after the other, and
    ``best`` the most that a right answer earned; both are nan if nothing was tried.
    """

    lines: list[str]
    faults: list[str]
    notes: list[str]
    seconds: float = math.nan
    best: float = math.nan

    def printed(self) -> Iterator[str]:
        """Yield all as lines of text."""
        yield from self.lines
        yield from (f"  fault: {one_line(fault, 400)}" for fault in self.faults)
        yield from (f"  note: {note}" for note in self.notes)


def try_rewards(data: RLDataModule, tokenizer: PreTrainedTokenizerBase) -> Iterator[RewardVerdict]:
    """Try the rewards of all prompt sets, one after the other."""
    for task in data.train_tasks:
        if reason := _untried(task.rewards.functions):
            yield RewardVerdict([f"rewards{_named(task)}, not tried: {reason}"], [], [])
        else:
            yield RewardTrial(task, tokenizer).run(data.groups_per_iteration * task.group_size)


class RewardTrial:
    """Grades texts for some rows of a task, each alone and then beside the others of its row.

    Args:
        task: whose rewards are tried, on its prompts.
        tokenizer: writes the tokens that rewards may ask for.

    Raises:
        DataError: if no prompt is short enough.
    """

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        self._task = task
        self._encode = cache(partial(tokenizer.encode, add_special_tokens=False))
        self._decode = tokenizer.decode
        task.rewards.configure(tokenizer)
        if not (prompts := list(task.prompts.first(_KNOWN))):
            raise DataError(f"{task.prompts!r}: all prompts are too long; raise max_prompt_tokens")
        self._rows = _spread(prompts)
        self._column, self._sure = _answer_column(task.rewards.functions.values(), self._rows)
        self._answers = list(dict.fromkeys(self._answer(prompt) for prompt in prompts))

    def run(self, per_iteration: int) -> RewardVerdict:
        """Try all texts; ``per_iteration`` is the number of completions of an iteration."""
        tried = list[tuple[Prompt, list[Graded]]]()
        for prompt in self._rows:
            graded = self._try(prompt)
            tried.append((prompt, graded))
            if all(one.error is not None for one in graded):
                break  # such as a judge that does not answer: others would take as long
        found = _Findings(self._task, self._column, self._sure, len(tried))
        for prompt, graded in tried:
            found.add(prompt, graded)
            self._again(prompt, graded, found)
        return found.verdict(per_iteration)

    def _try(self, prompt: Prompt) -> list[Graded]:
        """Grade a row's texts, each in a call of its own: the right ones, and then the wrong."""
        answer, right = self._answer(prompt), []
        if answer:
            forms = RIGHT_FORMS.items()
            right = [self._as_sampled(prompt, name, form.format(answer)) for name, form in forms]
        sound = [graded for graded in right if graded.error is None]
        if right and not sound:
            return right
        best = max(sound, key=lambda graded: graded.reward, default=None)
        form = RIGHT_FORMS["alone" if best is None else best.name]
        return right + [self._grade(prompt, *text) for text in self._wrong(prompt, answer, form)]

    def _wrong(self, prompt: Prompt, answer: str, form: str) -> Iterator[tuple[str, str]]:
        """Yield further texts, in the form that is paid most; those in ``WRONG`` are wrong."""
        others = [other for other in self._answers if other not in ("", answer)]
        if answer and others:
            yield OTHER, form.format(others[0])
            listed = [*others[:1], answer, *others[1:8]]
            yield ALL, "\n".join(map(form.format, listed))
        if answer:
            written = form.format(answer)
            yield CUT, written[: written.rindex(answer) + len(answer) // 2]
            yield "its form twice", form.format(written)
            yield "in Arabic digits", written.translate(_OTHER_DIGITS)
        yield EMPTY, ""
        yield REPEATED, as_text(prompt.prompt)
        yield MEGABYTE, "so " * (2**20 // 3)
        yield "half a character", form.format(answer) + "\ud83d"

    def _again(self, prompt: Prompt, graded: Sequence[Graded], found: "_Findings") -> None:
        """Grade a row's texts again: alone, as one group, and as one in the opposite order."""
        sound = [one for one in graded if one.error is None]
        alone = [self._grade(prompt, one.name, one.text).reward for one in sound]
        before = [one.reward for one in sound]
        found.changed["when the same text is graded again"] += _differ(before, alone)
        together = self._rewards(prompt, sound)
        backwards = self._rewards(prompt, sound[::-1])[::-1]
        found.changed["with the order of a group"] += _differ(together, backwards)

    def _as_sampled(self, prompt: Prompt, name: str, text: str) -> Graded:
        """Grade as much of a text as an engine would write of it."""
        sampling = self._task.sampling
        ends = [text.index(stop) + len(stop) for stop in sampling.stop if stop in text]
        written = text[: min(ends, default=len(text))]
        tokens = self._encode(written)
        if len(tokens) > sampling.max_tokens:
            written = str(self._decode(tokens[: sampling.max_tokens]))
        return replace(self._grade(prompt, name, written), cut=written != text)

    def _grade(self, prompt: Prompt, name: str, text: str) -> Graded:
        rollout = self._rollout(prompt, text, 0)
        begin = time.perf_counter()
        self._task.rewards.grade_here([[rollout]])
        seconds = time.perf_counter() - begin
        reward = math.nan if rollout.reward is None else rollout.reward
        return Graded(name, text, reward, rollout.error, seconds)

    def _rewards(self, prompt: Prompt, texts: Sequence[Graded]) -> list[float]:
        group = [self._rollout(prompt, one.text, place) for place, one in enumerate(texts)]
        self._task.rewards.grade_here([group])
        return [math.nan if rollout.reward is None else rollout.reward for rollout in group]

    def _rollout(self, prompt: Prompt, text: str, place: int) -> Rollout:
        rollout = Rollout(prompt, f"{prompt.key}/rewards", place, seed=place)
        tokens = self._encode(of_whole_characters(text))
        rollout.rows[0].append_written(tokens, [0.0] * len(tokens), [0] * len(tokens))
        whole = prompt.begun + text
        chat = not isinstance(prompt.prompt, str)
        rollout.completion = [{"role": "assistant", "content": whole}] if chat else whole
        rollout.status, rollout.finish_reason = RolloutStatus.COMPLETED, "stop"
        return rollout

    def _answer(self, prompt: Prompt) -> str:
        value = prompt.columns.get(self._column)
        return str(value) if _is_answer(value) else ""


class _Findings:
    """Counts, over rows, what each text was paid.

    ``sure``: the column holds answers that a reward reads; else only it may.
    """

    def __init__(self, task: Task, column: str, sure: bool, rows: int) -> None:
        self._task = task
        self._column = column
        self._sure = sure
        self._rows = rows
        self._rewards: dict[str, list[float]] = defaultdict(list)
        self._full: Counter[str] = Counter()  # as much as the right answer in its best form
        self._seconds: list[float] = []
        self._longest = 0.0  # seconds for a megabyte
        self._errors: dict[str, str] = {}
        self._unpaid: list[str] = []
        self._cut = 0  # rows whose right answer, in some form, is cut off and earns nothing
        self._best = math.nan  # of all rows
        self.changed: Counter[str] = Counter()

    def add(self, prompt: Prompt, graded: Sequence[Graded]) -> None:
        sound = {one.name: one.reward for one in graded if one.error is None}
        right = [reward for name, reward in sound.items() if name in RIGHT_FORMS]
        best = max(right, default=math.nan)
        pays = best > max(sound.get(OTHER, -math.inf), sound.get(EMPTY, -math.inf))
        self._best = max(best, self._best) if pays else self._best
        self._cut += not pays and any(one.cut for one in graded)
        for one in graded:
            if one.name == MEGABYTE:
                self._longest = max(self._longest, one.seconds)
            else:
                self._seconds.append(one.seconds)
            if one.error is not None:
                self._errors.setdefault(one.error.split("; prompt ")[0], one.name)
                continue
            self._rewards[one.name].append(one.reward)
            self._full[one.name] += pays and one.reward >= best
        if right and not pays:
            value = prompt.columns[self._column]
            self._unpaid.append(f"{value!r:.60} ({type(value).__name__}, row {prompt.id})")

    def verdict(self, per_iteration: int) -> RewardVerdict:
        if self._column:
            head = f"{self._rows} rows, whose answers are in the column {self._column!r}"
        else:
            head = f"{self._rows} rows; no column that a reward takes by name holds an answer"
        lines = [f"rewards{_named(self._task)}, tried on {head}:"]
        for name, rewards in self._rewards.items():
            shown = f"the answer {name}" if name in RIGHT_FORMS else name
            full = f"{self._full[name]} of {self._rows} rows in full" if self._column else ""
            lines.append(f"  {shown:26}{math.fsum(rewards) / len(rewards):8.3g}  {full}".rstrip())
        slowest = sorted(self._seconds)[math.ceil(0.99 * len(self._seconds)) - 1]
        faults, notes = list(self._faults()), list(self._notes(slowest, per_iteration))
        return RewardVerdict(
            lines, faults, notes, median(self._seconds) * per_iteration, self._best
        )

    def _faults(self) -> Iterator[str]:
        yield from (why for name, why in self._ungraded() if name != MEGABYTE)
        if self._unpaid and self._sure:
            yield self._unpaid_rows()
        for name in WRONG:
            if self._column and not self._unpaid and 2 * self._full[name] > self._rows:
                yield f"{name!r} earns as much as the right answer, which a policy would find"
        for how, count in self.changed.items():
            if count:
                yield f"rewards of {count} texts differ {how}"

    def _ungraded(self) -> Iterator[tuple[str, str]]:
        return ((name, f"it cannot grade {name!r}: {why}") for why, name in self._errors.items())

    def _unpaid_rows(self) -> str:
        sampling, why = self._task.sampling, ""
        if self._cut:
            why = (
                f"; in {self._cut} of them sampling.stop={list(sampling.stop)} or "
                f"sampling.max_tokens={sampling.max_tokens} ends it early"
            )
        return (
            "the right answer earns no more than a wrong one, however it is written, in "
            f"{len(self._unpaid)} of {self._rows} rows, first {self._unpaid[0]}{why}"
        )

    def _notes(self, slowest: float, per_iteration: int) -> Iterator[str]:
        # No completion is as long, but what fails here may be slow before.
        yield from (why for name, why in self._ungraded() if name == MEGABYTE)
        if self._unpaid and not self._sure:
            yield f"{self._unpaid_rows()}; perhaps the column {self._column!r} holds no answers"
        idle = [name for name in RIGHT_FORMS if self._rewards.get(name) and not self._full[name]]
        if idle and len(idle) < len(RIGHT_FORMS) and not self._unpaid:
            yield f"the right answer is not paid in full {', '.join(idle)}"
        yield (
            f"99 of 100 calls took at most {slowest:.2g} s, and the longest text "
            f"{self._longest:.2g} s; an iteration's {per_iteration} completions, one after the "
            f"other, up to {slowest * per_iteration:.2g} s"
        )


def _named(task: Task) -> str:
    return f" of {task.name}" if task.name else ""


def _untried(functions: Mapping[str, RewardFunction]) -> str:
    """Return why rewards cannot be tried on texts alone; empty if they can."""
    paid = [n for n, f in functions.items() if "environment_rewards" in signature(f).parameters]
    if paid:
        return f"an environment pays {', '.join(paid)}"
    if all(getattr(function, "compares", False) for function in functions.values()):
        return f"{', '.join(functions)} compares the completions of a group"
    return ""


def _spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts from all over the rows, and one for each other types of columns."""
    step = max(1, len(prompts) // ROWS)
    chosen = {prompt.id: prompt for prompt in prompts[::step][:ROWS]}
    known = {_types(prompt) for prompt in chosen.values()}
    for prompt in prompts:
        if _types(prompt) not in known:
            known.add(_types(prompt))
            chosen[prompt.id] = prompt
    return list(chosen.values())


def _types(prompt: Prompt) -> tuple[tuple[str, type], ...]:
    return tuple((name, type(value)) for name, value in sorted(prompt.columns.items()))


def _answer_column(
    functions: Iterable[RewardFunction], prompts: Sequence[Prompt]
) -> tuple[str, bool]:
    """Return the column of the answers that rewards read, and whether it is one for certain.

    It is not if its name does not say so, or if rewards take whatever there is; the name is empty
    if there is no such column.
    """
    parameters = [p for f in functions for p in signature(f).parameters.values()]
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    taken = {p.name for p in parameters}
    held = dict.fromkeys(
        name for prompt in prompts for name, value in prompt.columns.items() if _is_answer(value)
    )
    certain = [name for name in ANSWER_COLUMNS if name in held and name in taken]
    possible = [name for name in ANSWER_COLUMNS if name in held and takes_all]
    others = [name for name in held if name in taken]
    return next(iter((*certain, *possible, *others)), ""), bool(certain)


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""


def _differ(before: Sequence[float], after: Sequence[float]) -> int:
    pairs = zip(before, after, strict=True)
    return sum(x != y and not (math.isnan(x) and math.isnan(y)) for x, y in pairs)
