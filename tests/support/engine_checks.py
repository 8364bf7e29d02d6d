"""Share what tests of vLLM engines need: prompts, reference logprobs, ways to ask."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_rl.agents.base import Agent
from lightning_rl.engines import TransformersEngine
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.engines.vllm.local import VLLMLocal
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Rollout
from lightning_rl.run.loop.background import run_async
from lightning_rl.sync.memory import MemoryTransport
from tests.support.tolerances import rounding

LONG = [3 + i % 10 for i in range(70)]  # more than two cache blocks of 32 tokens
ROUNDING = rounding(additions=1_500, magnitude=15 / 0.7)
"""In nats, 5e-4: of logits up to 15, over temperatures from 0.7, that two programs compute by the
tiny model's sums in float32. Other weights, or a stale cache, are off by 0.1 and more."""
PROMPTS = [[3, 4, 2], [5], [6, 7, 8, 9, 10, 2], LONG, [3, 4, 2]]


def generate(
    engine: Any,
    prompts: Sequence[list[int]],
    sampling: Sampling,
    seeds: Iterable[int] | None = None,
) -> list[Completion]:
    """Generate all at once, by an engine or one replica of it; seeds count from 0 unless given."""

    async def run() -> list[Completion]:
        pairs = zip(prompts, range(len(prompts)) if seeds is None else seeds, strict=True)
        return await asyncio.gather(*(engine.generate(p, sampling, s) for p, s in pairs))

    return run_async(run())


def plain_model(model: Path, weights: Mapping[str, Tensor]) -> Any:
    """Return the Hugging Face model with these weights."""
    plain = AutoModelForCausalLM.from_pretrained(model)
    plain.load_state_dict(weights)
    return plain.eval()


def same_draws(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Tell whether these have the same weights, prompts and seeds, if in other batches.

    ``token_ids`` and ``logprobs`` are compared. Where a drawn number lies between two roundings it
    is another token, and so are those after it, which befalls one token in 100,000 or so: here one
    completion at most may part from the other's, and is compared up to there. Under other seeds or
    weights nearly all do.
    """
    parted = 0
    for one, other in zip(ours, theirs, strict=True):
        pairs = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False)
        alike = [abs(a - b) for _, _, a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if max(alike, default=0.0) > ROUNDING:
            return False
        parted += list(one.token_ids) != list(other.token_ids)
    return parted <= 1 < len(ours)


def true_logprobs(
    plain: Any,
    prompt: list[int],
    token_ids: list[int],
    sampling: Sampling,
    ends: Sequence[int] = (1,),
) -> list[float]:
    """Return the logprobs of a completion from their definition, in float64."""
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([prompt + token_ids])).logits[0].double()
    result = []
    for step, token in enumerate(token_ids):
        z = logits[len(prompt) - 1 + step].clone()
        written = torch.tensor(token_ids[:step], dtype=torch.long).bincount(minlength=len(z))
        seen = written > 0
        seen[prompt] = True
        penalty = sampling.repetition_penalty
        z[seen] = torch.where(z[seen] > 0, z[seen] / penalty, z[seen] * penalty)
        z -= sampling.frequency_penalty * written + sampling.presence_penalty * (written > 0)
        z /= sampling.temperature
        if step < sampling.min_tokens:
            z[list(ends)] = -torch.inf
        probs = z.softmax(-1)
        z[probs < sampling.min_p * probs.max()] = -torch.inf
        if sampling.top_k:
            z[z < z.sort(descending=True).values[sampling.top_k - 1]] = -torch.inf
        ordered, order = z.softmax(-1).sort(descending=True)
        before = ordered.cumsum(0) - ordered
        kept = order[before < sampling.top_p]
        assert token in kept.tolist()
        result.append(float(z[token] - z[kept].logsumexp(0)))
    return result


def require_written_by(
    plain: Any, prompts: Sequence[list[int]], completions: Sequence[Completion], sampling: Sampling
) -> None:
    """Require that completions were drawn from this model's distribution, as logprobs say."""
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = true_logprobs(plain, prompt, completion.token_ids, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)


def gap(engine: Any, plain: Any, ends: Sequence[int] = (1,)) -> float:
    """Return the largest logprob error after 70 prompt tokens; vLLM caches blocks of 32."""
    sampling = Sampling(max_tokens=4, min_tokens=4)
    (completion,) = generate(engine, [LONG], sampling, [5])
    expected = true_logprobs(plain, LONG, completion.token_ids, sampling, ends)
    return max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True))


def parts(engine: Any) -> list[Any]:
    """Return the replicas of an engine that has some, else the engine itself."""
    return getattr(engine, "replicas", [engine])


def require_idle(engine: Any) -> None:
    """Require that no earlier request is left, here or in vLLM, and that every replica lives."""
    assert engine.running
    assert engine.in_flight == 0
    assert not engine.paused
    assert all(replica.alive for replica in getattr(engine, "replicas", []))
    if isinstance(engine, VLLMLocal):
        assert not engine._llm.has_unfinished_requests()
        assert not engine._asleep


def require_switch(
    completion: Completion, prompt: list[int], plain: Mapping[int, Any], sampling: Sampling
) -> list[list[float]]:
    """Require a switch: a completion begins with the first of two versions, ends with the second.

    ``plain`` holds the model of each, in this order. Returns the logprobs by either alone.
    """
    (first, old), (second, new) = plain.items()
    switch = completion.versions.index(second)
    rest = len(completion.versions) - switch
    assert switch > 0
    assert len(completion.versions) == sampling.max_tokens
    assert completion.versions == [first] * switch + [second] * rest
    before, after = (
        true_logprobs(model, prompt, completion.token_ids, sampling) for model in (old, new)
    )
    expected = before[:switch] + after[switch:]
    assert completion.logprobs == pytest.approx(expected, abs=ROUNDING)
    return [before, after]


def own_logprobs(plain: Any, prompt: list[int], token_ids: list[int]) -> Tensor:
    """Return the logprobs of a completion's tokens, by the Hugging Face model at temperature 1."""
    ids = torch.tensor([prompt + token_ids])
    with torch.no_grad():
        logprobs = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]


def scaled(weights: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Return weights of another policy."""
    return {name: weight * factor for name, weight in weights.items()}


class FakeEngine(Engine):
    """Has no model: what it generates is a test's to say."""

    dtype, version, running, max_length = "float32", 0, True, 1000

    def start(self, model_dir) -> None: ...
    def load_weights(self, weights, version) -> None: ...
    def close(self) -> None: ...


class Forgetful(MemoryTransport):
    """Loses a tensor after it was counted."""

    def stage(self, part):
        bucket = super().stage(part)
        return bucket | {"tensors": [t for t in bucket["tensors"] if "norm" not in t[0]]}


@contextmanager
def connected(transport: Any, engine: Any) -> Iterator[Any]:
    transport.connect(engine)
    try:
        yield transport
    finally:
        transport.close()


def processes_of(session: int) -> list[int]:
    """Return living processes of a session, by the id of the process that leads it."""
    return [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if is_running(pid) and _session(pid) == session
    ]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def is_running(pid: int) -> bool:
    """Tell whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], object], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def train_adapters(policy, seed):
    """Give all adapters other weights; the policy then, merged."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return {name: weight.clone() for name, weight in policy.named_weights()}


def sampled(tiny_model, make_rollout, tmp_path, sampling, count=40):
    """Return rollouts by the transformers engine from a few prompts."""
    save_skeleton(str(tiny_model), tmp_path)
    policy = Policy(str(tiny_model))
    engine = TransformersEngine(device="cpu")
    engine.start(tmp_path)
    engine.load_weights(policy.named_weights(), 0)
    prompts = [[3, 4, 2], [5, 2], [6, 7, 8, 9, 10, 2], [12, 3, 2]] * (count // 4)

    async def run():
        requests = (engine.generate(p, sampling, seed) for seed, p in enumerate(prompts))
        return await asyncio.gather(*requests)

    rollouts = [
        make_rollout(
            prompt, c.token_ids, logprobs=c.logprobs, group_id=str(i % 4),
            sampling=sampling.distribution,
        )
        for i, (prompt, c) in enumerate(zip(prompts, asyncio.run(run()), strict=True))
    ]  # fmt: skip
    return policy, rollouts


def require_within_max_tokens(agent: Agent, rollout: Rollout, engine: Any, max_tokens: int) -> None:
    """Check what ``within_max_tokens`` promises, of an engine that noted its ``requests``."""
    assert agent.within_max_tokens
    whole = len(rollout.prompt.token_ids) + max_tokens
    for token_ids, sampling, _ in getattr(engine, "requests", []):
        assert len(token_ids) + sampling.max_tokens <= whole
