"""A process of a pool: it steps some environments, and answers as each is ready."""

from typing import Any

from lightning_rl.envs.collector import raised
from lightning_rl.envs.gym import Gym
from lightning_rl.envs.gym_player import EnvSlot, close
from lightning_rl.envs.processes import PipeEnd


def serve(line: PipeEnd, places: list[int], env: Gym, seed: int, limit: int | None) -> None:
    """Answer requests until there are no more.

    A request is (place, what, value): ``begin`` an episode by its number, ``step`` with an action,
    or ``again`` (an episode, and the actions in it so far). An answer is (place, row, reward, over,
    cut, episode); of an episode that ended, the row is that of its end, and (place, row) of the
    next one's begin follow. Instead of an answer there may be (place, an error that
    tells what it raised).
    """
    players = {place: EnvSlot(env.made(), seed, place, limit) for place in places}
    while (request := line.receive()) is not None:
        place, what, value = request
        try:
            answer = _answer(players[place], what, value)
        except BaseException as error:  # whatever an environment raises
            answer = (place, raised(env.name, players[place].where(), error))
        line.send(answer)
    close(env.name, (player.env for player in players.values()))


def _answer(player: EnvSlot, what: str, value: Any) -> tuple[Any, ...]:
    if what == "begin":
        return player.place, player.begin(value), 0.0, False, False, None, None
    if what == "again":
        row, is_over = player.again(*value)
        return player.place, row, 0.0, is_over, False, None, None
    row, reward, over, cut = player.step(value)
    if not (over or cut):
        return player.place, row, reward, over, cut, None, None
    ended = player.over(over)
    return player.place, row, reward, over, cut, ended, player.begin(player.episode + 1)
