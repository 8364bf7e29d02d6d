"""Injected faults: what each causes, and how long that takes.

    python -m benchmarks.faults [--ray] [--save]

Runs the tests in which real vLLM servers (``--ray``: actors on a two-node cluster too) are broken:
a layer left out, a cache not reset, a hung process, a file cut short, servers killed in a push and
under requests, all of them, a whole node. A line is a ``with fault(...)`` block of a test, whose
assertions held, and its seconds. The last line is JSON. ``--save`` also writes the table of
docs/sync.md. Takes some minutes, of which most is servers that start anew.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.support.results import parser_of, report, write_block

ROOT = Path(__file__).parents[1]
SERVER, RAY = "tests/integration/test_server_faults.py", "tests/integration/test_ray.py"
CHOSEN = (
    "skipped_layer or cache_that_is_not_reset or stuck_peer or truncated_file or dies_in_the_middle"
    " or requests_outlive or all_replicas_are_gone or whole_node"
)


@dataclass(frozen=True)
class Fault:
    """One line of the table."""

    injected: str
    happened: str
    seconds: float
    test: str


def measure(files: list[str]) -> list[Fault]:
    """Run the tests, and collect what they noted.

    Raises:
        RuntimeError: if one fails: then something did not happen as the table would say.
    """
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.xml"
        command = [sys.executable, "-m", "pytest", *files, "-k", CHOSEN, "-q", "--no-header"]
        command += [f"--junitxml={results}", "-o", "junit_family=xunit1"]  # which has properties
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            raise RuntimeError(f"tests of faults failed: {' '.join(command)}")
        return faults_in(results)


def faults_in(results: Path) -> list[Fault]:
    """Read the faults from pytest's XML, in the order of the tests."""
    found = []
    for case in ElementTree.parse(results).iter("testcase"):
        for note in case.iter("property"):
            if note.get("name") == "fault":
                injected, happened, seconds = json.loads(note.get("value", ""))
                test = case.get("name", "").partition("[")[0]
                found.append(Fault(injected, happened, seconds, test))
    return found


def table(faults: list[Fault]) -> list[str]:
    lines = ["| injected fault | what happened | seconds | test |", "|---|---|---|---|"]
    for fault in faults:
        seconds = f"{fault.seconds:.2f}" if fault.seconds < 10 else f"{fault.seconds:.0f}"
        lines.append(f"| {fault.injected} | {fault.happened} | {seconds} | `{fault.test}` |")
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ray", action="store_true", help="also Ray actors and a node")
    arguments = parser.parse_args()
    faults = measure([SERVER, RAY] if arguments.ray else [SERVER])
    lines = table(faults)
    print("\n".join(lines))
    if arguments.save:
        write_block(ROOT / "docs" / "sync.md", "faults", lines)
    report("faults", {"faults": [asdict(fault) for fault in faults]}, arguments.save)


if __name__ == "__main__":
    main()
