"""``lightning-rl staged``: training by fine-tuning jobs, stage by stage."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ActionConfigFile
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rl.callbacks.artifacts import fetch_files
from lightning_rl.cli.parser import RLArgumentParser, as_checked, checked_sources
from lightning_rl.cli.trust import require_trusted_parts, split_options
from lightning_rl.config.layers import Change, differences, flatten, load_yaml
from lightning_rl.config.mistakes import innermost
from lightning_rl.errors import ConfigError, RunInterrupted
from lightning_rl.games.staged.trainer import STATE, StagedTrainer
from lightning_rl.run.files.rundir import holding, write_whole

HELP = """\
usage: lightning-rl staged --config FILE [--config FILE ...] [--key value ...]
                           [--retest [--retest_dir DIR]] [--allow_changes]
       lightning-rl staged --name RUN [--key value ...]
       lightning-rl staged --from_wandb ENTITY/PROJECT/RUN [--run_dir DIR] [--key value ...]

Trains models by fine-tuning jobs, of an API or on this machine. The same command resumes a run,
however it ended; no interaction is sampled twice, and no job is created twice.

  --config FILE    YAML with arguments of StagedTrainer; later files and options win
  --run_dir DIR    the directory of the run's state, interactions, metrics and local jobs
  --name RUN       resume the run with this name (its directory's, or its id), found in the
                   working directory or up to three folders below it, as it was configured
  --from_wandb RUN resume a run from the state that WandbLogger stored, as it was configured;
                   RUN is its path at W&B, and DIR a new directory (default: named as its id)
  --retest         test the models of all iterations so far again, and do nothing else
  --retest_dir DIR where the results go (default: beside the run, RUN_retest); the run is unchanged
  --allow_changes  resume a run that was started with other settings
  --print_config   print the whole configuration, including defaults, and stop
  --trusted_only   allow no code but the library's own; --trust MODULE allows another module
"""

OPTIONS = ("--retest", "--allow_changes")

HARMLESS = {
    "iterations", "job_attempts", "keep_model_after_failure", "job_timeout_s", "poll_s",
    "max_concurrency", "retries", "timeout_s", "first_wait_s", "threads", "run_dir",
    "test_every_n_iterations", "base_url", "api_key_env",
}  # fmt: skip
"""The last parts of keys whose values may change when a run is resumed."""
BESIDE = ("logger", "callbacks")
"""The first parts of keys that observe a run, and do not affect what it does."""
TESTED = ("test", "test_limit")
"""The first parts of keys that only affect tests."""


def main(arguments: Sequence[str]) -> int:
    """Train, or test models again; returns the exit status."""
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    parser = make_parser()
    rest, name = without_option([a for a in arguments if a not in OPTIONS], "--name")
    rest, stored = without_option(rest, "--from_wandb")
    if stored is not None:
        rest, run_dir = without_option(rest, "--run_dir")
        rest = [*stored_run(stored, run_dir), *rest]
    rest, retest_dir = without_option(rest, "--retest_dir")
    config = parse([*(named_run(name) if name is not None else ()), *rest], parser)
    retest = "--retest" in arguments
    if retest_dir is not None and not retest:
        raise ConfigError(f"--retest_dir {retest_dir} works only with --retest; add it")
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
        raise RunInterrupted(f"{what}; run the same command to resume", 130) from error
    files = sorted(path.name for path in directory.glob("[!.]*"))
    print(f"Results are in {directory}: {', '.join(files)}")
    return 0


def make_parser() -> RLArgumentParser:
    """Return the parser of ``StagedTrainer``'s arguments."""
    parser = RLArgumentParser(description="")
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_class_arguments(StagedTrainer, None)
    return parser


def parse(arguments: Sequence[str], parser: LightningArgumentParser) -> Any:
    """Return the configuration from files and options.

    Raises:
        ConfigError: naming the first mistake, and where it was made.
    """
    rest, trusted = split_options(arguments)
    sources = checked_sources(rest, parser, trusted)
    config = parser.parse_args(as_checked(sources, rest))
    if trusted is not None:
        require_trusted_parts({"": config.as_dict()}, trusted, {"": StagedTrainer})
    return config


def build(config: Any, parser: LightningArgumentParser) -> StagedTrainer:
    """Build the trainer that a configuration describes."""
    try:
        parts = vars(parser.instantiate(config))
        return StagedTrainer(**{name: part for name, part in parts.items() if name != "config"})
    except Exception as error:  # a constructor refused its arguments
        raise innermost(error) from error


def without_option(arguments: Sequence[str], option: str) -> tuple[list[str], str | None]:
    """Return the other arguments, and an option's value; None if it is not there.

    Raises:
        ConfigError: if the option has no value.
    """
    rest, found = list(arguments), None
    for index, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name == option:
            found = value if equals else "".join(rest[index + 1 : index + 2])
            if not found or found.startswith("--"):
                raise ConfigError(f"{option} needs a value after it")
            del rest[index : index + (1 if equals else 2)]
            break
    return rest, found


def named_run(name: str) -> list[str]:
    """Return the options that resume the run of this name, from up to three folders below.

    Raises:
        ConfigError: if there is no such run, or several; the message names the runs found.
    """
    states = [path for depth in range(4) for path in Path().glob("*/" * depth + STATE)]
    files = [path for path in states if path.is_file()]
    runs = [path.parent for path in files if (path.parent / "config.yaml").is_file()]
    called = [run for run in runs if name in (run.resolve().name, _id_of(run))]
    if len(called) != 1:
        there = ", ".join(map(str, called or runs)) or "none"
        what = f"{len(called)} runs have this name" if called else "no run has this name"
        raise ConfigError(
            f"--name {name}: {what} in {Path.cwd()} or up to three folders below (runs: {there}); "
            "run this where the run was started, or give its files: --config RUN/config.yaml "
            "--run_dir RUN"
        )
    return ["--config", str(called[0] / "config.yaml"), "--run_dir", str(called[0])]


def stored_run(run: str, run_dir: str | None) -> list[str]:
    """Fetch the state of a run from W&B, and return the options that resume it.

    Raises:
        ConfigError: if the directory has a run already, or W&B does not give the state.
    """
    directory = Path(run.rpartition("/")[2] if run_dir is None else run_dir)
    if (directory / STATE).exists():
        raise ConfigError(
            f"--from_wandb {run}: {directory} holds a run already; resume it with --config "
            f"{directory / 'config.yaml'} --run_dir {directory}, or choose another --run_dir"
        )
    fetch_files(run, directory, STATE)
    return ["--config", str(directory / "config.yaml"), "--run_dir", str(directory)]


def _id_of(run: Path) -> str | None:
    try:
        state = json.loads((run / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it cannot be gone on with by its id
        return None
    return state.get("run") if isinstance(state, dict) else None


def require_same(directory: Path, text: str, besides: Sequence[str]) -> None:
    """Check that a run is resumed with the configuration it was started with.

    Args:
        directory: the run's directory.
        text: the present configuration, as YAML.
        besides: further keys that may differ.

    Raises:
        ConfigError: naming the differing keys.
    """
    path = directory / "config.yaml"
    if not path.exists():
        return
    held, _ = load_yaml(str(path))
    then, now = flatten(held), flatten(yaml.safe_load(text))
    changes = [c for c in differences(then, now) if not _harmless(c, besides)]
    if changes:
        raise ConfigError(
            f"{directory} holds a run that was started with other settings: "
            f"{'; '.join(map(str, changes[:6]))}: restore them, use another --run_dir, or continue "
            "with the new values from here: --allow_changes"
        )


def _harmless(change: Change, besides: Sequence[str]) -> bool:
    parts = change.key.split(".")
    return parts[-1] in HARMLESS or "engine" in parts or parts[0] in (*BESIDE, *besides)
