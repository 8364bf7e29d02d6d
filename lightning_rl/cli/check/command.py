"""``lightning-rl check``: show what a configuration does, and a rollout; writes nothing."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_rl.callbacks import Evaluate, WeightSync
from lightning_rl.callbacks.early_stopping import Monitor
from lightning_rl.cli.app import RLCLI
from lightning_rl.cli.check.batches import with_longest_whole
from lightning_rl.cli.check.disk import disk_plan
from lightning_rl.cli.check.mesh import choose
from lightning_rl.cli.check.reward_trial import try_rewards
from lightning_rl.cli.check.training import card_plan, planned_device, training_plan
from lightning_rl.cli.process import CommandParser
from lightning_rl.collect.base import CollectingDataModule
from lightning_rl.collect.checks import check_groups
from lightning_rl.config.lightning_flags import warn_of_flags
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.rollout import Prompt, Rollout, as_text
from lightning_rl.run.files.rundir import require_writable
from lightning_rl.run.hooks import callbacks_of, find_callbacks

HELP = """\
usage: lightning-rl check --config FILE [--config FILE ...] [--key value ...]
                          [--no_rollout | --rewards] [--gpu_memory_gb N [--gpus N]]
       lightning-rl fit --config FILE ... --dry_run

Does everything that `fit` would do before its first update: resolves the configuration, loads
tokenizer, prompts and model, starts the engine, makes one tiny group of rollouts and grades it.
Prints the algebra of the batches and an estimate of the memory. Writes nothing.

  --no_rollout   start no engine, generate and grade nothing
  --rewards      try only the rewards: on right answers as people write them, and on texts that
                 a model should not be paid for; status 1 if one would harm a run
  --gpu_memory_gb N  plan for GPUs of N GiB, which need not be present; default: this machine's
  --gpus N       say how N such GPUs should share the model; reads no weights and starts no engine
"""

_KINDS = ("--no_rollout", "--rewards")


def main(arguments: Sequence[str]) -> int:
    """Check what ``lightning-rl fit`` would do with these arguments."""
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    own, rest = own_options(arguments)
    with TemporaryDirectory(prefix="lightning_rl_") as scratch:
        wrong = _check(Built(rest, scratch), own)
    if wrong is not None:
        print(f"not good: {wrong}, as said above", file=sys.stderr)
        return 1
    if own.gpus is None and not own.rewards:
        print("good: `lightning-rl fit` with the same options would start")
    return 0


def own_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the command itself, and all others, which are those of ``fit``.

    Raises:
        ConfigError: if options have an invalid value, or exclude or need each other.
    """
    parser = CommandParser("check", "")
    for name in (*_KINDS, "--dry_run"):
        parser.add_argument(name, action="store_true")
    for name in ("--gpu_memory_gb", "--gpus"):
        parser.add_argument(name, nargs="?", const="")
    own, others = parser.parse_known_args(arguments)
    if (card := own.gpu_memory_gb) is not None:
        own.gpu_memory_gb = _number(card)
        if not 0 < own.gpu_memory_gb < math.inf:
            raise ConfigError(
                f"--gpu_memory_gb={card!r} must be a number > 0, the memory of one GPU in GiB"
            )
    if (gpus := own.gpus) is not None:
        if not gpus.isdecimal() or int(gpus) < 1:
            raise ConfigError(f"--gpus={gpus!r} must be a whole number >= 1")
        if card is None:
            raise ConfigError(
                f"--gpus={gpus} needs the memory of one GPU; pass --gpu_memory_gb too"
            )
        own.gpus = int(gpus)
    if len(kinds := [name for name in _KINDS if getattr(own, name[2:])]) > 1:
        raise ConfigError(f"{' and '.join(kinds)} exclude each other; pass one of them")
    return own, others


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _check(cli: "Built", own: argparse.Namespace) -> str | None:
    """Print the findings; returns what is wrong, if anything is."""
    module, data, trainer = cli.model, cli.datamodule, cli.trainer
    names = (type(module).__name__, type(data).__name__)
    warn_of_flags(trainer)
    print(f"configuration: good ({', '.join(names)} on {trainer.strategy.root_device})")
    if isinstance(data, CollectingDataModule):
        connect(cli)
        tried = data.check(module)
        if tried is not None:
            print("\n".join(tried))
            return None
    if not isinstance(module, RolloutModule) or not isinstance(data, RLDataModule):
        print("nothing more is checked: rollouts need a PolicyModule and an RLDataModule")
        return None
    gpus, card_gb = own.gpus, own.gpu_memory_gb
    too_small = "the GPU is too small"
    try:
        minibatches = max(policy.update.minibatches for policy in module.policies.values())
        check_groups(data.groups_per_iteration, minibatches, gpus or trainer.world_size)
        data.load_prompts("fit")
        if own.rewards:
            verdicts = list(try_rewards(data, data.load_tokenizer(module)))
            print("\n".join(line for verdict in verdicts for line in verdict.printed()))
            return "rewards have faults" if any(v.faults for v in verdicts) else None
        each = (prompt for _, prompt in data.train_prompts.numbered())
        prompts = with_longest_whole(each, data.groups_per_iteration)
        print(_prompts(prompts, data))
        print("".join(require_monitored(callbacks_of(trainer), data)), end="")
        if gpus is not None and card_gb is not None:
            lines, fits = choose(module, data, prompts, gpus, card_gb)
            print("\n".join(lines))
            return None if fits else too_small
        module.configure_model()
        lines, memory = training_plan(module, data, prompts, planned_device(trainer, card_gb))
        longest = max(len(prompt.token_ids) for prompt in prompts)
        disk = disk_plan(module, data, cli.place, cli.logged, longest)
        print("\n".join([*lines, *disk.lines()]))
        plan = card_plan(module, data, memory, card_gb)
        if plan is not None:
            print("\n".join(plan.lines()))
        if not own.no_rollout:
            print("\n".join(_try(cli, data, module)))
        return None if plan is None or plan.missing <= 0 else too_small
    finally:
        data.teardown("fit")


def connect(cli: RLCLI) -> None:
    """Connect module and data module to the trainer, as a run would."""
    cli.trainer.strategy.connect(cli.model)
    cli.datamodule.trainer = cli.model.trainer = cli.trainer
    cli.trainer.datamodule = cli.datamodule  # type: ignore[attr-defined]


def _prompts(prompts: Sequence[Prompt], data: RLDataModule) -> str:
    lines = []
    for task in data.train_tasks:
        lengths = [len(prompt.token_ids) for prompt in prompts if prompt.set == task.name]
        if not lengths:
            raise DataError(
                f"prompt set {task.name!r}: none of its prompts is short enough; raise its "
                "max_prompt_tokens"
            )
        mean = sum(lengths) / len(lengths)
        share = data.train_prompts.shares().get(task.name)
        called = "" if share is None else f" of {task.name} ({share:.0%} of the groups)"
        lines.append(
            f"prompts{called}: {len(lengths)} of {len(task.prompts)} are short enough, mean "
            f"{mean:.1f} tokens, longest {max(lengths)}; completions up to "
            f"{task.sampling.max_tokens} tokens"
        )
    return "\n".join(lines)


def require_monitored(callbacks: Sequence[Callback], data: RLDataModule) -> list[str]:
    """Check that evaluations record monitored metrics; list those only an iteration shows."""
    evaluates = any(isinstance(callback, Evaluate) for callback in callbacks)
    row: dict[str, float] = {}
    # Metrics of one's own say their names when they have seen rollouts.
    if evaluates and not data.held_out.own_metrics:
        samples = [rollout for group in data.held_out.groups(limit=1) for rollout in group]
        row = data.held_out.metrics(samples)
    unknown = []
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint | EarlyStopping) or not callback.monitor:
            continue
        Monitor(callback.monitor, type(callback).__name__).look(row, evaluates)
        if callback.monitor not in row:
            unknown.append(
                f"not checked: whether anything records {callback.monitor}, which "
                f"{type(callback).__name__} monitors; `rehearse` trains, and checks it\n"
            )
    return unknown


def _try(cli: RLCLI, data: RLDataModule, module: RolloutModule) -> list[str]:
    """Generate and grade two rollouts of each set's first prompt, with the real weights."""
    trainer = cli.trainer
    [sync] = find_callbacks(trainer, WeightSync)
    trainer.callbacks = [sync]  # type: ignore[attr-defined]  # no one else shall hear of this
    data.setup("fit")
    sync.setup(trainer, module, "fit")
    try:
        sync.sync(trainer, module)
        prompts, size = data.train_prompts.first(len(data.train_tasks)), min(2, data.group_size)
        rollouts = data.collection.pipeline.run(prompts, size, data.sampling, data.seed)
    finally:
        sync.teardown(trainer, module, "fit")
    known = trainer.callback_metrics
    gaps = [float(known[n]) for n in module.names_of("sync/probe_gap") if n in known]
    checked = f"; engine and trainer agree to {max(gaps):.2g} nats" if gaps else ""
    return [f"rollouts{checked}:", *(f"  {_told(rollout)}" for rollout in rollouts)]


def _told(rollout: Rollout) -> str:
    prompt, completion = (
        " ".join(as_text(text).split()) for text in (rollout.prompt.prompt, rollout.completion)
    )
    reward = rollout.error or f"reward {rollout.reward}"
    return (
        f"{prompt!r:.60} -> {completion!r:.60} ({rollout.length} tokens, "
        f"{rollout.finish_reason}): {reward}"
    )


class Built(RLCLI):
    """Builds what ``fit`` would run; its files are written to ``scratch``.

    Args:
        arguments: those of ``fit``.
        scratch: a directory, which the caller deletes.
    """

    def __init__(self, arguments: list[str], scratch: str) -> None:
        self._scratch = scratch
        self.place, self.logged = Path(), False
        """The folder that the run would write to, and whether it has a logger."""
        super().__init__(["fit", *arguments])

    def before_instantiate_classes(self) -> None:
        given = self.config.fit.trainer.default_root_dir
        if given is not None:
            require_writable(given, "trainer.default_root_dir")
            self.place = Path(given)
        self.config.fit.trainer.default_root_dir = self._scratch

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing: only the built objects are needed."""
        for logger in self.trainer.loggers:
            self.logged = True
            if logger.save_dir not in (None, self._scratch):
                self.place = Path(str(logger.save_dir))
        self.trainer.logger = None  # it was built, so its configuration is good
