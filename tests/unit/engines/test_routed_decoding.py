"""TransformersEngine records the experts of every token that it reads or writes."""

from random import Random

import pytest
import torch

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.routing import of_text
from lightning_rl.engines import Sampling, TransformersEngine, VLLMLocal, VLLMServer
from lightning_rl.engines.hf.decoding import RoutedDecoder
from lightning_rl.engines.hf.requests import DecodeRequest
from lightning_rl.errors import ConfigError
from lightning_rl.models.policy import Policy
from tests.support.engine_checks import generate
from tests.support.mixtures import saved_mixture
from tests.support.tolerances import scores_rounding

PROMPTS = [[3, 4, 2], [5], [6, 7, 8, 9, 10, 2], [3, 4, 2], [9, 9]]
SAMPLING = Sampling(max_tokens=8)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return saved_mixture("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def started(mixture, **options) -> TransformersEngine:
    engine = TransformersEngine(device="cpu", **options)
    engine.start(mixture)
    engine.load_weights(Policy(str(mixture)).named_weights(), 0)
    return engine


@pytest.fixture(scope="module")
def engine(mixture):
    engine = started(mixture, routed_experts=True)
    yield engine
    engine.close()


def packed(prompts, completions, make_rollout):
    return pack_rollouts(
        [
            make_rollout(prompt, c.token_ids, logprobs=c.logprobs, routed_experts=c.routed_experts)
            for prompt, c in zip(prompts, completions, strict=True)
        ]
    )


def test_they_are_of_the_prompt_and_all_tokens_but_the_last(engine):
    for prompt, one in zip(PROMPTS, generate(engine, PROMPTS, SAMPLING), strict=True):
        assert of_text(one.routed_experts).shape == (len(prompt) + len(one.token_ids) - 1, 2, 2)


def test_without_being_asked_none_are_recorded(mixture):
    plain = started(mixture)
    assert {one.routed_experts for one in generate(plain, PROMPTS, SAMPLING)} == {""}
    plain.close()


@pytest.mark.parametrize("max_batch_size", [256, 2])
def test_with_them_the_trainer_computes_the_engines_logprobs(mixture, make_rollout, max_batch_size):
    """Prompts may join in any order: with the experts of other tokens they would be far off."""
    engine = started(mixture, routed_experts=True, max_batch_size=max_batch_size)
    batch = packed(PROMPTS, generate(engine, PROMPTS, SAMPLING), make_rollout)
    engine.close()
    policy = Policy(str(mixture))
    policy.replays = True
    tokens = policy.score(batch, "ours", 10_000)["tokens"]
    mask, bound = tokens["loss_mask"], scores_rounding(policy.lm.config, tokens["ours"])
    gap = (tokens["ours"] - tokens["rollout_logprobs"])[mask].abs().max()
    assert gap <= bound
    tokens["routed_experts"] = tokens["routed_experts"].roll(1, 0)
    moved = policy.score(batch, "moved", 10_000)["tokens", "moved"]
    assert (moved - tokens["rollout_logprobs"])[mask].abs().max() > 100 * bound


def test_in_bfloat16_a_replay_takes_the_jumps_out_of_the_gap(mixture, make_rollout):
    """Rounding decides which near-even experts jump, and how far, so the test counts tokens."""
    engine = started(mixture, routed_experts=True, dtype="bfloat16")
    prompts = [[3 + n % 10, 3 + n // 10 % 10, 2 + n // 100] for n in range(200)]
    batch = packed(prompts, generate(engine, prompts, SAMPLING), make_rollout)
    engine.close()
    policy, gaps, otherwise = Policy(str(mixture)), [], []
    for policy.replays in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            tokens = policy.score(batch, "ours", 10_000)["tokens"]
            otherwise.append(float(policy(batch).router_outputs.otherwise))
        gaps.append((tokens["ours"] - tokens["rollout_logprobs"])[tokens["loss_mask"]].abs())
    assert otherwise[0] == 0 < otherwise[1]
    alone, replayed = gaps
    nearer = (replayed < alone)[(replayed - alone).abs() > 0.05]  # which bfloat16 resolves
    assert len(nearer) > 10
    # One without effect would bring half of them nearer.
    assert float(nearer.double().mean()) > 0.9


def test_tokens_keep_the_experts_that_wrote_them_when_weights_change(engine, mixture):
    """New weights bring new keys and values for tokens read again; logprobs are the old ones."""
    decoder = engine._decoder(engine._lm)
    assert isinstance(decoder, RoutedDecoder)
    rows = [DecodeRequest(engine, list(p), Sampling(max_tokens=6), Random(0)) for p in PROMPTS]
    decoder.join(rows)
    decoder.step()
    decoder.step()
    before = [torch.cat(row.routed) for row in rows]
    weights = Policy(str(mixture)).named_weights()
    engine.load_weights(((name, weight * 0.5) for name, weight in weights), 1)
    decoder.reread()
    while decoder.live:
        decoder.step()
    for row, known in zip(rows, before, strict=True):
        after = torch.cat(row.routed)
        assert torch.equal(after[: len(known)], known)
        assert len(after) == len(row.prompt) + len(row.tokens) - 1
    engine.load_weights(Policy(str(mixture)).named_weights(), 0)


def test_what_cannot_record_them_says_so(tiny_model):
    with pytest.raises(ConfigError, match="kept_tokens=64"):
        TransformersEngine(kept_tokens=64, routed_experts=True)
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no routers"):
        TransformersEngine(device="cpu", routed_experts=True).start(tiny_model)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"VLLMLocal reports .* only on a GPU"):
            VLLMLocal().configure_routing(True)
    other = VLLMServer()
    other.configure_routing(False)
    with pytest.raises(ConfigError, match="VLLMServer does not report"):
        other.configure_routing(True)
