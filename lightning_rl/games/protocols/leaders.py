"""Who leads whom among players that take each other's learning into account."""

from collections.abc import Sequence

from lightning_rl.errors import ConfigError
from lightning_rl.games.algos.game import Levels
from lightning_rl.games.algos.moves import GameUpdate
from lightning_rl.games.protocols.base import VERIFIER

Order = Sequence[Sequence[str]]
"""Names of players, level by level, leaders first."""


def check_order(
    order: Order | None, names: Sequence[str], kind: str, leader: str | None, update: GameUpdate
) -> None:
    """Refuse an order that is not of these players, or none where the update needs one.

    Args:
        order: as it was set.
        names: of all players.
        kind: what a player is called.
        leader: who leads without an order; None: nobody is the verifier.
        update: that the players learn by.

    Raises:
        ConfigError: naming the players.
    """
    if order is not None and sorted(name for level in order for name in level) != sorted(names):
        raise ConfigError(f"order={order} must name each {kind} once: {', '.join(names)}")
    if update.needs_order and order is None and leader is None:
        raise ConfigError(
            f"update={type(update).__name__} has to know who leads {', '.join(names)}: there is no "
            f"{VERIFIER!r}; set model.order, e.g. {[[name] for name in names]}"
        )


def levels_of(
    order: Order | None, players: list[str], leader: str | None, update: GameUpdate
) -> Levels | None:
    """Places of the ``players`` that learn, leaders first; None: everyone has all others in view.

    Without an order the leader leads all others if the update is made for leaders.
    """
    if order is None:
        if not update.needs_order:
            return None
        order = [[name for name in players if (name == leader) is leads] for leads in (True, False)]
    learning = [[players.index(name) for name in level if name in players] for level in order]
    return [level for level in learning if level]
