"""Say by one command what of this library works on a GPU machine, and how fast.

    make gpu-check                                     (or: python -m benchmarks.gpu)
    make gpu-check GPU_PYTHON=python3                  with the machine's own packages, no .venv
    make gpu-check LIST=1 | ONLY=push,sleep | DEVICE=cpu

A line of JSON per check, most important first: its outcome (pass, fail or skipped), figures,
seconds, and the end of its error. The last line is the summary. No check needs a network.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.runner import Record, run_all
from benchmarks.gpu.table import CHECKS

NEEDED = ("torch", "lightning", "transformers", "tensordict", "jsonargparse", "datasets", "pyarrow")
SECONDS = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all checks that ran passed; 1 if one failed, or none ran; 2 if none can."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the checks, and run none")
    parser.add_argument(
        "--only", default="", help="those with one of these in their name, by commas"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all together")
    parser.add_argument("--out", type=Path, help="keep the records in this file too")
    parser.add_argument("--scratch", type=Path, help="where the checks' files stay")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    checks = [check for check in CHECKS if any(part in check.name for part in wanted)]
    if options.list:
        print("\n".join(check.name for check in checks))
        return 0
    if not checks:
        return refuse(f"no check has {options.only!r} in its name; --list names them")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return refuse(
            f"{', '.join(missing)} not installed; `python -m benchmarks.gpu.wheels` says which "
            "wheels to bring"
        )
    if options.device == "cuda" and not sees_cuda():
        return refuse("torch sees no CUDA device; DEVICE=cpu tries the checks at tiny sizes")
    # Else a polite end would leave the running check behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        scratch = options.scratch
        if scratch is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        scratch.mkdir(parents=True, exist_ok=True)
        kept = stack.enter_context(options.out.open("w")) if options.out else None

        def tell(record: Record) -> None:
            for file in filter(None, (sys.stdout, kept)):
                print(json.dumps(record), file=file, flush=True)

        summary = run_all(checks, options.device, scratch, options.seconds, tell)
        tell(summary)
    counts = summary["summary"]
    return 0 if counts["pass"] and not counts["fail"] else 1


def refuse(why: str) -> int:
    """Refuse in one line."""
    print(f"gpu-check: {why}", file=sys.stderr)
    return 2


def sees_cuda() -> bool:
    """Ask in another process: torch takes seconds to import, and this one needs nothing of it."""
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    command = [sys.executable, "-c", ask]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
