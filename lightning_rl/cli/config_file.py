"""The configuration beside a run's files: the first one stays, each other one gets its own file."""

import yaml  # type: ignore[import-untyped]
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from lightning_rl.checkpoint_io import iteration_of
from lightning_rl.configuration import config_files, flatten
from lightning_rl.disk import write_whole
from lightning_rl.resume import going_on_from
from lightning_rl.rundir import run_dir

IGNORED = ("ckpt_path", "weights_only")


class KeepConfigs(SaveConfigCallback):
    """``config.yaml`` of the run; ``config_<n>.yaml`` if it goes on otherwise after iteration n."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        run_dir(trainer)  # on all ranks
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        directory, source = run_dir(trainer), going_on_from(trainer)
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
            if _table(files[max(files)].read_text(encoding="utf-8")) == _table(text):
                return
            path = directory / f"config_{iteration}.yaml"
        write_whole(path, text)


def _table(text: str) -> dict[str, object]:
    table = flatten(yaml.safe_load(text))
    return {key: value for key, value in table.items() if key not in IGNORED}
