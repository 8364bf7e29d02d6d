"""Define Pointing: provers who have read a row point at a digit, all that the verifier sees.

A row has exactly one 7 and no 3, or one 3 and no 7; accepting is right if it has the 7. A prover
answers with a place, a to h, and who reads its message is shown the digit there.
"""

from typing import Any

from lightning_rl.games import REJECT, Instructions, Seat, TextScenario

PLACES = "abcdefgh"
WANTED, OTHER = "7", "3"
POINT = {digit: f"Point at {digit} in " for digit in (WANTED, OTHER)}
QUESTION = "Is there a 7, or a 3?"
PROVER = Instructions(user="{point}{places}", form=f"[{PLACES}]")


class Pointing(TextScenario):
    """Prompts of a few tokens, and messages that others see through."""

    def __init__(self) -> None:
        prompts = dict.fromkeys(("prover", "prover0", "prover1"), PROVER)
        prompts["verifier"] = Instructions(user=QUESTION)
        super().__init__(prompts, accept=WANTED, reject=OTHER, forced_guess=False)

    def fields(self, seat: Seat) -> dict[str, Any]:
        """Add the row's digits, each after its place, and the question that a prover is asked."""
        places = "".join(map("".join, zip(PLACES, seat.columns["prompt"], strict=True)))
        point = POINT[OTHER if seat.stance == REJECT else WANTED]
        return super().fields(seat) | {"places": places, "point": point}

    def heard(self, seat: Seat, speaker: str, channel: str, text: str) -> str:
        shown = seat.columns["prompt"][PLACES.index(text)]
        return super().heard(seat, speaker, channel, shown)
