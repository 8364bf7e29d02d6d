"""Decoding with models that carry states on, cap scores or have sinks: exact, whoever joins."""

from random import Random

import pytest
import torch
import transformers as hf

from lightning_rl.engines.hf.decoding import Decoder
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.hf.requests import DecodeRequest
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError
from tests.support.architectures import GROUPED, TOKENS, UNPACKED, saved
from tests.support.doubles import EXACT, in_double as in_double

WRITTEN = UNPACKED | {
    "gemma2": lambda: hf.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=3, attn_logit_softcapping=0.5,
        final_logit_softcapping=1.0,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip


class Writer:
    version = 0


def request(writer, prompt, count, seed) -> DecodeRequest:
    return DecodeRequest(writer, prompt, Sampling(max_tokens=count), Random(seed))


@pytest.mark.parametrize("name", WRITTEN)
def test_logprobs_are_those_of_the_whole_text(name, tmp_path, in_double):
    """Rows of all lengths begin as one, join, leave, and are read anew."""
    directory = saved(WRITTEN[name](), tmp_path)
    lm, plain = (
        hf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).double().eval()
        for _ in range(2)
    )
    for one in (lm, plain) if name == "gpt_oss" else ():
        one.set_experts_implementation("eager")  # grouped products know no float64
    if plain._can_set_attn_implementation():
        plain.set_attn_implementation("eager")
    writer = Writer()
    decoder = Decoder(lm, ends=[1])
    first = [request(writer, [5, 3, 7, 9, 4], n, seed) for seed, n in enumerate((9, 6))]
    first.append(request(writer, [4], 4, 3))
    decoder.join(first)
    decoder.step()
    decoder.step()
    later = [request(writer, [6, 6, 2], 5, 4), request(writer, [2, 3, 4, 5, 6, 7, 8], 8, 5)]
    decoder.join(later)
    decoder.step()
    writer.version = 1  # as if weights had changed
    decoder.reread()
    while decoder.live:
        decoder.step()
    for row in (*first, *later):
        ids, start = torch.tensor([row.prompt + row.tokens]), len(row.prompt)
        with torch.no_grad():
            logits = plain(input_ids=ids, use_cache=False).logits[0, start - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, ids[0, start:, None]).squeeze(-1)
        found = torch.tensor(row.logprobs, dtype=torch.double)
        # Nemotron-H's single steps in transformers are themselves 6e-5 from its whole pass.
        bound = 1e-4 if name == "nemotron_h" else 1e5 * EXACT
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def test_texts_are_not_kept_of_states(tmp_path):
    saved(UNPACKED["lfm2"](), tmp_path)
    with pytest.raises(ConfigError, match=r"kept_tokens=64: Lfm2ForCausalLM.* set kept_tokens: 0"):
        TransformersEngine(kept_tokens=64, device="cpu").start(tmp_path)


def test_states_that_are_kept_elsewhere_are_refused(tmp_path):
    config = hf.RwkvConfig(**TOKENS, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    saved(config, tmp_path)
    with pytest.raises(ConfigError, match=r"RwkvForCausalLM stores its state .* use VLLMLocal"):
        TransformersEngine(device="cpu").start(tmp_path)
