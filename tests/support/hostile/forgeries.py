"""Programs that answer nothing, and want to be paid all the same: by tests of ``add`` and of more.

Each is run with :data:`TESTS`, or with tests of its own.
"""

from typing import NamedTuple

TESTS = "assert add(1, 2) == 3\nassert add(40, 2) == 42\n"


class Forgery(NamedTuple):
    program: str
    tests: str = TESTS


_ALWAYS = """
class Always{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return {ne}
    def __bool__(self): return True
    def __hash__(self): return 0
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return 0.0
    __rsub__ = __abs__ = __sub__
    def __len__(self): return 3
def add(a, b):
    return Always({value})
"""


def _always(base: str = "", value: str = "", tests: str = TESTS, ne: bool = False) -> Forgery:
    return Forgery(_ALWAYS.format(base=base, value=value, ne=ne), tests)


_LIES = """
class Lies({base}):
    def {method}(self, *others): return {said}
    __hash__ = object.__hash__
def add(a, b):
    return Lies({value})
"""
LYING = {
    f"a {base} whose {method} lies": Forgery(
        _LIES.format(base=base, value=value, method=method, said=said), f"assert {test}\n"
    )
    for base, value, method, said, test in (
        ("int", "7", "__eq__", "True", "add(1, 2) == 3"),
        ("int", "9", "__sub__", "0", "add(1, 2) - 3 == 0"),
        ("str", "'x'", "__eq__", "True", "add(1, 2) == 'three'"),
        ("str", "'x'", "replace", "''", "add(1, 2).replace('three', '') == ''"),
        ("str", "'x'", "find", "0", "add(1, 2).find('three') == 0"),
        ("str", "''", "startswith", "True", "add(1, 2).startswith('three')"),
        ("list", "", "__eq__", "True", "add(1, 2) == [3]"),
        ("list", "[9]", "index", "0", "add(1, 2).index(3) == 0"),
        ("tuple", "(9,)", "count", "1", "add(1, 2).count(3) == 1"),
        ("set", "{9}", "__eq__", "True", "{3} == add(1, 2)"),
        ("set", "{9}", "union", "others[0]", "add(1, 2).union({3}) == {3}"),
        ("set", "{9}", "symmetric_difference", "set()", "not add(1, 2).symmetric_difference({3})"),
        ("frozenset", "{9}", "__xor__", "set()", "not add(1, 2) ^ {3}"),
        ("dict", "", "__eq__", "True", "{'sum': 3} == add(1, 2)"),
        ("dict", "", "__contains__", "True", "'sum' in add(1, 2)"),
        ("dict", "", "__getitem__", "3", "add(1, 2)['sum'] == 3"),
    )
}
"""Values of plain types but for one method that says what pleases; each is worth nothing."""

_ENDS = "def add(a, b):\n    import os, sys\n    {}\n"
_WRITES = """
import os
for fd in range(3, 256):
    try:
        os.write(fd, {data})
    except OSError:
        pass
{after}
"""
_VALUE = b'{"value": true, "changed": [], "score": 1.0}'
_MESSAGE = _VALUE + b"\n"

FORGERIES: dict[str, Forgery] = {
    **LYING,
    "nothing": Forgery("pass"),
    "another name": Forgery("def sub(a, b):\n    return a - b\n"),
    "a wrong answer": Forgery("def add(a, b):\n    return a - b\n"),
    # ------------------------------------------------ changes Python
    "replaces builtins.exec": Forgery("import builtins\nbuiltins.exec = lambda *_: None\n"),
    "replaces exec and compile in all frames": Forgery(
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    frame.f_globals['exec'] = frame.f_globals['compile'] = lambda *a, **k: None\n"
        "    frame.f_globals['add'] = lambda a, b: a and b\n    frame = frame.f_back\n"
    ),
    "replaces AssertionError": Forgery(
        "import builtins\nclass Harmless(BaseException): pass\n"
        "builtins.AssertionError = Harmless\ndef add(a, b): return 0\n"
    ),
    "replaces json": Forgery(
        "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\n"
        "json.loads = lambda *a, **k: {'value': True}\ndef add(a, b): return 0\n"
    ),
    "replaces unittest's assertions": Forgery(
        "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n"
        "def add(a, b): return 0\n",
        "import unittest\nclass Tests(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(add(1, 2), 3)\n"
        "suite = unittest.defaultTestLoader.loadTestsFromTestCase(Tests)\n"
        "assert unittest.TextTestRunner().run(suite).wasSuccessful()\n",
    ),
    "replaces the comparison of ints by ctypes": Forgery(
        "import ctypes\nclass Type(ctypes.Structure):\n"
        "    _fields_ = [('head', ctypes.c_char * 200), ('compare', ctypes.c_void_p)]\n"
        "found = Type.from_address(id(int))\n"
        "PROTO = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object, "
        "ctypes.c_int)\nalways = PROTO(lambda a, b, op: True)\n"
        "found.compare = ctypes.cast(always, ctypes.c_void_p).value\ndef add(a, b): return 0\n"
    ),
    "a trace function": Forgery(
        "import sys, threading\ndef trace(frame, event, arg):\n"
        "    frame.f_trace_lines = False\n    return None\n"
        "sys.settrace(trace)\nthreading.settrace(trace)\ndef add(a, b): return 0\n"
    ),
    "an audit hook and a profile": Forgery(
        "import sys\nsys.addaudithook(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"
        "def add(a, b): return 0\n"
    ),
    "a path hook and a forged module": Forgery(
        "import sys, types\nfor name in ('math', 'operator', 'unittest', 'builtins'):\n"
        "    sys.modules[name] = types.ModuleType(name)\ndef add(a, b): return 0\n"
    ),
    "all functions that can be found become its own, and it hangs": Forgery(
        "import gc, types\ndef add(*a, **k): return True\n"
        "for found in gc.get_objects():\n"
        "    if isinstance(found, types.FunctionType) and found is not add:\n"
        "        try:\n            found.__code__ = add.__code__\n"
        "        except (ValueError, TypeError): pass\n"
    ),
    # ------------------------------------------------ looks for what is expected
    "looks for the tests in all objects": Forgery(
        "import gc, re\ntexts = [o for o in gc.get_objects() if isinstance(o, (str, dict, list))]\n"
        "found = re.findall(r'add\\((\\d+), (\\d+)\\) == (\\d+)', repr(texts))\n"
        "known = {(int(a), int(b)): int(c) for a, b, c in found}\n"
        "def add(a, b): return known.get((a, b))\n"
    ),
    "looks for the tests in its frames": Forgery(
        "import re, sys\nseen = ''\nframe = sys._getframe()\nwhile frame:\n"
        "    seen += repr(frame.f_locals) + repr(frame.f_globals)\n    frame = frame.f_back\n"
        "known = re.findall(r'== (\\d+)', seen)\n"
        "def add(a, b): return int(known.pop(0)) if known else None\n"
    ),
    "looks for the tests in its memory": Forgery(
        "import re\nparts = []\nwith open('/proc/self/maps') as maps, "
        "open('/proc/self/mem', 'rb') as memory:\n    for line in maps:\n"
        "        if ' rw' not in line: continue\n"
        "        a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        try:\n            memory.seek(a)\n            parts.append(memory.read(b - a))\n"
        "        except (OSError, ValueError): pass\n"
        "known = dict(((int(a), int(b)), int(c)) for a, b, c in "
        "re.findall(rb'assert add\\((\\d+), (\\d+)\\) == (\\d+)', b''.join(parts)))\n"
        "def add(a, b): return known.get((a, b))\n"
    ),
    "looks for the tests in its judge's memory": Forgery(
        "import os, re\nparent = os.getppid()\nparts = []\n"
        "with open(f'/proc/{parent}/maps') as maps, open(f'/proc/{parent}/mem', 'rb') as memory:\n"
        "    for line in maps:\n        a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        try:\n            memory.seek(a)\n            parts.append(memory.read(b - a))\n"
        "        except (OSError, ValueError): pass\n"
        "known = dict(((int(a), int(b)), int(c)) for a, b, c in "
        "re.findall(rb'assert add\\((\\d+), (\\d+)\\) == (\\d+)', b''.join(parts)))\n"
        "def add(a, b): return known.get((a, b))\n"
    ),
    "traces its judge": Forgery(
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "assert libc.ptrace(16, os.getppid(), 0, 0) == 0\ndef add(a, b): return 0\n"
    ),
    # ------------------------------------------------ objects that please everybody
    "equals everything": _always(),
    "equals everything, and nothing is unequal": _always(
        tests="assert not (add(1, 2) != 3)\n", ne=False
    ),
    "a float that is near everything": _always(
        "(float)", "9.5", "assert abs(add(1, 2) - 3.0) < 1e-6\n"
    ),
    "an object that is near everything": _always(tests="assert abs(add(1, 2) - 3.0) < 1e-6\n"),
    "an object that is near everything, from the other side": _always(
        tests="assert abs(3.0 - add(1, 2)) < 1e-6\n"
    ),
    "contains everything": _always(tests="assert 3 in add(1, 2)\n"),
    "is more than everything": _always(tests="assert add(1, 2) > 2\n"),
    "is true": _always(tests="assert add(1, 2)\n"),
    "equals everything inside of a list": Forgery(
        _ALWAYS.format(base="", value="", ne=False)
        + "one = add\ndef add(a, b): return [one(a, b)]\n",
        "assert add(1, 2) == [3]\n",
    ),
    "a dictionary's key that equals everything": Forgery(
        "class Key:\n    def __eq__(self, other): return True\n"
        "    def __hash__(self): return hash('sum')\ndef add(a, b): return {Key(): 3}\n",
        "assert add(1, 2)['sum'] == 3\n",
    ),
    "says that it is a subset": Forgery(
        "class Yes:\n    def __getattr__(self, name): return lambda *a: True\n"
        "def add(a, b): return Yes()\n",
        "assert add(1, 2).issubset({3})\n",
    ),
    "a set that finds no difference": Forgery(
        "class Set(set):\n    def symmetric_difference(self, other): return set()\n"
        "    def union(self, other): return other\ndef add(a, b): return Set()\n",
        "x = add(1, 2)\nassert not x.symmetric_difference({3}) and x.union({3}) == {3}\n",
    ),
    "a text whose rest is nothing": Forgery(
        "class Text(str):\n    def replace(self, *a): return ''\n    def find(self, *a): return 0\n"
        "def add(a, b): return Text('x')\n",
        "x = add(1, 2)\nassert x.replace('three', '') == '' and x.find('three') == 0\n",
    ),
    "a memory that numpy would read": Forgery(
        "class Array:\n    __array_interface__ = {'shape': (1,), 'typestr': '<i8', "
        "'data': (id(3), True), 'version': 3}\n    def __len__(self): raise TypeError\n"
        "def add(a, b): return Array()\n",
        "import numpy as np\nassert np.asarray(add(1, 2)) == 3\n",
    ),
    "hides what a block finds": Forgery(
        "class Block:\n    def __enter__(self): return 0\n"
        "    def __exit__(self, *a): return True\ndef add(a, b): return Block()\n",
        "with add(1, 2) as found:\n    assert found == 3\n",
    ),
    "ends the test's own loop": Forgery(
        "def add(a, b): raise StopIteration\n", "assert all(map(lambda n: add(n, 1) == n, [1]))\n"
    ),
    # ------------------------------------------------ names that the tests use
    "its own abs": Forgery(
        "abs = lambda x: 0\ndef add(a, b): return 9\n", "assert abs(add(1, 2) - 3) == 0\n"
    ),
    "its own len and all": Forgery(
        "len = lambda x: 1\nall = any = lambda x: True\ndef add(a, b): return []\n",
        "assert all([len(add(1, 2)) == 1])\n",
    ),
    "its own math": Forgery(
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef add(a, b): return 0\n",
        "assert math.isclose(add(1, 2), 3)\n",
    ),
    "its own numpy": Forgery(
        "class np:\n    allclose = staticmethod(lambda *a, **k: True)\ndef add(a, b): return 0\n",
        "assert np.allclose(add(1, 2), 3)\n",
    ),
    "its own check": Forgery(
        "check = lambda f: None\n",
        "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)\n",
    ),
    # ------------------------------------------------ ends early
    "sys.exit(0)": Forgery("raise SystemExit(0)"),
    "os._exit(0)": Forgery("import os\nos._exit(0)"),
    "exits when asked": Forgery(_ENDS.format("sys.exit(0)")),
    "ends at once when asked": Forgery(_ENDS.format("os._exit(0)")),
    "is killed when asked, and any error would do": Forgery(
        _ENDS.format("os.kill(os.getpid(), 9)"),
        "try:\n    add(1, 2)\nexcept Exception:\n    pass\nelse:\n    assert False\n",
    ),
    "prints at its exit": Forgery("import atexit\natexit.register(print, '1.0')\nraise SystemExit"),
    "a thread that ends it": Forgery(
        "import os, threading\nthreading.Timer(0.01, os._exit, [0]).start()\n"
        "def add(a, b):\n    while True: pass\n"
    ),
    "kills its judge": Forgery("import os\nos.kill(os.getppid(), 9)"),
    "a child goes on for it": Forgery("import os\nif os.fork():\n    os._exit(0)\nos.setsid()"),
    # ------------------------------------------------ writes what a judge would say
    "writes a score to all files": Forgery(
        _WRITES.format(data=b'{"score": 1.0, "log": {}}', after="os._exit(0)")
    ),
    "writes answers to all files": Forgery(
        _WRITES.format(data=_MESSAGE * 3, after="import time; time.sleep(0.2); os._exit(0)")
    ),
    "writes to its judge's files": Forgery(
        "import os\nfor fd in range(3, 64):\n    try:\n"
        "        os.write(os.open(f'/proc/{os.getppid()}/fd/{fd}', 1), b'{\"score\": 1.0}')\n"
        "    except OSError: pass\nos._exit(0)\n"
    ),
    "asks its judge to run a function of its own": Forgery(_WRITES.format(data=b"[]\n", after="")),
    "answers without an end": Forgery(_WRITES.format(data=b"[" * 2**16, after="")),
    # ------------------------------------------------ what it is given
    "swallows what a test's function finds": Forgery(
        "def add(a, then):\n    try: then(0)\n    except BaseException: pass\n",
        "def then(x):\n    assert x == 3\nadd(1, then)\n",
    ),
    "looks into a test's function": Forgery(
        "def add(a, then):\n    then.__globals__['__builtins__'].AssertionError = 0\n",
        "def then(x):\n    return x\nassert add(1, then) == 3\n",
    ),
}
