"""Words of a shell script: quotes removed, variables and defaults expanded, sums computed."""

import re
from collections.abc import Iterator

from lightning_rl.convert.shell_branches import Values, Word, computed
from lightning_rl.errors import ConfigError

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=")
_VARIABLE = re.compile(r"\w+|[@*#?!$-]")
_DEFAULT = re.compile(r"(\w+):?([-=+?])(.*)", re.DOTALL)
_LONGEST_VALUE = 10_000
"""Maximum characters of a variable, as repeated doubling would exhaust memory."""
_DEEPEST = 50
"""Maximum nesting of branches and of defaults."""


class WordReader:
    """Reads words from a position of a script, and keeps the values of its variables.

    Args:
        text: the script.
        place: its name in errors.
        depth: number of enclosing branches and defaults.

    Raises:
        ConfigError: if there are too many of them.
    """

    def __init__(self, text: str, place: str, depth: int = 0) -> None:
        self.text, self.place, self.at = text.replace("\r\n", "\n"), place, 0
        self.values: Values = {}
        self.met: dict[str, None] = {}
        """Doubts about the word that is being read."""
        self.depth = 0
        self.deeper(depth)

    def deeper(self, levels: int = 1) -> None:
        """Count branches and defaults that are entered."""
        self.depth += levels
        if self.depth > _DEEPEST:
            raise ConfigError(f"{self.place}: more than {_DEEPEST} nested branches or defaults")

    def assigned(self) -> str | None:
        """Read ``name=value`` or ``name=(a b)`` and return the name; None if there is none."""
        match = _ASSIGNMENT.match(self.text, self.at)
        if match is None:
            return None
        name, more = match.groups()
        self.at = match.end()
        if self.text.startswith("(", self.at):
            self.at += 1
            values = list(self._items())
        else:
            values = [joined(self.word(splits=False))]
        before = self.values.get(name, []) if more else []
        short = [Word(value[:_LONGEST_VALUE], value.doubts) for value in [*before, *values]]
        self.values[name] = short[:1000]
        return name

    def _items(self) -> Iterator[Word]:
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
                yield from self.word(end=" \t\n)")
        raise ConfigError(f"{self.place}: a list that begins with ( is not closed")

    def word(self, end: str = " \t\n;&|<>()", splits: bool = True) -> list[Word]:
        """Read one word, quotes and variables resolved; ``"${NAME[@]}"`` and ``$TWO_WORDS`` give
        several.

        ``splits``: split at blanks of unquoted variables, as everywhere but in assignments.
        """
        begin, word = self.at, ""
        several: list[str] = []
        outer, self.met = self.met, {}
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
                word += "" if self.next() == "\n" else self.next()
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
        whole = [*several, word] if word or not several else several
        met, self.met = self.met, outer
        return [part if isinstance(part, Word) else Word(part, met) for part in whole]

    def _quoted(self) -> tuple[str, list[str]]:
        text = ""
        several: list[str] = []
        while self.next() != '"':
            here = self.text[self.at]
            self.at += 1
            if here == "\\" and self.next() in '"\\$`\n':
                text += "" if self.next() == "\n" else self.next()
                self.at += 1
            elif here in "$`":
                inner, found = self._expanded(here)
                text, several = text + inner, several + found
            else:
                text += here
        self.at += 1
        return text, several

    def _expanded(self, sign: str) -> tuple[str, list[str]]:
        """Expand what follows ``$``: a variable, a sum, a command; a list gives several words."""
        if sign == "`":
            return self._not_known(f"`{self._up_to('`')}`", "$(...)"), []
        if self.next(missing="") == "(":
            self.at += 1
            inner = self._balanced("(", ")")
            if inner.startswith("(") and inner.endswith(")"):
                return self._sum(inner[1:-1]), []
            return self._not_known(f"$({inner})", "$(...)"), []
        if self.next(missing="") == "{":
            self.at += 1
            return self._variable(self._balanced("{", "}"))
        match = _VARIABLE.match(self.text, self.at)
        if match is None:
            return "$", []
        self.at = match.end()
        return self._variable(match[0])

    def _variable(self, name: str) -> tuple[str, list[str]]:
        listed = re.fullmatch(r"(\w+)\[[@*]\]", name)
        if listed and listed[1] in self.values:
            return "", [*self.values[listed[1]]]
        if name in self.values:
            return self._known(name), []
        match = _DEFAULT.fullmatch(name)
        if match is None:
            return self._not_known(f"${name}"), []
        known = self._known(match[1])
        if known or match[2] in "+?":
            return known, []
        inner = WordReader(match[3], self.place, self.depth + 1)
        inner.values = self.values
        value = joined(inner.word(end="")) if match[3] else Word("")
        self.met |= dict.fromkeys(value.doubts)
        if match[2] == "=":
            self.values[match[1]] = [value]
        return value, []

    def _known(self, name: str) -> str:
        """Return the value of a variable, a list's first item; an empty text if it has none."""
        value = (self.values.get(name) or [Word("")])[0]
        self.met |= dict.fromkeys(value.doubts)
        return value

    def _sum(self, text: str) -> str:
        """Compute a sum of whole numbers and variables."""
        names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: self._known(m[1]) or "?", text)
        try:
            return str(computed(names))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return self._not_known(f"$(({text}))", "$((...))")

    def _not_known(self, what: str, shown: str | None = None) -> str:
        """Note what only a run would reveal; return its text, or ``shown`` in its place."""
        what = what if len(what) <= 60 else f"{what[:57]}..."
        self.met[f"{what}: only a run of the script would tell"] = None
        return what if shown is None else shown

    def _up_to(self, end: str) -> str:
        begin = self.at
        self.at = self.text.find(end, begin)
        if self.at < 0:
            line = self.text.count("\n", 0, begin) + 1
            raise ConfigError(f"{self.place}:{line}: an opening {end} is not closed")
        self.at += 1
        return self.text[begin : self.at - 1]

    def _balanced(self, opens: str, closes: str) -> str:
        begin, depth = self.at, 1
        while depth:
            depth += (self.next() == opens) - (self.next() == closes)
            self.at += 1
        return self.text[begin : self.at - 1]

    def next(self, missing: str | None = None) -> str:
        if self.at < len(self.text):
            return self.text[self.at]
        if missing is not None:
            return missing
        raise ConfigError(f"{self.place}: an opening quote or bracket is not closed")


def joined(words: list[Word]) -> Word:
    """Join several words to one."""
    return Word("".join(words), (doubt for word in words for doubt in word.doubts))
