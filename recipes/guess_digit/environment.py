"""Define the environment of the guess-the-digit recipe."""

from lightning_rl.agents.base import Environment, Reply
from lightning_rl.rollout import Prompt


class GuessDigit(Environment):
    """Thinks of the row's ``digit``: `>:` says that it is larger than the guess, `<:` smaller.

    A hit ends the rollout and pays 1; so does, for nothing, a turn that is not a digit.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.digit = int(prompt.columns["digit"])

    def step(self, turn: str) -> Reply:
        if turn not in "0123456789" or len(turn) != 1:
            return Reply(done=True)
        guess = int(turn)
        if guess == self.digit:
            return Reply(reward=1.0, done=True)
        return Reply(">:" if self.digit > guess else "<:")
