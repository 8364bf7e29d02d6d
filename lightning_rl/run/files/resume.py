"""Resuming a run: alone in its directory, with its old configuration or permitted changes."""

import json
import re
import warnings
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml  # type: ignore[import-untyped]
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_rl.config.layers import (
    Change,
    Table,
    config_files,
    described,
    differences,
    flatten,
    with_defaults,
)
from lightning_rl.errors import CheckpointError, ConfigError
from lightning_rl.run.files.checkpoint_io import about, checkpoints_in, iteration_of
from lightning_rl.run.files.rundir import hold, release, run_dir, write_whole
from lightning_rl.run.processes import dist
from lightning_rl.run.processes.peers import Peer, introduce

# What the weights or the optimizer's state are made for.
FIXED = ("model.lora", "model.critic.head", "model.reference")
FIXED_CLASSES = ("model", "data", "model.optimizer")
PENALTIES = ("model.kl", "model.kl_reward")
# What else decides what is learned, of keys of which the others do not.
ALTERING = (
    "trainer.precision",
    "trainer.overfit_batches",
    "trainer.limit_train_batches",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm",
    "trainer.callbacks.WeightSync.schedule",
    "data.engine.dtype",
    "data.engine.max_model_len",
    "data.engine.options",
)
HARMLESS = (
    "trainer",
    "model.model",  # the weights are the checkpoint's
    "model.loading.gradient_checkpointing",
    "model.compile",
    "model.update.max_tokens_per_micro_batch",
    "data.engine",
    "data.evaluation",
    "data.max_failed_share",
    "data.selection.max_batches",
    "data.train_prompts.path",  # what is in the file counts
    "data.train.path",
    "data.val",
    "data.path",
)
OPTIMIZER = ("model.optimizer", "model.lr_scheduler", "model.critic.lr")
_POLICY = re.compile(r"^model\.policies\.\w+\.")


def require_one_start(path: Path | None) -> None:
    """Check that all ranks resume from the same checkpoint. Call it on every rank.

    Args:
        path: the checkpoint that this rank has found; None: it has found none.

    Raises:
        CheckpointError: if a rank finds another checkpoint than rank 0, or none.
    """
    found = dist.gather((Peer.of_this_process().node, None if path is None else path.name))
    first = found[0][1]
    for rank, (node, name) in enumerate(found):
        if name != first:
            raise CheckpointError(
                f"rank 0 (node {found[0][0]}) resumes from {first or 'no checkpoint'}, and rank "
                f"{rank} (node {node}) from {name or 'none'}: the run's folder must be on a file "
                "system that all nodes see"
            )


# ---------------------------------------------------------------- the directory


def enter_directory(trainer: Trainer) -> Path:
    """Return the run directory, locked by this run until it ends. Call it on every rank.

    Raises:
        ConfigError: if another process runs in it.
    """
    directory = run_dir(trainer)
    introduce()
    if trainer.state.fn == "fit":
        with dist.every_rank():
            if dist.rank() == 0:
                hold(directory)
        if hasattr(trainer.lightning_module, "configuration"):  # else it will be refused
            configuration_of(trainer.lightning_module)  # before anything changes
    return directory


def leave_directory(trainer: Trainer) -> None:
    """Release the lock on the run directory."""
    release(run_dir(trainer))


def run_id_of(checkpoints: Path) -> str | None:
    """Return the id of the run that a folder of checkpoints belongs to; None if unknown."""
    return _identity(checkpoints).get("id")


def run_day_of(checkpoints: Path) -> str | None:
    """Return the day on which the run of a folder of checkpoints began; None if unknown."""
    return _identity(checkpoints).get("day")


def enter_run(trainer: Trainer, module: Any, checkpoints: Path) -> str:
    """Return the run's id, kept beside its checkpoints; a run resumed there keeps its own.

    Raises:
        ConfigError: if a folder that the user chose holds another run's checkpoints.
    """
    if not trainer.is_global_zero:
        return ""
    source = None if trainer.ckpt_path is None else Path(str(trainer.ckpt_path)).resolve()
    goes_on = source is not None and source.parent == checkpoints.resolve()
    there = [] if goes_on else checkpoints_in(checkpoints)
    if there and checkpoints.name != "checkpoints":  # of a run directory, which loggers number
        raise ConfigError(
            f"dirpath={str(checkpoints)!r} holds another run's checkpoints, such as "
            f"{there[0].name}, which this run would replace; resume that run (--ckpt_path last), "
            "or choose another dirpath"
        )
    known = _identity(checkpoints) if goes_on else {}
    name = (module.run_id if goes_on else "") or known.get("id") or uuid4().hex
    start = {
        "iteration": module.iteration,
        "from": None if source is None else str(source),
        "changed": {change.key: [change.then, change.now] for change in module.changes or ()},
    }
    path = _identity_file(checkpoints)
    path.parent.mkdir(parents=True, exist_ok=True)
    starts = [*known.get("starts", []), start]
    identity = {"id": name, "day": module.day.date, "starts": starts}
    write_whole(path, json.dumps(identity, indent=1, default=str) + "\n")
    return str(name)


def _identity_file(checkpoints: Path) -> Path:
    in_run = checkpoints.name == "checkpoints"  # of a run directory; else a folder of the user's
    return (checkpoints.parent if in_run else checkpoints) / "run.json"


def _identity(checkpoints: Path) -> dict[str, Any]:
    path = _identity_file(checkpoints)
    try:
        known = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        warnings.warn(
            f"{path} is damaged ({error}); checkpoints of any run are accepted", stacklevel=2
        )
        return {}
    return known if isinstance(known, dict) else {}


def tell_of_beginning(trainer: Trainer, checkpoints: Path) -> None:
    """Say that ``ckpt_path="last"`` found nothing and a run begins; name a similar run if there is
    one.

    A new name usually means a new run, as in a script that is submitted twice; but a user who
    changed the name by mistake would otherwise wait for a run that began anew.
    """
    now: Table = getattr(trainer.lightning_module, "configuration", None) or {}
    for path in _neighbours(trainer, checkpoints) if now else ():
        then = about(path).get("run", {}).get("configuration") or {}
        if then and all(kind_of(c, then, now) == "harmless" for c in _differences(then, now)):
            rank_zero_warn(
                f"ckpt_path: 'last' found no checkpoint in {checkpoints}, so a new run begins; "
                f"{path} belongs to a run with the same configuration and another name: to resume "
                "that one, set trainer.logger back"
            )
            return
    rank_zero_info(f"there is no checkpoint in {checkpoints} to resume from: a new run begins")


def _neighbours(trainer: Trainer, checkpoints: Path) -> list[Path]:
    """Return the newest checkpoint of each run with the same parent folder, or grandparent."""
    if not trainer.loggers or trainer.loggers[0].save_dir is None:
        return []
    root = Path(trainer.loggers[0].save_dir)
    folders = [f for pattern in ("", "*/", "*/*/") for f in root.glob(f"{pattern}checkpoints")]
    return [c[0] for f in folders if f != checkpoints and (c := checkpoints_in(f))]


# ---------------------------------------------------------------- the configuration

_IGNORED = ("ckpt_path", "weights_only")
_OPEN = "auto"


class KeepConfigs(SaveConfigCallback):
    """Saves the run's ``config.yaml``, or ``config_<n>.yaml`` if it is resumed differently after
    iteration n.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run_dir(trainer)  # on all ranks
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        directory, source = run_dir(trainer), getattr(pl_module, "going_on_from", None)
        path = directory / self.config_filename
        config = self.config.clone()
        config.pop("allow_changes", None)  # of this start alone; other commands do not know it
        text = self.parser.dump(config, skip_unset=False)
        inside = source is not None and directory.resolve() in source.resolve().parents
        if source is not None and inside and path.exists():
            iteration = iteration_of(source)
            files = config_files(directory)
            for number in [n for n in files if n > iteration]:
                files.pop(number).unlink()  # what it led to is taken back
            before, now = _table(files[max(files)].read_text(encoding="utf-8")), _table(text)
            # What was left open then, and is now, is what it was settled to.
            if before == now | {key: before.get(key) for key in now if now[key] == _OPEN}:
                return
            path = directory / f"config_{iteration}.yaml"
        write_whole(path, text)


def settle(trainer: Trainer, policy: str, setting: str, value: int) -> None:
    """Write the value that a run has chosen for a setting of a policy's ``update`` to its newest
    configuration.

    It replaces ``auto``, so that resuming or repeating the run uses the same value.
    """
    files = config_files(run_dir(trainer))
    path = files[max(files)]
    if not trainer.is_global_zero or not path.exists():  # of a script: it says so by itself
        return
    text = path.read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    settings = config["model"].get("init_args", config["model"])
    if policy:
        settings = settings["policies"][policy]
        settings = settings.get("init_args", settings)
    if settings["update"].get(setting) == _OPEN:
        settings["update"][setting] = value
        head = "".join(line + "\n" for line in text.splitlines() if line.startswith("#"))
        write_whole(path, head + yaml.safe_dump(config, sort_keys=False))


def _table(text: str) -> Table:
    table = flatten(yaml.safe_load(text))
    return {key: value for key, value in table.items() if key not in _IGNORED}


def configuration_of(module: Any) -> Table:
    """Return the table of a run's configuration, with a fingerprint of its prompts."""
    trainer = module._trainer
    if trainer is None:
        return dict(module.configuration or {})
    data = getattr(trainer, "datamodule", None)
    if module.configuration is None:
        module.configuration = described(module, data, trainer)
    content: Table = {}
    for rows in ("train_prompts", "train"):
        known = getattr(getattr(data, rows, None), "fingerprint", None)
        content |= {} if known is None else {f"data.{rows}.content": known}
    return module.configuration | content


def _differences(then: Table, now: Table) -> list[Change]:
    """Return how the present run differs from a checkpoint's, as far as both tell it."""
    kinds = {("seed_everything" in table) for table in (then, now)}  # of a command, or of a script
    contents = {key for key in then.keys() ^ now.keys() if key.endswith(".content")}
    then, now = ({k: v for k, v in table.items() if k not in contents} for table in (then, now))
    return differences(with_defaults(then, now), now, shared=len(kinds) > 1)


def kind_of(change: Change, then: Table, now: Table) -> str:
    """Return ``refused`` (the run cannot resume), ``alters`` (it learns something else) or
    ``harmless``.
    """
    key = _POLICY.sub("model.", change.key)  # each is as a run's only one
    if key in FIXED_CLASSES or _below(key, FIXED):
        return "refused"
    if key in PENALTIES and _penalised(then) != _penalised(now):
        return "refused"
    guards = key.startswith("trainer.callbacks.") and "Guard" in key
    if guards or _below(key, ALTERING):
        return "alters"
    if _below(key, HARMLESS) or not key.startswith(("model", "data", "seed_everything")):
        return "harmless"
    return "alters"


def check_early(trainer: Trainer) -> None:
    """Refuse a configuration before an engine starts, if the checkpoint is already known."""
    module: Any = trainer.lightning_module
    path = module.going_on_from
    if trainer.state.fn == "fit" and path is not None:
        entry = about(path)
        _check(module, entry, path)
        if (day := (entry.get("run") or {}).get("day")) is not None:
            module.day.date = day  # before prompts are measured


def check_resume(module: Any, checkpoint: dict[str, Any]) -> None:
    """Compare the checkpoint's run with the one that resumes from it, and report the changes.

    Raises:
        ConfigError: naming the changes that prevent resuming, or alter the run without permission.
    """
    trainer = module._trainer
    if trainer is None:  # load_from_checkpoint
        return
    # ``rerun`` and ``audit`` load a checkpoint themselves, without Lightning's ``ckpt_path``.
    path = Path(str(trainer.ckpt_path or module.going_on_from))
    if trainer.state.fn == "fit":
        _check(module, checkpoint["lightning_rl"], path)
        module.run_id = checkpoint["lightning_rl"].get("run", {}).get("id", "")
    _require_fitting(module, checkpoint.get("state_dict") or {}, str(path))


def _check(module: Any, told: dict[str, Any], path: Path) -> None:
    then = (told.get("run") or {}).get("configuration")
    if not then or module.changes is not None:
        return
    now = configuration_of(module)
    changes = _differences(then, now)
    kinds = [(change, kind_of(change, then, now)) for change in changes]
    repeats = getattr(module.trainer.datamodule, "is_rerun", False)  # ``rerun`` or ``audit``
    no_way, on_demand = (_RESTORE, _RESTORE) if repeats else (_NO_WAY, _ON_DEMAND)
    _refuse([change for change, kind in kinds if kind == "refused"], path, no_way)
    allowed = module.allow_changes
    altering = [change for change, kind in kinds if kind == "alters"]
    if allowed is not True:
        listed = tuple(allowed or ())
        _refuse([c for c in altering if not _below(c.key, listed)], path, on_demand)
    module.changes = changes
    lines = [
        f"  {change}{' (permitted by --allow_changes)' if kind == 'alters' else ''}"
        for change, kind in kinds
        if change.key not in ("ckpt_path", "allow_changes", "weights_only")
    ]
    if lines:
        rank_zero_info(
            f"resuming after iteration {told['iteration']} of {path} with another configuration; "
            "the new values apply:\n" + "\n".join(lines)
        )


_RESTORE = "the run was trained with the old values; restore the config.yaml that it wrote"
_NO_WAY = (
    "the checkpoint's weights and optimizer state fit only the old values; set them back, or start "
    "a new run without --ckpt_path"
)
_ON_DEMAND = (
    "this alters the run; set it back, or continue with the new values by --allow_changes "
    "true (or a list of these keys; in Python module.allow_changes)"
)


def _refuse(changes: list[Change], path: Path, why: str) -> None:
    if changes:
        more = f" and {len(changes) - 6} more" if len(changes) > 6 else ""
        shown = "; ".join(map(str, changes[:6]))
        raise ConfigError(
            f"{path} cannot be resumed with the present configuration: {shown}{more}: {why}"
        )


def _require_fitting(module: Any, theirs: dict[str, Any], path: str) -> None:
    """Raise one message instead of a page of keys if the weights do not fit."""
    ours = module.state_dict()
    if not theirs or not ours:
        return
    shapes = [
        k
        for k, v in theirs.items()
        if k in ours and hasattr(v, "shape") and v.shape != ours[k].shape
    ]
    for names, what in (
        ([k for k in ours if k not in theirs], "the checkpoint lacks"),
        ([k for k in theirs if k not in ours], "only the checkpoint has"),
        (shapes, "have another shape in the checkpoint:"),
    ):
        if names:
            raise ConfigError(
                f"{path} is of another model: {what} {len(names)} weights, such as {names[0]}; "
                "configure the same model, LoRA, critic, kl and reference as that run"
            )


def use_new_optimizer_settings(module: Any) -> None:
    """Load only the state, not the settings, of an optimizer or schedule that may change."""
    changed = (_POLICY.sub("model.", change.key) for change in module.changes or ())
    if not any(_below(key, OPTIMIZER) for key in changed):
        return
    optimizers, schedulers = _in_lists(module.configure_optimizers())
    configs = module.trainer.lr_scheduler_configs
    for scheduler, config in zip(schedulers, configs, strict=bool(configs)):
        with warnings.catch_warnings():  # that the optimizer, which is none, has not stepped
            warnings.simplefilter("ignore")
            follows_metric = isinstance(scheduler, ReduceLROnPlateau)
            for _ in range(0 if follows_metric else config.scheduler.last_epoch):
                scheduler.step()
        config.scheduler.load_state_dict(scheduler.state_dict())
    for live, optimizer in zip(module.trainer.optimizers, optimizers, strict=True):
        for group, fresh in zip(live.param_groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in fresh.items() if name != "params"})


def _in_lists(made: Any) -> tuple[list[Any], list[Any]]:
    """Return lists of optimizers and schedules, whatever form ``configure_optimizers`` returns."""
    if isinstance(made, tuple):
        return made
    if isinstance(made, dict):
        schedule = made["lr_scheduler"]
        schedule = schedule["scheduler"] if isinstance(schedule, dict) else schedule
        return [made["optimizer"]], [schedule]
    return [made], []


def _penalised(table: Table) -> bool:
    return any(table.get(key) is not None for key in PENALTIES)


def _below(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in keys)
