"""Who leads whom among players that anticipate each other's learning."""

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
    """Refuse an order that does not name these players, or a missing one that the update needs.

    Args:
        order: the ``order`` setting.
        names: the names of all players.
        kind: the word for a player in error messages.
        leader: who leads without an order; None: no player is the verifier.
        update: the update that the players learn by.

    Raises:
        ConfigError: naming the players.
    """
    if order is not None and sorted(name for level in order for name in level) != sorted(names):
        raise ConfigError(f"order={order} must name each {kind} once: {', '.join(names)}")
    if update.needs_order and order is None and leader is None:
        raise ConfigError(
            f"update={type(update).__name__} needs an order of {', '.join(names)}, as none of them "
            f"is called {VERIFIER!r}; set model.order, e.g. {[[name] for name in names]}"
        )


def levels_of(
    order: Order | None, players: list[str], leader: str | None, update: GameUpdate
) -> Levels | None:
    """Return indices of the learning ``players``, leaders first; None: each anticipates all others.

    Without an order the leader leads all others, if the update needs leaders.
    """
    if order is None:
        if not update.needs_order:
            return None
        order = [[name for name in players if (name == leader) is leads] for leads in (True, False)]
    learning = [[players.index(name) for name in level if name in players] for level in order]
    return [level for level in learning if level]
