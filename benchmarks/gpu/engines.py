"""Check vLLM in the training process: memory, pushes, agreement with the trainer, speed."""

import asyncio
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import device_work, settle, used_bytes
from benchmarks.gpu.made import model_of, prompts_of, quantiles, warm_model
from lightning_rl import Loading, MemoryTransport, Prompt, Rollout, VLLMLocal
from lightning_rl.agents.base import append_written
from lightning_rl.engines.base import logprob_tolerance
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.extend import RolloutStatus, pack_rollouts
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.base import push as push_weights

KEPT_AFTER_CLOSE = (("before", "first closed", 1.5), ("first closed", "second closed", 0.1))
"""GiB that engines may leave taken: CUDA's libraries and kernels, which come once; no cache."""
GAP_TOKENS = 4_000
FREED_ASLEEP = 0.75
"""Sleeping has to give back at least this share of an engine's weights and cache."""


@contextmanager
def started(bench: Bench, model: Path, **options: Any) -> Iterator[VLLMLocal]:
    """Yield an engine without weights, and close it afterwards."""
    defaults: dict[str, Any] = {"max_model_len": 256, "kv_cache_gb": 0.05 if bench.tiny else 4.0}
    engine = VLLMLocal(**(defaults | options))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        save_skeleton(str(model), directory)
        engine.start(Path(directory))
    bench.note({"start s": time.perf_counter() - begin})
    try:
        yield engine
    finally:
        engine.close()


def policy_of(bench: Bench, model: Path, seed: int) -> Policy:
    """Make random weights on the device."""
    torch.manual_seed(seed)
    with torch.device(bench.device):
        return Policy(str(model), loading=Loading(random_init=True))


def push_to(engine: VLLMLocal, policy: Policy, version: int) -> None:
    """Push weights as ``WeightSync`` does."""
    transport = MemoryTransport()
    transport.connect(engine)
    push_weights(transport, engine, policy, version)
    transport.close()


def generate(
    engine: VLLMLocal, prompts: Sequence[list[int]], sampling: Sampling
) -> list[Completion]:
    """Generate all completions at once."""

    async def run() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(prompt, sampling, seed) for seed, prompt in enumerate(prompts))
        )

    return run_async(run())


# -------------------------------------------------------------------- life


def memory(bench: Bench) -> None:
    """Measure the memory that an engine takes and gives back, and start a second one after it."""
    model = model_of(bench, "0.5B")
    policy = policy_of(bench, model, seed=1)
    settle(bench)
    levels = {"before": used_bytes(bench)}
    for turn in ("first", "second"):
        begin = time.perf_counter()
        with started(bench, model, dtype="bfloat16", kv_cache_gb=None) as engine:
            levels[f"{turn} started"] = used_bytes(bench)
            push_to(engine, policy, version=1)
            levels[f"{turn} pushed"] = used_bytes(bench)
            generate(engine, prompts_of(4, 16), Sampling(max_tokens=8))
            levels[f"{turn} generated"] = used_bytes(bench)
        gc.collect()
        levels[f"{turn} closed"] = used_bytes(bench)
        bench.note({f"{turn} s": time.perf_counter() - begin})
        bench.note({"used GiB": {name: size / 2**30 for name, size in levels.items()}})
    for since, until, bound in KEPT_AFTER_CLOSE:
        kept = (levels[until] - levels[since]) / 2**30
        bench.require(kept < bound, f"{kept:.2f} GiB more are taken when {until} than {since}")


def sleep(bench: Bench) -> None:
    """Measure what sleep frees, and compare what the engine generates before and after it."""
    model = model_of(bench, "0.5B")
    policy = policy_of(bench, model, seed=1)
    for level in (2,) if bench.tiny else (1, 2):
        with bench.case(f"level {level}"):
            _sleep(bench, model, policy, level)


def _sleep(bench: Bench, model: Path, policy: Policy, level: int) -> None:
    prompts, greedy = prompts_of(8, 20), Sampling(max_tokens=16, temperature=0.0)
    # A CPU cannot give memory back: its trial goes through the same steps, awake.
    options = {"dtype": "bfloat16", "sleep_level": None if bench.tiny else level}
    with started(bench, model, **options) as engine:
        push_to(engine, policy, version=1)
        expected = generate(engine, prompts, greedy)
        settle(bench)
        awake = used_bytes(bench)
        slept = _seconds(bench, engine.sleep)
        # The difference is taken between two moments: other jobs may be on the card.
        freed = awake - used_bytes(bench)
        if level == 2:
            push_to(engine, policy, version=2)
        begin = time.perf_counter()
        again = generate(engine, prompts, greedy)
        woken = time.perf_counter() - begin
        push_to(engine, policy, version=3)
        after_push = generate(engine, prompts, greedy)
        weights = engine.weight_bytes(sum(p.numel() for p in policy.lm.parameters()))
        held = weights + (engine.kv_cache_gb or 0) * 2**30
    bench.note(
        {
            f"level {level}": {
                "weights and cache GiB": held / 2**30,
                "freed GiB": freed / 2**30,
                "sleep s": slept,
                "first tokens s": woken,
            }
        }
    )
    bench.require(
        bench.tiny or freed > FREED_ASLEEP * held,
        f"level {level}: falling asleep gives back {freed / 2**30:.1f} GiB, where weights and "
        f"cache have {held / 2**30:.1f}",
    )
    for when, completions in (("awake again", again), ("after a push", after_push)):
        same = [c.token_ids for c in completions] == [c.token_ids for c in expected]
        bench.require(same, f"level {level}: {when} it generates other tokens")


# -------------------------------------------------------------------- weights


def push(bench: Bench, tied: bool, dtype: str) -> None:
    """Check after each push that greedy completions are those of the weights pushed last."""
    model = model_of(bench, "small", tied)
    policies = [policy_of(bench, model, seed) for seed in (1, 2)]
    prompts = prompts_of(8, 20)
    bound = logprob_tolerance(dtype)
    with started(bench, model, dtype=dtype) as engine:
        for version, policy in enumerate(policies):
            begin = time.perf_counter()
            push_to(engine, policy, version)
            settle(bench)
            seconds = time.perf_counter() - begin
            completions = generate(engine, prompts, Sampling(max_tokens=24, temperature=0.0))
            regret = _regrets(bench, policy, prompts, completions)
            other = _regrets(bench, policies[1 - version], prompts, completions)
            bench.note(
                {
                    f"push {version}": {
                        "s": seconds,
                        "greedy equal": sum(r == 0 for r in regret) / len(regret),
                        "regret": max(regret),
                        "regret by the other weights": max(other),
                    }
                }
            )
            bench.require(
                max(regret) <= bound,
                f"push {version}: a greedy token is {max(regret):.3g} nats below the best one of "
                f"the weights that were pushed, above {bound:g}",
            )
            apart = max(regret) + max(other)
            bench.require(apart > 1.0, "both policies are alike, so this check sees nothing")


@torch.no_grad()
def _regrets(
    bench: Bench, policy: Policy, prompts: Sequence[list[int]], completions: list[Completion]
) -> list[float]:
    """Return how much likelier each token's best alternative is, by Hugging Face in float32."""
    config = AutoConfig.from_pretrained(policy.model)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(bench.device).eval()
    plain.load_state_dict(dict(policy.named_weights()))
    regrets: list[float] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor([prompt + completion.token_ids], device=bench.device)
        logprobs = plain(input_ids=tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, tokens[0, len(prompt) :, None]).squeeze(1)
        regrets += (logprobs.amax(1) - chosen).tolist()
    return regrets


def push_in_flight(bench: Bench) -> None:
    """Check that tokens before a push are the old weights', and those after it the new ones'."""
    dtype = "bfloat16"
    model = model_of(bench, "small")
    old, new = (policy_of(bench, model, seed) for seed in (1, 2))
    prompts = prompts_of(8, 20)
    sampling = Sampling(max_tokens=100, min_tokens=100)
    with started(bench, model, dtype=dtype) as engine:
        push_to(engine, old, version=1)

        async def run() -> list[Completion]:
            tasks = [
                asyncio.create_task(engine.generate(prompt, sampling, seed))
                for seed, prompt in enumerate(prompts)
            ]
            for _ in range(40):  # steps, about
                await asyncio.sleep(0)
            await engine.pause()
            engine.load_weights(new.named_weights(), 2)
            await engine.resume()
            return await asyncio.gather(*tasks)

        completions = asyncio.run(run())
    gaps: dict[str, list[float]] = {"old": [], "new": [], "old by the new weights": []}
    for prompt, completion in zip(prompts, completions, strict=True):
        by_old, by_new = (_gaps(policy, [prompt], [completion], sampling) for policy in (old, new))
        switch = completion.versions.index(2)
        gaps["old"] += by_old[:switch]
        gaps["new"] += by_new[switch:]
        gaps["old by the new weights"] += by_new[:switch]
        bench.require(0 < switch < sampling.max_tokens, f"the push came at token {switch}")
    bench.note({name: quantiles(values) for name, values in gaps.items()})
    for name in ("old", "new"):
        typical = float(torch.tensor(gaps[name]).abs().quantile(0.99))
        bound = logprob_tolerance(dtype)
        bench.require(typical < bound, f"{name} tokens are off by {typical:.3g} nats")


def _gaps(
    policy: Policy,
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
    sampling: Sampling,
) -> list[float]:
    """Return logprobs of all tokens as the trainer computes them, less the engine's."""
    rollouts = [
        Rollout(
            Prompt(str(index), "made", prompt),
            group_id=str(index),
            sample_index=0,
            seed=0,
            sampling=sampling.distribution,
            status=RolloutStatus.COMPLETED,
        )
        for index, prompt in enumerate(prompts)
    ]
    for rollout, completion in zip(rollouts, completions, strict=True):
        append_written(rollout, completion)
    batch = pack_rollouts(rollouts).to(next(policy.parameters()).device)
    with torch.no_grad():
        scores = policy(batch)
    return (scores.logprobs - batch["tokens", "rollout_logprobs"][scores.live]).tolist()


# -------------------------------------------------------------------- figures


def gap(bench: Bench, dtype: str) -> None:
    """Measure the gap of engine and trainer on sampled tokens, on which the probe's bound rests.

    The models are the recipe's after its warm start (random weights if the check ``recipe`` was
    not made) and a random one of 0.5B parameters.
    """
    recipe = warm_model(bench)
    if recipe.exists():
        with bench.case("recipe"):
            policy = Policy(str(recipe)).to(bench.device)
            lines = (recipe.parents[1] / "train.jsonl").read_text().splitlines()
            texts = [json.loads(line)["prompt"] for line in lines[: 8 if bench.tiny else 700]]
            prompts = [policy.tokenizer.encode(text) for text in texts]
            sampling = Sampling(max_tokens=10)
            _gap(bench, "recipe", policy, dtype, prompts, sampling, max_model_len=32)
    count, length = (8, 16) if bench.tiny else (64, 80)
    shapes = ["0.5B"] if recipe.exists() else ["small", "0.5B"]
    for shape in shapes[:-1] if bench.tiny else shapes:
        with bench.case(shape):
            policy = policy_of(bench, model_of(bench, shape), seed=1)
            sampling = Sampling(max_tokens=length, min_tokens=length)
            _gap(bench, shape, policy, dtype, prompts_of(count, 40), sampling)


def _gap(
    bench: Bench,
    name: str,
    policy: Policy,
    dtype: str,
    prompts: list[list[int]],
    sampling: Sampling,
    **options: Any,
) -> None:
    with started(bench, Path(policy.model), dtype=dtype, **options) as engine:
        push_to(engine, policy, version=1)
        completions = generate(engine, prompts, sampling)
    with torch.autocast(bench.device, torch.bfloat16, enabled=dtype == "bfloat16"):
        gaps = _gaps(policy, prompts, completions, sampling)
    found = quantiles(gaps)
    bench.note({name: {"tokens": len(gaps)} | found})
    bench.require(bench.tiny or len(gaps) >= GAP_TOKENS, f"{name}: only {len(gaps)} tokens")
    bound = logprob_tolerance(dtype) / 5
    bench.require(found["mean"] < bound, f"{name}: the mean gap is {found['mean']:.3g} nats")


def speed(bench: Bench, model_runner_v2: bool | None = None) -> None:
    """Measure tokens per second of many completions, the device's share of a step, and a push.

    ``model_runner_v2`` chooses between vLLM's two model runners; None: as vLLM does.
    """
    if model_runner_v2 is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(model_runner_v2))
    for shape in ("0.5B",) if bench.tiny else ("0.5B", "1.5B"):
        with bench.case(shape):
            _speed(bench, shape)


def _speed(bench: Bench, shape: str) -> None:
    count, length = (4, 8) if bench.tiny else (256, 256)
    model = model_of(bench, shape)
    policy = policy_of(bench, model, seed=1)
    sampling = Sampling(max_tokens=length, min_tokens=length)
    with started(bench, model, dtype="bfloat16", max_model_len=512) as engine:
        pushed = _seconds(bench, lambda: push_to(engine, policy, version=1))
        generate(engine, prompts_of(count, 128), Sampling(max_tokens=4))
        prompts = prompts_of(count, 128, seed=5)
        generated = _seconds(bench, lambda: generate(engine, prompts, sampling))
        steps = length // 8
        few = Sampling(max_tokens=steps, min_tokens=steps)
        share, kernels = device_work(bench, lambda: generate(engine, prompts, few))
    figures = {
        "tokens per s": count * length / generated,
        "ms of a step": generated / length * 1e3,
        "share of the device": share,
        "kernels of a step": kernels / steps,
        "push s": pushed,
    }
    bench.note({shape: figures})


def _seconds(bench: Bench, work: Callable[[], Any]) -> float:
    settle(bench)
    begin = time.perf_counter()
    work()
    settle(bench)
    return time.perf_counter() - begin
