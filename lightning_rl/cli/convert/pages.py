"""The tables of counterparts as Markdown, for docs/trl.md and docs/verl.md.

    python -m lightning_rl.cli.convert.pages docs/trl.md docs/verl.md

writes them anew between the two marks of each page.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_rl.cli.convert import trl_rows, verl_rows
from lightning_rl.cli.convert.rows import Row

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
SECTIONS: dict[str, Mapping[str, Sequence[Row]]] = {
    "trl.md": trl_rows.SECTIONS,
    "verl.md": verl_rows.SECTIONS,
}


def tables(sections: Mapping[str, Sequence[Row]]) -> str:
    """A heading and a table per section."""
    parts = []
    for title, rows in sections.items():
        lines = [f"### {title}", "", "| theirs | default | here | |", "|---|---|---|---|"]
        lines += [_line(row) for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(row: Row) -> str:
    ours = ", ".join(f"`{name}`" for name in row.ours.split(", ") if name) or "none"
    default = "" if row.default is None else f"`{row.default}`"
    if isinstance(row.default, dict):
        default = "a mapping"
    return f"| `{row.theirs}` | {default} | {ours} | {row.note} |"


def renewed(page: str, sections: Mapping[str, Sequence[Row]]) -> str:
    """The page with what is between the marks written anew."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables(sections)}\n\n{END}{after}"


def main() -> None:
    """Rewrite the pages that are named."""
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(renewed(page.read_text(), SECTIONS[page.name]))


if __name__ == "__main__":
    main()
