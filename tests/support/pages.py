"""Read the documentation's fenced blocks, and make each page's directory as its reader has it."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from lightning_rl.cli import compare, rehearse
from lightning_rl.cli.check.command import own_options
from lightning_rl.games.staged import command as staged
from tests.support.tiny_models import chatml_tokenizer, save_random_model

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
]
FIRST_PAGES = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
CHAT_PAGES = ("quickstart", "small-model", "bisect")
"""Pages whose configurations belong to recipes/smollm2."""
FENCE = re.compile(r'^( *)```(\w*)(?: title="([^"]+)")?$')


@dataclass
class Block:
    """A fenced block: ``title`` is the file it stands for, ``runs``: ``<!-- runs -->`` is above."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    runs: bool

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    blocks: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opened = FENCE.match(lines[number])
        if opened:
            indent, language, title = opened.groups()
            end = lines.index(f"{indent}```", number + 1)
            text = "".join(f"{line.removeprefix(indent)}\n" for line in lines[number + 1 : end])
            runs = number > 0 and lines[number - 1].strip() == "<!-- runs -->"
            blocks.append(Block(page, number + 1, language, title, text, runs))
            number = end
        number += 1
    return blocks


def per_block(blocks: list[Block]):
    return pytest.mark.parametrize("block", blocks, ids=lambda block: block.place)


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def blocks_in(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@cache
def command_lines() -> list[tuple[Block, list[str]]]:
    """Return each command once, without the environment variables before it."""
    commands: dict[tuple[str, ...], Block] = {}
    for block in blocks_in("bash"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"^[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                commands.setdefault(tuple(words), block)
    return [(block, list(words)) for words, block in commands.items()]


def cli_arguments(words: list[str]) -> list[str] | None:
    """Return ``lightning-rl``'s arguments (``python -m lightning_rl``); None for other commands."""
    if words[0] == "lightning-rl":
        return words[1:]
    return words[3:] if words[:3] == ["python", "-m", "lightning_rl"] else None


def fit_arguments(words: list[str]) -> list[str] | None:
    """Return what ``fit`` would be given where ``check`` is; None for a command without a run."""
    command, *rest = words
    if command == "check" or "--dry_run" in rest:
        return ["fit", *own_options(rest)[1]]
    if command == "rehearse":
        return ["fit", *rehearse.own_options(rest)[1]]
    if command == "compare":
        request = compare.read_options(rest)
        files = request.files[-1].split("+")
        return ["fit", *(f"--config={file}" for file in files), *request.overrides]
    if command not in ("fit", "validate", "test", "rollout"):
        return None
    if "--ckpt_path" in rest:  # a file that only a run leaves
        index = rest.index("--ckpt_path")
        del rest[index : index + 2]
    return [command, *rest]


def parse_staged_run(arguments: list[str]) -> None:
    """Build a staged run; of one that goes on by its name, a recipe's."""
    if "--name" in arguments:
        place = arguments.index("--name")
        assert arguments[place + 1 : place + 2]
        options = [*arguments[:place], *arguments[place + 2 :]]
        arguments = ["--config", "recipes/pointing/malt.yaml", *options]
    parser = staged.make_parser()
    staged.build(staged.parse([a for a in arguments if a not in staged.OPTIONS], parser), parser)


def configs_of(block: Block) -> list[str]:
    """Return options that give a block's configuration, or its differences from a recipe's."""
    Path("block.yaml").write_text(block.text)
    tree = yaml.safe_load(block.text)
    if "run_dir" in tree or "class_path" in tree.get("model", {}):
        return ["--config", "block.yaml"]
    if block.page.name == "README.md":
        recipe = block.page.parent.name
    else:
        recipe = "smollm2" if block.page.stem in CHAT_PAGES else "sort_digits"
    return ["--config", f"recipes/{recipe}/grpo.yaml", "--config", "block.yaml"]


def visit(page: Path, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go where a page's reader is: its files are at hand, its modules can be imported.

    The files of sort_digits are there too, with ``model`` as its models, and the quickstart's, with
    a random model that chats.
    """
    (place / "recipes").mkdir()
    for recipe in (ROOT / "recipes").iterdir():
        (place / "recipes" / recipe.name).symlink_to(recipe)
    runs = place / "runs" / "sort_digits"
    (runs / "sft").mkdir(parents=True)
    for name in ("model", "sft/hf"):
        (runs / name).symlink_to(model, target_is_directory=True)
    row = {"prompt": "312=", "answer": "123", "completion": "123"}
    for name in ("train", "heldout", "sft"):
        (runs / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    chats = place / "runs" / "smollm2"
    chats.mkdir()
    chat_model = model.parent / "chat"
    if not chat_model.exists():
        save_random_model(chat_model, chatml_tokenizer())
    (chats / "model").symlink_to(chat_model, target_is_directory=True)
    asked = {"prompt": [{"role": "user", "content": "3 times 4?"}], "answer": 12}
    for name in ("train", "heldout"):
        (chats / f"{name}.jsonl").write_text(json.dumps(asked) + "\n")
    for block in BLOCKS:
        if block.page == page and block.title is not None:
            file = place / block.title
            if file.parent.is_symlink():  # a recipe, which is not to be changed
                file.parent.unlink()
                shutil.copytree((ROOT / block.title).parent, file.parent)
            file.write_text(block.text)
    # `seed_everything` sets this variable, from which later tests would take their seed.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    for module in place.glob("*.py"):  # another test's may have the same name
        monkeypatch.delitem(sys.modules, module.stem, raising=False)


@contextmanager
def as_modules(files: Mapping[str, str], place: Path) -> Iterator[dict[str, ModuleType]]:
    """Write Python files, by name without ``.py``, and lend them as modules to the block."""
    for name, code in files.items():
        (place / f"{name}.py").write_text(code)
    sys.path.insert(0, str(place))
    try:
        yield {name: import_module(name) for name in files}
    finally:
        sys.path.remove(str(place))
        for name in files:
            sys.modules.pop(name, None)
