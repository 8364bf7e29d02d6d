"""Define small games whose expectations under a policy, and gradients, are known exactly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.results import parser_of, report, write_block
from lightning_rl.rollout import Call, Prompt, Rollout, RolloutStatus, Row

GROUP_SIZE = 4


@dataclass(frozen=True)
class Game:
    """A game of up to ``turns`` turns, in each of which an action is chosen on a field.

    A policy is a table of logits, (turns * fields, actions): it has probabilities of its own in
    each state, a turn and a field.

    Args:
        turns: at most.
        start: the first field.
        pays: for each field, what each action earns.
        leads: for each field, where each action leads; -1: the game is over.
    """

    turns: int
    start: int
    pays: tuple[tuple[float, ...], ...]
    leads: tuple[tuple[int, ...], ...]

    @property
    def fields(self) -> int:
        return len(self.pays)

    @property
    def actions(self) -> int:
        return len(self.pays[0])

    @property
    def states(self) -> int:
        return self.turns * self.fields

    @cached_property
    def rewards(self) -> Tensor:
        return torch.tensor(self.pays)

    @cached_property
    def next(self) -> Tensor:
        return torch.tensor(self.leads)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.reshape(self.turns, self.fields, self.actions).softmax(2)

    def values(self, logits: Tensor) -> Tensor:
        """Return the expected sum of rewards from each state on, (turns + 1, fields), exactly."""
        probs, later = self.probabilities(logits), logits.new_zeros(self.fields)
        table = [later]
        for turn in reversed(range(self.turns)):
            rest = torch.where(self.next >= 0, later[self.next.clamp(min=0)], 0.0)
            later = (probs[turn] * (self.rewards + rest)).sum(1)
            table.insert(0, later)
        return torch.stack(table)

    def policy(self, generator: torch.Generator) -> tuple[Tensor, float, Tensor]:
        """Draw logits at random; return the reward expected then, and its gradient, flat."""
        logits = torch.randn(self.states, self.actions, generator=generator, dtype=torch.double)
        logits.requires_grad_()
        expected = self.values(logits)[0, self.start]
        exact = torch.autograd.grad(expected, logits)[0].flatten()
        return logits.detach(), float(expected.detach()), exact

    def played(
        self, logits: Tensor, field: Tensor, generator: torch.Generator, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return fields before turns, and actions, both (count, turns - first); -1 at the end.

        ``field`` (count,) is where the games stand before turn ``first``.
        """
        probs, fields, actions = self.probabilities(logits), [], []
        for turn in range(first, self.turns):
            action = torch.multinomial(probs[turn, field], 1, generator=generator).squeeze(1)
            fields.append(field)
            actions.append(torch.where(field >= 0, action, -1))
            field = torch.where(field >= 0, self.next[field, action], -1)
        return torch.stack(fields, 1), torch.stack(actions, 1)

    def begun(self, count: int) -> Tensor:
        """Return the fields on which so many games begin."""
        return torch.full((count,), self.start)

    def recorded(self, fields: Tensor, actions: Tensor, at_end: bool) -> list[Rollout]:
        """Record games as rollouts: a token for each turn, and an environment's between two.

        Their rewards are the sums of what was earned, paid ``at_end`` or turn by turn.
        """
        prompt, rollouts = Prompt("0", "", [0]), []
        for place, (before, chosen) in enumerate(
            zip(fields.tolist(), actions.tolist(), strict=True)
        ):
            group, sample = divmod(place, GROUP_SIZE)
            rollout = Rollout(prompt, str(group), sample, place)
            rollout.status, paid = RolloutStatus.COMPLETED, []
            for turn, (field, action) in enumerate(zip(before, chosen, strict=True)):
                if field >= 0:
                    paid.append(self.pays[field][action])
                    state, reward = f"{turn} {field}", None if at_end else paid[-1]
                    call = Call(0, 2 * turn, 2 * turn + 1, state=state, reward=reward)
                    rollout.calls.append(call)
            count = 2 * len(paid) - 1
            mask = [n % 2 == 0 for n in range(count)]
            versions = [0 if own else -1 for own in mask]
            rollout.rows = [Row(prompt.token_ids, [1] * count, mask, [0.0] * count, versions)]
            rollout.reward = sum(paid)
            rollouts.append(rollout)
        return rollouts


def command(
    doc: str | None,
    name: str,
    page: Path,
    run: Callable[[int, int], dict[str, Any]],
    table: Callable[[dict[str, Any]], list[str]],
) -> None:
    """Run the command of a benchmark on games: on request save result and table."""
    parser = parser_of(doc)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = run(args.groups, args.seed)
    if args.save:
        write_block(page, name, table(result))
    report(name, result, args.save)


@dataclass(frozen=True)
class Turns:
    """The turns of games that were played.

    Each has its ``state``, its ``group``, the gradient of its log probability with respect to its
    state's logits (``score``), what is expected of the rest of its game (``value``), and what the
    turns before it earned (``before``).
    """

    game: Game
    state: Tensor
    group: Tensor
    score: Tensor
    value: Tensor
    before: Tensor

    @classmethod
    def of(
        cls, game: Game, logits: Tensor, fields: Tensor, actions: Tensor, group: Tensor
    ) -> "Turns":
        """Make the turns of games (N, turns) in groups (N,), of those only that are on a field."""
        number, turn = (fields >= 0).nonzero(as_tuple=True)
        field, action = fields[number, turn], actions[number, turn]
        state = turn * game.fields + field
        reward = torch.where(fields >= 0, game.rewards[fields, actions], 0.0)
        before = (reward.cumsum(1) - reward)[number, turn]
        # The gradient of a log softmax with respect to its own logits.
        score = torch.eye(game.actions, dtype=torch.double)[action] - logits[state].softmax(1)
        return cls(game, state, group[number], score, game.values(logits)[turn, field], before)

    def gradients(self, advantages: Tensor, games: int) -> Tensor:
        """Return each group's gradient, (groups, states * actions), for so many games."""
        weighted = advantages.unsqueeze(1) * self.score / games
        shape = int(self.group.max()) + 1, self.game.states, self.game.actions
        sums = torch.zeros(shape, dtype=torch.double)
        sums.index_put_((self.group, self.state), weighted, accumulate=True)
        return sums.flatten(1)


def noise_of(gradients: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the noise of groups' gradients (groups, W), and how far their mean is off.

    ``noise`` is the variance of one over the squared length of its expectation; ``cosine`` that of
    the mean and the ``exact`` one (W,); ``sigmas`` their distance in standard errors, over all
    weights: about 1 if it is unbiased.
    """
    mean, variance = gradients.mean(0), gradients.var(0)
    seen = variance > 0
    z = (mean - exact)[seen] / (variance[seen] / len(gradients)).sqrt()
    return {
        "noise": float(variance.sum() / mean.square().sum()),
        "cosine": float(torch.cosine_similarity(mean, exact, dim=0)),
        "sigmas": float(z.square().mean().sqrt()),
    }


def _walk() -> Game:
    pays, leads = [], []
    for field in range(5):
        inside = 0 < field < 4
        after = [field + move for move in (-1, 1, 0)]
        steps = (-0.2, 0.2, 0.0)
        earned = [step - 0.1 + (to == 4) for step, to in zip(steps, after, strict=True)]
        pays.append(tuple(earned) if inside else (0.0,) * 3)
        leads.append(tuple(to if inside and 0 < to < 4 else -1 for to in after))
    return Game(6, 2, tuple(pays), tuple(leads))


WALK = _walk()
"""Left, right or wait on five fields. Each turn costs 0.1 and pays 0.2 for a step to the right
(takes it back for one to the left); the right end pays 1 and ends the game, the left end ends it.
"""

PLAN = Game(
    6,
    0,
    ((0.0, 4.0, 8.0), *[(-0.5, 0.0, 0.5)] * 3),
    ((1, 2, 3), *[(field,) * 3 for field in (1, 2, 3)]),
)
"""One of three plans, worth 0, 4 and 8; then five steps of it, each worth -0.5, 0 or 0.5."""
