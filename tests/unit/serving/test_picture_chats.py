"""Agents send pictures, in each API's form; the model sees them, and rows hold them."""

import asyncio
import json
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest

from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Prompt, Rollout
from lightning_rl.serving.function_agent import AgentClient
from lightning_rl.serving.limits import RequestLimits
from lightning_rl.serving.server import AgentServer
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.loading import data_url
from lightning_rl.vision.messages import as_sent
from lightning_rl.vision.reader import encode
from tests.support.tiny_vision import picture, save_vision_model

pytestmark = pytest.mark.anyio
SMALL, WIDE, TALL = picture(1), picture(2, 64, 32), picture(3, 32, 48)
SAMPLING = Sampling(max_tokens=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return Policy(str(save_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")))


@pytest.fixture(scope="module")
def engine(policy, tmp_path_factory):
    engine = TransformersEngine(device="cpu")
    folder = tmp_path_factory.mktemp("engine")
    save_skeleton(policy.model, folder)
    engine.start(folder)
    engine.load_weights(policy.named_weights(), 0)
    yield engine
    engine.close()


def new_rollout(policy, pictures=(SMALL,)):
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": "What?"}]
    chat = [{"role": "user", "content": parts}]
    text = policy.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids, places = encode(policy.tokenizer, text, pictures, special=False)
    return Rollout(Prompt("p", chat, ids, {}, "", list(pictures), places), "1/0/p", 0, seed=3)


@asynccontextmanager
async def opened(policy, engine, **limits):
    server = AgentServer(policy.tokenizer, limits=RequestLimits(**limits))
    rollout = new_rollout(policy)
    try:
        async with server.session(rollout, engine, SAMPLING) as session:
            yield rollout, session
    finally:
        await server.close()


def shown(*pictures, text="What?"):
    parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def client_of(session):
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


async def test_a_prompt_sent_as_it_is_given_is_the_rollouts_own(policy, engine):
    async with opened(policy, engine) as (rollout, session):
        messages = AgentClient(session).prompt
        assert messages == shown(SMALL) == as_sent(rollout.prompt)
        async with client_of(session) as client:
            answer = await client.chat.completions.create(model="policy", messages=messages)
    [row] = rollout.rows
    assert (row.pictures, row.places) == (rollout.prompt.pictures, rollout.prompt.places)
    assert row.prompt_ids == rollout.prompt.token_ids
    assert answer.usage.prompt_tokens == len(row.prompt_ids)
    # Its answer is the engine's own, to the same question and seed.
    again = await engine.look(rollout.prompt.placed, row.prompt_ids, SAMPLING, rollout.seed)
    assert row.token_ids == again.token_ids
    assert row.logprobs == pytest.approx(again.logprobs, abs=1e-5)


async def test_a_conversation_with_new_pictures_goes_on_in_one_row(policy, engine):
    async with opened(policy, engine) as (rollout, session):
        async with client_of(session) as client:
            chat = shown(SMALL)
            for one in (WIDE, TALL):
                made = await client.chat.completions.create(model="policy", messages=chat)
                chat += [{"role": "assistant", "content": made.choices[0].message.content}]
                chat += shown(one, text="And this?")
            await client.chat.completions.create(model="policy", messages=chat)
        transcript = session.messages
    [row] = rollout.rows
    assert row.pictures == [SMALL, WIDE, TALL]
    pad = policy.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    tokens = row.prompt_ids + row.token_ids
    for start, count in zip(row.places, (4, 8, 6), strict=True):
        assert tokens[start : start + count] == [pad] * count
        assert tokens[start + count] != pad
    # The transcript, which is recorded, names pictures and holds no bytes of them.
    assert json.dumps(transcript).count("base64") == 0
    assert transcript[1]["content"][0] == {"type": "image", "digest": WIDE.digest}
    # What was collected can be scored as it was sampled.
    scored = await engine.look(
        rollout.pictures_of(rollout.calls[-1]), rollout.prompt_of(rollout.calls[-1]), SAMPLING,
        rollout.calls[-1].seed,
    )  # fmt: skip
    assert scored.token_ids == row.token_ids[-len(scored.token_ids) :]


async def test_anthropics_blocks_and_results_of_tools(policy, engine):
    kind, _, data = data_url(WIDE).removeprefix("data:").partition(";base64,")
    block = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    messages = [
        {"role": "user", "content": [block, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    async with opened(policy, engine) as (rollout, session):
        client = anthropic.AsyncAnthropic(
            base_url=session.anthropic_url, api_key=session.api_key, max_retries=0
        )
        async with client:
            await client.messages.create(model="policy", max_tokens=4, messages=messages)
    assert rollout.rows[-1].pictures == [WIDE, WIDE]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,QUJD", "is not a PNG, JPEG, WebP or GIF"),
        ("file:///etc/hostname", "files cannot be named here"),
        ("/etc/hostname", "files cannot be named here"),
        ("http://127.0.0.1:1/a.png", "not a public internet address"),
        ("http://169.254.169.254/latest/meta-data", "not a public internet address"),
    ],
)
async def test_what_is_no_picture_or_not_a_strangers_to_see_is_the_clients_fault(
    policy, engine, url, words
):
    part = {"type": "image_url", "image_url": {"url": url}}
    async with opened(policy, engine) as (rollout, session), client_of(session) as client:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": [part]}]
            )
        assert (caught.value.param, caught.value.code) == ("messages", "invalid_image")
        await client.chat.completions.create(model="policy", messages=shown(SMALL))
    assert rollout.calls  # it went on


async def test_bounds_of_pictures_are_the_servers(policy, engine):
    bounds = PictureLimits(max_per_prompt=2, max_pixels=64 * 32)
    async with (
        opened(policy, engine, pictures=bounds) as (_, session),
        client_of(session) as client,
    ):
        ask = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="max_per_prompt=2"):
            await ask(model="policy", messages=shown(SMALL, SMALL, SMALL))
        with pytest.raises(openai.BadRequestError, match="max_pixels=2,048"):
            await ask(model="policy", messages=shown(picture(4, 64, 64)))
        with pytest.raises(openai.BadRequestError, match="max_per_prompt=2"):  # in all of a chat
            await ask(model="policy", messages=shown(SMALL) + shown(SMALL, SMALL))
        await ask(model="policy", messages=shown(SMALL, WIDE))


async def test_words_that_stand_for_a_picture_are_refused(policy, engine):
    async with opened(policy, engine) as (_, session), client_of(session) as client:
        with pytest.raises(openai.BadRequestError, match="placeholders"):
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "<|image_pad|>"}]
            )


async def test_several_at_once_see_their_own(policy, engine):
    async with opened(policy, engine) as (rollout, session), client_of(session) as client:
        ask = client.chat.completions.create
        await asyncio.gather(
            *(ask(model="policy", messages=shown(one)) for one in (SMALL, WIDE, TALL))
        )
    assert sorted(row.pictures[0].digest for row in rollout.rows) == sorted(
        one.digest for one in (SMALL, WIDE, TALL)
    )
