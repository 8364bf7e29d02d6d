"""The memory that `lightning-rl check` estimates, against what an update takes.

    python -m benchmarks.memory recipes/sort_digits/grpo.yaml

Trains one iteration on the largest batch that the configuration allows, on the CPU, and follows
every allocation of torch. The last line is JSON.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks.task import quiet_trainer
from lightning_rl.cli.app import RLCLI
from lightning_rl.cli.check.activations import measure_activations
from lightning_rl.cli.check.batches import cut, largest_rollouts
from lightning_rl.cli.check.memory import training_memory
from lightning_rl.cli.check.placement import Placement
from lightning_rl.collect.loader import LazyLoader
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.models.memory import forward_tokens
from lightning_rl.module import PolicyModule


class Built(RLCLI):
    """Builds what a configuration names, and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def _dump_config(self) -> None:
        self.config_dump: dict[str, Any] = {}  # it is for checkpoints, and there will be none


class FollowAllocations(Callback):
    """``peak`` is the most that was allocated at one time since the first batch began."""

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def on_train_batch_start(self, *_: object) -> None:
        gc.collect()
        self.profiler.start()

    def on_train_batch_end(self, *_: object) -> None:
        self.profiler.stop()

    @property
    def peak(self) -> int:
        return peak_of(self.profiler)


def peak_while(call: Callable[[], Any]) -> int:
    """Return the most bytes that a call has allocated at one time, its result included."""
    gc.collect()  # garbage that is freed meanwhile would be taken off
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    del kept
    return peak_of(profiler)


def peak_of(profiler: profile) -> int:
    """The most bytes that were allocated at one time, beside what there was when it started.

    Threads that the profiler does not know, such as gloo's, free memory unheard: what is allocated
    at its address takes its place.
    """
    tree = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    there: dict[int, int] = {}
    used = peak = 0
    for event in sorted(_allocations(tree), key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            used += size - there.get(address, 0)
            there[address] = size
        else:
            used += size
            there.pop(address, None)
        peak = max(peak, used)
    return peak


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)


def main(config: str, *options: str) -> None:
    """Measure one update and print it beside the estimate."""
    cli = Built(["fit", "--config", config, *options])
    module, data = cli.model, cli.datamodule
    assert isinstance(module, PolicyModule)
    assert isinstance(data, RLDataModule)
    follow = FollowAllocations()
    trainer = quiet_trainer(Path.cwd(), [follow], precision=cli.trainer.precision)
    trainer.strategy.connect(module)
    data.trainer = module.trainer = trainer
    data.load_prompts("fit")
    module.configure_model()
    assert module.policy is not None
    rollouts = largest_rollouts(
        data.train_prompts.first(),
        data.groups_per_iteration,
        data.group_size,
        data.sampling.max_tokens,
        data.sampling.distribution,
    )
    for rollout in rollouts:  # else the update would leave them out
        rollout.reward = float(rollout.sample_index % 2)
    packs = cut(pack_rollouts(rollouts), module.minibatches, module.max_tokens_per_pack)
    largest = max((pack for parts in packs for pack in parts), key=forward_tokens)
    others = [] if module.reference is None else [module.reference]
    placement = Placement(precision=str(cli.trainer.precision))
    estimate = training_memory(
        module.policy,
        others,
        module.optimizer,
        largest,
        placement,
        measure=partial(measure_activations, bonus=module.objective.entropy is not None),
        passes=max(map(len, packs)),
    )
    print("\n".join(estimate.lines()))
    trainer.fit(module, LazyLoader(lambda _: pack_rollouts(rollouts), 1))
    before = ("weights", "other models", "master weights")  # made before the batch began
    measured = follow.peak + sum(estimate.parts.get(name, 0) for name in before)
    estimated = estimate.total + sum(estimate.host.values())  # on the CPU it is all one memory
    print(
        json.dumps(
            {
                "config": config,
                "pack_tokens": forward_tokens(largest),
                "estimated_mib": round(estimated / 2**20, 1),
                "measured_mib": round(measured / 2**20, 1),
                "ratio": round(estimated / measured, 3),
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", help="a configuration; what follows goes to lightning-rl fit")
    arguments, others = parser.parse_known_args()
    main(arguments.config, *others)
