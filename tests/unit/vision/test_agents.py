"""Agents whose models see: pictures of tools and environments, calls that differ in pictures."""

import asyncio
import json

import pytest
import torch
from PIL import Image

from lightning_rl.agents.episode import Episode
from lightning_rl.agents.templates import TurnTemplate
from lightning_rl.agents.tools import ToolAgent
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import PictureError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import Placed, Prompt, Rollout
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.loading import decode
from lightning_rl.vision.messages import pictures_of
from tests.support.engine_checks import FakeEngine
from tests.support.lots import LotEngine
from tests.support.tiny_vision import TEMPLATE, picture, save_vision_model

TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)
SAMPLING = Sampling(max_tokens=400)
DRAWN = decode(picture(5, 48, 32))


def draw(name: str) -> list:
    """Draw something.

    Args:
        name: what.
    """
    if name == "nothing":
        return [Image.new("RGB", (0, 4))]
    return ["Here it is:", DRAWN]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def policy(model):
    return Policy(str(model))


class Script(FakeEngine):
    """Writes given turns, and notes what it was shown."""

    version = 3
    max_length = 4000

    def __init__(self, tokenizer, *turns: str) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.shown: list[list[Placed]] = []
        self.seeds: list[int] = []

    async def look(self, pictures, token_ids, sampling, seed):
        self.shown.append(list(pictures))
        return await self.generate(token_ids, sampling, seed)

    async def generate(self, token_ids, sampling, seed):
        self.seeds.append(seed)
        tokens = self.tokenizer(self.turns.pop(0), add_special_tokens=False)["input_ids"]
        return Completion(tokens, [-0.5] * len(tokens), "stop", [3] * len(tokens))


def asked(tokenizer, options):
    chat = [{"role": "user", "content": "Draw a circle."}]
    text = TurnTemplate(tokenizer, options).render(chat)
    return Prompt("p", chat, tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture
def tool_agent(policy, monkeypatch):
    template = TOOLS + TEMPLATE.replace("<|im_end|>\n{% endfor %}", CALLS)
    monkeypatch.setattr(policy.tokenizer, "chat_template", template)
    agent = ToolAgent([draw])
    agent.configure(policy.tokenizer)
    return agent


def call(**arguments):
    written = json.dumps({"name": "draw", "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call><|im_end|>"


def test_a_tool_shows_a_picture(policy, tool_agent):
    engine = Script(policy.tokenizer, call(name="circle"), "Round.<|im_end|>")
    rollout = Rollout(asked(policy.tokenizer, tool_agent.chat_options), "g", 0, 1)
    asyncio.run(tool_agent.run(rollout, engine, SAMPLING))
    [row] = rollout.rows
    [shown] = row.placed
    assert (shown.picture.width, shown.picture.height) == (48, 32)
    assert engine.shown == [row.placed]  # of the second turn; the first one saw nothing
    count = policy.reader.prepare(shown.picture).count
    mark = policy.reader.family.placeholder
    ids = row.prompt_ids + row.token_ids
    assert [i for i, token in enumerate(ids) if token == mark] == [
        *range(shown.start, shown.start + count)
    ]
    reply = rollout.completion[1]
    assert reply["content"] == [{"type": "text", "text": "Here it is:"}, {"type": "image"}]
    json.dumps(rollout.completion)
    rollout.reward = 1.0
    assert torch.isfinite(policy(pack_rollouts([rollout])).logprobs).all()


def test_a_tools_broken_picture_is_told_to_the_model(policy, tool_agent):
    engine = Script(policy.tokenizer, call(name="nothing"), "No.<|im_end|>")
    rollout = Rollout(asked(policy.tokenizer, tool_agent.chat_options), "g", 0, 1)
    asyncio.run(tool_agent.run(rollout, engine, SAMPLING))
    assert rollout.completion[1]["content"].startswith(
        "Error: PictureError: an image of 0×4 pixels"
    )
    assert rollout.rows[0].pictures == []


def test_texts_that_write_placeholders_are_refused(policy):
    template = TurnTemplate(policy.tokenizer)
    with pytest.raises(PictureError, match="0 pictures are given, but the text has 1"):
        template.suffix([], [{"role": "user", "content": "a <|image_pad|>"}])
    chat, [one] = pictures_of(
        [{"role": "user", "content": [{"type": "image", "image": DRAWN}]}], PictureLimits()
    )
    ids, [placed] = template.seen_suffix([5, policy.tokenizer.eos_token_id], chat, [one])
    whole, [other] = template.seen_suffix([5], chat, [one])
    assert whole == [policy.tokenizer.eos_token_id, *ids]
    assert other.start == placed.start + 1
    assert ids[placed.start] == policy.reader.family.placeholder != ids[placed.start - 1]


def test_calls_that_differ_in_pictures_are_different_calls(policy):
    """They have other seeds, and no row of one is gone on with in another."""
    mark, one, two = policy.reader.family.placeholder, picture(1), picture(2)
    engine = Script(policy.tokenizer, "a", "b", "c", "d")
    first = Prompt("p", "", [8, *[mark] * 4, 9], pictures=[one], places=[1])
    rollout = Rollout(first, "g", 0, 1)
    episode = Episode(rollout)

    async def ask(ids, *pictures):
        return await episode.call(engine, ids, SAMPLING, pictures=pictures)

    async def run():
        (_, answer) = await ask(first.token_ids, Placed(1, one))
        await ask(first.token_ids, Placed(1, two))
        more = [*first.token_ids, *answer.token_ids, *[mark] * 4, 7]
        await ask(more, Placed(1, one), Placed(7, two))
        await ask(more, Placed(1, two), Placed(7, two))

    asyncio.run(run())
    episode.end()
    assert [[(start, p.digest) for start, p in row.placed] for row in rollout.rows] == [
        [(1, one.digest), (7, two.digest)],
        [(1, two.digest)],
        [(1, two.digest), (7, two.digest)],
    ]
    assert [call.row for call in rollout.calls] == [0, 1, 0, 2]
    assert len(set(engine.seeds)) == 4
    assert engine.seeds[0] == rollout.seed
    again = [list(rollout.pictures_of(call)) for call in rollout.calls]
    assert again == engine.shown


def test_new_weights_in_mid_answer_see_the_picture_anew(model, policy, tmp_path):
    engine = LotEngine(device="cpu")  # no token ends an answer, some are placeholders
    save_skeleton(str(model), tmp_path)
    engine.start(tmp_path)
    engine.load_weights(policy.named_weights(), 0)
    later = Policy(str(model))
    with torch.no_grad():
        for parameter in later.lm.parameters():
            parameter.mul_(1.2)
    mark = policy.reader.family.placeholder
    ids, places = policy.reader.expand([8, mark, 9, mark, 10], [picture(1), picture(2, 64, 32)])
    shown = [Placed(*pair) for pair in zip(places, [picture(1), picture(2, 64, 32)], strict=True)]

    async def run():
        asks = [
            asyncio.create_task(engine.look(shown, ids, Sampling(max_tokens=60), s))
            for s in range(3)
        ]
        while not any(len(request.tokens) > 8 for request in engine._writing):
            await asyncio.sleep(0)
        engine.load_weights(later.named_weights(), 1)
        return await asyncio.gather(*asks)

    for completion in asyncio.run(run()):
        assert set(completion.versions) == {0, 1}
        prompt = Prompt("p", "", ids, pictures=[p for _, p in shown], places=places)
        rollout = Rollout(prompt, "g", 0, 0, reward=0.0)
        count = len(completion.token_ids)
        rollout.rows[0].append_written(completion.token_ids, [0.0] * count, [0] * count)
        with torch.no_grad():
            by = [p(pack_rollouts([rollout])).logprobs for p in (policy, later)]
        expected = torch.stack(by)[completion.versions, range(count)]
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4
