"""Families of image-text models: what they make of pictures equals transformers' own forward."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlavaOnevisionConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_rl.data.batch import select
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.engines.vllm.local import VLLMLocal
from lightning_rl.errors import ConfigError, PictureError
from lightning_rl.extend import as_torchrl
from lightning_rl.models.heads import SeparateValueHead
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Placed, Prompt, Rollout, Row
from lightning_rl.vision.reader import encode
from lightning_rl.vision.training import Vision
from tests.support.architectures import policy_of
from tests.support.doubles import EXACT
from tests.support.followed import kept_for_backward
from tests.support.tiny_vision import FAMILIES, VOCAB, picture, save_vision_model, vision_tokenizer
from tests.support.tolerances import distance

SMALL, WIDE, TALL = picture(1), picture(2, 64, 32), picture(3, 32, 48)
SAMPLING = Sampling(max_tokens=6)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


def asked(policy, pictures, text="What?", number="p"):
    """Make a prompt of a chat that begins with the pictures."""
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": parts}]
    rendered = policy.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids, places = encode(policy.tokenizer, rendered, pictures, special=False)
    return Prompt(number, messages, ids, pictures=list(pictures), places=places)


def answered(prompt, token_ids, group="g", more=(), index=0):
    """Make a rollout; ``more`` are pictures that an environment shows after it."""
    row = Row.of(prompt)
    row.append_written(list(token_ids), [0.0] * len(token_ids), [0] * len(token_ids))
    for given, placed in more:
        row.append_given(given, placed)
        row.append_written([70, 71], [0.0] * 2, [0] * 2)
    return Rollout(prompt, group, index, 0, rows=[row], reward=1.0)


def shown(policy, *pictures):
    """Return given tokens with pictures among them, and their places."""
    mark = policy.reader.family.placeholder
    marks = [token for _ in pictures for token in (mark, 41)]
    ids, places = policy.reader.expand([40, *marks], pictures)
    return ids, [Placed(*pair) for pair in zip(places, pictures, strict=True)]


def by_transformers(policy, rollout):
    """Return logprobs of the model's own tokens, from transformers' forward on the pixels."""
    row = rollout.rows[0]
    ids = torch.tensor([row.prompt_ids + row.token_ids])
    family = policy.reader.family
    lm = AutoModelForImageTextToText.from_pretrained(policy.model).to(policy.lm.dtype)
    lm.load_state_dict(policy.lm.state_dict())
    prepared = [policy.reader.prepare(p) for p in row.pictures]
    own = family.own_inputs(prepared, ids) if prepared else {}
    logits = lm.eval()(input_ids=ids, **own).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    mask = torch.tensor([False] * len(row.prompt_ids) + row.loss_mask)[1:]
    return logprobs[mask]


def several(policy):
    """Make shared pictures, pictures beside each other, and some that come in later turns."""
    one, two = asked(policy, [SMALL], number="a"), asked(policy, [WIDE, SMALL], "Both?", "b")
    plain = asked(policy, [], "Text.", "c")
    return [
        answered(one, [60, 61, 62], "a"),
        answered(one, [63, 60], "a", [shown(policy, TALL)], 1),
        answered(two, [60, 61], "b", [shown(policy, SMALL, WIDE), shown(policy, TALL)]),
        answered(plain, [64, 65, 66], "c"),
    ]


def test_packed_scores_are_those_of_transformers(model, in_double):
    policy = policy_of(model).double()
    rollouts = several(policy)
    with torch.no_grad():
        packed = policy(pack_rollouts(rollouts)).logprobs
        alone = torch.cat([by_transformers(policy, r) for r in rollouts])
    assert distance(packed, alone) < EXACT


def test_deeper_states_come_of_each_picture_or_of_all_in_one(tmp_path):
    """Pictures' states before transformers 5.19 and since give the same model."""
    policy = Policy(str(save_vision_model(tmp_path / "model", "qwen3_vl")))
    family, body = policy.reader.family, policy.lm.base_model
    pictures = [policy.reader.prepare(p) for p in (SMALL, WIDE)]
    before, ask = family.features(policy.lm, pictures), body.get_image_features

    def older(*arguments, **named):
        found = ask(*arguments, **named)
        found.deepstack_features = [torch.cat(list(x)) for x in found.deepstack_features]
        return found

    body.get_image_features = older
    after = family.features(policy.lm, pictures)
    assert [x.shape for x in after.deeper] == [(len(before.first), 32)] * 2
    for ours, theirs in zip(after.deeper, before.deeper, strict=True):
        assert torch.equal(ours, theirs)


def test_pictures_matter(model):
    policy = policy_of(model)
    with torch.no_grad():
        one, other = (
            policy(pack_rollouts([answered(asked(policy, [p]), [60, 61])])).logprobs
            for p in (picture(1), picture(9))
        )
    assert (one - other).abs().max() > 1e-3


def test_prompts_of_equal_tokens_and_other_pictures_are_not_shared(model):
    policy = policy_of(model)
    rollouts = [
        answered(asked(policy, [picture(seed)], number=str(seed)), [60, 61], str(seed))
        for seed in (1, 9)
    ]
    assert rollouts[0].prompt.token_ids == rollouts[1].prompt.token_ids
    batch = pack_rollouts(rollouts)
    assert batch["rollouts", "prefix"].tolist() == [0, 1]
    with torch.no_grad():
        alone = torch.cat([policy(pack_rollouts([r])).logprobs for r in rollouts])
        assert torch.allclose(policy(batch).logprobs, alone, atol=2e-5)


def test_order_of_a_micro_batch_does_not_matter(model):
    policy = policy_of(model)
    rollouts = several(policy)
    batch = policy.with_sight(pack_rollouts(rollouts))
    with torch.no_grad():
        whole = policy.score(batch, "logprobs", 10_000)["tokens", "logprobs"].clone()
        order = torch.tensor([2, 0, 3, 1])
        turned = policy.score(select(batch, order), "logprobs", 10_000)["tokens"]
        cut = policy.score(batch, "logprobs", 1)["tokens", "logprobs"]  # a micro-batch for each
    lengths = batch["rollouts", "length"].tolist()
    parts = whole.split(lengths)
    assert torch.allclose(torch.cat([parts[i] for i in order]), turned["logprobs"], atol=2e-5)
    assert torch.allclose(whole, cut, atol=2e-5)


def count_features(policy):
    """Return the pictures of each run of the tower."""
    runs, family = [], policy.reader.family
    original = family.features

    def features(lm, pictures):
        runs.append(len(pictures))
        return original(lm, pictures)

    family.features = features
    return runs


def test_a_picture_is_seen_once_per_micro_batch_and_its_gradient_is_the_sum(model, in_double):
    policy = Policy(str(model), vision=Vision(train_tower=True, train_projector=True)).double()
    one, other = asked(policy, [SMALL, TALL], number="a"), asked(policy, [SMALL], "Now?", "b")
    rollouts = [answered(one, [60 + i, 61], "a", index=i) for i in range(4)]
    rollouts += [answered(other, [70, 61 + i], "b", index=i) for i in range(3)]
    runs = count_features(policy)
    policy(pack_rollouts(rollouts)).logprobs.sum().backward()
    assert runs == [2]  # two pictures, whoever shares them
    together = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    for rollout in rollouts:
        policy(pack_rollouts([rollout])).logprobs.sum().backward()
    assert runs[1:] == [2] * 4 + [1] * 3
    apart = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    assert together.keys() == apart.keys()
    seeing = [n for n in together if "visual" in n or "vision" in n]
    assert seeing
    # All that is trained takes part: ranks average all gradients.
    assert together.keys() == {n for n, p in policy.named_parameters() if p.requires_grad}
    assert any(together[n].abs().max() > 1e-6 for n in seeing)
    for name, gradient in together.items():
        # Biases of keys have none: what is left of it is made up of the others' rounding.
        assert (gradient - apart[name]).norm() < EXACT * (gradient.norm() + 1), name


def test_positions_are_those_of_transformers(model):
    policy = policy_of(model)
    if policy.reader.family.axes == 1:
        return  # they count tokens
    row = several(policy)[2].rows[0]
    assert len(row.pictures) == 5
    ids = torch.tensor([row.prompt_ids + row.token_ids])
    own = policy.reader.family.own_inputs([policy.reader.prepare(p) for p in row.pictures], ids)
    expected, delta = policy.lm.base_model.get_rope_index(
        ids, own["mm_token_type_ids"], own["image_grid_thw"]
    )
    seen = policy.reader.seen(ids[0].tolist(), row.placed)
    assert torch.equal(seen.positions(torch.arange(row.length)), expected[:, 0])
    assert seen.delta == int(delta)


def test_placeholders_that_do_not_fit_are_refused(model):
    policy = policy_of(model)
    prompt = asked(policy, [SMALL])
    for wrong in (
        replace(prompt, places=[prompt.places[0] + 1]),
        replace(prompt, token_ids=prompt.token_ids[:-3], places=[len(prompt.token_ids) - 4]),
    ):
        with pytest.raises(PictureError, match="placeholders"):
            policy(pack_rollouts([answered(wrong, [60])]))
    with pytest.raises(PictureError, match="2 pictures are given, but the text has 1"):
        policy.reader.expand([policy.reader.family.placeholder], [SMALL, TALL])


def engine_of(policy, tmp_path, **settings):
    engine = TransformersEngine(device="cpu", **settings)
    save_skeleton(policy.model, tmp_path / "engine")
    engine.start(tmp_path / "engine")
    engine.load_weights(policy.named_weights(), 0)
    return engine


def test_engine_and_trainer_agree(model, tmp_path, in_double):
    policy = policy_of(model).double()
    engine = engine_of(policy, tmp_path)
    engine._lm.double()
    prompts = [
        asked(policy, [SMALL]), asked(policy, [WIDE, TALL], "Both?"), asked(policy, [], "Text."),
    ]  # fmt: skip

    async def run():
        asks = [(p, seed) for p in prompts for seed in range(3)]
        return asks, await asyncio.gather(
            *(engine.look(p.placed, p.token_ids, SAMPLING, seed) for p, seed in asks)
        )

    asks, completions = asyncio.run(run())
    rollouts = [
        answered(p, c.token_ids, str(prompts.index(p)), index=seed)
        for (p, seed), c in zip(asks, completions, strict=True)
    ]
    with torch.no_grad():
        scored = policy(pack_rollouts(rollouts)).logprobs
    sampled = torch.tensor([x for c in completions for x in c.logprobs], dtype=torch.float64)
    assert distance(scored, sampled) < EXACT
    # What the model writes is no picture, placeholder or not.
    mark = policy.reader.family.placeholder
    lucky = answered(prompts[0], [60, mark, mark, 61])
    with torch.no_grad():
        assert torch.isfinite(policy(pack_rollouts([lucky])).logprobs).all()


def test_groups_share_a_run_of_the_tower(model, tmp_path):
    policy = policy_of(model)
    engine = engine_of(policy, tmp_path)
    runs, family = [], engine._reader.family
    original = family.features
    family.features = lambda lm, pictures: runs.append(len(pictures)) or original(lm, pictures)
    prompt, longer = asked(policy, [SMALL]), asked(policy, [SMALL], "What is this?")

    async def run():
        await asyncio.gather(
            *(
                engine.look(p.placed, p.token_ids, SAMPLING, s)
                for s in range(4)
                for p in (prompt, longer)
            )
        )

    asyncio.run(run())
    assert runs == [1]
    asyncio.run(run())  # as a later turn would
    assert runs == [1]
    engine.load_weights(policy.named_weights(), 1)
    asyncio.run(run())
    assert runs == [1, 1]


def test_kept_texts_know_their_pictures(model, tmp_path):
    policy = policy_of(model)
    engine = engine_of(policy, tmp_path, kept_tokens=1000)
    fresh = engine_of(policy, tmp_path)
    prompt, other = asked(policy, [SMALL]), asked(policy, [picture(9)])
    assert prompt.token_ids == other.token_ids
    first = asyncio.run(engine.look(prompt.placed, prompt.token_ids, SAMPLING, 0))
    more, placed = shown(policy, TALL)
    text = [*prompt.token_ids, *first.token_ids]
    later = [Placed(len(text) + start, one) for start, one in placed]
    for pictures in ([*prompt.placed, *later], [*other.placed, *later]):
        kept = engine._kept.longest(engine, [*text, *more], tuple(pictures))
        assert (kept is not None) == (pictures[0] == prompt.placed[0])
        one, another = (
            asyncio.run(e.look(pictures, [*text, *more], SAMPLING, 5)) for e in (engine, fresh)
        )
        equal = [a == b for a, b in zip(one.token_ids, another.token_ids, strict=True)]
        same = equal.index(False) if False in equal else len(equal)
        gap = torch.tensor(one.logprobs[:same]) - torch.tensor(another.logprobs[:same])
        assert same
        assert gap.abs().max() < 1e-4
        engine._kept.clear()
        asyncio.run(engine.look(prompt.placed, prompt.token_ids, SAMPLING, 0))


def test_what_reads_no_pictures_says_so(model, tiny_model, tmp_path):
    prompt = asked(policy_of(model), [SMALL])
    text = Policy(str(tiny_model))
    with pytest.raises(ConfigError, match="one of Qwen2_5_VL"):
        text(pack_rollouts([answered(replace(prompt, token_ids=[3] * 40), [4])]))
    with pytest.raises(ConfigError, match="no vision tower"):
        Policy(str(tiny_model), vision=Vision())
    engine = engine_of(text, tmp_path)
    with pytest.raises(ConfigError, match="does not read pictures"):
        asyncio.run(engine.look(prompt.placed, prompt.token_ids, SAMPLING, 0))
    assert copy.deepcopy(text).reader is None


def test_what_cannot_see_is_refused(tiny_model, model):
    with pytest.raises(ConfigError, match="value_head is a Qwen2Model, which does not read pict"):
        Policy(str(model), value_head=SeparateValueHead(str(tiny_model)))
    with pytest.raises(ConfigError, match="use TransformersEngine"):
        VLLMLocal().require_sight()


@pytest.mark.parametrize("copied", [True, False])
def test_a_critic_of_its_own_sees_what_the_policy_does(model, in_double, copied):
    head = SeparateValueHead(None if copied else str(model))
    policy = Policy(str(model), value_head=head, vision=Vision(train_projector=True)).double()
    torch.nn.init.normal_(head.linear.weight)
    with torch.no_grad():  # so that it is not the policy's
        head.body.get_input_embeddings().weight.mul_(0.5)
    rollouts = several(policy)
    values = policy(pack_rollouts(rollouts)).values
    expected = []
    for rollout in rollouts:
        row = rollout.rows[0]
        ids = torch.tensor([row.prompt_ids + row.token_ids])
        family = policy.reader.family
        plain = AutoModelForImageTextToText.from_pretrained(model).base_model.eval()
        plain.double().load_state_dict(head.body.state_dict())
        prepared = [policy.reader.prepare(p) for p in row.pictures]
        own = family.own_inputs(prepared, ids) if prepared else {}
        states = plain(input_ids=ids, **own).last_hidden_state[0, :-1]
        mask = torch.tensor([False] * len(row.prompt_ids) + row.loss_mask)[1:]
        expected.append(head.linear(states[mask])[:, 0])
    assert distance(values, torch.cat(expected)) < EXACT
    values.sum().backward()
    moved = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert all(name.startswith("value_head.") for name in moved)
    seeing = {n for n in moved if "visual" in n or "vision" in n or "projector" in n}
    assert seeing  # as the policy's: the projector is trained, and nothing else of the tower
    assert all("merger" in name or "projector" in name for name in seeing)


def test_other_architectures_are_refused_by_name(tmp_path):
    tokenizer = vision_tokenizer()
    config = LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 16,
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "intermediate_size": 16,
        },
    )
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    named = (
        r"LlavaOnevisionForConditionalGeneration reads pictures.*Qwen3VLForConditionalGeneration"
    )
    with pytest.raises(ConfigError, match=named):
        Policy(str(tmp_path), loading={"random_init": True})


def test_recomputed_activations_give_the_same_gradient(model):
    gradients = []
    for recompute in (False, True):
        policy = Policy(
            str(model),
            vision=Vision(train_tower=True),
            loading={"gradient_checkpointing": recompute},
        )
        layers = [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]
        assert {layer.gradient_checkpointing for layer in layers} == {recompute}
        policy(pack_rollouts(several(policy))).logprobs.sum().backward()
        gradients.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    kept, again = gradients
    assert kept.keys() == again.keys()
    assert all((kept[n] - again[n]).norm() <= 1e-5 * kept[n].norm() + 1e-6 for n in kept)


def test_a_memory_plan_counts_what_the_tower_keeps(model):
    rollouts = several(policy_of(model))
    kept = []
    for vision in (Vision(), Vision(train_projector=True), Vision(train_tower=True)):
        micro_batch = pack_rollouts(rollouts)
        kept.append(kept_for_backward(Policy(str(model), vision=vision), micro_batch))
    frozen, projector, tower = kept
    assert frozen < projector < tower


def test_a_batch_with_pictures_has_torchrls_form(model):
    policy = policy_of(model)
    rollouts = several(policy)
    batch = policy.with_sight(pack_rollouts(rollouts))
    assert as_torchrl(batch).batch_size[0] == len(rollouts)
