"""GameRolesModule: policies that write rollouts together and anticipate each other's learning."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algos.advantages import GroupAdvantage
from lightning_rl.algos.losses import Metrics, PolicyLoss, PPOClip, check_step_loss
from lightning_rl.algos.objective import Objective
from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import empty_like, select
from lightning_rl.data.splitting import deal_groups, split_minibatches
from lightning_rl.errors import ConfigError
from lightning_rl.games.algos.game import CrossFitted, Levels
from lightning_rl.games.algos.moves import GameUpdate
from lightning_rl.games.algos.scores import ScoreGame
from lightning_rl.games.algos.updates import SOS, Simultaneous
from lightning_rl.games.protocols.base import VERIFIER
from lightning_rl.games.protocols.leaders import check_order, levels_of
from lightning_rl.games.roles.conversations import conversation_losses, written
from lightning_rl.games.roles.module import RolesModule
from lightning_rl.games.roles.player import PolicyPlayer
from lightning_rl.games.roles.role_policy import RolePolicy
from lightning_rl.learn.base import save_primitive_hparams
from lightning_rl.models.pretrained import model_of
from lightning_rl.run.hooks import datamodule_of
from lightning_rl.run.seeding import derived_generator, run_seed
from lightning_rl.run.token_metrics import TokenMetrics


@dataclass(frozen=True)
class _StepLoss(PolicyLoss):
    """Applies a game update's loss to each token."""

    update: GameUpdate

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        return self.update.step_loss(logprobs, tokens)


@dataclass(frozen=True)
class _Part:
    """A policy's part in an iteration: its rows of the batch, and its objective."""

    group: RolePolicy
    rows: Tensor
    batch: TensorDict
    objective: Objective | None
    metrics: TokenMetrics

    def player(self, minibatch: TensorDict) -> PolicyPlayer:
        """Return the policy as a player on a minibatch of its rows."""
        return PolicyPlayer(self.group, minibatch, self.learned)

    @property
    def learned(self) -> Objective:
        """The objective of a policy that learns in this iteration."""
        assert self.objective is not None
        return self.objective


@configurable(model=model_of)
class GameRolesModule(RolesModule):
    """A :class:`RolesModule` whose policies anticipate each other's learning: SPG, LOLA, SOS.

    A policy's loss depends on the whole rollouts: on what every policy wrote, and its probability.
    Own gradients are those of a ``RolesModule``; how a step of one policy changes another's
    gradient is estimated from log probabilities and finite differences, so nothing is
    differentiated twice. All policies that are due take their steps together.

    Where an update multiplies estimates, each factor is made from different groups
    (:class:`CrossFitted`): with two levels of policies a minibatch's groups are cut in halves, with
    three in thirds. If filters leave too few groups in a minibatch, policies follow only their own
    gradients.

    Args:
        model: directory or hub name of the causal LM for policies that do not name one.
        policies: by name. Advantages must be one number per rollout, such as ``GRPO``'s; the loss
            is the update's; ``ppo_epochs`` and ``minibatches`` must be the same for all.
        update: how the policies' losses become update directions.
        order: names of policies, level by level, leaders first; None: the policy that plays the
            ``verifier`` leads all others if the update needs leaders, else every policy anticipates
            all others.
        seed: seeds the assignment of groups to minibatches and the update's random draws; None:
            the seed of ``seed_everything``.

    Raises:
        ConfigError: if the policies or the order do not fit.
    """

    def __init__(
        self,
        model: str,
        policies: dict[str, RolePolicy],
        update: GameUpdate = SOS(),
        order: list[list[str]] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(model, policies)
        save_primitive_hparams(self)
        self.game_update = update
        self.order = order
        self.seed = run_seed(seed)
        self._leader = self.roles.get(VERIFIER)
        check_order(order, self._names, "policy", self._leader, update)
        check_step_loss(f"update={type(update).__name__}", update.step_loss)
        _check_policies(self.policies)
        for group in self.policies.values():
            group.skipped.zero_advantage &= update.zero_at_zero_advantage

    # ---------------------------------------------------------------- set-up

    def check_trainer(self, trainer: Trainer) -> None:
        strategy, precision = trainer.strategy, str(trainer.precision)
        if not isinstance(strategy, SingleDeviceStrategy):
            raise ConfigError(
                "GameRolesModule multiplies gradients of a whole batch, but with "
                f"{type(strategy).__name__} each process holds only a part of it; set "
                "trainer.devices: 1, or use RolesModule"
            )
        if precision != "32-true":
            raise ConfigError(
                f"trainer.precision={precision}: GameRolesModule needs float32: it computes finite "
                "differences of log probabilities; set trainer.precision: 32-true, or use "
                "RolesModule"
            )
        super().check_trainer(trainer)

    def configure_callbacks(self) -> list[Callback]:
        self._check_parts()
        return super().configure_callbacks()

    def _check_parts(self) -> None:
        """Refuse minibatches with fewer groups than the estimates that the update multiplies."""
        groups = getattr(datamodule_of(self.trainer), "groups_per_iteration", None)
        parts = self.game_update.parts(self._levels(self._names), len(self._names))
        minibatches = self.policies[self._names[0]].update.minibatches
        if groups is not None and groups < parts * minibatches:
            raise ConfigError(
                f"groups_per_iteration={groups} must be >= {parts * minibatches}: "
                f"{type(self.game_update).__name__} multiplies estimates that need {parts} groups "
                f"or more in each of minibatches={minibatches}; raise it, or lower minibatches"
            )

    # ---------------------------------------------------------------- learning

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """Run one RL iteration: update all policies that are due and have written anything."""
        self.require_packed(batch)
        parts = {}
        for name, group in self.policies.items():
            rows = self.rows_of(name, batch)
            if len(rows) and group.schedule.due(self.iteration):
                parts[name] = self._part(group, rows, select(batch, rows))
        learning = {name: part for name, part in parts.items() if part.objective is not None}
        if learning:
            self._update(batch, learning)
        for name, part in parts.items():
            metrics = part.group.learner.summed_up(part.metrics) if name in learning else {}
            part.group.learner.end_iteration(metrics)
            part.group.record(metrics)
        self.iteration += 1

    def _part(self, group: RolePolicy, rows: Tensor, batch: TensorDict) -> _Part:
        batch = group.learner.compute_all(batch)
        objective = group.decided(batch)
        self.stopping, group.stopping = self.stopping or group.stopping, None
        group.learner.nonfinite_steps = 0
        if objective is not None:
            objective = replace(objective, loss=_StepLoss(self.game_update))
        return _Part(group, rows, batch, objective, TokenMetrics())

    def _update(self, batch: TensorDict, learning: Mapping[str, _Part]) -> None:
        """Take ``ppo_epochs`` x ``minibatches`` optimizer steps for all players."""
        first = next(iter(learning.values())).group.update
        draw = derived_generator(self.seed, self.iteration, first.ppo_epochs)
        with self.clock("train"):
            for epoch in range(first.ppo_epochs):
                dealing = derived_generator(self.seed, self.iteration, epoch)
                for rows in split_minibatches(batch, first.minibatches, dealing):
                    chosen = {
                        name: torch.isin(part.rows, rows).nonzero().squeeze(1)
                        for name, part in learning.items()
                    }
                    self._step(learning, {n: own for n, own in chosen.items() if len(own)}, draw)

    def _step(
        self, learning: Mapping[str, _Part], rows: Mapping[str, Tensor], draw: torch.Generator
    ) -> None:
        """Take one optimizer step for all players, each on some of its own rows (r,)."""
        own = []
        for name, chosen in rows.items():
            part = learning[name]
            minibatch = select(part.batch, chosen)
            part.group.learner.accumulate(minibatch, part.learned, part.metrics)
            own.append(part.player(minibatch).taken())
        update, parts = self._parts(learning, rows, draw)
        games = [self._game(learning, of_part) for of_part in parts]
        shares = [1 / len(parts)] * len(parts)
        game = CrossFitted(games, shares, own)
        moves = update.moves(game, draw)
        for name, player, move in zip(rows, game.players, moves, strict=True):
            learning[name].metrics.add(move.metrics)
            self._learning = name
            player.give(move.direction)
            player.group.learner.optimizer_step(learning[name].metrics)

    def _parts(
        self, learning: Mapping[str, _Part], rows: Mapping[str, Tensor], draw: torch.Generator
    ) -> tuple[GameUpdate, list[dict[str, Tensor]]]:
        """Return the update to apply, and all players' rows (r,) cut into parts by whole groups.

        With fewer groups than parts nothing can be multiplied: the update is then ``Simultaneous``.
        """
        group_of = {name: learning[name].batch["rollouts", "group"] for name in rows}
        groups = torch.cat([group_of[name][chosen] for name, chosen in rows.items()]).unique().cpu()
        count = self.game_update.parts(self._levels(list(rows)), len(rows))
        update = self.game_update if len(groups) >= count else Simultaneous()
        dealt = deal_groups(groups, count if update is self.game_update else 1, draw)
        return update, [
            {n: chosen[torch.isin(group_of[n][chosen].cpu(), some)] for n, chosen in rows.items()}
            for some in dealt
        ]

    def _game(self, learning: Mapping[str, _Part], rows: Mapping[str, Tensor]) -> ScoreGame:
        """Return the game as estimated from some of all players' rows (r,)."""
        players, said, logprobs = [], [], []
        for name, chosen in rows.items():
            part = learning[name]
            minibatch = select(part.batch, chosen) if len(chosen) else empty_like(part.batch)
            minibatch = part.group.skipped.without_truncated(minibatch)
            minibatch["tokens", "loss_weights"] = part.group.aggregation(minibatch)
            player = part.player(minibatch)
            players.append(player)
            now = player.logprobs()
            said.append(written(minibatch, now))
            logprobs.append(now.clone().requires_grad_())
        losses = conversation_losses(self.game_update, said, logprobs)
        rates = [player.rates for player in players]
        return ScoreGame(losses, logprobs, players, rates, self._levels(list(rows)))

    def _levels(self, names: list[str]) -> Levels | None:
        return levels_of(self.order, names, self._leader, self.game_update)


def _check_policies(policies: Mapping[str, RolePolicy]) -> None:
    """Refuse settings of policies that games cannot use.

    Raises:
        ConfigError: naming the policy and the key.
    """
    first, *_ = policies
    for name, group in policies.items():
        where = f"policies.{name}"
        if not isinstance(group.advantage, GroupAdvantage):
            raise ConfigError(
                f"{where}.advantage={type(group.advantage).__name__} may differ within a rollout, "
                "but GameRolesModule needs one advantage per rollout, because other players' "
                "tokens are credited by it; use GRPO, DrGRPO, RLOO, MaxRL or OPMD"
            )
        if group.objective.loss != PPOClip():
            raise ConfigError(
                f"{where}.loss={type(group.objective.loss).__name__}: in a game the update defines "
                "the loss; leave it out, or give it to the update: PSPG(loss=...)"
            )
        settings = group.update
        if settings.target_kl is not None:
            raise ConfigError(
                f"{where}.update.target_kl={settings.target_kl}: players take their steps "
                "together, so no pass can be skipped for one of them; leave it out"
            )
        for key in ("ppo_epochs", "minibatches"):
            given, others = getattr(settings, key), getattr(policies[first].update, key)
            if given != others:
                raise ConfigError(
                    f"{where}.update.{key}={given}, but policies.{first}.update.{key}={others}: "
                    "players take their steps together; set the same value for all policies"
                )
