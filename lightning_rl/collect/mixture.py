"""Several prompt sets in one run, each with its own agent, rewards and sampling."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent
from lightning_rl.config.arguments import configurable
from lightning_rl.data.implied_prompts import ImpliedPrompts
from lightning_rl.data.mixing import FixedWeights, Mixing
from lightning_rl.data.plans import GroupPlan
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import (
    ConfigError,
    DataError,
    require_at_least,
    require_finite,
)
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Prompt, Rollout

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@configurable(prompts=prompts_of)
@dataclass
class PromptSet:
    """Prompts with a name, and their own settings in place of the data module's.

    Args:
        name: name of the set in metrics and records: letters, digits, ``_``, ``.`` and ``-``.
        prompts: the rows, or the path of a file; in Python also a list of rows, or a table.
        weight: how many groups are drawn from it, relative to the other sets; see
            ``Mixture.mixing``.
        agent: generates the set's rollouts; None: the data module's.
        plan: plans its groups; None: the data module's.
        rewards: reward functions that grade them; None: the data module's, with its weights.
        reward_weights: one per reward of ``rewards``; None: all 1.
        max_failed_share: the maximum share of its rollouts in an iteration whose grading by
            ``rewards`` may fail; beyond it the run stops.
        sampling: all its sampling settings, with defaults for those not given; None: the data
            module's.
        group_size: rollouts per prompt; None: the data module's ``group_size``, or
            ``evaluation.samples``.
        success_reward: a rollout with at least this reward counts as correct; None: the data
            module's.

    Raises:
        ConfigError: for values out of range.
    """

    name: str
    prompts: AnyPrompts
    weight: float = 1.0
    agent: Agent | None = None
    plan: GroupPlan | None = None
    rewards: list[Callable[..., list[float]]] | None = None
    reward_weights: list[float] | None = None
    max_failed_share: float = 0.1
    sampling: Sampling | None = None
    group_size: int | None = None
    success_reward: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"prompt set name={self.name!r} is used in the names of metrics; use only letters, "
                "digits, _, . and -"
            )
        require_finite(weight=self.weight, success_reward=self.success_reward)
        if self.weight <= 0:
            raise ConfigError(
                f"prompt set {self.name!r}: weight={self.weight} must be > 0; remove the set to "
                "draw nothing from it"
            )
        if isinstance(self.prompts, Mixture):
            raise ConfigError(
                f"prompt set {self.name!r} is itself a Mixture; list its sets beside the others"
            )
        require_at_least(1, group_size=self.group_size)
        if self.rewards is None and self.reward_weights is not None:
            raise ConfigError(
                f"prompt set {self.name!r}: reward_weights={self.reward_weights} apply to its own "
                "rewards, which are not set; set rewards too, or use data.reward_weights"
            )
        with naming(self.name):
            self.grader = (
                None
                if self.rewards is None
                else Rewards(self.rewards, self.reward_weights, self.max_failed_share)
            )
            """Grades with ``rewards``; None if the set has none."""


@configurable
class Mixture(PromptDataset):
    """Draws each group's prompt from one of several sets, without end.

    Args:
        sets: the sets to draw from; each keeps its own order and position.
        mixing: decides which set is next; None: ``FixedWeights``.
        seed: seed of that choice; None: ``seed_everything``'s.

    Raises:
        ConfigError: without sets, or if two sets have the same name.
    """

    def __init__(
        self,
        sets: list[PromptSet],
        mixing: Mixing | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed=seed)
        names = [one.name for one in sets]
        if not names:
            raise ConfigError("Mixture(sets=[]) has nothing to draw from; list at least one set")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"two prompt sets have the name {twice!r}; rename one")
        self.sets = sets
        self.mixing = mixing if mixing is not None else FixedWeights()
        self.drawn = [0] * len(sets)
        """Number of prompts drawn from each set so far in the whole run."""

    def __repr__(self) -> str:
        return f"Mixture({', '.join(one.name for one in self.sets)})"

    def read(self) -> Iterable[tuple[str, Any]]:
        raise ConfigError(
            f"{self!r} has no rows of its own; wrap the prompts of each of its sets instead"
        )

    def load(
        self, tokenizer: PreTrainedTokenizerBase, chat_options: Mapping[str, Any] | None = None
    ) -> None:
        """Load all sets; a set with its own agent is rendered with that agent's chat options."""
        for one in self.sets:
            with naming(one.name):
                own = chat_options if one.agent is None else one.agent.chat_options
                one.prompts.load(tokenizer, own)
        self.fingerprint = "; ".join(f"{one.name}: {one.prompts.fingerprint}" for one in self.sets)

    def imply(self, prompts: ImpliedPrompts) -> None:
        for one in self.sets:
            one.prompts.imply(prompts)

    def row_columns(self) -> set[str]:
        return {name for one in self.sets for name in one.prompts.row_columns()}

    def __len__(self) -> int:
        return sum(len(one.prompts) for one in self.sets)

    def __getitem__(self, index: int) -> Prompt:
        """Index the prompts of the first set, then those of the second, and so on."""
        for one in self.sets:
            if index < len(one.prompts):
                return replace(one.prompts[index], set=one.name)
            index -= len(one.prompts)
        raise IndexError(index)

    def draw(self, count: int) -> list[Prompt]:
        return [self._draw() for _ in range(count)]

    def _draw(self) -> Prompt:
        weights = [one.weight for one in self.sets]
        number = self.mixing.choose(weights, self.drawn, self.seed)
        self.drawn[number] += 1
        chosen = self.sets[number]
        with naming(chosen.name):
            [prompt] = chosen.prompts.draw(1)
        self.dropped = sum(one.prompts.dropped for one in self.sets)
        return replace(prompt, set=chosen.name)

    def numbered(self) -> Iterator[tuple[int | None, Prompt]]:
        """Yield the prompts of all sets, taking one from each set in turn."""
        rounds = zip_longest(*map(_named, self.sets))
        return ((None, prompt) for prompt in chain.from_iterable(rounds) if prompt is not None)

    def observe(self, groups: Sequence[Sequence[Rollout]]) -> None:
        """Report the graded groups to their sets, and their rewards to the mixing."""
        by_set = [[g for g in groups if g[0].prompt.set == one.name] for one in self.sets]
        for one, mine in zip(self.sets, by_set, strict=True):
            one.prompts.observe(mine)
        rewards = [[_rewards(group) for group in mine] for mine in by_set]
        graded = [[group for group in mine if group] for mine in rewards]
        self.mixing.observe(graded, [one.success_reward for one in self.sets])

    def bound(self, room: int) -> None:
        for one in self.sets:
            one.prompts.bound(room)

    def shares(self) -> dict[str, float]:
        """Return the expected share of each set in the groups to come."""
        shares = self.mixing.shares([one.weight for one in self.sets])
        return {one.name: share for one, share in zip(self.sets, shares, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "sets": {one.name: one.prompts.state_dict() for one in self.sets},
            "drawn": list(self.drawn),
            "mixing": {type(self.mixing).__name__: self.mixing.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = [one.name for one in self.sets]
        if list(state.get("sets", ())) != names:
            then = ", ".join(state["sets"]) if "sets" in state else "rows without a set"
            raise ConfigError(
                f"the checkpoint's prompts were {then}, now they are {', '.join(names)}; use "
                "the same sets in the same order to resume"
            )
        if state["seed"] != self.seed:
            raise ConfigError(
                f"the checkpoint's sets were mixed with seed={state['seed']}, but now "
                f"seed={self.seed}; set it back to resume"
            )
        for one in self.sets:
            with naming(one.name):
                one.prompts.load_state_dict(state["sets"][one.name])
        self.drawn = list(state["drawn"])
        # Another kind of mixing has learned nothing yet.
        learned = state["mixing"].get(type(self.mixing).__name__)
        if learned is not None:
            self.mixing.load_state_dict(learned)
        self.dropped = sum(one.prompts.dropped for one in self.sets)


def _named(one: PromptSet) -> Iterator[Prompt]:
    """Yield a set's prompts, marked with the name of the set."""
    return (replace(prompt, set=one.name) for _, prompt in one.prompts.numbered())


def _rewards(group: Sequence[Rollout]) -> list[float]:
    return [rollout.reward for rollout in group if rollout.reward is not None]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix errors about a set with its name; a set without a name is the only one."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if not name:
            raise
        kind = DataError if isinstance(error, DataError) else ConfigError
        raise kind(f"prompt set {name!r}: {error}") from error
