"""Shell scripts, read and never run: the words of their commands, with variables put in."""

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightning_rl.errors import ConfigError

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=")
_REDIRECTION = re.compile(r"\d*[<>]+[&|-]*[ \t]*")
_VARIABLE = re.compile(r"\w+|[@*#?!$-]")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n.*?^\s*\1\s*$", re.DOTALL | re.MULTILINE)
_BEFORE = {"export", "local", "readonly", "declare", "then", "do", "else", "time", "exec", "nohup"}
_DEFAULT = re.compile(r"(\w+):?([-=+?])(.*)", re.DOTALL)
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST_SCRIPT = 1_000_000
_MOST_WORDS = 10_000
_LONGEST_VALUE = 10_000
"""Characters of a variable: one that doubles itself a hundred times ends here."""


@dataclass
class Script:
    """The commands of a script, and what could not be read without running it."""

    commands: list[list[str]] = field(default_factory=list)
    unknown: dict[str, list[str]] = field(default_factory=dict)
    """Variables, arguments of the script and commands whose values only a run would tell, by what
    stands for them in the words."""


def read_script(text: str, place: str) -> Script:
    """Split a script into its commands; assignments above a command are put into it.

    Of branches all are read, in their order; loops are read once.

    Raises:
        ConfigError: if quotes do not close, or the script is too large to be one.
    """
    if len(text) > _LARGEST_SCRIPT:
        raise ConfigError(f"{place}: {len(text):,} characters are too many for a script")
    return _Reader(_HEREDOC.sub("\n", text), place).read()


class _Reader:
    def __init__(self, text: str, place: str) -> None:
        self.text, self.place, self.at = text.replace("\r\n", "\n"), place, 0
        self.variables: dict[str, list[str]] = {}
        self.script = Script()

    def read(self) -> Script:
        while self.at < len(self.text):
            words: list[str] = []
            for group in self._command():
                words += group
                if len(words) > _MOST_WORDS:
                    raise ConfigError(f"{self.place}: a command of more than {_MOST_WORDS:,} words")
            if words:
                self.script.commands.append(words)
        return self.script

    def _command(self) -> Iterator[list[str]]:
        """The words up to the end of a command, each as what it expands to."""
        begun = False
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in "\n;&|":
                self.at += 1
                return
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif here in " \t()":
                begun = begun and here != ")"  # behind a pattern of a case, another command begins
                self.at += 1
            elif redirected := _REDIRECTION.match(self.text, self.at):
                self.at = redirected.end()
                self._word()
            elif here == "#":
                self.at = (self.text + "\n").find("\n", self.at)
            else:
                assigned = None if begun else self._assigned()
                if assigned is None:
                    words = self._word()
                    begun = begun or words[:1] not in [[name] for name in _BEFORE]
                    yield [] if not begun else words

    def _assigned(self) -> str | None:
        """Take ``name=value`` or ``name=(a b)`` in; None if there is none."""
        match = _ASSIGNMENT.match(self.text, self.at)
        if match is None:
            return None
        name, more = match.groups()
        self.at = match.end()
        if self.text.startswith("(", self.at):
            self.at += 1
            values = list(self._items())
        else:
            values = ["".join(self._word(splits=False))]
        before = self.variables.get(name, []) if more else []
        self.variables[name] = [value[:_LONGEST_VALUE] for value in [*before, *values]][:1000]
        return name

    def _items(self) -> Iterator[str]:
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == ")":
                self.at += 1
                return
            if here in " \t\n\\":
                self.at += 1
            elif here == "#":
                self.at = (self.text + "\n").find("\n", self.at)
            else:
                yield from self._word(end=" \t\n)")
        raise ConfigError(f"{self.place}: a list that begins with ( does not end")

    def _word(self, end: str = " \t\n;&|<>()", splits: bool = True) -> list[str]:
        """One word, quotes and variables resolved; several for ``"${NAME[@]}"`` and ``$TWO_WORDS``.

        ``splits``: at the blanks of variables that stand in no quotes, as all but assignments do.
        """
        begin, word = self.at, ""
        several: list[str] = []
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in end:
                break
            self.at += 1
            if here == "'":
                word += self._up_to("'")
            elif here == '"':
                inner, found = self._quoted()
                word, several = word + inner, several + found
            elif here == "\\":
                word += "" if self._next() == "\n" else self._next()
                self.at += 1
            elif here in "$`":
                inner, found = self._expanded(here)
                first, *more = (inner.split() or [""]) if splits else [inner]
                several += found
                word += first
                for following in more:
                    several.append(word)
                    word = following
            else:
                word += here
        if self.at == begin:  # a closing bracket that nothing opened
            self.at += 1
        return [*several, word] if word or not several else several

    def _quoted(self) -> tuple[str, list[str]]:
        text = ""
        several: list[str] = []
        while self._next() != '"':
            here = self.text[self.at]
            self.at += 1
            if here == "\\" and self._next() in '"\\$`\n':
                text += "" if self._next() == "\n" else self._next()
                self.at += 1
            elif here in "$`":
                inner, found = self._expanded(here)
                text, several = text + inner, several + found
            else:
                text += here
        self.at += 1
        return text, several

    def _expanded(self, sign: str) -> tuple[str, list[str]]:
        """What follows ``$``: a variable, a sum, a command; several words for a list."""
        if sign == "`":
            return self._not_known(f"`{self._up_to('`')}`", "$(...)"), []
        if self._next(missing="") == "(":
            self.at += 1
            inner = self._balanced("(", ")")
            if inner.startswith("(") and inner.endswith(")"):
                return self._sum(inner[1:-1]), []
            return self._not_known(f"$({inner})", "$(...)"), []
        if self._next(missing="") == "{":
            self.at += 1
            return self._variable(self._balanced("{", "}"))
        match = _VARIABLE.match(self.text, self.at)
        if match is None:
            return "$", []
        self.at = match.end()
        return self._variable(match[0])

    def _variable(self, name: str) -> tuple[str, list[str]]:
        listed = re.fullmatch(r"(\w+)\[[@*]\]", name)
        if listed and listed[1] in self.variables:
            return "", self.variables[listed[1]]
        if name in self.variables:
            return self.variables[name][0] if self.variables[name] else "", []
        match = _DEFAULT.fullmatch(name)
        if match is None:
            return self._not_known(f"${name}"), []
        known = "".join(self.variables.get(match[1], [])[:1])
        if known or match[2] in "+?":
            return known, []
        inner = _Reader(match[3], self.place)
        inner.variables, inner.script = self.variables, self.script
        value = "".join(inner._word(end="")) if match[3] else ""
        if match[2] == "=":
            self.variables[match[1]] = [value]
        return value, []

    def _sum(self, text: str) -> str:
        """Whole numbers and variables, added and multiplied."""
        names = re.sub(
            r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: "".join(self.variables.get(m[1], ["?"])), text
        )
        try:
            return str(_computed(ast.parse(names.strip()[:500], mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return self._not_known(f"$(({text}))", "$((...))")

    def _not_known(self, what: str, shown: str | None = None) -> str:
        """Note what only a run would tell; in a word, it stands as ``shown``."""
        what = what if len(what) <= 60 else f"{what[:57]}..."
        shown = what if shown is None else shown
        self.script.unknown.setdefault(shown, []).append(what)
        return shown

    def _up_to(self, end: str) -> str:
        begin = self.at
        self.at = self.text.find(end, begin)
        if self.at < 0:
            line = self.text.count("\n", 0, begin) + 1
            raise ConfigError(f"{self.place}:{line}: a {end} that opens does not close")
        self.at += 1
        return self.text[begin : self.at - 1]

    def _balanced(self, opens: str, closes: str) -> str:
        begin, depth = self.at, 1
        while depth:
            depth += (self._next() == opens) - (self._next() == closes)
            self.at += 1
        return self.text[begin : self.at - 1]

    def _next(self, missing: str | None = None) -> str:
        if self.at < len(self.text):
            return self.text[self.at]
        if missing is not None:
            return missing
        raise ConfigError(f"{self.place}: a quote or bracket that opens does not close")


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1e15:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    raise ValueError
