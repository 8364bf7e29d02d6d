"""``lightning-rl staged``: training by fine-tune jobs, stage by stage."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ActionConfigFile
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rl.cli.parser import RLArgumentParser, checked_sources
from lightning_rl.cli.trust import require_trusted_parts, split_options
from lightning_rl.config import names
from lightning_rl.config.layers import Change, differences, flatten, load_yaml
from lightning_rl.config.mistakes import innermost
from lightning_rl.errors import ConfigError, RunInterrupted
from lightning_rl.games.staged.trainer import STATE, StagedTrainer
from lightning_rl.run.rundir import holding, write_whole

HELP = """\
usage: lightning-rl staged --config FILE [--config FILE ...] [--key value ...]
                           [--retest [--retest_dir DIR]] [--allow_changes]
       lightning-rl staged --name RUN [--key value ...]

Trains models by fine-tune jobs: of an API, or on this machine. The same command goes on with a run
that ended in any way; no interaction is sampled twice, and no job is created twice.

  --config FILE    YAML with arguments of StagedTrainer; later files and options win
  --run_dir DIR    where the run's state, interactions, metrics and local jobs are
  --name RUN       go on with the run of this name (its directory's, or its id), found in the
                   working directory or up to three folders below it, as it was configured
  --retest         test the models of every iteration so far again, and do nothing else
  --retest_dir DIR where that goes (default: beside the run, RUN_retest); the run stays as it is
  --allow_changes  go on with a run that was configured otherwise
  --print_config   print the whole configuration, defaults included, and stop
  --trusted_only   name no code but the library's own; --trust MODULE allows another
"""

OPTIONS = ("--retest", "--allow_changes")

HARMLESS = {
    "iterations", "job_attempts", "keep_model_after_failure", "job_timeout_s", "poll_s",
    "max_concurrency", "retries", "timeout_s", "first_wait_s", "threads", "run_dir",
    "test_every_n_iterations", "base_url", "api_key_env",
}  # fmt: skip
"""Last parts of keys that a run may go on with another value of."""
BESIDE = ("logger", "callbacks")
"""First parts of those that hear of a run, and do not decide what it does."""
TESTED = ("test", "test_limit")
"""Those that only tests depend on."""

# Short class names work in YAML for what has been imported: all that is public.
names.load_all()


def main(arguments: Sequence[str]) -> int:
    """Train, or test again."""
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    parser = make_parser()
    rest, name = without_option([a for a in arguments if a not in OPTIONS], "--name")
    rest, retest_dir = without_option(rest, "--retest_dir")
    config = parse([*(named_run(name) if name is not None else ()), *rest], parser)
    retest = "--retest" in arguments
    if retest_dir is not None and not retest:
        raise ConfigError(f"--retest_dir {retest_dir} is of --retest alone; add that")
    directory = Path(config.run_dir)
    text = parser.dump(config, skip_unset=False)
    if "--allow_changes" not in arguments:
        require_same(directory, text, TESTED if retest else ())
    trainer = build(config, parser)
    try:
        if retest:
            print(json.dumps(trainer.retest(retest_dir), indent=1))
            return 0
        with holding(directory):
            write_whole(directory / "config.yaml", text)
        trainer.fit()
    except KeyboardInterrupt as error:
        what = f"stopped in stage {trainer.state.stage} of iteration {trainer.state.iteration}"
        raise RunInterrupted(f"{what}; the same command goes on from there", 130) from error
    files = sorted(path.name for path in directory.glob("[!.]*"))
    print(f"Results are in {directory}: {', '.join(files)}")
    return 0


def make_parser() -> RLArgumentParser:
    """The parser of what ``StagedTrainer`` takes."""
    parser = RLArgumentParser(description="")
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_class_arguments(StagedTrainer, None)
    return parser


def parse(arguments: Sequence[str], parser: LightningArgumentParser) -> Any:
    """The configuration that files and options make.

    Raises:
        ConfigError: naming the first mistake, and where it was made.
    """
    rest, trusted = split_options(arguments)
    checked_sources(rest, parser, trusted)
    config = parser.parse_args(rest)
    if trusted is not None:
        require_trusted_parts({"": config.as_dict()}, trusted, {"": StagedTrainer})
    return config


def build(config: Any, parser: LightningArgumentParser) -> StagedTrainer:
    """Make what a configuration says."""
    try:
        parts = vars(parser.instantiate(config))
        return StagedTrainer(**{name: part for name, part in parts.items() if name != "config"})
    except Exception as error:  # a constructor refused its arguments
        raise innermost(error) from error


def without_option(arguments: Sequence[str], option: str) -> tuple[list[str], str | None]:
    """The other arguments, and an option's value; None if it is not there.

    Raises:
        ConfigError: if it has no value.
    """
    rest, found = list(arguments), None
    for place, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name == option:
            found = value if equals else "".join(rest[place + 1 : place + 2])
            if not found or found.startswith("--"):
                raise ConfigError(f"{option} needs a value")
            del rest[place : place + (1 if equals else 2)]
            break
    return rest, found


def named_run(name: str) -> list[str]:
    """The options that go on with a run of this name, wherever it lies below the working directory.

    Raises:
        ConfigError: if there is none, or several; names those that there are.
    """
    states = [path for depth in range(4) for path in Path().glob("*/" * depth + STATE)]
    files = [path for path in states if path.is_file()]
    runs = [path.parent for path in files if (path.parent / "config.yaml").is_file()]
    called = [run for run in runs if name in (run.resolve().name, _id_of(run))]
    if len(called) != 1:
        there = ", ".join(map(str, called or runs)) or "none"
        what = f"{len(called)} runs have this name" if called else "there is no such run"
        raise ConfigError(
            f"--name {name}: {what} in {Path.cwd()} or up to three folders below (runs: {there}); "
            "stand where the run was begun, or name its files: --config RUN/config.yaml --run_dir "
            "RUN"
        )
    return ["--config", str(called[0] / "config.yaml"), "--run_dir", str(called[0])]


def _id_of(run: Path) -> str | None:
    try:
        state = json.loads((run / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it cannot be gone on with by its id
        return None
    return state.get("run") if isinstance(state, dict) else None


def require_same(directory: Path, text: str, besides: Sequence[str]) -> None:
    """Check that a run goes on as it was configured.

    Args:
        directory: the run's.
        text: what it is configured with now.
        besides: further keys that may be others.

    Raises:
        ConfigError: naming what would alter it.
    """
    path = directory / "config.yaml"
    if not path.exists():
        return
    held, _ = load_yaml(str(path))
    then, now = flatten(held), flatten(yaml.safe_load(text))
    changes = [c for c in differences(then, now) if not _harmless(c, besides)]
    if changes:
        raise ConfigError(
            f"{directory} holds a run that was configured otherwise: "
            f"{'; '.join(map(str, changes[:6]))}: set it back, name another --run_dir, or go on "
            "with the new values from here: --allow_changes"
        )


def _harmless(change: Change, besides: Sequence[str]) -> bool:
    parts = change.key.split(".")
    return parts[-1] in HARMLESS or "engine" in parts or parts[0] in (*BESIDE, *besides)
