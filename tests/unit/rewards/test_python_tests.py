"""PythonTests: what a program can be asked; right ones pass, and none passes by a trick."""

import asyncio
import datetime

import pytest

from benchmarks.hostile.attacks import ATTACKS, HONEST, TESTS
from benchmarks.hostile.forgeries import FORGERIES
from lightning_rl.errors import ConfigError
from lightning_rl.rewards.calling import RewardFailure
from lightning_rl.rewards.rules import PythonTests, program_in

ADD = "def add(a, b):\n    return a + b\n"


def run(pool, **columns):
    return asyncio.run(pool(**columns))


@pytest.fixture(scope="module")
def python_tests():
    try:
        pool = PythonTests(workers=1, timeout_s=60)
    except ConfigError as error:
        pytest.skip(str(error))
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
        "assert f() == (1, 2)\nassert f().y == 2\nassert f()[0] == 1\nassert f() < (1, 3)",
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
    ],
)  # fmt: skip
def test_wrong_programs_and_what_cannot_be_compared_score_nothing(python_tests, program, tests):
    assert run(python_tests, completions=[program], tests=[tests]) == [0.0]


def require_unpaid(judge, names):
    """None of the programs is paid, and their worker judges the next as if nothing had been."""
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


def test_a_score_beyond_those_of_tests_is_none(python_tests, monkeypatch):
    monkeypatch.setattr(python_tests, "_grade", lambda sample: {"score": 1e6})
    (score,) = run(python_tests, completions=[ADD], tests=["assert True"])
    assert "returned 1000000.0; a test result is in" in score.reason


def test_programs_are_paid_whatever_runs_before_and_beside_them(monkeypatch):
    """24 honest ones between 15 attacks on what runs them; two are judged at a time."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the trainer's
    programs: list[str] = []
    for attack in ATTACKS.values():
        programs += [attack, HONEST]
    programs += [HONEST] * (24 - len(ATTACKS))
    pool = PythonTests(workers=2, timeout_s=60)
    scores = run(pool, completions=programs, tests=[TESTS] * len(programs))
    workers = [worker.running for worker in pool._idle]
    pool.close()
    assert scores == [0.0, 1.0] * len(ATTACKS) + [1.0] * (24 - len(ATTACKS))
    assert workers == [True, True]


def test_a_program_sees_no_process_of_this_machine(python_tests):
    """Only its judge, which is process 1 of its room, and itself."""
    program = (
        "import os\ndef others():\n"
        "    found = {int(p) for p in os.listdir('/proc') if p.isdigit()}\n"
        "    return os.getppid(), sorted(found - {1, os.getpid()})\n"
    )
    assert run(python_tests, completions=[program], tests=["assert others() == (1, [])"]) == [1.0]


def test_a_program_that_hangs_is_wrong(python_tests):
    pool = PythonTests(workers=1, timeout_s=0.2)
    assert run(pool, completions=["while True: pass"], tests=["assert True"]) == [0.0]
    pool.close()


def test_broken_tests_are_no_fault_of_the_program(python_tests):
    (score,) = run(python_tests, completions=[ADD], tests=["assert add(1, 2 == 3"])
    assert "SyntaxError" in score.reason
    (score,) = run(python_tests, completions=[ADD], asserts=["assert True"])
    assert "no column 'tests'; it has ['asserts']" in score.reason


def test_the_program_is_the_last_block_or_everything():
    assert program_in("a = 1") == "a = 1"
    assert program_in("```\nold\n```\nbetter:\n```py\nnew\n```") == "new\n"
    assert program_in([{"role": "assistant", "content": "```python\nx\n```"}]) == "x\n"
    assert program_in("```\nold\n```</think>\n```\nnew\n```") == "new\n"
    assert program_in("<think>\n```\nold\n```") == program_in("a = 1", opened_thought=True) == ""
