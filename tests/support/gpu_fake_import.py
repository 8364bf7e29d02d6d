"""Provide a check whose module leaves a file when it is imported, and another when it begins."""

import subprocess
import sys
import time
from pathlib import Path

SCRATCH = Path(sys.argv[4])
(SCRATCH / "imported").touch()


def hangs(bench):
    """Hang with a child, whose number it notes first."""
    (SCRATCH / "began").touch()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    bench.note(child=child.pid)
    print("hanging now", flush=True)
    time.sleep(60)
