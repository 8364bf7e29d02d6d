"""What does `Trainer.fit` cost over a bare loop of the same named steps?

    OMP_NUM_THREADS=1 python -m benchmarks.overhead [--save]

The quickstart's GRPO through `Trainer.fit`, with weight sync, preview, step timer and TensorBoard
logger; and before or after each of its iterations, in turn, one of a bare loop (as
recipes/sort_digits/bare_loop.py: no Trainer, callbacks or logger) with the same engine, prompts,
seeds and start, so that both train on the very same rollouts, which is checked. Sync and probe are
part of both. The last line is JSON with `ratio`, the median of CPU seconds per iteration, Trainer /
bare; goal: <= 1.03.
"""

import time

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer

from benchmarks.support.results import parser_of, report_ratio
from benchmarks.support.task import (
    GROUP_SIZE,
    GROUPS,
    SAMPLING,
    Rows,
    fit,
    make_data,
    make_module,
    make_prompts,
    prepare,
)
from lightning_rl import (
    PolicyModule,
    PreviewTable,
    Rewards,
    Rollout,
    SingleTurn,
    StepTimer,
    WeightSync,
)
from lightning_rl.engines.base import Engine
from lightning_rl.extend import OwnLoop, RolloutPipeline, pack_rollouts
from lightning_rl.learn.probe import probe_gap
from recipes.sort_digits.reward import exact_match


class BareLoop:
    """An iteration of training, step by named step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.module = make_module(seed=0)
        OwnLoop(self.module, Fabric(accelerator="cpu", devices=1))
        self.policy = self.module.loaded_policy
        self.prompts = make_prompts(seed=0)
        self.prompts.load(self.policy.tokenizer)
        self.probe = self.prompts.first(4)
        self.pipeline = RolloutPipeline(
            engine,
            SingleTurn(),
            Rewards([exact_match]),
            self.policy.tokenizer,
        )

    def iterate(self) -> list[Rollout]:
        """Collect, learn, then sync and probe, in the Trainer's order."""
        learner, iteration = self.module.learner, self.module.iteration
        drawn = self.prompts.draw(GROUPS)
        rollouts = self.pipeline.run(drawn, GROUP_SIZE, SAMPLING, iteration=iteration)
        batch = learner.compute_advantages(pack_rollouts(rollouts))
        learner.end_iteration(learner.update(batch))
        self.engine.load_weights(self.policy.named_weights(), version=learner.iteration)
        probe_gap(self.engine, self.policy, self.probe, SAMPLING.temperature, tokens=2)
        return rollouts


class Compare(Rows):
    """Times the Trainer's iterations and the bare loop's, in turn the one and the other first.

    Whoever comes second finds warm caches, so both do the same.
    """

    def __init__(self, warmup: int) -> None:
        super().__init__()
        self.warmup = warmup

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.engine = trainer.datamodule.engine  # type: ignore[attr-defined]
        self.bare = BareLoop(self.engine)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin(pl_module)

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        if not pl_module.iteration:
            return
        fitted = time.process_time() - self.since
        if self.bare.module.iteration < pl_module.iteration:
            self.run_bare(pl_module)
        if tokens(self.bare_rollouts) != tokens(self.rollouts):
            raise RuntimeError("Trainer and bare loop trained on different rollouts")
        if pl_module.iteration > self.warmup:
            self.rows.append({"fit": fitted, "bare": self.bare_seconds})
        self.begin(pl_module)

    def begin(self, pl_module: LightningModule) -> None:
        """Begin the Trainer's next iteration; before every other one, run the bare loop's."""
        assert isinstance(pl_module, PolicyModule)
        if pl_module.iteration % 2:
            self.run_bare(pl_module)
        self.since = time.process_time()

    def run_bare(self, module: PolicyModule) -> None:
        """Run one iteration of the bare loop, with the engine lent to it."""
        assert module.policy is not None
        self.engine.load_weights(self.bare.policy.named_weights(), self.bare.module.iteration)
        begin = time.process_time()
        self.bare_rollouts = self.bare.iterate()
        self.bare_seconds = time.process_time() - begin
        self.engine.load_weights(module.policy.named_weights(), module.iteration)


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids for rollout in rollouts]


def run(iterations: int, warmup: int) -> list[dict[str, float]]:
    """Return CPU seconds of both, one row per counted iteration."""
    compare = Compare(warmup)
    data = make_data(iterations + warmup, seed=0)
    fit(make_module(seed=0), data, [WeightSync(), PreviewTable(), StepTimer(), compare])
    return compare.rows


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prepare()
    rows = run(arguments.iterations, arguments.warmup)
    sides = {"fit": "Trainer.fit", "bare": "bare loop"}
    report_ratio("overhead", rows, sides, arguments.threads, arguments.save)


if __name__ == "__main__":
    main()
