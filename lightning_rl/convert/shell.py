"""Shell scripts, read and never run: the words of their commands, with variables expanded."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lightning_rl.convert.shell_branches import (
    Arm,
    Word,
    is_test,
    matches,
    reachable,
    settled,
    truth,
)
from lightning_rl.convert.shell_words import WordReader, joined
from lightning_rl.errors import ConfigError

_REDIRECTION = re.compile(r"\d*[<>]+[&|-]*[ \t]*")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n.*?^\s*\1\s*$", re.DOTALL | re.MULTILINE)
_BEFORE = {"export", "local", "readonly", "declare", "do", "{", "time", "exec", "nohup"}
_KEYWORD = re.compile(r"(case|if|then|elif|else|fi|esac)(?=[\s;&|()]|$)")
_ARM_ENDS = re.compile(r";;&|;;|;&")
_BETWEEN = re.compile(r"(?:\s|\\\n|#[^\n]*)*")
_IN = re.compile(r"\s+in\b(?:\s|#[^\n]*)*")
_OPENS_PATTERN = re.compile(r"(?:\s|#[^\n]*)*\(?[ \t]*")
_BETWEEN_PATTERNS = re.compile(r"[ \t|]*")
_LARGEST_SCRIPT = 1_000_000
_MOST_WORDS = 10_000


@dataclass
class Script:
    """The commands of a script; their words record what could not be read without running it."""

    commands: list[list[Word]] = field(default_factory=list)


def read_script(text: str, place: str) -> Script:
    """Split a script into its commands, with variables that it assigned before expanded.

    Of ``case`` and ``if``, the branch that the values select is read. If only a run would decide,
    :func:`.shell_branches.settled` chooses the variables, which are then in doubt, and the commands
    of all branches are read. Loops are read once.

    Raises:
        ConfigError: if quotes do not close, or the script is too large or too deeply nested.
    """
    if len(text) > _LARGEST_SCRIPT:
        raise ConfigError(f"{place}: {len(text):,} characters are too many for a script")
    return _Reader(_HEREDOC.sub("\n", text), place).read()


class _Reader(WordReader):
    def __init__(self, text: str, place: str) -> None:
        super().__init__(text, place)
        self.script = Script()

    def read(self) -> Script:
        while self.at < len(self.text):
            self._block()
        return self.script

    def _block(self, *ends: str) -> str:
        """Read commands up to one of ``ends``; return that, or an empty text at the end."""
        while self.at < len(self.text):
            self._skip(_BETWEEN)
            ended = _ARM_ENDS.match(self.text, self.at)
            keyword = _KEYWORD.match(self.text, self.at)
            if ended:
                self.at = ended.end()
                if ";;" in ends:
                    return ";;"
            elif keyword:
                begin, self.at = self.at, keyword.end()
                if keyword[1] in ends:
                    return keyword[1]
                {"case": self._case, "if": self._if}.get(keyword[1], lambda begin: None)(begin)
            else:
                self._chain()
        return ""

    def _chain(self) -> None:
        """Read a command, and those that ``&&`` and ``||`` join to it."""
        begin = self.at
        words, said = self._one_command()
        if not is_test(words):
            said = True  # it is taken to succeed
        while (sign := self.text[self.at : self.at + 2]) in ("&&", "||"):
            what = self._since(begin)
            self.at += 2
            self._skip(_BETWEEN)
            taken = said if sign == "&&" or said is None else not said
            self._settle([self._arm(taken, self._one_command)[0]], what)
        if self.next("") in ("\n", ";", "&", "|") and not _ARM_ENDS.match(self.text, self.at):
            self.at += 1

    def _if(self, begin: int) -> None:
        arms: list[Arm] = []
        end: object = "elif"
        what = ""
        while end == "elif":
            said = self._condition()
            what = what or self._since(begin)
            arm, end = self._arm(said, lambda: self._block("elif", "else", "fi"))
            arms.append(arm)
        if end == "else":
            arms.append(self._arm(True, lambda: self._block("fi"))[0])
        self._settle(arms, what)

    def _condition(self) -> bool | None:
        """Read up to ``then``; return the truth of a single test if it is known."""
        self._skip(_BETWEEN)
        _, said = self._one_command()
        alone = self.next("") in ("\n", ";")
        self._block("then")
        return said if alone else None

    def _case(self, begin: int) -> None:
        self._skip(_BETWEEN)
        subject, unsure = self._apart(" \t\n;")
        self._skip(_IN)
        what, end = self._since(begin), ""
        arms: list[Arm] = []
        while end != "esac" and self.at < len(self.text):
            self._skip(_OPENS_PATTERN)
            if self.text.startswith("esac", self.at):
                self.at += len("esac")
                break
            taken = self._fits(subject, unsure)
            arm, ended = self._arm(taken, lambda: self._block(";;", "esac"))
            arms.append(arm)
            end = str(ended)
        self._settle(arms, what)

    def _fits(self, subject: str, unsure: bool) -> bool | None:
        """Read an arm's patterns; return True if it is taken when none before it is, None if
        unknown.
        """
        found: list[bool | None] = []
        while self.next("") not in ("", ")"):
            pattern, doubtful = self._apart(" \t\n|)")
            fits = pattern == "*" or matches(subject, pattern)
            found.append(None if (unsure or doubtful) and pattern != "*" else fits)
            self._skip(_BETWEEN_PATTERNS)
            if self.next("") == "\n":
                raise ConfigError(f"{self.place}: a pattern of a case lacks its closing )")
        self.at += 1
        return True if True in found else None if None in found else False

    def _arm(self, taken: bool | None, read: Callable[[], object]) -> tuple[Arm, object]:
        """Read what follows with ``read`` into an arm, isolated from the present values."""
        values, script, level = self.values, self.script, self.depth
        self.values, self.script = values.copy(), Script()
        self.deeper()
        end = read()
        arm = Arm(taken, self.values, self.script.commands)
        self.values, self.script, self.depth = values, script, level
        return arm, end

    def _settle(self, arms: list[Arm], what: str) -> None:
        """Continue after branches with the values of the arm that is taken, or of those that may
        be.
        """
        possible = reachable([*arms, Arm(True, self.values)])
        for arm in possible:
            self.script.commands += arm.commands
        self.values = possible[0].values if len(possible) == 1 else settled(possible, what)

    def _one_command(self) -> tuple[list[Word], bool | None]:
        """Read one command into the script; return its words, and its truth as a condition."""
        words: list[Word] = []
        for group in self._command():
            words += group
            if len(words) > _MOST_WORDS:
                raise ConfigError(f"{self.place}: a command has more than {_MOST_WORDS:,} words")
        if words:
            self.script.commands.append(words)
        return words, None if any(word.doubts for word in words) else truth(words)

    def _command(self) -> Iterator[list[Word]]:
        """Yield the words up to the end of a command, each as the list it expands to."""
        begun = False
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in "\n;&|" or (not begun and _KEYWORD.match(self.text, self.at)):
                return
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif here in " \t()":
                begun = begun and here != ")"  # behind the name of a function, its body begins
                self.at += 1
            elif redirected := _REDIRECTION.match(self.text, self.at):
                self.at = redirected.end()
                self.word()
            elif here == "#":
                self.at = (self.text + "\n").find("\n", self.at)
            else:
                assigned = None if begun else self.assigned()
                if assigned is None:
                    words = self.word()
                    begun = begun or words[:1] not in [[name] for name in _BEFORE]
                    yield [] if not begun else words

    def _apart(self, end: str) -> tuple[str, bool]:
        """Read a word that belongs to no command; return it and whether it is in doubt."""
        word = joined(self.word(end, splits=False))
        return word, bool(word.doubts)

    def _since(self, begin: int) -> str:
        """Return the text as written, from there to here, as one line of at most 60 characters."""
        return " ".join(self.text[begin : self.at].split())[:60]

    def _skip(self, what: re.Pattern[str]) -> None:
        match = what.match(self.text, self.at)
        self.at = match.end() if match else self.at
