"""Test facts that pages state, and that change with the code: names, counts, sizes."""

import ast
import inspect
import re
import runpy
from configparser import ConfigParser
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import lightning_rl.callbacks as callbacks
from lightning_rl.algos.advantages import Advantage
from lightning_rl.algos.losses import PolicyLoss
from lightning_rl.config.hints import class_names
from lightning_rl.config.names import MODULE_OF, SURFACES, public as public_name
from lightning_rl.engines.base import Engine
from lightning_rl.run.processes.openmp import SPINS, WAITING
from tests.support.chats import CHATS
from tests.support.families import ARCHITECTURES
from tests.support.tiny_vision import FAMILIES

ROOT = Path(__file__).parents[3]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_callback_has_a_line():
    pages = page("docs/callbacks.md") + page("docs/guards.md")
    named = set(re.findall(r"`(\w+)", pages))
    bases = {"BatchGuard", "Finding", "Guard", "GuardAction", "IterationGuard"}
    assert sorted(set(callbacks.__all__) - named - bases) == []


def test_every_recipe_is_in_the_readme():
    recipes = [path.parent.name for path in (ROOT / "recipes").glob("*/README.md")]
    assert len(recipes) >= 4
    text = page("README.md")
    assert [name for name in recipes if f"recipes/{name}/README.md" not in text] == []


def test_a_script_is_told_to_export_what_the_command_sets():
    assert f"`export {WAITING}={SPINS}`" in " ".join(page("docs/troubleshooting.md").split())


def test_only_public_engines_are_offered():
    for module in (ROOT / "lightning_rl" / "engines").glob("*.py"):
        if module.stem not in ("__init__", "vllm_worker"):  # which needs a server's own process
            import_module(f"lightning_rl.engines.{module.stem}")
    offered = {
        name
        for name, engine in class_names([Engine]).items()
        if engine.__module__.startswith("lightning_rl.engines")
    }
    assert offered - set(MODULE_OF) - {"SimulatedEngine"} == set()
    assert {"VLLMLocal", "VLLMServer", "RayEngine", "TransformersEngine"} <= offered


def public(base: type) -> list[type]:
    found = (public_name(name) for name in MODULE_OF)
    return [c for c in found if inspect.isclass(c) and issubclass(c, base) and c is not base]


@pytest.mark.parametrize("base", [Advantage, PolicyLoss])
def test_every_advantage_and_loss_names_its_paper(base):
    concrete = [c for c in public(base) if "__call__" in vars(c) or "compare" in vars(c)]
    concrete = [c for c in concrete if c.__name__ != "GroupAdvantage"]  # a base, of no paper
    assert len(concrete) >= 5
    assert [c.__name__ for c in concrete if not re.search(r"\b(19|20)\d\d\b", c.__doc__)] == []


def test_collectors_are_tried_on_as_many_loads_as_the_page_says():
    test = page("tests/unit/collect/test_collectors.py")
    loads = sum(map(int, re.findall(r"max_examples=(\d+)", test)))
    assert f"on {loads} random loads" in page("docs/collectors.md")


def test_pages_and_setup_agree_on_the_environments_size():
    cuda, cpu = re.search(
        r"= cuda \]; then size_gb=(\d+); else size_gb=(\d+)", page("install/setup.sh")
    ).groups()
    assert f"({cpu} GB for the CPU, {cuda} GB for CUDA" in " ".join(page("README.md").split())


def test_the_tables_of_families_have_the_rows_that_are_tested():
    """``python -m benchmarks.real --save`` writes them; nothing in them failed."""
    blocks = re.findall(
        r"<!-- (architectures|templates) -->\n(.*?)<!-- /", page("docs/models.md"), re.DOTALL
    )
    tables = {name: text.splitlines()[2:] for name, text in blocks}
    cells = [[cell.strip() for cell in line.split("|")] for line in tables["architectures"]]
    expected = [(f"`{name}`", one.layout) for name, one in ARCHITECTURES.items()]
    expected += [(f"`{name}`", "packed") for name in FAMILIES]
    assert [(row[1], row[3]) for row in cells] == expected
    assert [line.split("|")[1].strip() for line in tables["templates"]] == list(CHATS)
    assert not [line for lines in tables.values() for line in lines if "**no**" in line]


def test_every_test_that_a_page_names_is_there():
    """`test_...`, `test_...[case]`; one that ends in dots is cut short."""
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in (*re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")), path.stem)
    }
    for name in ("README.md", "docs/api/faults.md", "docs/resume.md", "docs/sync.md"):
        for test, cut in re.findall(r"`(test_\w+?)(_?\.\.\.)?(?:\[.*?\]|\.py)?`", page(name)):
            assert [t for t in there if t.startswith(test) if cut or t == test], (name, test)


def test_the_site_begins_with_the_readme():
    found = runpy.run_path(str(ROOT / "docs" / "front_page.py"))["front_page"](
        "![x](docs/images/x.png) [Check](docs/sync.md#what) "
        "[sort digits](recipes/sort_digits/README.md), [uv](https://uv.org/a) [Apache](LICENSE)"
    )
    assert found == (
        "![x](images/x.png) [Check](sync.md#what) "
        "sort digits (`recipes/sort_digits`), [uv](https://uv.org/a) Apache"
    )


def test_every_command_is_on_its_page():
    from lightning_rl.cli import COMMANDS, usage

    text = page("docs/cli.md")
    assert [c for c in COMMANDS if f"**{c}**" not in text and f"lightning-rl {c}" not in text] == []
    assert [c for c in COMMANDS if f"\n  {c} " not in usage()] == []


# ---------------------------------------------------------------- names of modules and files

NAME = re.compile(r"(?<![\w./-])lightning_rl(?:\.(?!_)\w+)+")
PATH = re.compile(r"(?<![\w./-])(?:lightning_rl|benchmarks|tests|recipes|docs)(?:/[\w-]+)+\.\w+")
INVENTED = {
    "lightning_rl.commands",  # groups of entry points
    "lightning_rl.classes",
    "lightning_rl.progress",  # a key in Parquet files
    "recipes/reasoning_gym/my_task.yaml",
}


def texts() -> list[Path]:
    """Return all files in which readers meet names of modules; tests also invent some."""
    folders = ("docs", "recipes", "benchmarks", "install", "lightning_rl")
    kinds = (".md", ".py", ".pyi", ".yaml", ".toml", ".sh")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    found = [path for path in found if path.suffix in kinds]
    return [*found, *(ROOT / name for name in ("README.md", "Makefile", "mkdocs.yml"))]


@cache
def bound_in(module: Path) -> set[str]:
    """Return all names that a module's text binds, wherever it does."""
    nodes = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
    aliases = {(n.asname or n.name).split(".")[0] for n in nodes if isinstance(n, ast.alias)}
    return aliases | {getattr(n, key) for n in nodes for key in ("name", "id") if hasattr(n, key)}


def exists(name: str) -> bool:
    """Tell whether a dotted name exists: the module, and the first name after it."""
    place = ROOT / "lightning_rl"
    for part in name.split(".")[1:]:
        if (place / part).is_dir():
            place /= part
        elif (module := place / f"{part}.py").exists():
            place = module
        elif place.is_dir():
            package = ".".join(("lightning_rl", *place.relative_to(ROOT / "lightning_rl").parts))
            public_names = SURFACES.get(package, {})
            return part in public_names or part in bound_in(place / "__init__.py")
        else:
            return part in bound_in(place)
    return True


def test_no_text_names_a_module_or_file_that_is_gone():
    gone = set()
    for path in texts():
        text = path.read_text(encoding="utf-8")
        modules, files = set(NAME.findall(text)) - INVENTED, set(PATH.findall(text))
        wrong = [name for name in modules if not exists(name)]
        wrong += [name for name in files - INVENTED if not (ROOT / name).exists()]
        gone |= {f"{path.relative_to(ROOT)}: {name}" for name in wrong}
    assert not gone, "\n".join(sorted(gone))


def test_the_citation_is_of_this_version():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    cited = yaml.safe_load(page("CITATION.cff"))
    ours = setup["metadata"]
    assert (cited["version"], cited["license"]) == (ours["version"], ours["license_expression"])
    assert [author["name"] for author in cited["authors"]] == [ours["author"]]
