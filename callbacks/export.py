"""HFExport: the policy as a folder that Hugging Face libraries and vLLM can load."""

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.hub import HubModel
from lightning_rl.callbacks.model_card import ModelCard
from lightning_rl.callbacks.ranking import Ranked, ranked, require_mode, retained
from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, DiskError, HubError, local_path, require_at_least
from lightning_rl.learn.base import LanguageModule, RecordingModule
from lightning_rl.models.export import ModelExport
from lightning_rl.models.model_checks import require_finite_weights
from lightning_rl.run.files.folders import before_of, link_to, replace_folder
from lightning_rl.run.files.rundir import output_path, refused
from lightning_rl.run.hooks import is_fast_dev_run
from lightning_rl.run.processes.dist import every_rank

STATE = "export.json"
"""File in each export with its iteration (else optimizer step) and its metrics."""


@configurable
class HFExport(RLCallback):
    """Writes the trained model for ``AutoModelForCausalLM.from_pretrained`` and vLLM's server.

    At the end of training it writes to ``directory``; during training, every N iterations and
    whenever ``monitor`` is at its best so far, to ``iteration_<n>`` in ``<directory>_exports``, in
    the background, from a copy of the weights in host memory. The end of the run waits for it.
    Exports are atomic, even if the run is killed: :func:`latest_hf_checkpoint` finds the newest.
    Beside the weights are a model card (``README.md``) with the run's figures, ``curves.png`` and
    ``config.yaml``.

    With several policies, each has a folder of its name.

    Args:
        directory: the target folder, except in a fast dev run; None: ``hf`` in the run directory.
        every_n_iterations: how often to export during training; 0: only at the end.
        keep_last: how many of these to keep.
        monitor: a metric such as ``eval/accuracy``; when it is at its best so far the policy is
            exported too, and the link ``best`` points to it.
        mode: ``max`` or ``min``, which values of ``monitor`` are good.
        merge_adapters: write a LoRA merged into its model; false: its adapters alone, as peft does.
        push_to_hub: ``owner/model``, a repository to which each export is pushed as one commit, in
            the background, with the token of ``HF_TOKEN`` or ``hf auth login``. A push that fails
            during training is a warning, as the next one brings its model; if the last one fails,
            the run ends with an error.
        private: if the repository is created, make it private.

    Raises:
        ConfigError: if a value is out of range, ``monitor`` is not recorded, or a LoRA cannot be
            written without its model.
        NonFiniteWeightsError: if the weights are NaN or infinite; earlier exports stay.
        DiskError: if an export cannot be written; earlier exports stay.
        HubError: if the last export cannot be pushed; it is complete on disk.
    """

    language_only = True

    def __init__(
        self,
        directory: str | None = None,
        every_n_iterations: int = 0,
        keep_last: int = 2,
        monitor: str | None = None,
        mode: str = "max",
        merge_adapters: bool = False,
        push_to_hub: str | None = None,
        private: bool = True,
    ) -> None:
        require_at_least(0, every_n_iterations=every_n_iterations)
        require_at_least(1, keep_last=keep_last)
        require_mode(mode)
        if directory is not None:
            local_path(directory, "HFExport.directory")
        self.directory = directory
        self.every_n_iterations = every_n_iterations
        self.keep_last = keep_last
        self.monitor = monitor
        self.mode = mode
        self.merge_adapters = merge_adapters
        self.push_to_hub = push_to_hub
        self.private = private
        self.saved: list[str] = []
        """Names of this run's exports during training, oldest first."""
        self.best: Ranked = []
        self._hub = None if push_to_hub is None else HubModel(push_to_hub, private)
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    # ---------------------------------------------------------------- Lightning's hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._module(pl_module)
        if self.every_n_iterations or self.monitor is not None:
            self.module_of(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for policy in self._module(pl_module).loaded_policies.values():
            if policy.lora is not None and not self.merge_adapters:
                policy.lora.require_adapters_hold_all()  # now, not when training is over
        if self._hub is not None and not is_fast_dev_run(trainer):
            with every_rank():  # a refusal ends them all
                if trainer.is_global_zero:
                    self._hub.open()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not isinstance(pl_module, RecordingModule) or not pl_module.iteration_ended:
            return
        name, every = f"iteration_{pl_module.iteration}", self.every_n_iterations
        value = None if self.monitor is None else pl_module.recorded.get(self.monitor)
        self.best = ranked(self.best, value, name, 1, self.mode)
        if (value, name) in self.best or (every and pl_module.iteration % every == 0):
            self.saved = [*(old for old in self.saved if old != name), name]
            module, place = self._module(pl_module), self.exports(trainer) / name
            self._export(trainer, module, place, copied=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._export(trainer, self._module(pl_module), self.target(trainer), copied=False)
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        try:
            self._finish()
        except (DiskError, HubError) as error:  # what stopped the run comes first
            rank_zero_warn(str(error))

    def target(self, trainer: Trainer) -> Path:
        """Return the folder that is written; with several policies, the parent of their folders."""
        return output_path(trainer, self.directory, "hf")

    def exports(self, trainer: Trainer) -> Path:
        """Return the folder of exports during training."""
        return _exports_of(self.target(trainer))

    # ---------------------------------------------------------------- writing

    def _export(self, trainer: Trainer, module: LanguageModule, target: Path, copied: bool) -> None:
        """Gather the weights, on all ranks, and have rank 0 write them in the background."""
        for policy in module.loaded_policies.values():
            require_finite_weights(policy, f"exported to {target}")
        self._wait()  # one copy at a time
        exports = {
            name: ModelExport(policy, self.merge_adapters, copied)
            for name, policy in module.loaded_policies.items()
        }
        if not trainer.is_global_zero:
            return
        card = ModelCard.of(trainer, module, self.merge_adapters)
        counts = isinstance(module, RecordingModule)  # else supervised training
        iteration = module.iteration if counts else trainer.global_step
        state = {"iteration": iteration, "metrics": card.metrics}
        text = json.dumps(state, indent=1) + "\n"
        hub = None if is_fast_dev_run(trainer) else self._hub
        kept_in = self.exports(trainer)

        def work() -> None:
            _write(exports, card, text, target)
            try:
                if hub is not None:
                    hub.push(target, f"Iteration {iteration}")
            except HubError as error:
                if not copied:  # the last one
                    raise
                rank_zero_warn(str(error))
            self._tidy(kept_in, target)

        self._writer = self._writer or ThreadPoolExecutor(1, "HFExport")
        self._writing = self._writer.submit(work)

    def _wait(self) -> None:
        """Wait for the export in progress; raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _finish(self) -> None:
        try:
            self._wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def _tidy(self, exports: Path, written: Path) -> None:
        """Delete exports that are neither among the last nor the best, and update the link
        ``best``.
        """
        if written.parent != exports:
            return
        there, best, kept = retained(exports, self.saved, self.best, self.keep_last)
        for name in best:
            link_to(exports / "best", name)
        for name in there:
            if name not in kept:
                shutil.rmtree(exports / name)

    # ---------------------------------------------------------------- going on

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self.saved, "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = list(state_dict["saved"])
        self.best = [(value, name) for value, name in state_dict["best"]]

    @staticmethod
    def _module(pl_module: LightningModule) -> LanguageModule:
        if not isinstance(pl_module, LanguageModule):
            raise ConfigError(
                f"HFExport: {type(pl_module).__name__} has no policy to export; remove the callback"
            )
        return pl_module


def _write(
    exports: dict[str, ModelExport],
    card: ModelCard,
    state: str,
    target: Path,
) -> None:
    """Write all policies to a temporary folder, and rename it when all is on disk."""
    try:
        with replace_folder(target) as folder:
            for name, export in exports.items():
                export.write(folder / name)
                card.write(folder / name)
            (folder / STATE).write_text(state)
    except OSError as error:
        raise refused(target, error) from error


def latest_hf_checkpoint(directory: str | Path) -> Path | None:
    """Return the newest complete model that ``HFExport`` wrote to a run directory; None if none.

    Args:
        directory: the run directory, or the ``directory`` of ``HFExport``.
    """
    folder = Path(directory)
    target = folder if (folder / STATE).is_file() or _exports_of(folder).is_dir() else folder / "hf"
    found = [target, before_of(target), *_exports_of(target).glob("iteration_*")]
    whole = [path for path in found if (path / STATE).is_file()]
    # The iteration tells, not the time of a file: copying a run gives its files other times.
    told = {path: json.loads((path / STATE).read_text()) for path in whole}
    return max(whole, key=lambda path: int(told[path]["iteration"]), default=None)


def _exports_of(target: Path) -> Path:
    return target.with_name(f"{target.name}_exports")
