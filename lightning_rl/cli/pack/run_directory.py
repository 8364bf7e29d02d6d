"""The run directory of a pack, in which its update is made again."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_rl.cli.pack.trees import read_tree
from lightning_rl.cli.requested import models_in
from lightning_rl.config.yaml_text import dump_yaml, parse_yaml
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.errors import CheckpointError, ConfigError
from lightning_rl.run.files.checkpoint_io import write_checkpoint


def make_run(about: Mapping[str, Any], parts: Path, run: Path) -> None:
    """Write a pack's run directory.

    Args:
        about: what ``pack.json`` says.
        parts: the pack's members.
        run: the directory to write, which must not exist.

    Raises:
        CheckpointError: if the checkpoint is damaged, or of another iteration.
        ConfigError: if the configuration is damaged.
    """
    version = about["iteration"] - 1
    checkpoint = read_tree(parts / "checkpoint") if version > 0 else None
    if checkpoint is not None:
        _require_fitting(checkpoint, version)
    config = _config_in(parts)
    # All on this machine. A stranger's configuration does not say how many processes are started.
    config["trainer"] |= {"devices": about["processes"], "num_nodes": 1}
    run.mkdir(parents=True)
    for folder in ("models", "rerun", "code"):
        if (parts / folder).is_dir():
            shutil.copytree(parts / folder, run / folder)
    there = {path.relative_to(run).as_posix(): path for path in run.glob("models/*")}
    for node in models_in(config.get("model")):
        if node["model"] in there:
            node["model"] = str(there[node["model"]].absolute())
    (run / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    if checkpoint is not None:
        write_checkpoint(checkpoint, run / "checkpoints" / f"iteration_{version}.ckpt")


def as_one_process(about: Mapping[str, Any], parts: Path) -> dict[str, Any]:
    """Make one process train on all rollouts of a pack of several, those of one rank after those
    of another; returns what its ``pack.json`` says then.
    """
    log, iteration = RerunLog(parts), about["iteration"]
    shares = [log.rollouts(iteration, rank) for rank in range(about["processes"])]
    outcomes = [replace(outcome, ranks=1) for outcome in log.lines()]
    log.forget_after(0)
    log.write_rollouts(iteration, 0, [rollout for share in shares for rollout in share])
    for outcome in outcomes:
        log.write_outcome(outcome)
    config = _config_in(parts)
    config["trainer"]["strategy"] = "auto"
    (parts / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    return {**about, "processes": 1}


def _config_in(parts: Path) -> dict[str, Any]:
    text = (parts / "config.yaml").read_text(encoding="utf-8")
    config = parse_yaml(text, "the pack's config.yaml")
    trainer = config.get("trainer") if isinstance(config, dict) else None
    if not isinstance(trainer, dict) or config.get("ckpt_path") is not None:
        raise ConfigError(
            "the pack's config.yaml must hold a trainer, and no ckpt_path; ask for the pack again"
        )
    return dict(config)


def _require_fitting(checkpoint: Any, version: int) -> None:
    try:
        found = checkpoint["lightning_rl"]["iteration"]
        lists = [checkpoint[name] for name in ("optimizer_states", "lr_schedulers")]
        if not all(isinstance(one, list) for one in lists):
            raise TypeError("its optimizers and schedules must be lists")
        if not isinstance(checkpoint["state_dict"], dict):
            raise TypeError("its weights must be a mapping")
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the pack's checkpoint is damaged ({error!r}); ask for the pack again"
        ) from error
    if found != version:
        raise CheckpointError(
            f"the pack's checkpoint is of version {found!r:.20}, but the update needs {version}; "
            "ask for the pack again"
        )
