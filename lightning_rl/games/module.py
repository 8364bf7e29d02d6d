"""GameModule: trains agents in an environment that take each other's learning into account."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_rl.algos.kl import EntropyBonus
from lightning_rl.algos.losses import ValueLoss, check_step_loss
from lightning_rl.config.arguments import configurable
from lightning_rl.envs.algos.steps import StepAdvantage, StepGAE
from lightning_rl.envs.base import Measured, add
from lightning_rl.envs.module import ActorCriticModule, Made
from lightning_rl.envs.networks.actor_critic import ActorCritic, joint_entropy, joint_log_prob
from lightning_rl.envs.rows import Rows, rows_of
from lightning_rl.errors import ConfigError
from lightning_rl.games.algos.game import CrossFitted, Game, Levels, flat
from lightning_rl.games.algos.moves import GameUpdate, game_loss, said_before
from lightning_rl.games.algos.updates import SOS
from lightning_rl.games.protocols.base import VERIFIER
from lightning_rl.games.protocols.leaders import check_order, levels_of
from lightning_rl.learn.base import save_primitive_hparams
from lightning_rl.run.processes.dist import world_size
from lightning_rl.run.seeding import derived_generator


@configurable
class GameModule(ActorCriticModule):
    """Trains agents in environments, each anticipating how the others learn: SPG, LOLA, SOS.

    Every group of agents that the environment names is one player, whose loss is the mean of its
    members'. Losses are estimated from whole episodes, or as much of them as a batch holds, with
    the advantages of all steps, including those in which others act. Critics learn as in
    ``ActorCriticModule``.

    Where an update multiplies estimates, each factor is made from different environments
    (:class:`CrossFitted`): a minibatch is cut into one part per level of players (two without an
    ``order``).

    Args:
        agents: by the names of the environment's groups; a group that is not named gets an
            ``ActorCritic()``. No agent may share a body between actor and critic.
        update: how the players' losses become update directions.
        order: names of agents, level by level, leaders first; None: an agent called ``verifier``
            leads all others if the update needs leaders, else every agent anticipates all others.
        advantage: the advantage estimator.
        value_loss: the critic's loss.
        entropy: the entropy bonus; None for none.
        optimizer: called with the parameter groups; in YAML any torch optimizer.
        lr_scheduler: called with the optimizer; stepped once per iteration.
        epochs: passes over each batch; more than one only makes sense for the proximal updates.
        minibatches: optimizer steps per pass, each on a subset of the environments.
        max_grad_norm: the norm that each agent's update direction is clipped to; None: no clipping.
        seed: seeds the order of environments and the update's random draws; None: the seed of
            ``seed_everything``.

    Raises:
        ConfigError: if a value is out of range, or if agents, order or the number of processes
            do not fit.
    """

    def __init__(
        self,
        agents: dict[str, ActorCritic] | None = None,
        update: GameUpdate = SOS(),
        order: list[list[str]] | None = None,
        advantage: StepAdvantage = StepGAE(),
        value_loss: ValueLoss = ValueLoss(),
        entropy: EntropyBonus | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=3e-4, eps=1e-5, fused=True),
        lr_scheduler: LRSchedulerCallable | None = None,
        epochs: int = 1,
        minibatches: int = 1,
        max_grad_norm: float | None = 0.5,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            agents=agents,
            advantage=advantage,
            value_loss=value_loss,
            entropy=entropy,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            epochs=epochs,
            minibatches=minibatches,
            max_grad_norm=max_grad_norm,
            seed=seed,
        )
        check_step_loss(f"update={type(update).__name__}", update.step_loss)
        save_primitive_hparams(self)
        self.game_update = update
        self.order = order

    # ---------------------------------------------------------------- set-up

    def check_agents(self) -> None:
        """Refuse agents, an order or a number of processes that these settings cannot train.

        Raises:
            ConfigError: naming the agent and the setting.
        """
        for name, agent in self.agents.items():
            if agent.share_body:
                raise ConfigError(
                    f"agent {name!r} shares {type(agent.body).__name__} between actor and critic, "
                    "but GameModule updates actors separately from critics; set share_body: "
                    "false, or use ActorCriticModule"
                )
        if world_size() > 1:
            raise ConfigError(
                f"GameModule multiplies gradients of a whole batch, but each of the {world_size()} "
                "processes holds only a part of it; set trainer.devices: 1"
            )
        leader = VERIFIER if VERIFIER in self.agents else None
        check_order(self.order, list(self.agents), "agent", leader, self.game_update)

    def rows_of(self, name: str, batch: TensorDict) -> tuple[Rows, dict[str, float]]:
        """Return all that the players learn from in a batch, and metrics.

        Steps in which other agents acted get advantages, too.

        Raises:
            ConfigError: if the batch leaves out some of its episodes.
        """
        if "skipped" in batch:
            raise ConfigError(
                "data.min_episode_length leaves out episodes, but GameModule learns from all steps "
                "of all players; set it to 1, or use ActorCriticModule"
            )
        rows, measured = rows_of(self.agents[name], name, batch, self.advantage, idle=True)
        begins = batch["next", "done"].squeeze(-1).roll(1, 1)
        begins[:, 0] = True
        return replace(rows, begins=begins.flatten()), measured

    def places(
        self, rows: Mapping[str, Rows], shape: tuple[int, int], order: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield minibatches of whole environments in random order, places (M, T): steps need their
        past.

        Raises:
            ConfigError: if a minibatch has too few environments to be cut into the update's parts.
        """
        environments, steps = shape
        names = list(rows)
        parts = self.game_update.parts(self._levels(names), len(names))
        if environments < parts * self.minibatches:
            raise ConfigError(
                f"minibatches={self.minibatches} must be <= {environments // parts}: the batch has "
                f"{environments} environments, and a minibatch needs at least {parts}, because "
                f"{type(self.game_update).__name__} multiplies estimates from that many separate "
                "parts; lower it, or raise data.num_envs"
            )
        device = next(iter(rows.values())).learned["advantages"].device
        drawn = torch.randperm(environments, generator=order).to(device)
        begins = drawn.unsqueeze(1) * steps
        yield from (begins + torch.arange(steps, device=device)).tensor_split(self.minibatches)

    # ---------------------------------------------------------------- a step

    def update(self, rows: Mapping[str, Rows], shape: tuple[int, int]) -> dict[str, float]:
        """Take ``epochs`` x ``minibatches`` optimizer steps for all players, and return metrics."""
        # A place beyond those of the epochs' orders.
        self._draw = derived_generator(self.seed, self.iteration, self.epochs)
        return super().update(rows, shape)

    def _optimize(
        self,
        rows: Mapping[str, Rows],
        places: Tensor,
        old: Mapping[str, Made],
        measured: Measured,
    ) -> None:
        """Take one optimizer step for all players on some of the environments, places (M, T)."""
        names = list(rows)
        players, rates = self._players(names)
        levels = self._levels(names)
        games, shares, critics = [], [], torch.zeros((), device=self.device)
        for part in places.tensor_split(self.game_update.parts(levels, len(names))):
            losses, critic = self._losses(rows, part, measured)
            games.append(Game(losses, players, rates, levels))
            shares.append(len(part) / len(places))
            critics = critics + shares[-1] * critic
        with torch.autocast(self.device.type, enabled=False):  # for products of gradients
            actors = self._actors_loss(names, CrossFitted(games, shares), measured)
            self.step(critics + actors, names, measured)

    def _levels(self, names: list[str]) -> Levels | None:
        return levels_of(self.order, names, VERIFIER, self.game_update)

    def _losses(
        self, rows: Mapping[str, Rows], places: Tensor, measured: Measured
    ) -> tuple[list[Tensor], Tensor]:
        """Return each player's loss, and the sum of all critics' losses, as scalars from places (M,
        T).
        """
        own = {name: of_all.at(places) for name, of_all in rows.items()}
        begins = next(iter(rows.values())).begins
        assert begins is not None
        # No other kernel of attention can be differentiated twice.
        with sdpa_kernel(SDPBackend.MATH):
            said = {name: self._said(name, of_one) for name, of_one in own.items()}
        losses = self._players_losses(own, said, begins[places], measured)
        return losses, self._critics_loss(own, measured)

    def _said(self, name: str, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return log probabilities and entropies (M, T, *A) of an agent's actions; 0 where it did
        not act.

        Only steps in which it acts go through its actor, which is differentiated many times.
        """
        acts = rows.learned["weights"] > 0
        logprobs, entropies = torch.zeros(2, *acts.shape, device=acts.device)
        here = acts.flatten(2).any(2) if acts.ndim > 2 else acts
        if bool(here.any()):
            seen = {key: value[here] for key, value in rows.observations.items()}
            made, _ = self.agents[name].act(seen)
            done = {key: value[here] for key, value in rows.actions.items()}
            mine = joint_log_prob(made, done).where(acts[here], 0.0)
            logprobs = logprobs.to(mine.dtype).index_put((here,), mine)
            mine = joint_entropy(made).where(acts[here], 0.0)
            entropies = entropies.to(mine.dtype).index_put((here,), mine)
        return logprobs, entropies

    def _actors_loss(self, names: list[str], game: CrossFitted, measured: Measured) -> Tensor:
        """Return a scalar whose gradients are the update's directions for all players."""
        moves = self.game_update.moves(game, self._draw)
        for name, move in zip(names, moves, strict=True):
            add(measured, self.named(name, move.metrics))
        pairs = zip(game.players, moves, strict=True)
        return torch.stack([flat(player) @ move.direction for player, move in pairs]).sum()

    def _players_losses(
        self,
        own: Mapping[str, Rows],
        made: Mapping[str, tuple[Tensor, Tensor]],
        begins: Tensor,
        measured: Measured,
    ) -> list[Tensor]:
        """Return each player's loss as a scalar that depends on all players' actions, from steps
        (M, T).
        """
        acts = {name: rows.learned["weights"] > 0 for name, rows in own.items()}
        said = _all_said({name: logprobs for name, (logprobs, _) in made.items()}, acts)
        was = _all_said({n: rows.learned["old_logprobs"] for n, rows in own.items()}, acts)
        before, losses = said_before(said, begins), []
        for name, rows in own.items():
            credit = _over_members(rows.learned["advantages"])
            tokens = {
                "advantages": credit.flatten(),
                "old_logprobs": was.unsqueeze(2).expand_as(credit).flatten(),
            }
            logprobs = said.unsqueeze(2).expand_as(credit).flatten()
            loss, metrics = self.game_update.step_loss(logprobs, tokens)
            metrics = {f"policy/{key}": value for key, value in metrics.items()}
            entropy = made[name][1]
            metrics |= {
                "policy/loss": loss.detach(),
                "policy/entropy": entropy.detach()[acts[name]],
            }
            add(measured, self.named(name, metrics))
            of_steps = loss.reshape(credit.shape).mean(2)
            if self.entropy is not None:
                bonus = self.entropy.at(self.iteration) * _over_members(entropy).mean(2)
                of_steps = of_steps - bonus
            losses.append(game_loss(of_steps, before))
        return losses

    def _critics_loss(self, own: Mapping[str, Rows], measured: Measured) -> Tensor:
        """Return the sum of all critics' losses, a scalar; steps in which others act count, too."""
        total = torch.zeros((), device=self.device)
        if not self.advantage.needs_values:
            return total
        for name, rows in own.items():
            values = self.agents[name].values(rows.observations)
            tokens = {key: value.flatten() for key, value in rows.learned.items()}
            loss, metrics = self.value_loss(values.flatten(), tokens)
            metrics = {f"value/{k.removeprefix('value_')}": v for k, v in metrics.items()}
            add(measured, self.named(name, metrics))
            total = total + loss.mean()
        return total

    def _players(self, names: list[str]) -> tuple[list[list[nn.Parameter]], list[Tensor]]:
        """Return each player's actor parameters, and the learning rate of each number in them,
        (D_i,).
        """
        optimizer: Any = self.optimizers()  # one, so not a list
        groups = {group["name"]: group for group in optimizer.param_groups}
        players, rates = [], []
        for name in names:
            own = [groups[part] for part in (f"{name}/body", f"{name}/actor") if part in groups]
            moving = [(p, g["lr"]) for g in own for p in g["params"] if p.requires_grad]
            players.append([p for p, _ in moving])
            rates.append(torch.cat([p.new_full((p.numel(),), lr) for p, lr in moving]))
        return players, rates


def _all_said(logprobs: Mapping[str, Tensor], acts: Mapping[str, Tensor]) -> Tensor:
    """Return the joint log probability (M, T) of each step: the sum over those who acted in it."""
    parts = [_over_members(v.where(acts[n], 0.0)).sum(2) for n, v in logprobs.items()]
    return torch.stack(parts).sum(0)


def _over_members(values: Tensor) -> Tensor:
    """Return values as (M, T, n), with a group's n members last; n is 1 for a single agent."""
    return values.reshape(*values.shape[:2], -1)
