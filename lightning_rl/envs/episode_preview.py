"""EpisodePreview: an animated picture of an episode, on disk and in TensorBoard."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_rl.callbacks.base import RLCallback
from lightning_rl.callbacks.evaluate import is_last
from lightning_rl.config.arguments import configurable
from lightning_rl.envs.datamodule import EnvDataModule
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.run.files.rundir import run_dir
from lightning_rl.run.hooks import datamodule_of


@configurable
class EpisodePreview(RLCallback):
    """Shows how the agents play: ``episodes/iteration_<n>.gif`` in the run directory.

    It runs before the first iteration, after every N-th and after the last; always the same
    episode, greedy if evaluations are. TensorBoard shows it among the images.

    Args:
        every_n_iterations: iterations between previews.
        max_frames: maximum number of frames; longer episodes are shown with a stride.
        width: width of the picture in pixels; smaller pictures are not enlarged.
        fps: steps shown per second.

    Raises:
        ConfigError: for values below 1; at start, if there are no environments, and when it is
            rendered, if the environment has no pictures.
    """

    def __init__(
        self,
        every_n_iterations: int = 20,
        max_frames: int = 120,
        width: int = 240,
        fps: int = 30,
    ) -> None:
        require_at_least(
            1, every_n_iterations=every_n_iterations, max_frames=max_frames, width=width, fps=fps
        )
        self.every_n_iterations = every_n_iterations
        self.max_frames = max_frames
        self.width = width
        self.fps = fps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(datamodule_of(trainer), EnvDataModule):
            raise ConfigError(
                "EpisodePreview shows episodes of an EnvDataModule; for rollouts of a language "
                "model use PreviewTable"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.ckpt_path:
            self._show(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        iteration = self.module_of(pl_module).iteration
        if iteration % self.every_n_iterations == 0 or is_last(trainer, iteration):
            self._show(trainer, pl_module)

    @rank_zero_only
    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = datamodule_of(trainer)
        assert isinstance(data, EnvDataModule)
        iteration = self.module_of(pl_module).iteration
        pictures = data.watch().pictures
        every = -(-len(pictures) // self.max_frames)
        animation, size = as_gif(pictures[::every], self.width, self.fps)
        folder = run_dir(trainer) / "episodes"
        folder.mkdir(exist_ok=True)
        (folder / f"iteration_{iteration}.gif").write_bytes(animation)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                _to_tensorboard(logger, animation, size, iteration)


def as_gif(pictures: Sequence[np.ndarray], width: int, fps: int) -> tuple[bytes, tuple[int, int]]:
    """Encode pictures (H, W, 3) of bytes as a looping GIF; return it, its width and height."""
    from PIL import Image

    images = [Image.fromarray(np.asarray(picture, np.uint8)) for picture in pictures]
    for image in images:
        image.thumbnail((width, width))
    file = BytesIO()
    duration = max(20, round(1000 / fps))  # browsers play what is shorter slower
    first, *rest = images
    first.save(file, "GIF", save_all=True, append_images=rest, duration=duration, loop=0)
    return file.getvalue(), first.size


def _to_tensorboard(
    logger: TensorBoardLogger, animation: bytes, size: tuple[int, int], iteration: int
) -> None:
    # SummaryWriter.add_video makes the same of tensors, with moviepy, which we do without.
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(
        width=size[0], height=size[1], colorspace=3, encoded_image_string=animation
    )
    summary = Summary(value=[Summary.Value(tag="episode", image=image)])
    logger.experiment._get_file_writer().add_summary(summary, iteration)
