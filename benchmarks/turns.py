"""How much noise does credit per turn take out of the policy gradient?

    python -m benchmarks.turns [--groups 10000] [--save]

A game on five fields: up to six turns, in each of which the policy goes left, goes right or waits.
Each turn costs 0.1 and pays 0.2 for a step to the right (takes it back for one to the left); the
right end pays 1 and ends the game, the left end ends it. The policy has its own probabilities, not
even ones, in each of the game's states, so the expected reward and its gradient are computed
exactly, by going through all states.

Groups of four games are then played, packed as any rollouts are, and credited by each advantage.
The gradient of a group is the sum over its turns of advantage times the gradient of the turn's log
probability, divided by four: all advantages see the same turns, so the same tokens. The table says

- ``noise``: the variance of one group's gradient over the squared length of its expectation, both
  measured: so many groups have as much noise as signal;
- ``cosine``: of its mean and the exact gradient;
- ``sigmas``: where the expectation should be the exact gradient, how far the mean is away, in
  standard errors, over all weights of the policy; about 1 if it is unbiased.

Rewards fall on the turns that earned them (``turns``), or all on the last turn (``end``): the same
games, and the same exact gradient. The exact critic knows what will be paid, so in the second case
also for what was done before. The last line is JSON. ``--save`` also writes the table of
docs/algorithms.md. Takes about a minute.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import parser_of, report, write_block
from lightning_rl import GRPO, RLOO, Advantage, DrGRPO, GiGPO, RewardToGo, TurnGAE
from lightning_rl.data.episodes import calls_of
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.rollout import Call, Prompt, Rollout, RolloutStatus

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
FIELDS, TURNS, GROUP_SIZE = 5, 6, 4
MOVES = (-1, 1, 0)
COST, STEP, GOAL = 0.1, 0.2, 1.0
STATES = TURNS * FIELDS
UNBIASED = ("RLOO", "RewardToGo", "TurnGAE, exact critic")
ADVANTAGES: dict[str, Advantage] = {
    "GRPO": GRPO(),
    "DrGRPO": DrGRPO(),
    "RLOO": RLOO(),
    "RewardToGo": RewardToGo(),
    "GiGPO": GiGPO(),
    "GiGPO, no std, gamma 1": GiGPO(gamma=1.0, normalize_std=False),
    "TurnGAE, exact critic": TurnGAE(whiten=False),
}


def earned(field: int, move: int) -> tuple[float, int, bool]:
    """What a move from a field pays, where it leads, and whether the game is over."""
    after = field + move
    over = after in (0, FIELDS - 1)
    return STEP * move - COST + (GOAL if after == FIELDS - 1 else 0.0), after, over


def values(logits: Tensor) -> Tensor:
    """The expected sum of rewards from each state on, (TURNS + 1, FIELDS), exactly."""
    probs = logits.reshape(TURNS, FIELDS, len(MOVES)).softmax(2)
    later = [logits.new_zeros(()) for _ in range(FIELDS)]
    table = [torch.stack(later)]
    for turn in reversed(range(TURNS)):
        now = []
        for field in range(FIELDS):
            expected = logits.new_zeros(())
            for action, move in enumerate(MOVES if 0 < field < FIELDS - 1 else ()):
                reward, after, over = earned(field, move)
                rest = 0.0 if over else later[after]
                expected = expected + probs[turn, field, action] * (reward + rest)
            now.append(expected)
        later = now
        table.insert(0, torch.stack(later))
    return torch.stack(table)


def played(logits: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Fields before each turn and actions in it, both (count, TURNS); -1 after the end."""
    probs = logits.reshape(TURNS, FIELDS, len(MOVES)).softmax(2)
    field = torch.full((count,), FIELDS // 2)
    fields, actions = [], []
    for turn in range(TURNS):
        live = (field > 0) & (field < FIELDS - 1)
        action = torch.multinomial(probs[turn, field], 1, generator=generator).squeeze(1)
        fields.append(torch.where(live, field, -1))
        actions.append(torch.where(live, action, -1))
        field = torch.where(live, field + torch.tensor(MOVES)[action], field)
    return torch.stack(fields, 1), torch.stack(actions, 1)


def recorded(fields: Tensor, actions: Tensor, at_end: bool) -> list[Rollout]:
    """Games as rollouts: a token for each turn, and one of the environment's between two."""
    prompt, rollouts = Prompt("0", "", [0]), []
    for place, (before, moved) in enumerate(zip(fields.tolist(), actions.tolist(), strict=True)):
        group, sample = divmod(place, GROUP_SIZE)
        rollout = Rollout(prompt, str(group), sample, place, 1.0, status=RolloutStatus.COMPLETED)
        paid = []
        for turn, (field, action) in enumerate(zip(before, moved, strict=True)):
            if field >= 0:
                paid.append(earned(field, MOVES[action])[0])
                rollout.calls.append(
                    Call(0, 2 * turn, 2 * turn + 1, state=f"{turn} {field}", reward=paid[-1])
                )
        count = 2 * len(paid) - 1
        mask = [n % 2 == 0 for n in range(count)]
        rollout.token_ids, rollout.loss_mask = [1] * count, mask
        rollout.logprobs, rollout.versions = [0.0] * count, [0 if mine else -1 for mine in mask]
        rollout.reward = sum(paid)
        if at_end:
            for call in rollout.calls:
                call.reward = None
        rollouts.append(rollout)
    return rollouts


@dataclass(frozen=True)
class Games:
    """The turns of games that were played.

    Of each its ``state``, its ``group``, the gradient of its log probability with respect to its
    state's logits (``score``), what is expected of the rest of its game (``value``), and what the
    turns before it earned (``before``).
    """

    state: Tensor
    group: Tensor
    score: Tensor
    value: Tensor
    before: Tensor

    def gradients(self, advantages: Tensor) -> Tensor:
        """Of each group, (groups, STATES * len(MOVES))."""
        weighted = advantages.unsqueeze(1) * self.score / GROUP_SIZE
        sums = torch.zeros(int(self.group.max()) + 1, STATES, len(MOVES), dtype=torch.double)
        sums.index_put_((self.group, self.state), weighted, accumulate=True)
        return sums.flatten(1)


def games_of(logits: Tensor, fields: Tensor, actions: Tensor) -> Games:
    game, turn = (fields >= 0).nonzero(as_tuple=True)
    field, action = fields[game, turn], actions[game, turn]
    state = turn * FIELDS + field
    pays = torch.tensor([[earned(f, move)[0] for move in MOVES] for f in range(FIELDS)])
    reward = torch.where(fields >= 0, pays[fields, actions], 0.0)
    before = (reward.cumsum(1) - reward)[game, turn]
    # The gradient of a log softmax with respect to its own logits.
    score = torch.eye(len(MOVES), dtype=torch.double)[action] - logits[state].softmax(1)
    return Games(state, game // GROUP_SIZE, score, values(logits)[turn, field], before)


def measure(
    games: Games, rollouts: list[Rollout], exact: Tensor, critic: Tensor
) -> dict[str, dict[str, float]]:
    """Noise, cosine and sigmas of each advantage; ``critic`` says the value before each turn."""
    found = {}
    batch = pack_rollouts(rollouts)
    live = batch["tokens", "loss_mask"]
    assert torch.equal(calls_of(batch).tokens, live.nonzero().squeeze(1))  # in the games' order
    batch["tokens", "values"] = torch.zeros(len(live)).index_put((live,), critic.float())
    for name, advantage in ADVANTAGES.items():
        credit = advantage(batch)["tokens", "advantages"][live].double()
        gradients = games.gradients(credit)
        mean, variance = gradients.mean(0), gradients.var(0)
        seen = variance > 0
        z = (mean - exact)[seen] / (variance[seen] / len(gradients)).sqrt()
        found[name] = {
            "noise": float(variance.sum() / mean.square().sum()),
            "cosine": float(torch.cosine_similarity(mean, exact, dim=0)),
            **({"sigmas": float(z.square().mean().sqrt())} if name in UNBIASED else {}),
        }
    return found


def run(groups: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(STATES, len(MOVES), generator=generator, dtype=torch.double)
    logits.requires_grad_()
    start = values(logits)[0, FIELDS // 2]
    exact = torch.autograd.grad(start, logits)[0].flatten()
    logits = logits.detach()
    fields, actions = played(logits, groups * GROUP_SIZE, generator)
    games = games_of(logits, fields, actions)
    result: dict[str, Any] = {"expected_reward": float(start.detach()), "groups": groups}
    for name, at_end in (("turns", False), ("end", True)):
        rollouts = recorded(fields, actions, at_end)
        critic = games.value + games.before if at_end else games.value
        measured = result[name] = measure(games, rollouts, exact, critic)
        print(f"\nrewards on {'the last turn' if at_end else 'the turns that earned them'}")
        print(f"{'':26}{'noise':>8}{'cosine':>8}{'sigmas':>8}")
        for advantage, row in measured.items():
            sigmas = f"{row['sigmas']:8.2f}" if "sigmas" in row else ""
            print(f"{advantage:26}{row['noise']:8.2f}{row['cosine']:8.4f}{sigmas}")
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Markdown: noise and cosine, rewards on turns and at the end."""
    turns, end = result["turns"], result["end"]
    return [
        "| advantage | noise, paid per turn | noise, paid at the end | cosine |",
        "|---|---|---|---|",
        *(
            f"| {name} | {row['noise']:.1f} | {end[name]['noise']:.1f} | {row['cosine']:.2f} |"
            for name, row in turns.items()
        ),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = run(args.groups, args.seed)
    if args.save:
        write_block(PAGE, "turns", table(result))
    report("turns", result, args.save)


if __name__ == "__main__":
    main()
