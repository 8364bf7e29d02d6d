"""Pointing: provers who have read a row of digits point at one, and that is all the verifier sees.

Exactly one of two digits is in the row. Accepting is right if it is the first. A prover answers
with a place, a to h; who reads it is shown the digit there, and nothing else of the row.
"""

from typing import Any

from lightning_rl import REJECT, Instructions, Seat, TextScenario

PLACES = "abcdefgh"
POINT, IN, IS_THERE, OR, END = "Point at ", " in ", "Is there a ", " or a ", "?"
PROVER = Instructions(user=f"{POINT}{{mine}}{IN}{{places}}", form=f"[{PLACES}]")
VERIFIER = Instructions(user=f"{IS_THERE}{{first}}{OR}{{second}}{END}")


class Pointing(TextScenario):
    """Prompts of a few tokens, and messages that others see through."""

    def __init__(self) -> None:
        provers = dict.fromkeys(("prover", "prover0", "prover1"), PROVER)
        super().__init__(
            {**provers, "verifier": VERIFIER}, accept="first", reject="second", forced_guess=False
        )

    def fields(self, seat: Seat) -> dict[str, Any]:
        """Besides the row's: its digits, each after its place, and the one a prover argues for."""
        places = "".join(map("".join, zip(PLACES, seat.columns["prompt"], strict=True)))
        mine = seat.columns["second" if seat.stance == REJECT else "first"]
        return super().fields(seat) | {"places": places, "mine": mine}

    def heard(self, seat: Seat, speaker: str, channel: str, text: str) -> str:
        shown = seat.columns["prompt"][PLACES.index(text)]
        return super().heard(seat, speaker, channel, shown)
