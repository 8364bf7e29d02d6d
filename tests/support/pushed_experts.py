"""Push the experts of a mixture to a real vLLM, twice, and compare its logprobs each time.

    python -m tests.support.pushed_experts <kind> <folder>

In a process of its own: vLLM makes its group of experts with the first engine of a process, if that
is of a mixture.
"""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_rl.engines import Sampling, VLLMLocal
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from tests.support.engine_checks import PROMPTS, ROUNDING, generate, true_logprobs
from tests.support.mixtures import saved_mixture


def main(kind: str, folder: Path) -> None:
    model, skeleton = saved_mixture(kind, folder / "model"), folder / "skeleton"
    save_skeleton(str(model), skeleton)
    weights = dict(Policy(str(model)).named_weights())
    plain = AutoModelForCausalLM.from_pretrained(model)
    engine = VLLMLocal(max_model_len=128, kv_cache_gb=0.05, dtype="float32")
    engine.start(skeleton)
    try:
        sampling = Sampling(max_tokens=8)
        for version, factor in enumerate((1.0, 0.8)):
            engine.load_weights(((n, w * factor) for n, w in weights.items()), version)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter *= factor
            for prompt, one in zip(PROMPTS, generate(engine, PROMPTS, sampling), strict=True):
                expected = true_logprobs(plain, prompt, one.token_ids, sampling)
                assert one.logprobs == pytest.approx(expected, abs=ROUNDING)
        [held] = engine.held_digests(list(weights))
        unread = {name for name in weights if ".experts." in name}
        assert held.unread.keys() == unread
        assert held.digests.keys() == weights.keys() - unread
    finally:
        engine.close()
    print("pushed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
