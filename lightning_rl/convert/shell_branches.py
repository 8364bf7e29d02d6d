"""How a shell script's branches are decided, and which is chosen if only a run would decide."""

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
    """A word of a script, with a sentence for each doubt that only a run would resolve."""

    doubts: tuple[str, ...]

    def __new__(cls, text: str, doubts: Iterable[str] = ()) -> "Word":
        word = super().__new__(cls, text)
        word.doubts = tuple(dict.fromkeys(doubts))
        return word


Values = dict[str, list[Word]]
"""The variables at one point of a script."""


@dataclass
class Arm:
    """One branch: its variables and commands, and whether it is taken.

    Args:
        taken: True if the values select it; None: only a run would tell.
        values: the variables after it.
        commands: the words of its commands.
    """

    taken: bool | None
    values: Values
    commands: list[list[Word]] = field(default_factory=list)

    @property
    def leaves(self) -> bool:
        """True if the script ends within it."""
        return any(words[:1] in (["exit"], ["return"]) for words in self.commands)


def reachable(arms: Iterable[Arm]) -> list[Arm]:
    """Return the arms that a run may take: doubtful ones, up to the first that is surely taken."""
    found: list[Arm] = []
    for arm in arms:
        if arm.taken is not False:
            found.append(arm)
        if arm.taken:
            break
    return found


def settled(arms: Sequence[Arm], what: str) -> Values:
    """Return the variables after branches of which only a run would tell which one is taken.

    They are those of the last arm, which stands for all other cases, or of the first if the script
    ends within the last. A variable without a value there gets that of the first. Values that
    differ between the arms are in doubt.

    Args:
        arms: two or more, the last of which is taken if no other is.
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
    """Return True if a command is a test, as ``[ -n "$X" ]`` is."""
    return words[:1] == ["!"] or words[:1] in [[name] for name in _TESTS]


def truth(words: Sequence[str]) -> bool | None:
    """Return the truth of a command whose words are known; None if only a run would tell."""
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
    """Return True if a text matches a shell pattern such as ``qwen*``."""
    return fnmatch.fnmatchcase(text, pattern)


def computed(text: str) -> int:
    """Compute an arithmetic expression of whole numbers.

    Raises:
        ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError: if it is not one.
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
