"""How near is an iteration to its floor?

    OMP_NUM_THREADS=1 python -m benchmarks.floor [--save]       (or: make bench-floor)

Runs the quickstart's GRPO through `Trainer.fit` with its callbacks and logger, and after every
iteration the bare work of the same rollouts: `vllm.LLM.generate` of as many tokens for the same
prompts (no logprobs, no seeds), then a hand-written torch forward, backward and AdamW step on the
same tokens, prompts shared within a group. The ratio of CPU seconds, iteration by iteration, is
what the library costs. Groups whose rewards are all alike are trained on by the bare step, but left
out by the library, which is exact; `skipped` is their share. The last line is JSON with `ratio`
(against the floor with shared prompts) and, against other floors, `ratio_unshared`,
`ratio_skipping` (it leaves out the same rollouts) and `ratio_asking` (its vLLM is asked for
logprobs, and each request has a seed, as ours are).
"""

import statistics
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.support.plain_step import PlainStep
from benchmarks.support.results import parser_of, report
from benchmarks.support.task import LR, MODEL, Rows, fit, make_data, make_module, prepare
from lightning_rl import PolicyModule, PreviewTable, Rollout, StepTimer, WeightSync

PHASES = ("generate", "train", "sync")
"""The phases of an iteration, as StepTimer records them, in wall seconds."""
FLOORS = ("shared", "unshared", "skipping", "asking")


class Floor(Rows):
    """Times each iteration's CPU seconds, then the bare work of the same rollouts."""

    def __init__(self, warmup: int) -> None:
        super().__init__()
        self.warmup = warmup

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from vllm import LLM

        threads = torch.get_num_threads()
        set_threads = torch.set_num_threads
        self.llm = LLM(
            str(MODEL),
            dtype="float32",
            max_model_len=32,
            kv_cache_memory_bytes=64 << 20,
            block_size=32,
            enforce_eager=True,
            disable_log_stats=True,
        )
        torch.set_num_threads = set_threads  # vLLM makes it a no-op
        torch.set_num_threads(threads)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        policy: Any = pl_module.policy
        self.plain = {
            name: PlainStep(policy.lm.config, policy.lm.state_dict(), LR) for name in FLOORS
        }

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin = time.process_time()

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        if pl_module.iteration == 0:
            return
        row = {
            "iteration": time.process_time() - self.begin,
            **{phase: metrics[f"time/{phase}"] for phase in PHASES},
            "skipped": metrics["policy/skipped_share"],
            "tokens": float(sum(len(r.token_ids) for r in self.rollouts)),
        }
        # Another one begins each time, so that none always finds the warmest caches.
        turn = pl_module.iteration % len(self.plain)
        for name in [*self.plain, *self.plain][turn : turn + len(self.plain)]:
            rollouts = with_spread(self.rollouts) if name == "skipping" else self.rollouts
            advantages = torch.randn(sum(len(r.token_ids) for r in rollouts))
            # As in an iteration, the step follows generation, and so finds its caches cold.
            row[f"generate_{name}"] = cpu_seconds(self.generate, name == "asking")
            share = name != "unshared"
            row[f"step_{name}"] = cpu_seconds(self.plain[name].step, rollouts, advantages, share)
        if pl_module.iteration > self.warmup:
            self.rows.append(row)

    def generate(self, asking: bool) -> None:
        """Generate as many tokens as the rollouts have, for the same prompts."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = [
            SamplingParams(
                max_tokens=len(r.token_ids),
                ignore_eos=True,
                temperature=1.0,
                detokenize=False,
                seed=r.seed if asking else None,
                logprobs=0 if asking else None,
                flat_logprobs=asking,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for r in self.rollouts
        ]
        prompts = [{"prompt_token_ids": r.prompt.token_ids} for r in self.rollouts]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        produced = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert produced == sum(len(r.token_ids) for r in self.rollouts)


def with_spread(rollouts: list[Rollout]) -> list[Rollout]:
    """Keep the rollouts in whose group rewards differ."""
    rewards: dict[str, set[float | None]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.group_id, set()).add(rollout.reward)
    return [rollout for rollout in rollouts if len(rewards[rollout.group_id]) > 1]


def cpu_seconds(function: Any, *arguments: Any) -> float:
    """Return the CPU seconds (all threads) of one call."""
    begin = time.process_time()
    function(*arguments)
    return time.process_time() - begin


def run(iterations: int, warmup: int) -> list[dict[str, float]]:
    """Train and measure; returns one row per counted iteration."""
    floor = Floor(warmup)
    callbacks = [WeightSync(), PreviewTable(), StepTimer(), floor]
    fit(make_module(), make_data(iterations + warmup), callbacks)
    return floor.rows


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="runs whose iterations are counted")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prepare()
    runs = (run(arguments.iterations, arguments.warmup) for _ in range(arguments.repeats))
    rows = [row for each in runs for row in each]
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    ratios = {
        "ratio" if name == "shared" else f"ratio_{name}": statistics.median(
            r["iteration"] / (r[f"generate_{name}"] + r[f"step_{name}"]) for r in rows
        )
        for name in FLOORS
    }
    print(f"\nCPU seconds, median of {len(rows)} iterations, {arguments.threads} thread(s):")
    inside = ", ".join(f"{phase} {median[phase]:.3f}" for phase in PHASES)
    print(f"  {'iteration':<15} {median['iteration']:.3f}  (wall: {inside})")
    for name in FLOORS:
        generate, step = median[f"generate_{name}"], median[f"step_{name}"]
        inside = f"generate {generate:.3f}, step {step:.3f}"
        print(f"  {'floor, ' + name:<15} {generate + step:.3f}  ({inside})")
    print(f"  {'tokens':<15} {median['tokens']:.0f} per iteration, {median['skipped']:.0%} skipped")
    report("floor", ratios | median, arguments.save)


if __name__ == "__main__":
    main()
