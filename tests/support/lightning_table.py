"""The tables of docs/api/lightning.md, from what the code does.

python -m tests.support.lightning_table            writes them into the page
"""

from pathlib import Path

from lightning_rl.config.lightning_flags import CALLBACKS, TRAINER, FlagVerdict

PAGE = Path(__file__).parents[2] / "docs" / "api" / "lightning.md"
SECTIONS = {"flags": TRAINER, "callbacks": CALLBACKS}


def table(entries: dict[str, FlagVerdict]) -> str:
    """One row per name."""
    rows = (f"| `{name}` | {e.verdict.value} | {e.words} |" for name, e in entries.items())
    return "\n".join(["| | | |", "|---|---|---|", *rows])


def page(text: str) -> str:
    """The page with its tables made anew."""
    for name, entries in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{table(entries)}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
