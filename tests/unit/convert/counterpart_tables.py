"""Write the tables of docs/convert/*.md, from the data that ``lightning-rl convert`` reads.

python -m tests.unit.convert.counterpart_tables         writes them into the pages
"""

from pathlib import Path

from lightning_rl.convert.conversion import ParameterRow, sections

DOCS = Path(__file__).parents[3] / "docs" / "convert"
LIBRARIES = ("trl", "verl", "prime_rl")
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def tables(library: str) -> str:
    """Return a heading and a table per section."""
    parts = []
    for title, rows in sections(library).items():
        lines = [f"### {title}", "", "| theirs | default | here | |", "|---|---|---|---|"]
        lines += [_line(row) for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(row: ParameterRow) -> str:
    ours = ", ".join(f"`{name}`" for name in row.ours.split(", ") if name) or "none"
    default = "" if row.default is None else f"`{row.default}`"
    if isinstance(row.default, dict):
        default = "a mapping"
    return f"| `{row.theirs}` | {default} | {ours} | {row.note} |"


def page(text: str, library: str) -> str:
    """Make what is between the page's marks anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{tables(library)}\n\n{END}{after}"


if __name__ == "__main__":
    for name in LIBRARIES:
        file = DOCS / f"{name}.md"
        file.write_text(page(file.read_text(encoding="utf-8"), name), encoding="utf-8")
