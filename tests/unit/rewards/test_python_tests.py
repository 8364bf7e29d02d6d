"""Test PythonTests: what a program can be asked; right ones pass, and none passes by a trick."""

import asyncio
import datetime
import os
import subprocess
import sys

import pytest

from lightning_rl.errors import ConfigError
from lightning_rl.rewards import program_judge, sandbox
from lightning_rl.rewards.calling import RewardFailure
from lightning_rl.rewards.rules import PythonTests, program_in
from tests.support.hostile.attacks import ATTACKS, HONEST, TESTS
from tests.support.hostile.forgeries import FORGERIES
from tests.support.sandbox import need_sandbox

ADD = "def add(a, b):\n    return a + b\n"


def run(pool, **columns):
    return asyncio.run(pool(**columns))


@pytest.fixture(scope="module")
def python_tests():
    need_sandbox()
    pool = PythonTests(workers=1, timeout_s=60)
    yield pool
    pool.close()


STACK = """
class Stack:
    def __init__(self): self.held = []
    def push(self, x): self.held.append(x)
    def pop(self): return self.held.pop()
    def empty(self): return not self.held
    def __len__(self): return len(self.held)
"""
POINT = "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
RIGHT = {
    "an assertion": (ADD, "assert add(1, 2) == 3"),
    "in a fenced block": (f"Sure!\n```python\n{ADD}```\nDone.", ["assert add(1, 2) == 3"]),
    "a function that checks": (ADD, f"{CHECK}\ncheck(add)"),
    "a function that checks, in a text of its own": (ADD, [CHECK, "check(add)"]),
    "unittest": (
        ADD,
        "import unittest\nclass Tests(unittest.TestCase):\n    def test(self):\n"
        "        self.assertEqual(add(1, 2), 3)\n"
        "        with self.assertRaises(TypeError): add(1)\n"
        "suite = unittest.defaultTestLoader.loadTestsFromTestCase(Tests)\n"
        "assert unittest.TextTestRunner().run(suite).wasSuccessful()",
    ),
    "an error": (
        "def f(x):\n    raise ValueError('no')",
        "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'no'\n"
        "else:\n    assert False",
    ),
    "keywords": ("def f(*a, **k): return a, k", "assert f(1, x=(2,)) == ((1,), {'x': (2,)})"),
    "a class": (
        STACK,
        "s = Stack()\ns.push([1])\ns.push('b')\nassert len(s) == 2\nassert s.held == [[1], 'b']\n"
        "assert s.pop() == 'b'\nassert s.pop() == [1]\nassert s.empty()\n"
        "try:\n    s.pop()\nexcept IndexError:\n    pass\nelse:\n    assert False",
    ),
    "objects that are given back": (
        f"{STACK}def top(stack): return stack.held[-1]",
        "s = Stack()\ns.push(4)\nassert top(s) == 4",
    ),
    "objects that are added": (
        "class V:\n    def __init__(self, x): self.x = x\n"
        "    def __add__(self, other): return V(self.x + other.x)\n",
        "assert (V(1) + V(2)).x == 3",
    ),
    "a named tuple": (
        f"{POINT}def f(): return Point(1, 2)",
        "assert f() == (1, 2)\nassert f()[0] == 1\nassert f() < (1, 3)\nassert Point(1, 2).y == 2",
    ),
    "contents of subclasses": (
        "import collections, enum\nclass Side(enum.IntEnum): LEFT = 1\n"
        "def f(x): return collections.Counter(x)\ndef g(): return [Side.LEFT, collections.deque()]",
        "assert f('aab') == {'a': 2, 'b': 1}\nassert type(f('')) is dict\n"
        "assert g()[0] == 1 and len(g()[1]) == 0",
    ),
    "a class of a built-in one": (
        "from collections import OrderedDict\nclass LRUCache(OrderedDict):\n"
        "    def put(self, k, v): self[k] = v\n    def get(self, k): return self.pop(k, -1)\n",
        "c = LRUCache()\nc.put(1, 5)\nassert len(c) == 1\n"
        "assert c.get(1) == 5\nassert c.get(1) == -1",
    ),
    "LeetCode's Solution": (
        "class Solution:\n    def twoSum(self, a: list, t: int):\n"
        "        return {frozenset(a) - {t - x} and x for x in a}",
        "assert Solution().twoSum([2, 7], 9) == {2, 7}",
    ),
    "a linked list": (
        "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
        "def f(n): return n.next or n",
        "n = Node(1)\nn.next = Node(2)\nassert f(n).v == 2\nassert f(f(n)).next is None",
    ),
    "MBPP's rows": (
        "def Extract(rows): return [row[0] for row in rows]\n"
        "def is_Even(n): return n % 2 == 0\n",
        ["assert Extract([[1, 2], [3]]) == [1, 3]", "assert is_Even(2) == True"],
    ),
    "text in, text out": (
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nif __name__ == '__main__':\n"
        "    sys.exit()",
        "assert output_of('1 2\\n').split() == ['3']\nassert output_of('40 2') == '42\\n'",
    ),
    "a generator": (
        "def f(n):\n    yield from range(n)",
        "assert list(f(3)) == [0, 1, 2]\nassert 2 in f(3)\nassert 3 not in f(3)\n"
        "g = f(1)\nassert next(g) == 0\nassert next(g, None) is None",
    ),
    "a function that is given": ("def f(g, x): return [g(y) for y in x]",
                                 "assert f(lambda y: y * 2, [1, 2]) == [2, 4]"),
    "a decorator": (
        "def twice(f):\n    return lambda x: f(f(x))",
        "seen = []\n@twice\ndef next_one(x):\n    seen.append(x)\n    return x + 1\n"
        "assert next_one(3) == 5\nassert seen == [3, 4]",
    ),
    "in place": (
        "def f(x):\n    x.sort()\ndef g(grid):\n    grid[1][0] = 7\n"
        "def h(d):\n    d.pop('a'); d['b'] = [1]\n",
        "x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]\ngrid = [[1], [2, 3]]\nrow = grid[1]\ng(grid)\n"
        "assert row == [7, 3]\nassert grid[1] is row\nd = {'a': 1}\nh(d)\nassert d == {'b': [1]}",
    ),
    "kinds of data": (
        "import datetime, decimal, fractions\ndef f(x): return x",
        "import datetime, decimal, fractions\n"
        "for x in (None, True, 1.5, 10**400, -2**53, b'a', 1j, (), "
        "(1, [2]), {1: {2}}, frozenset([1]), range(3), decimal.Decimal('0.1'), "
        "fractions.Fraction(1, 3), datetime.date(2024, 2, 29), datetime.timedelta(1, 2, 3), "
        "datetime.datetime(2024, 1, 2, 3), float('inf'), '\\ud800'):\n"
        "    y = f(x)\n    assert y == x and type(y) is type(x), x\nassert f(float('nan')) != 0",
    ),
    "what it prints": (
        "def f(x): print(x)",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    f(5)\n"
        "assert out.getvalue() == '5\\n'",
    ),
    "a module that the tests do not import": (
        "import math\ndef area(r): return math.pi * r * r",
        "assert math.isclose(area(1), math.pi)",
    ),
    "numpy's numbers and arrays": (
        "import numpy as np\ndef f(x): return np.array(x)\ndef total(x): return np.sum(x)",
        "import numpy as np\nassert total([1, 2]) == 3\nassert abs(total([0.5]) - 0.5) < 1e-9\n"
        "assert np.allclose(f([1, 2]), [1, 2])",
    ),
    "a dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int",
        "assert P(3).x == 3\nassert repr(P(3)) == 'P(x=3)'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(python_tests, name):
    program, tests = RIGHT[name]
    assert run(python_tests, completions=[program], tests=[tests]) == [1.0]


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]),
        ("def add(a, b) return a", "assert add(1, 2) == 3"),
        ("\0", "assert add(1, 2) == 3"),
        ("x = bytearray(10**10)", "assert len(x) == 10**10"),
        ("def f(x): x.append(f); return x", "assert f([]) == []"),
        ("x = []\nx.append(x)", "assert x == []"),
        ("def f(x):\n    x.sort()\n    return x", "x = [2, 1]\nassert f(x) == [2, 1]"),
        (POINT, "assert Point(1, 2) == Point(1, 2)"),
        ("x = input()", "try:\n    x\nexcept EOFError:\n    pass"),
        ("pass", "try:\n    add(1, 2)\nexcept Exception:\n    pass"),
        ("print(int(input()))\nraise ValueError", "assert output_of('3') == '3\\n'"),
        ("def f(x): x[0] = (2, 2)", "x = [(1, 1)]\nf(x)\nassert x == [(1, 1)]"),
    ],
)  # fmt: skip
def test_wrong_programs_and_what_cannot_be_compared_score_nothing(python_tests, program, tests):
    assert run(python_tests, completions=[program], tests=[tests]) == [0.0]


LIAR = """
import datetime, decimal, fractions
from collections import deque
def of(method, told, wrong, base):
    lies = {method: lambda *args, **named: told}
    if not base:
        return type("Liar", (), lies)()
    liar = type("Liar", (type(wrong),), lies)
    try:
        return liar(wrong)
    except TypeError:
        return liar(*wrong.__reduce__()[1])
"""
LIED_TO = """
import builtins, datetime, decimal, fractions, operator
from collections import deque
day, second = datetime.datetime(2024, 1, 2, 3), datetime.timedelta(0, 1)
pairs = [
    ("three", "3x"), (b"ab", b"c"), (bytearray(b"ab"), bytearray()), (3, 4), (0.5, 2.5), (1j, 2j),
    ([3], [4, 5]), ((3,), (4, 5)), ({3}, {4, 5}), (frozenset([3]), frozenset()), ({"a": 3}, {}),
    (deque([3]), deque()), (range(3), range(5)), (decimal.Decimal(3), decimal.Decimal(4)),
    (fractions.Fraction(1, 3), fractions.Fraction(2)), (second, second * 2),
    (day, day.replace(year=2025)), (day.date(), datetime.date(2025, 1, 1)),
]
values = {type(right) for right, _ in pairs} | {bool, type(None)}
def asked(value, name, args):
    called = getattr(operator, name, None) or getattr(builtins, name.strip("_"), None)
    if name.startswith("__") and called:
        return called(value, *args)
    return getattr(value, name)(*args)
paid, tried = set(), 0
for right, wrong in pairs:
    for name in dir(right):
        for args in ((), (right,), ("a",), (0,), (right, right)):
            try:
                told = asked(right, name, args)
                if type(told) not in values or asked(wrong, name, args) == told:
                    continue
            except Exception:
                continue
            for base in (True, False):
                tried += 1
                try:
                    if asked(of(name, told, wrong, base), name, args) == told:
                        paid.add((type(right), name))
                except Exception:
                    pass
assert tried > 500 and of("find", 0, "three", True) == "three"
"""


def test_no_method_of_an_object_speaks_for_a_value(python_tests):
    """Each method of each type, in a subclass and in a class of its own, that knows the answer.

    Compared in one process, as a naive judge does, hundreds of them are believed.
    """
    names = {}
    exec(f"{LIAR}\n{LIED_TO}", names)
    assert len(names["paid"]) > 300
    assert run(python_tests, completions=[LIAR], tests=[f"{LIED_TO}assert not paid"]) == [1.0]


def require_unpaid(judge, names):
    """Require that no program is paid, and that the worker judges the next as if nothing was."""
    programs = [FORGERIES[name] for name in names]
    scores = run(
        judge,
        completions=[forgery.program for forgery in programs] + [ADD],
        tests=[forgery.tests for forgery in programs] + ["assert add(1, 2) == 3"],
    )
    assert scores.pop() == 1.0
    assert {n: s for n, s in zip(names, scores, strict=True) if s != 0.0} == {}


def test_no_program_that_answers_nothing_is_paid(python_tests):
    require_unpaid(python_tests, [name for name in FORGERIES if not name.endswith("hangs")])


@pytest.mark.slow
def test_no_program_that_hangs_is_paid():
    need_sandbox()
    pool = PythonTests(workers=2, timeout_s=4)
    require_unpaid(pool, [name for name in FORGERIES if name.endswith("hangs")])
    pool.close()


def test_tests_that_no_program_could_fail_are_refused(python_tests):
    (score,) = run(python_tests, completions=["pass"], tests=["assert True"])
    assert score == RewardFailure(
        "BadTestsError: the tests never use the program; use a name that it defines"
    )
    given = "class Node: pass\nassert f(Node())"
    (score,) = run(python_tests, completions=["def f(x): return 1"], tests=[given])
    assert "pass the program a Node; pass only plain data, functions" in score.reason
    for tests in (None, 3, ["assert f()", 3], datetime.date(2024, 1, 1)):
        (score,) = run(python_tests, completions=[ADD], tests=[tests])
        assert "must be a string or a list of strings" in score.reason


def test_programs_are_paid_whatever_runs_before_and_beside_them(monkeypatch):
    """24 honest ones between 15 attacks on what runs them; two are judged at a time."""
    need_sandbox()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the trainer's
    programs: list[str] = []
    for attack in ATTACKS.values():
        programs += [attack, HONEST]
    programs += [HONEST] * (24 - len(ATTACKS))
    pool = PythonTests(workers=2, timeout_s=60)
    scores = run(pool, completions=programs, tests=[TESTS] * len(programs))
    pool.close()
    assert scores == [0.0, 1.0] * len(ATTACKS) + [1.0] * (24 - len(ATTACKS))


def test_a_program_sees_no_process_of_this_machine(python_tests):
    """A program sees only itself and its judge, which is process 1 of its sandbox."""
    program = (
        "import os\ndef others():\n"
        "    found = {int(p) for p in os.listdir('/proc') if p.isdigit()}\n"
        "    return os.getppid(), sorted(found - {1, os.getpid()})\n"
    )
    assert run(python_tests, completions=[program], tests=["assert others() == (1, [])"]) == [1.0]


REACHES = {
    "kills what it may": ("os.kill(-1, 9)", ProcessLookupError),
    "writes a file of Python's": ("open(os.__file__, 'a')", OSError),
    "writes beside its directory": ("open('/written', 'w')", OSError),
    "writes among the devices": ("open('/dev/written', 'w')", OSError),
    "connects to this machine": ("socket.create_connection(('127.0.0.1', 80), 1)", OSError),
    "reads a file of the user's": ("open({file!r})", FileNotFoundError),
    "reads the trainer's environment": ("os.environ['SECRET']", KeyError),
    "reads its judge's environment": ("open('/proc/1/environ').read()", PermissionError),
    "opens its judge's files": ("[open(f'/proc/1/fd/{{n}}') for n in range(9)]", PermissionError),
}


@pytest.mark.parametrize("what", REACHES)
def test_a_sandbox_keeps_from_network_files_processes_and_secrets(
    what, python_tests, tmp_path, monkeypatch
):
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / "answers").write_text("42")
    expression, error = REACHES[what]
    text = expression.format(file=str(tmp_path / "answers"))
    program = f"import os, socket\ndef reach():\n    {text}\n"
    tests = (
        f"try:\n    reach()\nexcept {error.__name__}:\n    pass\n"
        "else:\n    raise AssertionError('reached')"
    )
    assert run(python_tests, completions=[program], tests=[tests]) == [1.0]


def test_without_a_sandbox_there_are_limits(tmp_path, monkeypatch):
    """Nothing of what a program started is left, either; each has an empty directory."""
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    pool = PythonTests(workers=1, timeout_s=60, memory_mb=256, sandbox=False)
    alone = "import os\ndef files(): return os.listdir(), open('left', 'w').close()\n"
    leaves = ["sh", "-c", f"sleep 86399; : {tmp_path}"]
    started = (
        f"import subprocess\nleft = subprocess.Popen({leaves}, start_new_session=True)\n"
        "def pid(): return left.pid\n"
    )
    completions = [alone, alone, "x = bytearray(2**30)", started]
    tests = ["assert files() == ([], None)"] * 2 + ["assert len(x) == 2**30", "assert pid() > 1"]
    scores = run(pool, completions=completions, tests=tests)
    pool.close()
    assert scores == [1.0, 1.0, 0.0, 1.0]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True)
    assert str(tmp_path) not in running.stdout


def test_a_machine_without_a_sandbox_is_refused_at_once(monkeypatch):
    """Nothing runs unprotected instead; the message says how to get one."""
    sandbox._room.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(sandbox.shutil, "which", lambda name: None)
        with pytest.raises(ConfigError, match=r"apt-get install bubblewrap, .* sandbox: false"):
            PythonTests()
        patch.setattr(sandbox.shutil, "which", lambda name: "/bin/false")
        with pytest.raises(ConfigError, match=r"cannot make a sandbox here .* user namespaces"):
            PythonTests()
    sandbox._room.cache_clear()


@pytest.mark.slow
def test_a_container_that_hides_parts_of_proc_has_a_sandbox_without_it():
    """The container permits no new /proc, which is found by trying, in such a user namespace."""
    need_sandbox()
    script = (
        "import asyncio\nfrom lightning_rl.rewards.rules import PythonTests\n"
        "program = 'import os\\ndef seen(): return os.listdir(\"/proc\")'\n"
        "tests = 'assert seen() == []'\n"
        "print(asyncio.run(PythonTests(timeout_s=60)(completions=[program], tests=[tests])))\n"
    )
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    hidden = f'mount -t tmpfs none /proc/tty && exec {" ".join(inside)} "$0" -c "$1"'
    done = subprocess.run(
        [*inside, "sh", "-c", hidden, sys.executable, script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[1.0]\n", done.stderr


def test_a_process_that_does_not_start_is_no_fault_of_its_program(monkeypatch):
    monkeypatch.setattr(program_judge, "sandboxed", lambda *_: ["sh", "-c", "echo no room; exit 1"])
    pool = PythonTests(workers=1, timeout_s=60)
    (score,) = run(pool, completions=[ADD], tests=["assert add(1, 2) == 3"])
    pool.close()
    assert score == RewardFailure("its process did not start: no room")


def test_a_program_that_hangs_is_wrong(python_tests):
    pool = PythonTests(workers=1, timeout_s=4)
    assert run(pool, completions=["while True: pass"], tests=["f()"]) == [0.0]
    pool.close()


def test_broken_tests_are_no_fault_of_the_program(python_tests):
    (score,) = run(python_tests, completions=[ADD], tests=["assert add(1, 2 == 3"])
    assert "SyntaxError" in score.reason
    with pytest.raises(KeyError, match=r"no column 'tests'; it has \['asserts'\]"):
        run(python_tests, completions=[ADD], asserts=["assert True"])


def test_the_program_is_the_last_block_or_everything():
    assert program_in("a = 1") == "a = 1"
    assert program_in("```\nold\n```\nbetter:\n```py\nnew\n```") == "new\n"
    assert program_in([{"role": "assistant", "content": "```python\nx\n```"}]) == "x\n"
    assert program_in("```\nold\n```</think>\n```\nnew\n```") == "new\n"
    assert program_in("<think>\n```\nold\n```") == program_in("a = 1", opened_thought=True) == ""
