"""What the documentation shows works: snippets, commands, error messages, links, paths."""

import inspect
import json
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.memory import Built
from lightning_rl.cli import COMMANDS, find_command, main
from lightning_rl.cli.audit import parse_arguments as parse_audit
from lightning_rl.cli.parser import card_of, gpus_of
from lightning_rl.cli.rerun import parse_arguments as parse_rerun
from lightning_rl.cli.rollouts import parse_arguments as parse_rollouts
from lightning_rl.cli.view.command import parse_arguments as parse_view
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.errors import LightningRLError
from lightning_rl.games.staged.command import (
    OPTIONS as STAGED_OPTIONS,
    build as build_staged,
    make_parser as make_staged_parser,
    parse as parse_staged,
)

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
]
FENCE = re.compile(r'^( *)```(\w*)(?: title="([^"]+)")?$')
LANGUAGES = {"bash", "console", "json", "python", "text", "toml", "yaml"}


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


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def blocks_in(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def command_lines() -> list[tuple[Block, list[str]]]:
    """Each command once, without the environment variables before it."""
    commands = {}
    for block in blocks_in("bash"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"^[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                commands.setdefault(tuple(words), block)
    return [(block, list(words)) for words, block in commands.items()]


def cli_arguments(words: list[str]) -> list[str] | None:
    """Arguments of ``lightning-rl`` or ``python -m lightning_rl``; None for another command."""
    if words[0] == "lightning-rl":
        return words[1:]
    return words[3:] if words[:3] == ["python", "-m", "lightning_rl"] else None


def parse_staged_run(arguments: list[str]) -> None:
    if "--name" in arguments:  # of a run that there is not
        place = arguments.index("--name")
        assert arguments[place + 1 : place + 2]
        options = [*arguments[:place], *arguments[place + 2 :]]
        arguments = ["--config", "recipes/pointing/malt.yaml", *options]
    parser = make_staged_parser()
    build_staged(parse_staged([a for a in arguments if a not in STAGED_OPTIONS], parser), parser)


def per_block(blocks: list[Block]):
    return pytest.mark.parametrize("block", blocks, ids=lambda block: block.place)


CLI_COMMANDS = [c for c in command_lines() if cli_arguments(c[1]) is not None]
OTHER_COMMANDS = [c for c in command_lines() if cli_arguments(c[1]) is None]


@pytest.fixture(scope="module")
def workplaces(tiny_model, tmp_path_factory):
    """A directory per page: what the quickstart leaves behind, and the files the page shows."""
    made: dict[Path, Path] = {}

    def make(page: Path) -> Path:
        if page in made:
            return made[page]
        place = made[page] = tmp_path_factory.mktemp(page.stem)
        shutil.copytree(ROOT / "recipes", place / "recipes")
        runs = place / "runs" / "sort_digits"
        (runs / "sft").mkdir(parents=True)
        for model in (runs / "model", runs / "sft" / "hf"):
            model.symlink_to(tiny_model, target_is_directory=True)
        row = {"prompt": "312=", "answer": "123", "completion": "123"}
        for name in ("train", "heldout", "sft"):
            (runs / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        for block in BLOCKS:
            if block.page == page and block.title is not None:
                (place / block.title).write_text(block.text)
        return place

    return make


@pytest.fixture
def stand_in(workplaces, monkeypatch):
    """Go where a page's reader is: its files are at hand, its modules can be imported."""
    # `seed_everything` sets this variable, from which later tests would take their seed.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")

    def go(page: Path) -> Path:
        place = workplaces(page)
        monkeypatch.chdir(place)
        monkeypatch.syspath_prepend(str(place))
        for module in place.glob("*.py"):  # another test's may have the same name
            monkeypatch.delitem(sys.modules, module.stem, raising=False)
        return place

    return go


def test_every_block_says_what_it_is():
    assert len(BLOCKS) > 40
    assert not [block.place for block in BLOCKS if block.language not in LANGUAGES]


@per_block(blocks_in("python"))
def test_python_compiles(block):
    compile(block.text, block.place, "exec")


@per_block([block for block in blocks_in("python") if block.runs])
def test_python_runs(block, stand_in):
    place = stand_in(block.page)
    # The same program, on the engine that starts at once, and for one iteration.
    text = re.sub(r"VLLMLocal\(max_model_len=32\)", "TransformersEngine()", block.text)
    text = text.replace("VLLMLocal", "TransformersEngine")
    text = text.replace("iterations_per_epoch=24", "iterations_per_epoch=1")
    exec(compile(text, block.place, "exec"), {"__name__": "__main__"})
    if block.title == "train.py":
        summary = json.loads((place / "lightning_logs/version_0/summary.json").read_text())
        assert (summary["status"], summary["iterations"]) == ("completed", 1)


@per_block(blocks_in("yaml"))
def test_yaml_builds_what_it_names(block, stand_in):
    place = stand_in(block.page)
    (place / "block.yaml").write_text(block.text)
    configs = ["--config", "block.yaml"]
    if "run_dir" in yaml.safe_load(block.text):
        parse_staged_run(configs)
        return
    if "class_path" not in yaml.safe_load(block.text).get(
        "model", {}
    ):  # what differs from a recipe
        recipe = block.page.parent.name if block.page.name == "README.md" else "sort_digits"
        configs = ["--config", f"recipes/{recipe}/grpo.yaml", *configs]
    Built(["fit", *configs])


@pytest.mark.parametrize(
    ("block", "words"), CLI_COMMANDS, ids=[" ".join(words)[-70:] for _, words in CLI_COMMANDS]
)
def test_our_command_is_understood(block, words, stand_in, capsys):
    arguments = cli_arguments(words)
    command = find_command(arguments[0])
    stand_in(block.page)
    if "--ckpt_path" in arguments:  # a file that only a run leaves
        index = arguments.index("--ckpt_path")
        del arguments[index : index + 2]
    if arguments[0] in ("doctor", "quickstart"):
        return
    if arguments[0] == "check" or "--dry_run" in arguments:
        own_options = ("--dry_run", "--no_rollout", "--run", "--layout")
        _, others = gpus_of(card_of(arguments[1:])[1])
        arguments = ["fit", *(a for a in others if a not in own_options)]
    if arguments[0] not in COMMANDS:  # a package's
        import_module(command.module).parse_arguments(arguments[1:])
        return
    own = {
        "view": parse_view,
        "rollouts": parse_rollouts,
        "rerun": parse_rerun,
        "audit": parse_audit,
        "staged": parse_staged_run,
    }
    if arguments[0] in own:
        own[arguments[0]](arguments[1:])
        return
    if not any(a in ("--help", "--print_config") or a.endswith(".help") for a in arguments):
        Built(arguments)
        return
    with pytest.raises(SystemExit) as done:
        Built(arguments)
    assert done.value.code in (0, None)
    assert len(capsys.readouterr().out) > 100


@pytest.mark.parametrize(
    ("block", "words"), OTHER_COMMANDS, ids=[" ".join(words)[:70] for _, words in OTHER_COMMANDS]
)
def test_any_other_command_exists(block, words):
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:2] == ["python", "-m"]:
        source = inspect.getsource(import_module(words[2]))
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
        )


@per_block(blocks_in("console"))
def test_an_error_is_as_shown(block, stand_in, capsys):
    stand_in(block.page)
    command, _, shown = block.text.partition("\n")
    assert command.startswith("$ lightning-rl ")
    try:
        status = main(shlex.split(command)[2:])
    except (LightningRLError, MisconfigurationException) as error:
        pytest.fail(f"not caught: {error!r}")
    assert status == 2
    printed = capsys.readouterr().err
    assert printed[printed.index("lightning-rl: ") :] == shown


def test_the_configuration_of_the_cli_page_runs(stand_in):
    page = ROOT / "docs" / "cli.md"
    place = stand_in(page)
    block = next(block for block in blocks_in("yaml") if block.page == page)
    (place / "verbatim.yaml").write_text(block.text)
    # Its precision is bf16-mixed, which the engine (vLLM) follows; one iteration is enough.
    assert main(["fit", "--config", "verbatim.yaml", "--trainer.limit_train_batches", "1"]) == 0
    assert "bfloat16" not in block.text
    assert (place / "lightning_logs/version_0/checkpoints/iteration_1.ckpt").exists()


def test_the_mixture_of_its_page_trains_each_set_as_it_says(stand_in, capsys):
    place = stand_in(ROOT / "docs" / "mixtures.md")
    asked = [{"prompt": f"{digit}{digit}=", "answer": f"{digit}{digit}"} for digit in range(10)]
    lines = "".join(json.dumps(row) + "\n" for row in asked)
    (place / "runs/sort_digits/train.jsonl").write_text(lines)
    configs = ["--config", "recipes/sort_digits/grpo.yaml", "--config", "mixture.yaml"]
    monitor = ["--trainer.callbacks+=IterationCheckpoint", "--trainer.callbacks.monitor"]
    quick = ["check", *configs, "--trainer.enable_checkpointing", "true", "--no_rollout", *monitor]
    assert main([*quick, "eval/spell/accuracy"]) == 0
    assert "prompts of sort (75% of the groups): 10 of 10 are short" in capsys.readouterr().out
    assert main([*quick, "eval/spel/accuracy"]) == 2
    assert "did you mean eval/spell/accuracy?" in capsys.readouterr().err
    small = ["--data.groups_per_iteration", "16", "--data.group_size", "16"]
    kept = ["--trainer.callbacks+=RolloutRecorder", "--trainer.callbacks.num_groups", "null"]
    assert main(["fit", *configs, *small, *kept, "--trainer.limit_train_batches", "2"]) == 0
    run = place / "runs/sort_digits/grpo/version_0"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward/mean" in row]
    assert len(trained) == 2
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in trained)
    assert all(row["rollout/sort/share"] + row["rollout/spell/share"] == 1 for row in trained)
    names = [n for n in rows[0] if n.startswith("eval/") and n.endswith(("accuracy", "pass@2"))]
    assert sorted(names) == ["eval/accuracy", "eval/sort/accuracy", "eval/spell/accuracy",
                             "eval/spell/pass@2"]  # fmt: skip
    rollouts = [found.rollout for found in open_rollouts(run / "recorded.jsonl").read()]
    assert len(rollouts) == 2 * 16 * 16
    of = {name: [r for r in rollouts if r.prompt.set == name] for name in ("sort", "spell")}
    assert [*map(len, of.values())] == [
        sum(256 * row[f"rollout/{name}/share"] for row in trained) for name in of
    ]
    assert {(r.sampling.temperature, *r.reward_parts) for r in of["sort"]} == {(1.0, "exact_match")}
    assert {(r.sampling.temperature, *r.reward_parts) for r in of["spell"]} == {
        (0.8, "environment")
    }
    assert all(all(r.loss_mask) for r in of["sort"])
    assert max(len(r.token_ids) for r in of["spell"]) > 1  # some first digit was right
    for rollout in of["spell"]:
        # A digit a turn, answered by "=" as long as it was right.
        assert rollout.loss_mask == [i % 2 == 0 for i in range(len(rollout.token_ids))]
        # The first tokens are special, and the digits the next ones.
        digit = 3 + int(rollout.prompt.columns["answer"][0])
        right = [token == digit for token in rollout.token_ids[::2]]
        assert right in ([False], [True, False], [True, True])
        assert rollout.reward == sum(right) / 2
    # Written again, alone, by the agent and with the sampling of its set.
    chosen = max(of["spell"], key=lambda r: (r.group_id.startswith("1/"), len(r.token_ids)))
    assert len(chosen.token_ids) > 1
    assert main(["rerun", str(run), "--rollout", chosen.id]) == 0


def slug(heading: str) -> str:
    """The anchor that MkDocs and GitHub give a heading."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"
    for path in re.findall(r"`((?:recipes|docs|install|benchmarks|tests)/[\w./]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if not re.search(rf"[:-] {page}$", config, re.MULTILINE)] == []
