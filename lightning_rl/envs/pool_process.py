"""A process of a pool: it steps some environments, and answers as each is ready."""

from typing import Any

from lightning_rl.envs.collector import raised
from lightning_rl.envs.gym import Gym
from lightning_rl.envs.gym_player import EnvSlot, close
from lightning_rl.envs.processes import PipeEnd


def serve(line: PipeEnd, places: list[int], env: Gym, seed: int, limit: int | None) -> None:
    """Answer requests until there are no more.

    A request is (place, a method of :class:`EnvSlot`, arguments...), an answer is (place, its
    return value), or an error that names what the environment raised.
    """
    slots = {place: EnvSlot(env.made(), seed, place, limit) for place in places}
    while (request := line.receive()) is not None:
        place, what, *arguments = request
        answer: Any
        try:
            answer = getattr(slots[place], what)(*arguments)
        except BaseException as error:  # whatever an environment raises
            answer = raised(env.name, slots[place].where(), error)
        line.send((place, answer))
    close(env.name, (slot.env for slot in slots.values()))
