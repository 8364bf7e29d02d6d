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
from lightning_rl.config.layers import Change, differences, flatten
from lightning_rl.config.mistakes import innermost
from lightning_rl.errors import ConfigError, RunInterrupted
from lightning_rl.run.rundir import require_free, write_whole
from lightning_rl.staged.trainer import StagedTrainer

HELP = """\
usage: lightning-rl staged --config FILE [--config FILE ...] [--key value ...]
                           [--retest] [--allow_changes]

Trains models by fine-tune jobs: of an API, or on this machine. The same command goes on with a run
that ended in any way; no interaction is sampled twice, and no job is created twice.

  --config FILE    YAML with arguments of StagedTrainer; later files and options win
  --run_dir DIR    where the run's state, interactions, metrics and local jobs are
  --retest         test the models of every iteration so far again, and do nothing else
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
    config = parse([a for a in arguments if a not in OPTIONS], parser)
    retest = "--retest" in arguments
    directory = Path(config.run_dir)
    text = parser.dump(config, skip_unset=False)
    if "--allow_changes" not in arguments:
        require_same(directory, text, TESTED if retest else ())
    trainer = build(config, parser)
    try:
        if retest:
            print(json.dumps(trainer.retest(), indent=1))
            return 0
        directory.mkdir(parents=True, exist_ok=True)
        require_free(directory)
        write_whole(directory / "config.yaml", text)
        trainer.fit()
    except KeyboardInterrupt as error:
        what = f"stopped in stage {trainer.state.stage} of iteration {trainer.state.iteration}"
        raise RunInterrupted(f"{what}; the same command goes on from there", 130) from error
    files = sorted(path.name for path in directory.glob("[!.]*"))
    print(f"It all lies in {directory}: {', '.join(files)}")
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
    then, now = (flatten(yaml.safe_load(t)) for t in (path.read_text(encoding="utf-8"), text))
    changes = [c for c in differences(then, now) if not _harmless(c, besides)]
    if changes:
        raise ConfigError(
            f"{directory} holds a run that was configured otherwise: "
            f"{'; '.join(map(str, changes[:6]))}: set it back, name another --run_dir, or go on "
            "with the new values from here: --allow_changes"
        )


def _harmless(change: Change, besides: Sequence[str]) -> bool:
    parts = change.key.split(".")
    return parts[-1] in HARMLESS or "engine" in parts or parts[0] in besides
