"""A run on two processes, for tests: python -m tests.integration.ddp_run OUT MODEL [RANK]

With RANK, that process alone sends itself SIGTERM in its second update.
"""

import os
import signal
import sys

from lightning_rl.callbacks import IterationCheckpoint, RLCallback, RunReport, WeightSync
from lightning_rl.errors import RunInterrupted
from lightning_rl.module import PolicyModule
from tests.support.small_run import adamw, data_module, trainer_of


class SignalOneRank(RLCallback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_update_start(self, trainer, pl_module, batch) -> None:
        if pl_module.iteration == 1 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    out, model, *rank = sys.argv[1:]
    extra = [SignalOneRank(int(rank[0]))] if rank else []
    callbacks = [WeightSync(), RunReport(), *extra, IterationCheckpoint(100)]
    trainer = trainer_of(out, callbacks, devices=2, enable_checkpointing=True)
    data = data_module(
        eval_prompts=None, groups_per_iteration=2, group_size=4, iterations_per_epoch=4
    )
    try:
        trainer.fit(PolicyModule(model, optimizer=adamw(1e-2), seed=7), data, ckpt_path="last")
    except RunInterrupted as stopped:
        print(f"rank {trainer.global_rank}: {stopped}", flush=True)
        return stopped.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
