"""Loads prompts as it is told, line by line: a process of its own, as HF_ENDPOINT is read once."""

import json
import os
import sys
from typing import Any

from lightning_rl.config import names
from lightning_rl.errors import LightningRLError
from lightning_rl.models.tokenizer import load_tokenizer


def answer(told: dict[str, Any]) -> dict[str, Any]:
    """Return the prompts that are drawn and the state after them, or the error."""
    os.environ.pop("HF_TOKEN", None)
    if told.get("token"):
        os.environ["HF_TOKEN"] = told["token"]
    prompts = names.public(told["kind"])(shuffle=told.get("shuffle", False), **told["options"])
    try:
        prompts.load(load_tokenizer(sys.argv[1]))
        if told.get("state"):
            prompts.load_state_dict(told["state"])
        drawn = prompts.draw(told.get("draw", 2))
        first = prompts.first(told["first"]) if "first" in told else []
    except LightningRLError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "prompts": [prompt.prompt for prompt in drawn],
        "columns": [prompt.columns for prompt in drawn],
        "ids": [prompt.id for prompt in drawn],
        "rows": len(prompts),
        "state": prompts.state_dict(),
        "first": [prompt.prompt for prompt in first],
    }


if __name__ == "__main__":
    said, sys.stdout = sys.stdout, sys.stderr  # the answers alone go out
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=said, flush=True)
