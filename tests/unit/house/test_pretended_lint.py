"""Find where tensors are made: a factory that names no device may use another one."""

import ast
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(__file__).parents[3] / "lightning_rl"
FACTORIES = {
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "tensor", "zeros"),
}
CHECKED = [
    *sorted((LIBRARY / "models").glob("*.py")),
    *sorted((LIBRARY / "algos").glob("*.py")),
    *(LIBRARY / f"learn/{name}.py" for name in ("base", "skipped", "precision", "probe")),
    *(LIBRARY / f"data/{name}.py" for name in ("batch", "packing", "splitting")),
    *(LIBRARY / f"{name}.py" for name in ("module", "run/files/metrics")),
]


def silent_factories(source: str) -> Iterator[tuple[str, int]]:
    """Yield function and line of each call of a torch factory without ``device``."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and isinstance(call.func.value, ast.Name)
                and call.func.value.id == "torch"
                and call.func.attr in FACTORIES
                and not {"device", "out"} & {keyword.arg for keyword in call.keywords}
            ):
                yield function.name, call.lineno


def test_the_lint_finds_what_it_looks_for():
    source = """
def f(x):
    good = torch.zeros(3, device=x.device), torch.zeros_like(x), x.new_zeros(2)
    return torch.arange(3), other.arange(3)
"""
    assert list(silent_factories(source)) == [("f", 4)]


def test_every_factory_names_its_device():
    found = {str(path): list(silent_factories(path.read_text("utf-8"))) for path in CHECKED}
    assert len(found) >= 25
    assert {name: places for name, places in found.items() if places} == {}
