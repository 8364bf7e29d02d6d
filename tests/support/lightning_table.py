"""Write the tables of docs/api/lightning.md, from the cases that tests run by ``lightning-rl fit``.

python -m tests.support.lightning_table            writes them into the page

The word of each row is what ``tests/integration/test_lightning_table.py`` asserts.
"""

from pathlib import Path

from lightning_rl.config.lightning_flags import CALLBACKS, TRAINER
from tests.support.lightning_cases import CASES, SAYS, word_of

PAGE = Path(__file__).parents[2] / "docs" / "api" / "lightning.md"
EXPLAINED = {
    "flags": {name: entry.words for name, entry in TRAINER.items()},
    "callbacks": {name: entry.words for name, entry in CALLBACKS.items()},
} | SAYS


def table(part: str) -> str:
    """Return one row per name."""
    said = EXPLAINED.get(part, {})
    rows = (
        f"| `{name}` | {word_of(cases)} | {said.get(name, 'as in Lightning')} |"
        for name, cases in CASES[part].items()
    )
    return "\n".join(["| | | |", "|---|---|---|", *rows])


def page(text: str) -> str:
    """Return the page with its tables made anew."""
    for part in CASES:
        begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{table(part)}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
