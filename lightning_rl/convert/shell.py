"""Shell scripts: Bash evaluates them in a sandbox that has no programs, and records commands."""

import fcntl
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_rl.errors import ConfigError
from lightning_rl.rewards.sandbox import emptied
from lightning_rl.run.processes.child import Child

_SECONDS = 10.0
_MOST_RUNS = 6
_MOST_WORDS = 10_000
_LARGEST_SCRIPT = 1_000_000
_MOST_PRINTED = 1_000_000
_MOST_FILES = 200
INSTEAD = "give the command itself: lightning-rl convert -- python3 -m verl.trainer.main_ppo ..."
SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")

_RECORDED = (
    *("python", "python3", "torchrun", "deepspeed", "accelerate", "trl"),
    *("ray", "uv", "srun"),
)
_REAL = ("basename", "dirname", "mkdir", "readlink", "realpath", "seq", "uname")
"""Programs that only their arguments decide: one that reads from another would lose its mark."""
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store")
_KERNEL = ("/dev", "/proc", "/sys")

_WRAPPER = """
ulimit -f 4096 -t 4 -u 256 -v 131072
cd -- "${1%/*}"
exec 3>&2 2> /dev/null
BASH_ENV=$0 bash -- "$@" > /dev/null 2>&3 3>&-
case $? in  # SIGABRT, SIGKILL, SIGSEGV, SIGXCPU, SIGXFSZ
    134 | 137 | 139 | 152 | 153) echo 'bash: it ended at 4 s, 128 MiB or 4 MiB written' >&3 ;;
esac
SECONDS=0
until ((SECONDS > 2)) || ! kill -0 -1; do :; done  # what runs in the background
"""
# All commands succeed, and print a mark; the subshell protects the script's own variables.
_PRELUDE = """
command_not_found_handle() {
    case $1 in
        sh) shift; bash "$@"; return ;;
        *.sh) [[ ! -r $1 ]] || { bash "$@"; return; } ;;
    esac
    _record "$@"
    # Whoever writes to a program would fail if that did not read.
    [[ ! -p /dev/stdin ]] || while IFS= read -r _; do :; done
}
_record() (
    trap '' PIPE
    _unset=
    for _name in ${_unassigned[@]+"${_unassigned[@]}"}; do
        [[ -v $_name ]] || _unset+=" $_name"
    done
    for _word in "$#" "$@" "$_unset"; do printf '%s %s\\0' "$BASHPID" "$_word" >&"$_TO"; done
    (($# == 0)) || printf '$(%s)\\n' "${1##*/}"
    exit 0
) 2> /dev/null
trap _record EXIT
"""
_MESSAGE = re.compile(r"(?!\+).*?: (?:line (\d+): )?(.+)")
_MISSING = re.compile(r"(cd: )?(.+?): (?:.*: )?(No such file or directory|cannot execute.*)")
_UNWRITABLE = re.compile(r"(.+?): (?:Read-only file system|Permission denied)")
_UNBOUND = re.compile(r"([A-Za-z_]\w*): unbound variable")
_PATH = re.compile(r"[\w.+@~/-]+")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*|\d))")


class Word(str):
    """A word of a command, with a sentence for each part that only a run would tell."""

    doubts: tuple[str, ...] = ()


@dataclass
class Script:
    """The record of a script's run.

    Args:
        commands: the words of the commands that were asked for.
        others: names of other commands that it called, which were not run.
        unset: variables that it read and nothing set.
        messages: what Bash complained about.
    """

    commands: list[list[Word]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def run_script(path: Path, wanted: Callable[[Sequence[str]], object]) -> Script:
    """Let Bash evaluate a script, and record the commands that ``wanted`` is true of.

    Nothing but Bash runs: all else succeeds, and prints its name as a mark. The script sees the
    files that its text names, and sees itself write. A second run gives texts to the variables that
    nothing has set, which shows the words that depend on them.

    Raises:
        ConfigError: if the script is too large, or there is no Bash or no sandbox here.
    """
    path = path.absolute()
    text = path.read_bytes().decode()
    if len(text) > _LARGEST_SCRIPT:
        raise ConfigError(f"{path}: {len(text):,} characters are too many for a script")
    if "\r\n" in text:
        raise ConfigError(f"{path}: Bash reads no lines that end with CR LF; run dos2unix on it")
    names = list(dict.fromkeys(a or b for a, b in _VARIABLE.findall(text)))
    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(path, text, Path(folder), [n for n in names if not n.isdigit()])
        script, unset = runs.script(0, wanted)
        positions = [int(name) for name in names if name.isdigit() and name != "0"]
        script.unset = [*unset, *(str(n) for n in sorted(positions))]
        if script.unset and script.commands:
            runs.marks |= {name: f"${name}" for name in unset}
            marked, _ = runs.script(max(positions, default=0), wanted)
            _mark(script, marked)
    mark = re.compile(r"\$\([^()]*\)|" + _marks(script.unset))
    for word in (word for words in script.commands for word in words):
        word.doubts = tuple(
            f"{m[0]}: only a run of the script would tell" for m in mark.finditer(word)
        )
    return script


def _marks(names: Sequence[str]) -> str:
    return rf"\$(?:{'|'.join(names)})\b" if names else r"(?!)"


def _mark(script: Script, marked: Script) -> None:
    """Take the words of a run in which unset variables had marks, if all else is the same."""
    marks = re.compile(_marks(script.unset))
    for at, words in enumerate(script.commands):
        other = marked.commands[at] if at < len(marked.commands) else []
        one, two = ([w for w in (marks.sub("", w) for w in both) if w] for both in (words, other))
        if one == two:
            script.commands[at] = other
        else:
            names = ", ".join(f"${name}" for name in script.unset)
            script.messages.append(f"it does something else where these are set: {names}")


class _Runs:
    """Runs of one script, each of which shows it more of what those before it missed."""

    def __init__(self, path: Path, text: str, folder: Path, names: Sequence[str]) -> None:
        bash = shutil.which("bash")
        if bash is None:
            raise ConfigError(f"{path}: Bash evaluates it, and there is none here; {INSTEAD}")
        self.path, self.folder, self.bash, self.names = path, folder, bash, names
        self.files = dict.fromkeys(_files_of(text, path.parent))
        self.folders: dict[str, None] = {}
        self.marks: dict[str, str] = {}
        self.functions: dict[str, None] = dict.fromkeys(_RECORDED)
        programs = {bash, os.path.realpath(bash), "/bin/bash", "/usr/bin/bash"}
        (folder / "bin").mkdir()
        for name, program in (("bash", bash), *((name, shutil.which(name)) for name in _REAL)):
            if program is not None:
                (folder / "bin" / name).symlink_to(os.path.realpath(program))
                programs.add(os.path.realpath(program))
        for name in _RECORDED:  # for exec, which sees no functions
            recorder = folder / "bin" / name
            recorder.write_text(f'#!{bash}\n_unassigned=()\n_record {name} "$@"\ntrap EXIT\n')
            recorder.chmod(0o755)
        beside = str(Path(os.path.realpath(bash)).parents[1] / "lib")
        self.shown = [*_LIBRARIES, beside, "/etc/ld.so.cache", *sorted(programs), str(folder)]

    def script(
        self, arguments: int, wanted: Callable[[Sequence[str]], object]
    ) -> tuple[Script, list[str]]:
        """Run the script until it misses nothing that it can be shown; return also what was unset.

        Args:
            arguments: how many arguments it gets, the first of which is ``$1``.
            wanted: chooses commands.
        """
        for _ in range(_MOST_RUNS):
            records, messages, in_time = self._run(arguments)
            before = self._known()
            for _, message in messages:
                self._learn(message)
            if not in_time or self._known() == before:
                break
        result = Script(messages=[f"line {n}: {text}" if n else text for n, text in messages])
        result.messages = [text[:160] for text in dict.fromkeys(result.messages)][:5]
        if not in_time:
            result.messages.append(f"the script did not end within {_SECONDS:g} s")
        unset = [*self.marks]
        for *words, missing in records:
            if len(words) > _MOST_WORDS:
                raise ConfigError(f"{self.path}: a command has more than {_MOST_WORDS:,} words")
            if wanted(words):
                result.commands.append([Word(word) for word in words])
            elif words:
                result.others.append(words[0])
            if wanted(words) or not words:
                unset += missing.split()
        result.others = sorted(set(result.others))  # those of a pipe come in any order
        return result, list(dict.fromkeys(unset))

    def _known(self) -> list[list[str]]:
        return [[*known] for known in (self.files, self.folders, self.functions, self.marks)]

    def _run(self, arguments: int) -> tuple[list[list[str]], list[tuple[str, str]], bool]:
        """Return the words of each command and what was unset then, messages, and if it ended."""
        functions = (
            f'function {name} {{ _record {name} "$@"; }}\n'
            if name in _RECORDED
            else f'function {name} {{ command_not_found_handle {name} "$@"; }}\n'
            for name in self.functions
        )
        with tempfile.TemporaryFile() as file:
            descriptor = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD, 100)  # no script closes it
            prelude = self.folder / "prelude"
            prelude.write_text(
                f"_TO={descriptor} _unassigned=({shlex.join(self.names)})\n"
                f"{_PRELUDE}{''.join(functions)}"
            )
            command = [self.bash, "-c", _WRAPPER, str(prelude), str(self.path)]
            command += [f"${n}" for n in range(1, arguments + 1)]
            known = {n: os.environ[n] for n in ("HOME", "USER") if n in os.environ}
            env = known | self.marks | {"PATH": str(self.folder / "bin"), "LC_ALL": "C.UTF-8"}
            try:
                shown = [*self.shown, *self.files, str(self.path)]
                command = emptied(command, shown, [*self.folders])
                child = Child(command, env, log=True, pass_fds=[descriptor], keeper=False)
            except ConfigError as error:
                raise ConfigError(
                    f"{self.path}: a sandbox evaluates it: {error}; or {INSTEAD}"
                ) from error
            finally:
                os.set_inheritable(descriptor, False)
            try:
                in_time = child.ended_within(_SECONDS)
            finally:
                child.kill()
                os.close(descriptor)
            file.seek(0)
            records = list(_records(file.read()))
        printed = child.printed(_MOST_PRINTED).decode(errors="replace").splitlines()
        found = (
            _MESSAGE.fullmatch("".join(c for c in line if c.isprintable())) for line in printed
        )
        return records, [(match[1] or "", match[2]) for match in found if match], in_time

    def _learn(self, message: str) -> None:
        """Show at the next run what a complaint is about: a file, a directory or a command."""
        if unwritable := _UNWRITABLE.fullmatch(message):
            self.files.pop(self._absolute(unwritable[1]), None)
        if unbound := _UNBOUND.fullmatch(message):
            self.marks[unbound[1]] = f"${unbound[1]}"
        missing = _MISSING.fullmatch(message)
        if missing is None or self._absolute(missing[2]).startswith(_KERNEL):
            return
        path = self._absolute(missing[2])
        if missing[1]:
            self.folders[path] = None
        elif path not in self.files and _readable(path, self.path.parent):
            self.files[path] = None
        else:
            self.folders[os.path.dirname(path)] = None
            if "/" in missing[2] and _PATH.fullmatch(missing[2]):
                self.functions[missing[2]] = None

    def _absolute(self, path: str) -> str:
        return os.path.normpath(self.path.parent / path)


def _files_of(text: str, folder: Path) -> Iterable[str]:
    """Yield the files that a text names, also behind a variable: ``$DIR/env.sh``."""
    words = dict.fromkeys(_PATH.findall(text))
    bases = (str(folder), os.path.expanduser("~"), "/")
    found = (
        os.path.normpath(os.path.join(base, word.lstrip("~/"))) for word in words for base in bases
    )
    files = (path for path in found if _readable(path, folder))
    return [path for path, _ in zip(files, range(_MOST_FILES), strict=False)]


def _readable(path: str, folder: Path) -> bool:
    """Return True for a file that is no program, and lies in the folder or is open to everybody."""
    try:
        mode = os.stat(path).st_mode if not path.startswith(_KERNEL) else 0
    except (OSError, ValueError):  # ValueError: a zero byte
        return False
    shared = mode & stat.S_IROTH or path.startswith(f"{folder}/")
    return bool(stat.S_ISREG(mode) and shared) and (path.endswith(SUFFIXES) or not mode & 0o111)


def _records(written: bytes) -> Iterator[list[str]]:
    """Yield what the recorders wrote, word by word: several may write at the same time."""
    open_: dict[str, tuple[int, list[str]]] = {}
    for chunk in written.split(b"\0")[:-1]:
        process, _, word = chunk.decode(errors="replace").partition(" ")
        if process not in open_:
            open_[process] = (int(word) + 1 if word.isdecimal() else 1, [])
            continue
        count, words = open_[process]
        words.append(word)
        if len(words) == count:
            yield open_.pop(process)[1]
