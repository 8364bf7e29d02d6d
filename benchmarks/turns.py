"""How much noise does credit per turn take out of the policy gradient?

    python -m benchmarks.turns [--groups 10000] [--save]

A game on five fields: up to six turns, in each of which the policy goes left, goes right or waits
(`WALK` of `support/games.py`). The policy has its own probabilities, not even ones, in each of
the game's states, so the expected reward and its gradient are computed exactly, by going through
all states.

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

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.games import GROUP_SIZE, WALK, Turns, command, noise_of
from lightning_rl import GRPO, RLOO, DrGRPO, GiGPO, RewardToGo, TurnGAE
from lightning_rl.data.episodes import calls_of
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.extend import Advantage
from lightning_rl.rollout import Rollout

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
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


def measure(
    turns: Turns, rollouts: list[Rollout], exact: Tensor, critic: Tensor
) -> dict[str, dict[str, float]]:
    """Measure noise, cosine and sigmas of advantages; ``critic`` gives values before turns."""
    found = {}
    batch = pack_rollouts(rollouts)
    live = batch["tokens", "loss_mask"]
    assert torch.equal(calls_of(batch).tokens, live.nonzero().squeeze(1))  # in the games' order
    batch["tokens", "values"] = torch.zeros(len(live)).index_put((live,), critic.float())
    for name, advantage in ADVANTAGES.items():
        credit = advantage(batch)["tokens", "advantages"][live].double()
        found[name] = noise_of(turns.gradients(credit, GROUP_SIZE), exact)
        if name not in UNBIASED:
            del found[name]["sigmas"]
    return found


def run(groups: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    logits, expected, exact = WALK.policy(generator)
    fields, actions = WALK.played(logits, WALK.begun(groups * GROUP_SIZE), generator)
    turns = Turns.of(WALK, logits, fields, actions, torch.arange(len(fields)) // GROUP_SIZE)
    result: dict[str, Any] = {"expected_reward": expected, "groups": groups}
    for name, at_end in (("turns", False), ("end", True)):
        rollouts = WALK.recorded(fields, actions, at_end)
        critic = turns.value + turns.before if at_end else turns.value
        measured = result[name] = measure(turns, rollouts, exact, critic)
        print(f"\nrewards on {'the last turn' if at_end else 'the turns that earned them'}")
        print(f"{'':26}{'noise':>8}{'cosine':>8}{'sigmas':>8}")
        for advantage, row in measured.items():
            sigmas = f"{row['sigmas']:8.2f}" if "sigmas" in row else ""
            print(f"{advantage:26}{row['noise']:8.2f}{row['cosine']:8.4f}{sigmas}")
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown with noise and cosine, rewards on turns and at the end."""
    turns, end = result["turns"], result["end"]
    return [
        "| advantage | noise, paid per turn | noise, paid at the end | cosine |",
        "|---|---|---|---|",
        *(
            f"| {name} | {row['noise']:.1f} | {end[name]['noise']:.1f} | {row['cosine']:.2f} |"
            for name, row in turns.items()
        ),
    ]


if __name__ == "__main__":
    command(__doc__, "turns", PAGE, run, table)
