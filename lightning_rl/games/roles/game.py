"""GameRolesModule: policies that write rollouts together, and learn with each other in view."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import Callback
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
from lightning_rl.games.roles.group import SharedModelGroup
from lightning_rl.games.roles.module import RolesModule
from lightning_rl.games.roles.player import PolicyPlayer
from lightning_rl.learn.base import save_primitive_hparams
from lightning_rl.models.pretrained import model_of
from lightning_rl.run.hooks import datamodule_of
from lightning_rl.run.metrics import TokenMetrics
from lightning_rl.run.seeding import derived_generator, run_seed


@dataclass(frozen=True)
class _StepLoss(PolicyLoss):
    """Of each token, as a game update has it."""

    update: GameUpdate

    def __call__(self, logprobs: Tensor, tokens: TensorDict) -> tuple[Tensor, Metrics]:
        return self.update.step_loss(logprobs, tokens)


@dataclass(frozen=True)
class _Part:
    """A policy's part in an iteration: its rows of the batch, and what it learns of them."""

    group: SharedModelGroup
    rows: Tensor
    batch: TensorDict
    objective: Objective | None
    metrics: TokenMetrics

    def player(self, minibatch: TensorDict) -> PolicyPlayer:
        """The policy as what it makes of some of its rows."""
        return PolicyPlayer(self.group, minibatch, self.learned)

    @property
    def learned(self) -> Objective:
        """The objective of one that learns."""
        assert self.objective is not None
        return self.objective


@configurable(model=model_of)
class GameRolesModule(RolesModule):
    """A :class:`RolesModule` whose policies learn with the others in view: SPG, LOLA, SOS.

    A policy's loss is that of the rollouts that all wrote: it knows what each said, and with which
    probability. Own gradients are those of a ``RolesModule``; how a step of one changes the others'
    is estimated from log probabilities, and nothing is differentiated twice. All policies that are
    due take their steps together.

    Where an update multiplies estimates, each is made of other groups (:class:`CrossFitted`): of
    two levels of policies those of a minibatch are cut in halves, of three in thirds. A minibatch
    that has too few, as others were left out, moves policies by their own gradients alone.

    Args:
        model: directory or hub name of the causal LM that all start from which name none.
        policies: by name. Advantages are one number for a rollout, such as ``GRPO``'s; the loss is
            the update's; ``ppo_epochs`` and ``minibatches`` are the same for all.
        update: what the policies make of their losses.
        order: names of policies, level by level, leaders first; None: the policy that plays the
            ``verifier`` leads all others if the update is made for leaders, else everyone has all
            in view.
        seed: of the order in which groups are dealt to minibatches, and of what the update draws;
            None: ``seed_everything``'s.

    Raises:
        ConfigError: for policies or an order that do not fit.
    """

    def __init__(
        self,
        model: str,
        policies: dict[str, SharedModelGroup],
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
            group.left_out.zero_advantage &= update.zero_at_zero_advantage

    # ---------------------------------------------------------------- set-up

    def configure_callbacks(self) -> list[Callback]:
        strategy, precision = self.trainer.strategy, str(self.trainer.precision)
        if not isinstance(strategy, SingleDeviceStrategy):
            raise ConfigError(
                f"GameRolesModule multiplies gradients of a whole batch, and with "
                f"{type(strategy).__name__} processes each have a part of it; set trainer.devices: "
                "1, or use RolesModule"
            )
        if precision != "32-true":
            raise ConfigError(
                f"trainer.precision={precision}: GameRolesModule needs float32: it uses finite "
                "differences of log probabilities; set trainer.precision: 32-true, or use "
                "RolesModule"
            )
        self._check_parts()
        return super().configure_callbacks()

    def _check_parts(self) -> None:
        """Refuse minibatches of too few groups for the estimates that the update multiplies."""
        groups = getattr(datamodule_of(self.trainer), "groups_per_iteration", None)
        parts = self.game_update.parts(self._levels(self._names), len(self._names))
        minibatches = self.policies[self._names[0]].minibatches
        if groups is not None and groups < parts * minibatches:
            raise ConfigError(
                f"groups_per_iteration={groups} must be >= {parts * minibatches}: "
                f"{type(self.game_update).__name__} multiplies estimates from {parts} groups or "
                f"more in each of minibatches={minibatches}; raise it, or lower minibatches"
            )

    # ---------------------------------------------------------------- learning

    def training_step(self, batch: TensorDict, batch_idx: int) -> None:
        """One RL iteration: an update of all policies that are due and have written anything."""
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
            metrics = part.group.summed_up(part.metrics) if name in learning else {}
            part.group.end_iteration(metrics)
            part.group.record(metrics)
        self.iteration += 1

    def _part(self, group: SharedModelGroup, rows: Tensor, batch: TensorDict) -> _Part:
        batch = group.compute_all(batch)
        objective = group.decided(batch)
        self.stopping, group.stopping = self.stopping or group.stopping, None
        group.nonfinite_steps = 0
        if objective is not None:
            objective = replace(objective, loss=_StepLoss(self.game_update))
        return _Part(group, rows, batch, objective, TokenMetrics())

    def _update(self, batch: TensorDict, learning: Mapping[str, _Part]) -> None:
        """Epochs x minibatches of steps of all players."""
        first = next(iter(learning.values())).group
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
        """One optimizer step of all players on some of their own rows (r,)."""
        own = []
        for name, chosen in rows.items():
            part = learning[name]
            minibatch = select(part.batch, chosen)
            part.group.accumulate(minibatch, part.learned, part.metrics)
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
            player.group.step(learning[name].metrics)

    def _parts(
        self, learning: Mapping[str, _Part], rows: Mapping[str, Tensor], draw: torch.Generator
    ) -> tuple[GameUpdate, list[dict[str, Tensor]]]:
        """What is made of all players' rows (r,), and those rows in parts, a group in one of them.

        With fewer groups than parts nothing can be multiplied, and all have their own gradients.
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
        """The game as it is estimated from some of all players' rows (r,)."""
        players, said, logprobs = [], [], []
        for name, chosen in rows.items():
            part = learning[name]
            minibatch = select(part.batch, chosen) if len(chosen) else empty_like(part.batch)
            minibatch = part.group.left_out.without_truncated(minibatch)
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


def _check_policies(policies: Mapping[str, SharedModelGroup]) -> None:
    """Refuse settings of policies that a game has no use for.

    Raises:
        ConfigError: naming policy and key.
    """
    first, *_ = policies
    for name, group in policies.items():
        where = f"policies.{name}"
        if not isinstance(group.advantage, GroupAdvantage):
            raise ConfigError(
                f"{where}.advantage={type(group.advantage).__name__}: what others said counts in a "
                "game as the whole rollout does, so GameRolesModule takes advantages that are one "
                "number for it; use GRPO, DrGRPO, RLOO, MaxRL or OPMD"
            )
        if group.objective.loss != PPOClip():
            raise ConfigError(
                f"{where}.loss={type(group.objective.loss).__name__}: in a game the update has the "
                "loss; leave it out, or give it to the update: PSPG(loss=...)"
            )
        if group.target_kl is not None:
            raise ConfigError(
                f"{where}.target_kl={group.target_kl}: players take their steps together, in all "
                "passes; leave it out"
            )
        for key in ("ppo_epochs", "minibatches"):
            given, others = getattr(group, key), getattr(policies[first], key)
            if given != others:
                raise ConfigError(
                    f"{where}.{key}={given}, and policies.{first}.{key}={others}: players take "
                    "their steps together; give all policies the same"
                )
