"""How near is an iteration to its floor?

    python -m benchmarks.floor            (or: make bench-floor)

Runs the quickstart's GRPO through `Trainer.fit` with its callbacks and logger, and after every
iteration the bare work of the same rollouts: `vllm.LLM.generate` of as many tokens for the same
prompts (no logprobs, no seeds), and a hand-written torch forward, backward and AdamW step on the
same tokens, prompts shared within a group. The ratio of CPU seconds, iteration by iteration, is
what the library costs. Groups whose rewards are all alike are trained on by the bare step, but left
out by the library, which is exact; `skipped` is their share. The last line is JSON with `ratio`
(against the floor with shared prompts), `ratio_unshared`, and `ratio_skipping` (against a floor
with shared prompts that leaves out the same rollouts).
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.plain_step import PlainStep
from benchmarks.task import LR, MODEL, fit, make_data, make_module, prepare
from lightning_rl import PolicyModule, PreviewTable, RLCallback, Rollout, StepTimer, WeightSync


class Floor(RLCallback):
    """Times each iteration's CPU seconds, then the bare work of the same rollouts."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.rows: list[dict[str, float]] = []

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
            share: PlainStep(policy.lm.config, policy.lm.state_dict(), LR)
            for share in (True, False)
        }
        self.plain_skipping = PlainStep(policy.lm.config, policy.lm.state_dict(), LR)

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin = time.process_time()

    def on_collect_end(
        self, trainer: Trainer, pl_module: LightningModule, rollouts: list[Rollout]
    ) -> None:
        self.rollouts = rollouts

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        if pl_module.iteration == 0:
            return
        iteration = time.process_time() - self.begin
        advantages = torch.randn(sum(len(r.token_ids) for r in self.rollouts))
        # Alternate the order, so that neither variant always finds warm caches.
        order = (True, False) if pl_module.iteration % 2 else (False, True)
        steps = {
            share: cpu_seconds(self.plain[share].step, self.rollouts, advantages, share)
            for share in order
        }
        moving = with_spread(self.rollouts)
        trained = advantages[: sum(len(r.token_ids) for r in moving)]
        row = {
            "iteration": iteration,
            "skipped": metrics["policy/skipped_share"],
            "step_skipping": cpu_seconds(self.plain_skipping.step, moving, trained, True),
            "generate": cpu_seconds(self.generate),
            "step": steps[True],
            "step_unshared": steps[False],
            "tokens": float(len(advantages)),
        }
        if pl_module.iteration > self.warmup:
            self.rows.append(row)

    def generate(self) -> None:
        """As many tokens as the rollouts have, for the same prompts."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = [
            SamplingParams(
                max_tokens=len(r.token_ids),
                ignore_eos=True,
                temperature=1.0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for r in self.rollouts
        ]
        prompts = [{"prompt_token_ids": r.prompt.token_ids} for r in self.rollouts]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        produced = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert produced == sum(len(r.token_ids) for r in self.rollouts)


def with_spread(rollouts: list[Rollout]) -> list[Rollout]:
    """Those in whose group rewards differ."""
    rewards: dict[str, set[float | None]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.group_id, set()).add(rollout.reward)
    return [rollout for rollout in rollouts if len(rewards[rollout.group_id]) > 1]


def cpu_seconds(function: Any, *arguments: Any) -> float:
    """CPU seconds (all threads) of one call."""
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    prepare()
    rows = run(arguments.iterations, arguments.warmup)
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    ratios = {
        name: statistics.median(r["iteration"] / (r["generate"] + r[step]) for r in rows)
        for name, step in (
            ("ratio", "step"),
            ("ratio_unshared", "step_unshared"),
            ("ratio_skipping", "step_skipping"),
        )
    }
    print(f"\nCPU seconds, median of {len(rows)} iterations, {arguments.threads} thread(s):")
    for key in ("iteration", "generate", "step", "step_unshared", "step_skipping"):
        print(f"  {key:<14} {median[key]:.3f}")
    print(f"  {'tokens':<14} {median['tokens']:.0f} per iteration, {median['skipped']:.0%} skipped")
    print(json.dumps({k: round(v, 3) for k, v in (ratios | median).items()}))


if __name__ == "__main__":
    main()
