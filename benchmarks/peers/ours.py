"""Run the library on one task for `benchmarks/peers`, in processes of its own.

Through `Trainer.fit`, with the weight sync and its probe, the preview of rollouts, the step timer
and a TensorBoard logger.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from benchmarks.peers.run import Progress, parser_of_run
from benchmarks.support.task import fit, make_data, make_module
from lightning_rl import (
    PreviewTable,
    Rollout,
    Sampling,
    StepTimer,
    StreamedCollector,
    TransformersEngine,
    VLLMLocal,
    WeightSync,
)
from lightning_rl.callbacks import RLCallback
from lightning_rl.extend import Engine

PARTS = ("generate", "train", "iteration")
ENGINES: dict[str, Callable[[int], Engine]] = {
    "vllm": lambda length: VLLMLocal(
        max_model_len=length, options={"max_num_batched_tokens": 8192}
    ),
    "transformers": lambda length: TransformersEngine(),
}
"""The engines by the generation's name, given the longest prompt and completion."""


class Clock(RLCallback):
    """Reports to ``Progress``; stops at the goal."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    # Before WeightSync's, so the first sync counts in the first iteration.
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.progress.begin()

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        tokens = sum(len(r.token_ids) for r in rollouts)
        self.progress.collected([r.reward or 0.0 for r in rollouts], tokens)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        # The first row is of the first sync, before any iteration.
        if not self.progress.rewards:
            return
        self.progress.parts.append({part: metrics[f"time/{part}"] for part in PARTS})
        if self.progress.finished():
            trainer.should_stop = True


def main() -> None:
    parser = parser_of_run("One run of the library.")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--streamed", type=int, default=0, help="groups in flight; 0: not streamed")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    seed_everything(arguments.seed, verbose=False)
    progress = Progress(arguments.goal)
    data = make_data(
        arguments.iterations,
        ENGINES[arguments.generation](arguments.max_model_len),
        Path(arguments.prompts),
        sampling=Sampling(max_tokens=arguments.max_tokens),
        collector=StreamedCollector(arguments.streamed) if arguments.streamed else None,
    )
    callbacks = [Clock(progress), WeightSync(), PreviewTable(), StepTimer()]
    strategy = "ddp" if arguments.processes > 1 else "auto"
    module = make_module(Path(arguments.model))
    fit(module, data, callbacks, devices=arguments.processes, strategy=strategy)
    progress.report(arguments.out)


if __name__ == "__main__":
    main()
