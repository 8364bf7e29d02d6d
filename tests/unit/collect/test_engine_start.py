"""Test the length that an engine starts with: what is set, what the run needs, or what fits."""

import inspect
import itertools

import pytest

import lightning_rl
from lightning_rl.agents.base import Agent, SingleTurn
from lightning_rl.agents.multi_turn import Environment, MultiTurn
from lightning_rl.agents.thinking import ThinkingBudget
from lightning_rl.agents.tools import ToolAgent
from lightning_rl.collect.engine_start import configure_for_requests
from lightning_rl.collect.tasks import Task
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.data.streaming import HFStreamingPrompts
from lightning_rl.engines import (
    RayEngine,
    Sampling,
    TransformersEngine,
    VLLMAdapters,
    VLLMLocal,
    VLLMServer,
)
from lightning_rl.engines.multi_policy_engine import MultiPolicyEngine
from lightning_rl.models.model_files import positions_in, save_skeleton
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rewards.base import Rewards

POSITIONS = 96


@pytest.fixture
def model(tiny_model, tmp_path):
    save_skeleton(str(tiny_model), tmp_path)
    text = (tmp_path / "config.json").read_text()
    had = positions_in(tmp_path)
    (tmp_path / "config.json").write_text(
        text.replace(f'"max_position_embeddings": {had}', f'"max_position_embeddings": {POSITIONS}')
    )
    assert positions_in(tmp_path) == POSITIONS
    return tmp_path


def reward(completions):
    return [0.0 for _ in completions]


def task(model, prompts, max_tokens, agent=None, **options):
    rows = prompts if not isinstance(prompts, list) else IterablePrompts(prompts, **options)
    rows.load(load_tokenizer(str(model)))
    agent = SingleTurn() if agent is None else agent
    return Task("", rows, agent, Rewards([reward]), Sampling(max_tokens=max_tokens), 2, 1.0)


def lengths_of(engine, model):
    engines = engine.engines.values() if isinstance(engine, MultiPolicyEngine) else [engine]
    return {e.settings.arguments(model)["max_model_len"] for e in engines}


ENGINES = {
    "VLLMLocal": VLLMLocal,
    "VLLMServer": VLLMServer,
    "RayEngine": RayEngine,
    "VLLMAdapters": VLLMAdapters,
    "MultiPolicyEngine": lambda **given: MultiPolicyEngine(
        {n: VLLMLocal(**given) for n in ("a", "b")}
    ),
}
CHOSEN = {"none": {}, "set": {"max_model_len": 50}, "option": {"options": {"max_model_len": 50}}}
AGENTS = {
    "one turn": (SingleTurn(), 19),
    "turns within max_tokens": (MultiTurn(Environment), 19),
    "a program": (None, -1),
}


class Program(Agent):
    async def run(self, rollout, engine, sampling):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "chosen", "agent"), list(itertools.product(ENGINES, CHOSEN, AGENTS))
)
def test_engines_take_what_is_set_what_is_needed_or_what_fits(model, make, chosen, agent):
    engine = ENGINES[make](**CHOSEN[chosen])
    runner, needed = AGENTS[agent]
    # The longest prompt and the longest completion need not come together.
    tasks = [
        task(model, ["1234=", "12="], 14, agent=runner or Program()),
        task(model, ["123=", "1="], 7, agent=runner or Program()),
    ]
    configure_for_requests(engine, tasks, model)
    assert lengths_of(engine, model) == {needed if chosen == "none" else 50}


def test_servers_that_run_and_engines_without_a_length_do_not_ask(model):
    tasks = [task(model, ["1234="], 14)]
    for engine in (VLLMServer(urls=["http://127.0.0.1:1"]), TransformersEngine()):
        configure_for_requests(engine, tasks, model)
        assert tasks[0].prompts._lengths is None


@pytest.mark.parametrize(
    ("prompts", "options", "max_tokens", "expected"),
    [
        (["1=", "123456="], {}, 10, 17),
        (["1=", "123456="], {"max_prompt_tokens": 4}, 10, 12),  # the longer one is dropped
        (["123456="], {"max_prompt_tokens": 4}, 10, 14),  # so that this is what the error names
        (["1="], {}, 1, 4),  # a push is probed with two tokens
        (["1="], {}, POSITIONS - 2, POSITIONS),
        (["1="], {}, POSITIONS - 1, -1),  # the model decides how much that is
    ],
)
def test_prompts_that_are_dropped_do_not_count(model, prompts, options, max_tokens, expected):
    engine = VLLMLocal()
    configure_for_requests(engine, [task(model, prompts, max_tokens, **options)], model)
    assert lengths_of(engine, model) == {expected}


@pytest.mark.parametrize(("limit", "expected"), [(None, -1), (12, 22)])
def test_a_stream_is_as_long_as_its_limit_says(model, limit, expected):
    engine, prompts = VLLMLocal(), HFStreamingPrompts("nowhere", max_prompt_tokens=limit)
    prompts.load = lambda *_: None
    configure_for_requests(engine, [task(model, prompts, 10)], model)
    assert lengths_of(engine, model) == {expected}


def test_another_run_of_the_same_engine_gets_its_own_length(model):
    engine = VLLMLocal()
    for prompt, expected in (("1234=", 15), ("1=", 12)):
        configure_for_requests(engine, [task(model, [prompt], 10)], model)
        assert lengths_of(engine, model) == {expected}
    assert engine.max_model_len is None


def test_what_it_starts_with_is_said_once_in_a_line(model, caplog):
    tasks = [task(model, ["1234=", "1="], 14)]
    with caplog.at_level("INFO"):
        configure_for_requests(ENGINES["MultiPolicyEngine"](), tasks, model)
        configure_for_requests(VLLMLocal(), [task(model, ["1="], 4, agent=Program())], model)
    needed, fits = [m for m in caplog.messages if m.startswith("the engine's length")]
    assert needed == (
        "the engine's length is 19 tokens: the longest prompt has 5, a completion up to 14"
    )
    assert fits == (
        "the engine's length is as much as fits into its KV cache, since requests of Program grow "
        "by turns"
    )


# ---------------------------------------------------------------- agents


def test_a_subclass_with_its_own_run_says_anew_how_long_requests_get():
    class Twice(SingleTurn):
        async def run(self, rollout, engine, sampling):
            return await super().run(await super().run(rollout, engine, sampling), engine, sampling)

    class Named(SingleTurn):
        pass

    class Same(SingleTurn):
        within_max_tokens = True

        async def run(self, rollout, engine, sampling):
            return await super().run(rollout, engine, sampling)

    known = {kind: kind().within_max_tokens for kind in (Program, Twice, Named, Same)}
    assert known == {Program: False, Twice: False, Named: True, Same: True}


def test_those_that_say_so_are_tried_here():
    exported = (getattr(lightning_rl, name) for name in lightning_rl.__all__)
    kinds = [k for k in exported if inspect.isclass(k) and issubclass(k, Agent)]
    bounded = {kind for kind in kinds if kind.within_max_tokens is True}
    assert bounded == {SingleTurn, MultiTurn, ToolAgent, ThinkingBudget}
