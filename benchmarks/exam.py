"""Examine a model on the held-out questions of recipes/smollm2, by vLLM alone.

    python -m benchmarks.exam MODEL --out FILE [--max-tokens 32] [--temperature 1]

An exam that takes nothing from this library but its recipe's questions and reward: the model
directory is loaded by vLLM, which renders its chat template and samples one answer to each question
in float32. FILE gets JSON: for each task a list of zeros and ones, an item per question, the mean
number of tokens, and the share of answers that were cut off.
"""

import argparse
import json
import os
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.smollm2.prepare import NUM_HELD_OUT
from recipes.smollm2.tasks import ASKED, TASKS, last_number, questions

MAX_PROMPT = 96
"""Tokens of the longest question, with the chat template around it."""


def examine(model: Path, max_tokens: int, temperature: float) -> dict[str, Any]:
    """Ask all questions of all tasks."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype="float32",
        max_model_len=MAX_PROMPT + max_tokens,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        seed=0,
    )
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    right, answers = {}, []
    for task in TASKS:
        asked = list(islice(questions(task, held_out=True), NUM_HELD_OUT))
        chats = [[{"role": "user", "content": f"{q.text} {ASKED}"}] for q in asked]
        said = [output.outputs[0] for output in llm.chat(chats, sampling, use_tqdm=False)]
        right[task] = last_number([one.text for one in said], [q.answer for q in asked])
        answers += said
    return {
        "right": right,
        "tokens": fmean(len(one.token_ids) for one in answers),
        "cut_off": fmean(one.finish_reason == "length" for one in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    given = parser.parse_args()
    result = examine(given.model, given.max_tokens, given.temperature)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
