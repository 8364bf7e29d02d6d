"""Episodes on real vLLM: each call under the weights that it names, and generated again alone."""

from dataclasses import replace

import pytest
import torch

from lightning_rl.agents.episode import Episode
from lightning_rl.callbacks import WeightSync
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.prefetch import AsyncCollector
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines import Sampling
from lightning_rl.engines.base import logprob_tolerance
from lightning_rl.engines.sampling import Completion, StructuredOutputs
from lightning_rl.models.policy import Policy
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rewards.base import Rewards
from lightning_rl.run.loop.background import run_async
from tests.support.engine_checks import same_draws
from tests.support.small_run import Rows, data_module, grpo, numbers, share_of_sevens, trainer_of
from tests.support.three_calls import ThreeCalls

pytest.importorskip("vllm")
SAMPLING = Sampling(max_tokens=10)


class Watch(Rows):
    """Weights of every version, and the rollouts that were trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.rollouts = {}, []

    def on_weights_synced(self, trainer, pl_module, version) -> None:
        self.weights[version] = {k: v.clone() for k, v in pl_module.policy.state_dict().items()}

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        self.rollouts += rollouts


@pytest.fixture(scope="module")
def trained(vllm, tiny_model, tmp_path_factory):
    """Train six iterations during which weights change between and within calls."""
    watch, module = Watch(), grpo(tiny_model)
    data = data_module(
        train_prompts=numbers(100, 200, seed=1), evaluation=None, rewards=[share_of_sevens],
        engine=vllm, agent=ThreeCalls(pause=0.3), sampling=SAMPLING, group_size=4,
        groups_per_iteration=4, iterations_per_epoch=6, collector=AsyncCollector(2),
    )  # fmt: skip
    trainer_of(tmp_path_factory.mktemp("run"), [WeightSync(), watch]).fit(module, data)
    return module, watch


def versions_of(rollout) -> list[set[int]]:
    rows = rollout.rows
    return [set(rows[c.row].versions[c.start : c.stop]) for c in rollout.calls]


def test_every_token_of_every_row_was_written_by_the_version_it_names(trained):
    module, watch = trained
    by_call = [versions_of(rollout) for rollout in watch.rollouts]
    # Pushes came between calls, and in the middle of some, or else this tests little.
    assert sum(len(set.union(*calls)) > 1 for calls in by_call) > 10
    assert any(len(versions) > 1 for calls in by_call for versions in calls)
    batch = pack_rollouts(watch.rollouts)
    versions, wrong = batch["tokens", "versions"], torch.zeros(len(batch["tokens"]))
    assert torch.equal(versions >= 0, batch["tokens", "loss_mask"])
    for version, weights in watch.weights.items():
        module.policy.load_state_dict(weights)
        with torch.no_grad():
            scored = module.policy.score(batch, "again", 4096)["tokens"]
        gap = (scored["again"] - scored["rollout_logprobs"]).abs()
        wrong = torch.where(versions == version, gap, wrong)
    # Other weights' logprobs are off by tenths.
    assert float(wrong.max()) < logprob_tolerance("float32", "float32")


def test_staleness_is_of_all_rows_and_rows_are_counted(trained):
    _, watch = trained
    for row in watch.rows[1:]:
        assert row["rollout/calls_per_episode"] == 3
        assert row["rollout/rows_per_episode"] >= 2
        assert (row["rollout/dropped_tokens"], row["rollout/unscorable_calls"]) == (0, 0)
        assert 0 <= row["rollout/staleness_max"] <= 2
    assert max(row["rollout/staleness_max"] for row in watch.rows[1:]) == 2


def answered_again(engine, rollout, sampling) -> list[tuple[Completion, Completion]]:
    """Return what each call had written, and what it writes alone, from its prompt and its seed."""
    rows, found = rollout.rows, []
    for call in rollout.calls:
        row = rows[call.row]
        columns = (row.token_ids, row.logprobs, row.versions)
        tokens, logprobs, versions = (column[call.start : call.stop] for column in columns)
        was = Completion(tokens, logprobs, call.finish_reason, versions)
        alone = replace(sampling, max_tokens=len(tokens)).of(row.sampling or rollout.sampling)
        found.append((was, run_async(engine.generate(rollout.prompt_of(call), alone, call.seed))))
    return found


@pytest.fixture  # for each test anew: a run of another test ends with no version in the engine
def pipeline(vllm, tiny_model, weights):
    vllm.load_weights(weights.items(), 9)
    return RolloutPipeline(
        vllm, ThreeCalls(), Rewards([share_of_sevens]), load_tokenizer(str(tiny_model))
    )


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_every_call_is_generated_again_alone_from_its_seed(pipeline, temperature):
    sampling = replace(SAMPLING, temperature=temperature)
    prompts = numbers(100, 116)
    prompts.load(pipeline.tokenizer)
    rollouts = pipeline.run(prompts.first(), 2, sampling, seed=3)
    assert len(rollouts) == 32
    pairs = [p for rollout in rollouts for p in answered_again(pipeline.engine, rollout, sampling)]
    assert same_draws(*zip(*pairs, strict=True))


class Formed(ThreeCalls):
    """Its second call is held to a form."""

    async def run(self, rollout, engine, sampling):
        episode, own = Episode(rollout), rollout.prompt.token_ids
        _, first = await episode.call(engine, own, sampling)
        form = replace(sampling, structured_outputs=StructuredOutputs(choice=["77"]))
        _, held = await episode.call(engine, [*own, *first.token_ids, 2], form)
        await episode.call(engine, [*own, *first.token_ids, 2, *held.token_ids, 2], sampling)
        episode.end()
        return rollout


def test_a_call_that_was_held_to_a_form_leaves_its_rollout_trainable(pipeline, tiny_model):
    prompts = numbers(100, 104)
    prompts.load(pipeline.tokenizer)
    rollouts = replace(pipeline, agent=Formed()).run(prompts.first(), 2, SAMPLING, seed=4)
    batch = pack_rollouts(rollouts)
    scored = Policy(str(tiny_model)).score(batch, "again", 4096)["tokens"]
    gap = (scored["again"] - scored["rollout_logprobs"]).abs()[scored["loss_mask"]]
    assert float(gap.max()) < logprob_tolerance("float32", "float32")
    for rollout in rollouts:
        held = rollout.calls[1]
        row = rollout.rows[held.row]
        assert not any(row.loss_mask[held.start : held.stop])
        assert row.token_ids[held.start : held.stop][:2] == [10, 10]  # sevens
        assert row.loss_mask[held.stop + 1 :] == [True] * (len(row.token_ids) - held.stop - 1)
