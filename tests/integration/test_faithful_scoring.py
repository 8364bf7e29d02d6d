"""Sampling-faithful scoring: on fresh vLLM rollouts every ratio of the first minibatch is 1."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.agents.base import SingleTurn
from lightning_rl.algos.losses import PolicyLoss
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.datamodule import RLDataModule
from lightning_rl.engines import Sampling, StructuredOutputs, VLLMLocal
from lightning_rl.errors import ConfigError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy, load_tokenizer
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import SamplingDistribution
from tests.support.doubles import EXACT, Doubled, doubled
from tests.support.small_run import trainer_of
from tests.support.tiny_models import save_random_model
from tests.support.tolerances import scores_rounding

VOCABULARY = 2048  # large enough for a nucleus of hundreds of tokens


def share_of_even_tokens(completion_ids):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """Make a random model with a large vocabulary, of which the tokenizer knows the first few."""
    directory = tmp_path_factory.mktemp("wide")
    save_random_model(
        directory, AutoTokenizer.from_pretrained(tiny_model), vocab_size=VOCABULARY,
        max_position_embeddings=128, initializer_range=0.15, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    # This is as in Qwen3 and Phi-3.5: config.json names one of several ends.
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    return directory


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    skeleton = tmp_path_factory.mktemp("skeleton")
    save_skeleton(str(model), skeleton)
    engine = VLLMLocal(max_model_len=64, kv_cache_gb=0.05)
    engine.start(skeleton)
    engine.load_weights(Policy(str(model)).named_weights(), 0)
    yield engine
    engine.close()


class Recorded(PolicyLoss):
    """A REINFORCE that notes every micro-batch's log ratios, to the old policy and to the
    engine."""

    def __init__(self) -> None:
        self.to_old: list[torch.Tensor] = []
        self.to_engine: list[torch.Tensor] = []

    def __call__(self, logprobs, tokens):
        self.to_old.append((logprobs.detach() - tokens["old_logprobs"]).double())
        self.to_engine.append((logprobs.detach() - tokens["rollout_logprobs"]).double())
        return -tokens["advantages"] * logprobs, {}


def outside_of_the_trainers_cut(model, rollouts, sampling) -> int:
    """Count sampled tokens that float64 logits would have cut by rounding at the boundary."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.double)
    count = 0
    for rollout in rollouts:
        prompt = rollout.prompt.token_ids
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([prompt + rollout.token_ids])).logits[0]
        for step, token in enumerate(rollout.token_ids):
            z = logits[len(prompt) - 1 + step] / sampling.temperature
            if sampling.top_k:
                z = z.masked_fill(z < z.topk(sampling.top_k).values[-1], -torch.inf)
            probs = z.softmax(-1)
            before = probs[probs > probs[token]].sum()
            count += bool(probs[token] == 0 or before >= sampling.top_p)
    return count


def ratio_rounding(model, batch, sampling) -> float:
    """Return how far rounding takes the ratio of a float64 probability to the engine's from 1.

    ``scores_rounding`` is for two that are off.
    """
    engine = batch["tokens", "rollout_logprobs"][batch["tokens", "loss_mask"]]
    return scores_rounding(str(model), engine / sampling.temperature) / 2


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_tokens"),
    [(0, 1.0, 0), (0, 0.9, 0), (5, 1.0, 0), (50, 1.0, 0), (50, 0.9, 0), (0, 1.0, 5), (0, 0.999, 5)],
)
def test_the_first_minibatchs_ratios_are_one(model, engine, train_on, top_k, top_p, min_tokens):
    tokenizer = load_tokenizer(str(model))
    prompts = IterablePrompts([{"prompt": f"{n}="} for n in range(100, 132)], shuffle=False)
    prompts.load(tokenizer)
    pipeline = RolloutPipeline(engine, SingleTurn(), Rewards([share_of_even_tokens]), tokenizer)
    sampling = Sampling(
        max_tokens=8, temperature=0.7, top_p=top_p, top_k=top_k, min_tokens=min_tokens
    )
    rollouts = pipeline.run(prompts.draw(32), 4, sampling, seed=3)
    for rollout in rollouts:
        assert (rollout.finish_reason == "stop") == (rollout.token_ids[-1] in (1, 5))
        assert not {1, 5} & set(rollout.token_ids[:-1])
    loss = Recorded()
    module = PolicyModule(
        str(model),
        loss=loss,
        update={"minibatches": 2},
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
    )
    module.configure_model()
    module.policy.double()
    batches = [doubled(pack_rollouts(rollouts))]
    with Doubled():
        train_on(module, batches)

    assert len(loss.to_old) == 2  # a micro-batch per minibatch
    bound = ratio_rounding(model, batches[0], sampling)
    for log_ratio, most in ((loss.to_old[0], EXACT), (loss.to_engine[0], bound)):
        assert len(log_ratio) >= 200
        assert float(log_ratio.expm1().abs().max()) <= most
    # The second minibatch comes after an update, so that its ratios say something.
    assert float(loss.to_old[1].expm1().abs().max()) > 4 * bound
    if min_tokens:  # scored as if ends had been possible, ratios are away from 1
        del batches[0]["tokens", "no_end"]
        with Doubled():
            untrained = Policy(str(model)).double().score(batches[0], "without", 10_000)["tokens"]
        gap = (untrained["without"] - untrained["rollout_logprobs"])[untrained["loss_mask"]]
        assert float(gap.expm1().abs().max()) > 4 * bound
    outside = outside_of_the_trainers_cut(model, rollouts, sampling)
    tokens = sum(len(r.token_ids) for r in rollouts)
    gaps = [float(x[0].expm1().abs().max()) for x in (loss.to_old, loss.to_engine)]
    print(
        f"\ntop_k={top_k} top_p={top_p}: {tokens} tokens, {outside} kept at the boundary; first "
        f"minibatch of {len(loss.to_old[0])}: |ratio - 1| old {gaps[0]:.1e}, engine {gaps[1]:.1e}"
    )
    assert outside <= tokens // 100


@pytest.mark.parametrize(
    "setting",
    [
        {"min_p": 0.1},
        {"min_p": 0.02, "top_k": 50, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "presence_penalty": 0.5, "frequency_penalty": -0.4},
        {"frequency_penalty": 1.1, "min_p": 0.05, "min_tokens": 6, "top_p": 0.95},
    ],
)
def test_min_p_and_penalties_are_scored_as_vllm_samples(model, engine, setting):
    tokenizer = load_tokenizer(str(model))
    rows = [{"prompt": f"{n}=" * 3} for n in range(100, 132)]
    prompts = IterablePrompts(rows, shuffle=False)
    prompts.load(tokenizer)
    pipeline = RolloutPipeline(engine, SingleTurn(), Rewards([share_of_even_tokens]), tokenizer)
    sampling = Sampling(max_tokens=16, temperature=0.7, **setting)
    rollouts = pipeline.run(prompts.draw(32), 4, sampling, seed=5)
    policy = Policy(str(model)).double()
    batch = doubled(pack_rollouts(rollouts))
    with Doubled():
        tokens = policy.score(batch, "scored", 10_000)["tokens"]
    live = tokens["loss_mask"]
    gap = (tokens["scored"] - tokens["rollout_logprobs"])[live]
    assert len(gap) >= 1000
    # Rounding may cut at vLLM's boundary what is kept here: a few tokens, and none of them by much.
    near = gap.expm1().abs() <= ratio_rounding(model, batch, sampling)
    assert int((~near).sum()) <= len(gap) // 500
    for rollout in rollouts:  # scored as if they had not been set
        own = rollout.sampling
        rollout.sampling = SamplingDistribution(own.temperature, own.top_k, own.top_p)
    with Doubled():
        batch = policy.score(doubled(pack_rollouts(rollouts)), "without", 10_000)
    without = batch["tokens", "without"]
    assert float((without - tokens["rollout_logprobs"])[live].abs().max()) > 0.05


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"choice": ["13", "345", "9"]}, "13|345|9"),
        ({"regex": "[13579]{3}"}, "[13579]{3}"),
        ({"grammar": 'root ::= "7" [3-5] "="'}, "7[3-5]="),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 99}}, "[1-9][0-9]"),
    ],
)
def test_evaluations_may_hold_completions_to_a_form(model, engine, tmp_path, form, pattern):
    tokenizer = load_tokenizer(str(model))
    prompts = IterablePrompts([{"prompt": f"{n}="} for n in range(100, 104)], shuffle=False)
    prompts.load(tokenizer)
    pipeline = RolloutPipeline(engine, SingleTurn(), Rewards([share_of_even_tokens]), tokenizer)
    held = Sampling(max_tokens=8, structured_outputs=StructuredOutputs(**form))
    rollouts = pipeline.run(prompts.draw(4), 2, held)
    ends = (1, 5)  # of this model: the second is a digit, which ends what is complete
    texts = [tokenizer.decode([i for i in r.token_ids if i not in ends]) for r in rollouts]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    with pytest.raises(ConfigError, match="cannot score them"):
        pack_rollouts(rollouts)
    data = RLDataModule(prompts, [share_of_even_tokens], sampling=held)
    trainer = trainer_of(tmp_path, logger=False)
    with pytest.raises(ConfigError, match=r"structured_outputs=.* in data\.evaluation only"):
        trainer.fit(PolicyModule(str(model)), data)
