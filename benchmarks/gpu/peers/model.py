"""Make a model of a true shape with random weights, whose completions end by lot; and prompts."""

import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.peers.task import Task
from recipes.math.data import problems
from recipes.math.make_model import make_model, make_tokenizer

ROWS, STEPS = 64, 128
"""Completions, and tokens of each, on which the end is calibrated."""
CONSTANT = 0.1
"""The first number of every token's embedding: the bias of the end token acts through it."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def make(bench: Bench, **options: Any) -> None:
    """Write ``model`` and ``train.jsonl`` for a task."""
    task = Task(**options).on(bench)
    began = time.perf_counter()
    rows = list(problems(1000, seed=0))
    tokenizer = make_tokenizer([text for row in rows for text in row.values()])
    with torch.device(bench.device):
        model = make_model(task.shape, tokenizer, **(TINY if bench.tiny else {}))
    out = task.directory(bench)
    out.mkdir(parents=True, exist_ok=True)
    write_prompts(out / "train.jsonl", [row["question"] for row in rows], 1 if bench.tiny else 3)
    made = time.perf_counter()
    with (out / "train.jsonl").open() as file:
        prompts = [json.loads(next(file))["prompt"] for _ in range(8 if bench.tiny else ROWS)]
    steps = task.longest if bench.tiny else STEPS
    bench.note(end_by_lot(model, tokenizer, prompts, task.mean, task.longest, steps))
    bench.note(make_s=made - began, calibrate_s=time.perf_counter() - made)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    bench.note(parameters=sum(p.numel() for p in model.parameters()))


def write_prompts(path: Path, questions: list[str], most: int) -> None:
    """Write 512 prompts of one to ``most`` questions."""
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(512):
            prompt = " ".join(rng.choices(questions, k=1 + rng.randrange(most)))
            file.write(json.dumps({"prompt": prompt, "answer": str(number)}) + "\n")


@torch.no_grad()
def end_by_lot(
    model: Any, tokenizer: Any, prompts: list[str], mean: int, longest: int, steps: int
) -> dict[str, float]:
    """Give the end token the bias with which completions have ``mean`` tokens; returns figures.

    How probable the end is depends on what was written before, so the model writes, without an
    end: the other tokens are then drawn as they are in completions that have not ended yet,
    whatever the bias. At each token its logit and the factor of the bias are kept, which tells
    the mean length for every bias, so that one can be found without writing again.
    """
    embedding, end = model.get_input_embeddings().weight, tokenizer.eos_token_id
    embedding[:, 0] = CONSTANT
    watch = _Watch(end)
    head = model.get_output_embeddings().register_forward_pre_hook(watch.see)
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    torch.manual_seed(0)
    model.eval()
    model.generate(
        **batch,
        max_new_tokens=steps,
        do_sample=True,
        top_k=0,
        logits_processor=LogitsProcessorList([watch]),
    )
    head.remove()
    logits, slopes = torch.stack(watch.logits), torch.stack(watch.slopes)
    bias = bias_for(logits, slopes, mean, longest)
    embedding[end, 0] = CONSTANT + bias
    return {
        "bias": bias,
        "least_slope": float(slopes.min()),
        "expected_tokens": expected_length(logits, slopes, bias, longest),
    }


class _Watch(LogitsProcessor):
    """Keeps the end token's log odds, and what one unit of bias adds to them; forbids the end."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.logits: list[Tensor] = []
        self.slopes: list[Tensor] = []

    def see(self, head: Any, inputs: tuple[Tensor, ...]) -> None:
        """Note the last state of each completion, as it comes to the output layer."""
        self.slopes.append(inputs[0][:, -1, 0].double().cpu())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        own = scores[:, self.end].double()
        scores = scores.clone()
        scores[:, self.end] = -torch.inf
        self.logits.append((own - scores.double().logsumexp(-1)).cpu())
        return scores


def expected_length(logits: Tensor, slopes: Tensor, bias: float, longest: int) -> float:
    """Return the mean tokens, end included, of completions cut at ``longest``.

    ``logits`` (steps, rows) are the end token's log odds without a bias, ``slopes`` what one unit
    of it adds. For tokens later than these, those of their second half are taken again.
    """
    hazards = (logits + bias * slopes).sigmoid()
    late = hazards[len(hazards) // 2 :]
    again = -(-max(0, longest - len(hazards)) // len(late))
    alive = (1 - torch.cat([hazards, *[late] * again])[: longest - 1]).cumprod(0)
    return 1 + float(alive.sum(0).mean())


def bias_for(logits: Tensor, slopes: Tensor, mean: float, longest: int) -> float:
    """Return the bias at which :func:`expected_length` is ``mean``."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_length(logits, slopes, middle, longest) > mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2
