"""What decides a shell script's branches, and which is taken where only a run would decide."""

import ast
import fnmatch
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_TESTS = ("[", "[[", "test")


class Word(str):
    """A word of a script, and what only a run would tell about it, a sentence each."""

    doubts: tuple[str, ...]

    def __new__(cls, text: str, doubts: Iterable[str] = ()) -> "Word":
        word = super().__new__(cls, text)
        word.doubts = tuple(dict.fromkeys(doubts))
        return word


Values = dict[str, list[Word]]
"""The variables of a script at one place."""


@dataclass
class Arm:
    """One branch: what it leaves behind, and whether it is taken.

    Args:
        taken: whether the values decide for it; None: only a run would tell.
        values: the variables behind it.
        commands: the words of its commands.
    """

    taken: bool | None
    values: Values
    commands: list[list[Word]] = field(default_factory=list)

    @property
    def leaves(self) -> bool:
        """Whether the script ends with it."""
        return any(words[:1] in (["exit"], ["return"]) for words in self.commands)


def reachable(arms: Iterable[Arm]) -> list[Arm]:
    """The arms that a run may take: one that the values decide for, and doubtful ones before."""
    found: list[Arm] = []
    for arm in arms:
        if arm.taken is not False:
            found.append(arm)
        if arm.taken:
            break
    return found


def settled(arms: Sequence[Arm], what: str) -> Values:
    """The variables behind branches of which only a run would tell which it takes.

    They are those of the last, which stands for all else, or of the first if the script ends with
    the last. A variable that has no value there has that of the first. What differs between the
    arms is in doubt.

    Args:
        arms: two or more, the last of which is taken where no other is.
        what: the line that decides.
    """
    going_on = [arm.values for arm in arms if not arm.leaves] or [arm.values for arm in arms]
    chosen = going_on[0] if arms[-1].leaves else arms[-1].values
    result: Values = {}
    for values in (*reversed(going_on), chosen):
        result |= values
    for name, taken in sorted(result.items()):
        found = [values.get(name) or taken for values in going_on]
        others = dict.fromkeys(_shown(value) for value in found if value != taken)
        if others:
            doubt = (
                f"{name}={_shown(taken)}: only a run of the script would tell what {what!r} "
                f"decides; it may be {' or '.join(others)}"
            )
            result[name] = [Word(word, (*word.doubts, doubt)) for word in taken]
    return result


def _shown(values: Sequence[str]) -> str:
    text = " ".join(values)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_test(words: Sequence[str]) -> bool:
    """Whether a command compares something, as ``[ -n "$X" ]`` does."""
    return words[:1] == ["!"] or words[:1] in [[name] for name in _TESTS]


def truth(words: Sequence[str]) -> bool | None:
    """What a command says whose words are known; None if only a run would tell."""
    if words[:1] == ["!"]:
        said = truth(words[1:])
        return None if said is None else not said
    if not is_test(words):
        return {"true": True, ":": True, "false": False}.get(" ".join(words))
    compared = list(words[1:] if words[0] == "test" else words[1:-1])
    if compared[:1] == ["!"]:
        return truth(["!", words[0], *words[2:]])
    match compared:
        case [text] | ["-n", text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [text, "=" | "==", pattern]:
            return matches(text, pattern)
        case [text, "!=", pattern]:
            return not matches(text, pattern)
        case [left, sign, right] if sign in _COMPARED and left.isdecimal() and right.isdecimal():
            return bool(_COMPARED[sign](int(left), int(right)))
    return None


def matches(text: str, pattern: str) -> bool:
    """Whether a text is what a pattern of the shell, such as ``qwen*``, stands for."""
    return fnmatch.fnmatchcase(text, pattern)


def computed(text: str) -> int:
    """The value of a sum of whole numbers.

    Raises:
        ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError: if it is none.
    """
    return _computed(ast.parse(text.strip()[:500], mode="eval").body)


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1e15:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    raise ValueError
