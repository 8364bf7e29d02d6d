"""Test that what the documentation shows exists, compiles, and can be read by the commands.

Whether it builds and runs is seen in tests/integration/test_docs.py.
"""

import inspect
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rl.cli import find_command, main
from lightning_rl.cli.help import arguments_of
from lightning_rl.config.names import SURFACES, public
from lightning_rl.errors import LightningRLError
from tests.support import argument_tables
from tests.support.command_parser import read
from tests.support.pages import (
    BLOCKS,
    PAGES,
    ROOT,
    blocks_in,
    cli_arguments,
    command_lines,
    configs_of,
    fit_arguments,
    parse_staged_run,
    per_block,
    visit,
)

LANGUAGES = {"bash", "console", "json", "python", "text", "toml", "yaml"}
CLI_COMMANDS = [c for c in command_lines() if cli_arguments(c[1]) is not None]
OTHER_COMMANDS = [c for c in command_lines() if cli_arguments(c[1]) is None]


def test_every_block_says_what_it_is():
    assert len(BLOCKS) > 40
    assert not [block.place for block in BLOCKS if block.language not in LANGUAGES]


@per_block(blocks_in("python"))
def test_python_compiles(block):
    compile(block.text, block.place, "exec")


RECORDS = {"Prompt", "Rollout"}
"""Rewards and agents are given these; nobody configures them."""


def test_each_class_has_a_table_of_its_arguments_in_one_page():
    classes = {name: public(name) for name in SURFACES["lightning_rl"] if name not in RECORDS}
    with_arguments = {
        name
        for name, found in classes.items()
        if inspect.isclass(found) and not issubclass(found, Exception) and arguments_of(found)
    }
    shown = [name for names in argument_tables.pages().values() for name in names]
    assert len(shown) == len(set(shown))
    assert with_arguments - set(shown) == set()
    for name in shown:
        undescribed = [one.name for one in arguments_of(public(name)) if not one.says]
        assert not undescribed, name


@pytest.mark.parametrize("page", argument_tables.pages(), ids=lambda page: page.name)
def test_tables_of_arguments_are_of_this_code(page):
    # If not: python -m tests.support.argument_tables
    text = page.read_text(encoding="utf-8")
    assert argument_tables.filled(text) == text


# The package of docs/extend/package.md is installed in tests/integration/test_packages.py.
@per_block([block for block in blocks_in("yaml") if block.page.name != "package.md"])
def test_yaml_is_read(block, tiny_model, tmp_path, monkeypatch):
    visit(block.page, tiny_model, tmp_path, monkeypatch)
    configs = configs_of(block)
    if "run_dir" in yaml.safe_load(block.text):
        parse_staged_run(configs)
    else:
        read(["fit", *configs])


@pytest.mark.parametrize(
    ("block", "words"), CLI_COMMANDS, ids=[" ".join(words)[-70:] for _, words in CLI_COMMANDS]
)
def test_our_command_is_understood(block, words, tiny_model, tmp_path, monkeypatch, capsys):
    visit(block.page, tiny_model, tmp_path, monkeypatch)
    command, *options = cli_arguments(words)
    if any(a in ("--help", "--print_config") or a.endswith(".help") for a in options):
        with pytest.raises(SystemExit) as done:
            main([command, *options])
        assert done.value.code in (0, None)
        assert len(capsys.readouterr().out) > 100
    elif (arguments := fit_arguments([command, *options])) is not None:
        read(arguments)
    elif command == "staged":
        parse_staged_run(options)
    elif command not in ("doctor", "quickstart"):
        import_module(find_command(command).module).parse_arguments(options)


@pytest.mark.parametrize(
    ("block", "words"), OTHER_COMMANDS, ids=[" ".join(words)[:70] for _, words in OTHER_COMMANDS]
)
def test_any_other_command_exists(block, words):
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:2] == ["python", "-m"]:
        module = import_module(words[2])
        file = Path(module.__file__)
        files = file.parent.glob("*.py") if hasattr(module, "__path__") else [file]
        source = "".join(file.read_text() for file in files)
        assert [w for w in words[3:] if w.startswith("--") and f'"{w}"' not in source] == []
    elif words[0].endswith("/bin/pip"):  # of an agent's own environment
        assert words[1] == "install"
    elif words[:3] == ["uv", "pip", "install"] and "--python" in words:  # the same
        assert f"uv venv {words[words.index('--python') + 1]}\n" in block.text
    elif words[:3] == ["uv", "pip", "install"]:
        files = [w for w in words if w.startswith("install/")]
        assert all((ROOT / file).is_file() for file in files)
        setup = (ROOT / "setup.cfg").read_text()
        package, extras, wheel = re.match(r"(.+)\[([\w,]+)\](.*)", words[-1]).groups()
        assert all(re.search(rf"^{e} =", setup, re.MULTILINE) for e in extras.split(","))
        version = re.search(r"^version = (.+)$", setup, re.MULTILINE)[1]
        built = (f" @ file:///path/to/lightning_rl-{version}-py3-none-any.whl", [])
        assert (wheel, files) == built if package == "lightning_rl" else package == "." and files
    elif words[0] == "printf":  # what install/cpu-overrides.txt says
        pattern, *packages, _ = words[1:]
        overrides = (ROOT / "install" / "cpu-overrides.txt").read_text().splitlines()
        written = [pattern.removesuffix("\\n") % package for package in packages]
        assert written == [line for line in overrides if not line.startswith("#")]
    else:
        assert words[:2] in (
            ["source", ".venv/bin/activate"],
            ["uv", "venv"],
            ["tensorboard", "--logdir"],
            ["pip", "uninstall"],
            ["pip", "install"],
            ["pytest", "--rehearse"],
            ["python", "train.py"],  # a block of the same page
        )


@per_block(blocks_in("console"))
def test_an_error_is_as_shown(block, tiny_model, tmp_path, monkeypatch, capsys):
    visit(block.page, tiny_model, tmp_path, monkeypatch)
    command, _, shown = block.text.partition("\n")
    assert command.startswith("$ lightning-rl ")
    try:
        status = main(shlex.split(command)[2:])
    except (LightningRLError, MisconfigurationException) as error:
        pytest.fail(f"not caught: {error!r}")
    assert status == 2
    printed = capsys.readouterr().err
    assert printed[printed.index("lightning-rl: ") :] == shown


def slug(heading: str) -> str:
    """Return the anchor that MkDocs and GitHub give a heading."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = re.sub(
        r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"
    for path in re.findall(r"`((?:recipes|docs|install|benchmarks|tests)/[\w./]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not re.search(rf"[:-] {page}$", config, re.MULTILINE)] == []
