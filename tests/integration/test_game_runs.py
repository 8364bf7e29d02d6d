"""Runs of GameModule: players that see each other come to rest; what does not fit is refused."""

from typing import ClassVar

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_rl import GSPO, EntropyBonus, Surrogate
from lightning_rl.callbacks import RLCallback
from lightning_rl.envs import (
    ActorCritic,
    ActorCriticModule,
    EnvDataModule,
    MLPBody,
    StepGAE,
    TorchRLEnv,
)
from lightning_rl.errors import ConfigError
from lightning_rl.extend import Periodic
from lightning_rl.games import LOLA, PSOS, SPG, GameModule, Simultaneous
from recipes.matrix_games.env import MatrixGame
from tests.support.small_run import trainer_of

PENNIES = [[[3, -1], [-1, 1]], [[-3, 1], [1, -1]]]
"""The first wins where both show the same, thrice for heads. Both are to show them in 1 of 3."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs leave their files behind where they are."""
    monkeypatch.chdir(tmp_path)


class Heads(RLCallback):
    """Records how likely both show heads after each iteration, and where games began, (E, T)."""

    def __init__(self):
        self.path, self.begins = [], None

    def on_update_start(self, trainer, pl_module, batch):
        if isinstance(pl_module, GameModule):
            rows, _ = pl_module.rows_of("row", batch)
            self.begins = rows.begins.reshape(batch.batch_size)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        seen = {"observation": torch.eye(5)[:1]}
        made = [agent.act(seen)[0]["action"] for agent in pl_module.agents.values()]
        self.path.append([float(d.logprobs[0, 0].exp().detach()) for d in made])
        self.batch = batch


def agents(**options):
    return {name: ActorCritic(body=MLPBody([8]), **options) for name in ("row", "column")}


def options(lr=0.3):
    return {
        "advantage": StepGAE(gamma=1.0, normalize=False),
        "optimizer": lambda p: torch.optim.SGD(p, lr=lr),
        "max_grad_norm": None,
    }


def trained(module, iterations=1, rounds=1, games=1, envs=256, min_length=1):
    """Return the module after a run, and how likely heads were on the way."""
    arguments = {"pays": PENNIES, "rounds": rounds, "num_envs": envs}
    data = EnvDataModule(
        TorchRLEnv(f"{MatrixGame.__module__}.MatrixGame", arguments),
        num_envs=envs,
        frames_per_iteration=envs * rounds * games,
        iterations_per_epoch=iterations,
        eval_episodes=0,
        min_episode_length=min_length,
    )
    heads = Heads()
    trainer_of(".", [heads], logger=False).fit(module, data)
    if heads.begins is not None:
        assert torch.equal(heads.begins[0], torch.arange(rounds * games) % rounds == 0)
    return module, heads.path


def made(cls, **arguments):
    seed_everything(0, verbose=False)
    return cls(**(options() | {"agents": agents()} | arguments))


def far(path):
    """Return the largest distance from the equilibrium, over the last third."""
    return max(abs(p - 1 / 3) for both in path[-len(path) // 3 :] for p in both)


@pytest.mark.slow
def test_players_that_see_each_other_come_to_rest():
    blind = far(trained(made(GameModule, update=Simultaneous()), 36)[1])
    seeing = far(trained(made(GameModule, update=LOLA(rate=1.0)), 36)[1])
    assert blind > 0.25
    assert seeing < 0.12


def test_players_that_do_not_look_at_each_other_learn_as_in_actor_critic():
    ours, _ = trained(
        made(GameModule, update=Simultaneous(), entropy=EntropyBonus(0.1)), rounds=3, games=2
    )
    plain = {"loss": Surrogate(), "epochs": 1, "minibatches": 1, "entropy": EntropyBonus(0.1)}
    theirs, _ = trained(made(ActorCriticModule, **plain), rounds=3, games=2)
    for name, weight in ours.state_dict().items():
        torch.testing.assert_close(weight, theirs.state_dict()[name], rtol=1e-5, atol=1e-6)


class Looked(LOLA):
    """A LOLA whose games are kept."""

    games: ClassVar[list] = []

    def moves(self, game, draw):
        wholes = [game.gradient(i, i).detach().clone() for i in range(2)]
        halves = [[part.gradient(i, i).detach() for part in game.parts] for i in range(2)]
        self.games.append((game.shares, wholes, halves))
        return super().moves(game, draw)


def test_each_half_of_the_games_is_an_estimate_of_its_own():
    """The first part has three of five games, and the mean over all is that over both."""
    trained(made(GameModule, update=Looked(rate=1.0), minibatches=2), envs=10, rounds=2)
    assert len(Looked.games) == 2
    for shares, wholes, halves in Looked.games:
        assert shares == [0.6, 0.4]
        for whole, (first, second) in zip(wholes, halves, strict=True):
            assert not torch.allclose(first, second)
            torch.testing.assert_close(0.6 * first + 0.4 * second, whole)


def test_a_player_that_pauses_stays_as_it_is():
    # Bounded, what opposes a player of one degree of freedom may hold it where it is.
    module = made(GameModule, update=PSOS(rate=1.0, bound=None))
    module.given_agents["column"].schedule = Periodic(2, first=1)
    _, path = trained(module, 3, envs=64)
    assert path[0][1] != path[1][1]
    assert path[1][1] == path[2][1]
    assert len({row for row, _ in path}) == 3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: made(GameModule, agents=agents(share_body=True)), "agent 'row' shares MLPBody"),
        (lambda: made(GameModule, update=SPG()), "update=SPG needs an order of row, column"),
        (lambda: made(GameModule, order=[["row"]]), "must name each agent once: row, column"),
        (
            lambda: made(GameModule, minibatches=129),
            "minibatches=129 must be <= 128: .* needs at least 2",
        ),
        (
            lambda: made(GameModule, update=Simultaneous(), minibatches=257),
            "minibatches=257 must be <= 256",
        ),
        (lambda: made(GameModule, update=PSOS(loss=GSPO())), "update=PSOS reads the column 'row'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        trained(make())


def test_a_game_is_learned_in_one_process(monkeypatch):
    module = GameModule(agents())
    monkeypatch.setattr("lightning_rl.games.module.world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"each of the 2 processes holds .* trainer.devices: 1"):
        module.check_agents()


def test_episodes_are_not_left_out_of_a_game():
    with pytest.raises(ConfigError, match="min_episode_length leaves out episodes"):
        trained(GameModule(agents(), **options()), rounds=2, envs=8, min_length=2)
