"""Define the guess-the-digit game as an environment for OpenEnv, which is served by its Python."""

from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """What the player wrote: a digit."""

    text: str


class Told(Observation):
    """What the player is told: `>:` if the digit is larger than the guess, `<:` if smaller."""

    text: str


class GuessDigit(Environment[Guess, Told, State]):
    """Thinks of a digit, the last one of the seed. A hit ends the episode and pays 1.

    So does, for nothing, a turn that is not a digit.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        self.digit, self.tries = (seed or 0) % 10, 0
        return Told(text="guess:")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
        self.tries += 1
        if action.text not in "0123456789" or len(action.text) != 1:
            return Told(text="", done=True, reward=0.0)
        guess = int(action.text)
        hit = guess == self.digit
        told = "" if hit else ">:" if self.digit > guess else "<:"
        return Told(text=told, done=hit, reward=float(hit))

    @property
    def state(self) -> State:
        """The number of guesses so far."""
        return State(step_count=self.tries)
