"""Run one check in its process: import what it needs, wait for its turn, run, leave a record.

    python -m benchmarks.gpu.child TARGET OPTIONS DEVICE SCRATCH RECORD

Imports take seconds, and are over when the check before ends. A line on standard input says that
it has; its end, that nobody is there any more.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path

from benchmarks.gpu.bench import Bench, Skipped, last_lines


def main(target: str, options: str, device: str, scratch: str, record: str) -> int:
    """Run ``module:function``; 0 unless it failed."""
    module, _, function = target.partition(":")
    bench = Bench(device, Path(scratch), Path(record))
    try:
        check = getattr(importlib.import_module(module), function)
        if not sys.stdin.readline():
            return 1
        check(bench, **json.loads(options))
    except Skipped as reason:
        bench.write("skipped", str(reason))
        return 0
    except BaseException:  # sys.exit too: whatever it was must be in the record
        traceback.print_exc()
        bench.write("fail", "\n".join([*bench.faults, last_lines(traceback.format_exc())]))
        return 1
    bench.write("fail" if bench.faults else "pass")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
