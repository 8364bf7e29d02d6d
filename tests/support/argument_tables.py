"""Write the tables of classes' arguments in the reference, from signatures and docstrings.

    python -m tests.support.argument_tables         writes them into the pages

A page of ``docs/api`` lists the classes: ``<!-- arguments: WeightSync FixedSchedule -->``. The text
from there to ``<!-- /arguments -->`` is generated.
"""

import re
from functools import cache
from pathlib import Path

from lightning_rl.cli.help import Argument, arguments_of
from lightning_rl.config.names import public
from tests.support.pages import ROOT

REFERENCE = ROOT / "docs" / "api"
MARKED = re.compile(r"<!-- arguments: ([\w ]+) -->\n.*?<!-- /arguments -->", re.DOTALL)


def pages() -> dict[Path, list[str]]:
    """Return the classes whose tables are in each page that has any."""
    found = {path: classes_in(path.read_text(encoding="utf-8")) for path in REFERENCE.glob("*.md")}
    return {path: names for path, names in found.items() if names}


def classes_in(text: str) -> list[str]:
    return [name for match in MARKED.finditer(text) for name in match[1].split()]


def filled(text: str) -> str:
    """Make the page's tables anew."""
    return MARKED.sub(
        lambda match: "\n\n".join(
            [
                f"<!-- arguments: {match[1]} -->",
                *map(table, match[1].split()),
                "<!-- /arguments -->",
            ]
        ),
        text,
    )


@cache
def table(name: str) -> str:
    lines = [f"**`{name}`**", "", "| argument | type | default | |", "|---|---|---|---|"]
    return "\n".join([*lines, *map(row, arguments_of(public(name)))])


def row(argument: Argument) -> str:
    default = "required" if argument.default is None else f"`{argument.default}`"
    cells = f"`{argument.name}`", f"`{argument.type}`", default, argument.says.replace("``", "`")
    return "| " + " | ".join(plain(cell).replace("|", r"\|") for cell in cells) + " |"


def plain(text: str) -> str:
    """Remove links of Sphinx: ``:class:`PPOClip``` becomes `PPOClip`."""
    return re.sub(r":\w+:`~?\.?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text)


if __name__ == "__main__":
    for path in pages():
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
