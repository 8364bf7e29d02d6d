"""Is the exported model as good when nothing but transformers loads it?

    python -m recipes.sort_digits.check_export runs/sort_digits/grpo/version_0/hf

Samples the held-out prompts at temperature 1 with `generate` and prints the accuracy.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def sampled_accuracy(model_dir: str, rows: list[dict[str, str]], seed: int = 0) -> float:
    """Return the share of completions, one per row, that are the answer and end by themselves."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(seed)
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    output = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=10)
    right = 0
    for tokens, row in zip(output[:, inputs["input_ids"].shape[1] :], rows, strict=True):
        ended = tokenizer.eos_token_id in tokens.tolist()
        right += ended and tokenizer.decode(tokens, skip_special_tokens=True) == row["answer"]
    return right / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sampled accuracy of an exported model.")
    parser.add_argument("model_dir")
    parser.add_argument("--heldout", default="runs/sort_digits/heldout.jsonl")
    parser.add_argument("--samples", type=int, default=4)
    arguments = parser.parse_args()
    rows = [
        json.loads(line)
        for line in Path(arguments.heldout).read_text(encoding="utf-8").splitlines()
    ]
    samples = rows * arguments.samples
    accuracy = sampled_accuracy(arguments.model_dir, samples)
    print(f"accuracy {accuracy:.3f} ({len(rows)} prompts x {arguments.samples} samples)")


if __name__ == "__main__":
    main()
