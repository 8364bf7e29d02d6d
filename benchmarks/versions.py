"""Note which versions of packages were tried together.

    python -m benchmarks.versions units

``make test-all``, ``make test-range`` and ``make gpu-check`` call it after tests that passed. It
adds a row to ``lightning_rl/cli/check/tried_versions.jsonl``, which ``lightning-rl doctor`` reads,
or adds to the row of the same versions, and writes the table of docs/versions.md.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

from benchmarks.support.results import write_block
from lightning_rl.cli.check.doctor import versions_here
from lightning_rl.cli.check.tried_versions import FILE, Versions, read_tried

PAGE = Path(__file__).parents[1] / "docs/versions.md"


def noted(rows: Sequence[Versions], here: Versions, ran: str, today: str) -> list[Versions]:
    """Return the rows with what was run today, the newest last."""
    same = [row for row in rows if (row.device, row.packages) == (here.device, here.packages)]
    before = same[0].ran if same else ()
    now = replace(here, ran=tuple(dict.fromkeys([*before, ran])), date=today)
    return [*(row for row in rows if row not in same), now]


def table(rows: Sequence[Versions]) -> list[str]:
    """Return the lines of the table, the newest row first."""
    lines = [
        "| device | torch | vLLM | transformers | passed | date |",
        "|---|---|---|---|---|---|",
    ]
    for row in reversed(rows):
        cells = [row.device, *(version or "none" for version in row.packages)]
        lines.append(f"| {' | '.join([*cells, ', '.join(row.ran), row.date])} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.versions", description=__doc__)
    parser.add_argument("ran", help="what passed, such as units")
    rows = noted(read_tried(), versions_here(), parser.parse_args().ran, str(date.today()))
    FILE.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    write_block(PAGE, "versions", table(rows))
    print(json.dumps(asdict(rows[-1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
