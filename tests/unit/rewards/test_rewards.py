"""Test grading: every form of reward function, and everything that can go wrong in one."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from importlib import import_module

import pytest

from lightning_rl.agents.base import SingleTurn
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.errors import ConfigError, RewardError, StalledError
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.by_set import RewardsBySet
from lightning_rl.rewards.calling import RewardFailure, batch_reward, reward_name
from lightning_rl.rewards.pool import Isolated
from lightning_rl.rewards.remote import Remote
from lightning_rl.rollout import RolloutStatus
from lightning_rl.run.loop.background import run_async, runtime
from tests.support.tiny_models import chat_tokenizer


@pytest.fixture
def groups(make_rollout):
    """Return two groups of two; completions "a0", "a1", "b0", "b1", and a column n: 10 or 20."""
    return [
        [
            make_rollout(
                [3],
                [4, 1],
                group_id=g,
                sample_index=i,
                completion=f"{g}{i}",
                columns={"n": n},
                reward=None,
            )
            for i in range(2)
        ]
        for g, n in (("a", 10), ("b", 20))
    ]


def grade(groups, *functions, **options):
    rewards = Rewards(list(functions), **options)
    run_async(rewards.grade(groups))
    rewards.require_graded([rollout for group in groups for rollout in group])
    return [[r.reward for r in group] for group in groups]


@pytest.mark.parametrize(("template", "opened"), [("deepseek_r1_distill", True), ("qwen3", False)])
def test_a_reward_learns_whether_the_template_has_opened_a_thought(make_rollout, template, opened):
    tokenizer = chat_tokenizer(template)
    asked = "Begin with <think>"  # said by a user, it opens none
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
    )
    rollout = make_rollout(tokenizer(text)["input_ids"], [40, 41], completion="4", reward=None)
    rewards = Rewards([lambda opened_thoughts, **_: [float(*opened_thoughts)]])
    RolloutPipeline(TransformersEngine(), SingleTurn(), rewards, tokenizer).grade([[rollout]])
    assert rollout.reward == float(opened)


def last_digit(prompts, completions, **columns):
    return [float(text[-1]) for text in completions]


def test_a_plain_function_gets_columns_by_name(groups):
    def trl_style(prompts, completions, n, **kwargs):
        assert prompts == ["text"] * 2
        assert set(kwargs) == {
            "completion_ids",
            "finish_reasons",
            "opened_thoughts",
            "environment_rewards",
            "group_ids",
            "trainer_state",
            "extras",
            "log_extra",
            "log_metric",
        }
        return [x + float(c[-1]) for x, c in zip(n, completions, strict=True)]

    assert grade(groups, trl_style) == [[10, 11], [20, 21]]


def test_a_function_without_kwargs_gets_only_what_it_names(groups):
    def narrow(completions, completion_ids):
        return [len(ids) + float(c[-1]) for ids, c in zip(completion_ids, completions, strict=True)]

    assert grade(groups, narrow) == [[2, 3], [2, 3]]


def test_an_object_with_call(groups):
    class Graded:
        def __call__(self, completions):
            return [0.5] * len(completions)

    assert grade(groups, Graded()) == [[0.5, 0.5], [0.5, 0.5]]
    assert groups[0][0].reward_parts == {"Graded": 0.5}


def test_async_functions_wait_for_each_other(groups):
    entered = []

    async def judge(completions, **columns):
        entered.append(completions)
        while len(entered) < 2:  # ends only if both groups are graded at the same time
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    assert grade(groups, judge) == [[1, 1], [1, 1]]


def test_several_rewards_add_up_with_their_weights(groups):
    def constant(completions, **columns):
        return [1] * len(completions)

    rewards = grade(groups, last_digit, constant, weights=[2.0, -0.5])
    assert rewards == [[-0.5, 1.5], [-0.5, 1.5]]
    assert groups[0][1].reward_parts == {"last_digit": 1.0, "constant": 1.0}


def test_none_means_that_a_reward_does_not_apply(groups):
    def sometimes(completions, **columns):
        return [None if c == "a0" else 5.0 for c in completions]

    assert grade(groups, last_digit, sometimes) == [[0, 6], [5, 6]]
    assert groups[0][0].reward_parts == {"last_digit": 0.0, "sometimes": None}


def test_no_reward_applies_is_a_failure_of_that_rollout_only(groups):
    def sometimes(completions, **columns):
        return [None if c == "a0" else 5.0 for c in completions]

    assert grade(groups, sometimes, max_failed_share=0.25) == [[None, 5], [5, 5]]
    assert groups[0][0].status is RolloutStatus.FAILED
    assert "every function returned None" in groups[0][0].error


def raises(completions, **columns):
    if completions[0] == "a0":
        raise KeyError("answer")
    return [1.0] * len(completions)


def too_few(completions, **columns):
    return [1.0] * (1 if completions[0] == "a0" else 2)


def not_a_number(completions, **columns):
    return [float("nan") if c == "a1" else 1.0 for c in completions]


def not_even_a_float(completions, **columns):
    return ["good" if c == "a1" else 1.0 for c in completions]


def not_a_list(completions, **columns):
    return 3.0 if completions[0] == "a0" else [1.0, 1.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "reward raises: KeyError: 'answer'"),
        (too_few, "reward too_few: ValueError: returned 1 scores for 2 completions"),
        (
            not_a_list,
            "reward not_a_list: ValueError: returned 3.0; expected a list with a score per",
        ),
    ],
)
def test_a_failing_reward_fails_its_group_and_no_other(groups, function, message):
    assert grade(groups, last_digit, function, max_failed_share=0.5) == [[None, None], [1, 2]]
    for rollout in groups[0]:
        assert rollout.status is RolloutStatus.FAILED
        assert rollout.error.startswith(message)
    for rollout in groups[1]:
        assert rollout.status is RolloutStatus.COMPLETED
        assert rollout.error is None


def own_failure(completions, **columns):
    return [RewardFailure("no answer from the judge") if c == "a1" else 1.0 for c in completions]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            not_a_number,
            "reward not_a_number: returned nan; a score must be a finite number or None",
        ),
        (
            not_even_a_float,
            "reward not_even_a_float: returned 'good'; a score must be a finite number or None",
        ),
        (own_failure, "reward own_failure: no answer from the judge"),
    ],
)
def test_a_score_that_is_none_fails_its_rollout_and_no_other(groups, function, message):
    assert grade(groups, function, last_digit, max_failed_share=0.25) == [[1, None], [1, 2]]
    assert groups[0][1].status is RolloutStatus.FAILED
    assert groups[0][1].error == f"{message}; prompt 'text', completion 'a1'"
    assert groups[0][0].status is RolloutStatus.COMPLETED


GRADERS = """
import json


def parse(text):
    return json.loads("{" + text)


def broken(completions):
    return [parse(text) for text in completions]


async def broken_async(completions):
    return broken(completions)


class Broken:
    def __call__(self, completions):
        return broken(completions)
"""
KINDS = {
    "plain": lambda g: g.broken,
    "async": lambda g: g.broken_async,
    "class": lambda g: g.Broken(),
    "partial": lambda g: partial(g.broken),
    "batch": lambda g: batch_reward(g.broken),
    "Isolated": lambda g: Isolated(g.broken, workers=1),
    "Remote": lambda g: Remote(g.broken_async, retries=0),
}


@pytest.mark.parametrize("here", [True, False], ids=["after generating", "while generating"])
@pytest.mark.parametrize("of_set", [True, False], ids=["of a prompt set", "of all prompts"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_part_of_a_sum_raises_is_told_with_its_place_prompt_and_completion(
    groups, kind, of_set, here, tmp_path, monkeypatch
):
    (tmp_path / "graders.py").write_text(GRADERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "graders", raising=False)
    function = KINDS[kind](import_module("graders"))
    rollouts = [rollout for group in groups for rollout in group]
    for number, rollout in enumerate(rollouts):
        rollout.completion += "\x1b" + 9999 * "y"
        asked = f"{number}?" + 9999 * "z"
        rollout.prompt.prompt = [{"role": r, "content": asked} for r in ("system", "user")]
    rewards = Rewards([lambda completions: [1.0] * len(completions), function], [2.0, 0.5])
    grader = RewardsBySet({"": rewards}) if of_set else rewards
    grader.grade_here(groups) if here else run_async(grader.grade(groups))
    rewards.close()
    for number, rollout in enumerate(rollouts):
        assert rollout.status is RolloutStatus.FAILED
        assert rollout.error.startswith(f"reward {reward_name(function)}: JSONDecodeError: ")
        assert f"{tmp_path.name}/graders.py:6 in parse" in rollout.error
        assert f"prompt 'user: {number}?zzz" in rollout.error
        assert f"completion '{rollout.completion[:2]}\N{REPLACEMENT CHARACTER}yyy" in rollout.error
        assert len(rollout.error) < 700
        assert rollout.extra["traceback"].startswith("Traceback (most recent call last):\n")
        assert f'"{tmp_path}/graders.py", line 6, in parse' in rollout.extra["traceback"]


def test_what_failed_is_not_given_to_the_next_reward(groups):
    seen = []

    def later(completions):
        seen.append(completions)
        return [1.0] * len(completions)

    grade(groups, own_failure, later, max_failed_share=0.25)
    assert seen == [["a0"], ["b0", "b1"]]


def test_too_many_failures_stop_the_run_with_the_first_error_and_lose_nothing(groups):
    with pytest.raises(
        RewardError, match=r"2 of 4 .*50%, max_failed_share=0\.49.*'answer'"
    ) as stop:
        grade(groups, raises, max_failed_share=0.49)
    assert stop.value.rollouts == [*groups[0], *groups[1]]


def test_closing_closes_what_can_be_closed():
    class Holding:
        closed = 0

        def __call__(self, completions):
            return [1.0] * len(completions)

        def close(self):
            self.closed += 1

    holding = Holding()
    Rewards([last_digit, holding]).close()
    assert holding.closed == 1


def test_aborted_rollouts_are_not_graded_and_are_no_failure(groups):
    groups[0][0].status = RolloutStatus.ABORTED
    assert grade(groups, last_digit, max_failed_share=0.0) == [[None, 1], [0, 1]]


class Fixed:
    def __init__(self, value):
        self.value = value

    def score(self, completions, **columns):
        return [self.value] * len(completions)

    __call__ = score


def test_what_wraps_a_function_is_called_as_that_is_and_numbered(groups):
    def scaled(completions, by, **columns):
        return [by * float(text[-1]) for text in completions]

    functions = [
        partial(scaled, by=2), partial(partial(scaled), by=3), scaled, Fixed(1.0).score,
        Fixed(2.0).score, lambda completions, **_: [4.0] * len(completions),
        lambda completions, **_: [5.0] * len(completions), Fixed(6.0), Fixed(7.0),
    ]  # fmt: skip
    names = [
        "scaled_2", "scaled_3", "scaled", "score", "score_2", "lambda", "lambda_2", "Fixed",
        "Fixed_2",
    ]  # fmt: skip
    assert list(Rewards(functions).functions) == names
    kept = [i for i, name in enumerate(names) if name != "scaled"]
    # The constants are 1 + 2 + 4 + 5 + 6 + 7; the completion that ends in 1 has 2 + 3 more.
    assert grade(groups, *(functions[i] for i in kept))[0] == [25, 30]
    assert groups[0][1].reward_parts["scaled_2"] == 3.0


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="at least one reward function"):
        Rewards([])
    with pytest.raises(ConfigError, match="1 values for 2 rewards"):
        Rewards([last_digit, raises], weights=[1.0])
    with pytest.raises(ConfigError, match="share the name 'last_digit'"):
        Rewards([last_digit, last_digit])
    with pytest.raises(ConfigError, match=r"max_failed_share=1\.5"):
        Rewards([last_digit], max_failed_share=1.5)


def test_grading_works_inside_a_running_event_loop(groups):
    async def notebook():
        return grade(groups, last_digit)

    assert asyncio.run(notebook()) == [[0, 1], [0, 1]]


def test_plain_functions_may_use_signals_as_in_any_main_thread(groups):
    def alarmed(completions):
        try:
            previous = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # only the main thread may
            signal.signal(signal.SIGALRM, previous)
        except Exception:
            return [0.0] * len(completions)  # as rewards do that are written with care
        return [1.0] * len(completions)

    rewards = Rewards([alarmed])
    rewards.grade_here(groups)
    assert [r.reward for group in groups for r in group] == [1.0] * 4


def test_signals_where_the_main_thread_is_busy_are_a_failure_and_no_zero(groups):
    def alarmed(completions):
        try:
            signal.alarm(1)
        except Exception:
            return [0.0] * len(completions)

    assert grade(groups, alarmed, max_failed_share=1.0) == [[None, None], [None, None]]
    assert "signal.alarm works in the main thread only" in groups[0][0].error
    assert "wrap it in Isolated" in groups[0][0].error


def leaves(completions):
    if completions[0] == "a0":
        os._exit(0)
    return [1.0] * len(completions)


def exits(completions):
    if completions[0] == "a0":
        sys.exit(0)
    return [1.0] * len(completions)


def interrupts(completions):
    if completions[0] == "a0":
        raise KeyboardInterrupt
    return [1.0] * len(completions)


def stops(completions):
    if completions[0] == "a0":
        raise StopIteration
    return [1.0] * len(completions)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


def unspeakable(completions):
    if completions[0] == "a0":
        raise Unspeakable
    return [1.0] * len(completions)


def as_async(function):
    async def reward(completions):
        return function(completions)

    return reward


@pytest.mark.parametrize("here", [True, False], ids=["after generating", "while generating"])
@pytest.mark.parametrize("kind", [lambda f: f, as_async], ids=["plain", "async"])
@pytest.mark.parametrize(
    ("function", "message"),
    [(leaves, r"called os\._exit\(0\), which would"), (exits, "SystemExit: 0"),
     (interrupts, "KeyboardInterrupt"), (stops, "StopIteration"), (unspeakable, "Unspeakable: ")],
)  # fmt: skip
def test_no_reward_ends_the_process_or_the_loop(groups, function, message, kind, here):
    if kind is as_async and function is stops:
        message = "coroutine raised StopIteration"
    rewards = Rewards([kind(function)])
    rewards.grade_here(groups) if here else run_async(rewards.grade(groups))
    assert [[r.reward for r in group] for group in groups] == [[None, None], [1, 1]]
    assert re.search(message, groups[0][0].error)


def test_a_process_that_a_reward_forked_may_end(groups):
    def forks(completions):
        child = os.fork()
        if child == 0:
            os._exit(7)
        return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)

    rewards = Rewards([forks])
    rewards.grade_here(groups)
    assert groups[0][0].reward == 7.0


@pytest.mark.parametrize("loop", [True, False])
def test_one_that_never_ends_is_left_behind_and_does_not_hold_up_the_next(groups, loop):
    entered, release, calls = threading.Event(), threading.Event(), []

    def hangs_once(completions):
        calls.append(completions)
        if len(calls) == 1:
            entered.set()
            release.wait()
        return [1.0] * len(completions)

    def give_up():
        entered.wait()
        while not runtime.is_waiting():  # the call may begin before the main thread waits for it
            time.sleep(0.001)
        runtime.abandon_wait(StalledError("enough"))

    rewards = Rewards([hangs_once])
    threading.Thread(target=give_up).start()
    with pytest.raises(StalledError):
        run_async(rewards.grade(groups)) if loop else rewards.grade_here(groups)
    assert [r.reward for group in groups for r in group] == [None] * 4
    rewards.grade_here(groups)
    release.set()
    assert [r.reward for group in groups for r in group] == [1.0] * 4


ENDS = """
import os, sys, threading
from lightning_rl.cli.process import run_to_the_end
from lightning_rl.run.loop.threads import leave_behind

def in_a_thread():
    def call():
        os._exit(0)
    threading.Thread(target=call).start()
    threading.Event().wait()

def forks():
    child = os.fork()
    if child == 0:
        os._exit(0)
    return os.waitpid(child, 0)[1]

def hangs():
    thread = threading.Thread(target=threading.Event().wait)  # which Python would wait for
    thread.start()
    leave_behind(thread)
    return 143

print("begun")
sys.exit(run_to_the_end(globals()[sys.argv[1]]))
"""


@pytest.mark.parametrize(("command", "status"), [("in_a_thread", 1), ("forks", 0), ("hangs", 143)])
def test_the_command_ends_with_the_status_that_it_earned(command, status):
    done = subprocess.run([sys.executable, "-c", ENDS, command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "begun\n")
    assert ("os._exit(0) was called before the command was done, at <string>:8 in call"
            in done.stderr) == (command == "in_a_thread")  # fmt: skip


def test_a_plain_function_that_returns_an_awaitable_is_refused(groups):
    async def later():
        await asyncio.sleep(0)
        return [1.0, 1.0]

    with pytest.raises(ConfigError, match="async def"):
        Rewards([lambda completions: later()]).grade_here(groups)


def test_a_slow_plain_function_does_not_hold_up_the_event_loop(groups):
    turns, graded = [], threading.Event()

    def slow(completions):
        graded.wait(10)  # ends only if the loop goes on meanwhile
        return [1.0] * len(completions)

    async def both():
        grading = asyncio.create_task(Rewards([slow]).grade(groups))
        await asyncio.sleep(0.01)
        turns.append(grading.done())
        graded.set()
        await grading

    run_async(both())
    assert turns == [False]


def test_what_a_reward_does_to_its_arguments_stays_with_it(make_rollout):
    """Changes at any depth stay; another reward and training see the original."""

    def spoils(prompts, completions, completion_ids, extras, answer):
        count = len(completions)
        prompts[0][0]["content"] = "?"
        for given in (prompts, completions, completion_ids[0], completion_ids, extras, answer[0]):
            given.clear()
        return [1.0] * count

    def sees(prompts, completions, completion_ids, answer):
        assert prompts == [[{"role": "user", "content": "1+2="}]] * 2
        assert (completions, completion_ids) == (["3", "3"], [[4, 5], [4, 5]])
        return [float(len(a["parts"])) for a in answer]

    group = [
        make_rollout([3], [4, 5], sample_index=i, completion="3", reward=None,
                     columns={"answer": {"parts": [1, 2]}})
        for i in range(2)
    ]  # fmt: skip
    for rollout in group:
        rollout.prompt.prompt = [{"role": "user", "content": "1+2="}]
    Rewards([spoils, sees]).grade_here([group])
    assert [r.reward for r in group] == [3.0, 3.0]
    assert [r.token_ids for r in group] == [[4, 5], [4, 5]]


def test_a_reward_that_crashes_python_is_named(tmp_path):
    """It ended the run without a word."""
    (tmp_path / "crashing.py").write_text(
        "import ctypes\ndef crashes(completions):\n    ctypes.string_at(0)\n"
    )
    script = (
        "import asyncio\nfrom crashing import crashes\n"
        "from lightning_rl.rewards.calling import RewardCaller\n"
        "asyncio.run(RewardCaller().call_in_loop(crashes, {'completions': ['a']}))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert 'crashing.py", line 3 in crashes' in done.stderr


def computes(completions):
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    return [0.0] * len(completions)


def waits(completions):
    time.sleep(0.05)
    return [0.0] * len(completions)


@pytest.mark.parametrize("how", ["ahead", "here"])
def test_a_plain_function_that_takes_much_of_an_iteration_is_named_once(
    monkeypatch, how, make_rollout
):
    monkeypatch.setattr("lightning_rl.rewards.base._NOTABLE_S", 0.02)
    rewards = Rewards([waits, computes])

    def grade():
        group = [make_rollout([1], [2], reward=None)]
        if how == "here":
            rewards.grade_here([group])
        else:
            run_async(rewards.grade_ahead([group]))

    def warned(seconds):
        grade()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rewards.end_iteration(seconds)
        return [str(warning.message) for warning in told]

    assert warned(1000.0) == []  # of so long an iteration it is little
    (told,) = warned(0.06)
    assert re.match(r"reward computes computes for .* wrap it in Isolated", told)
    assert warned(0.06) == []
    rewards.close()
