"""Commands of this package that another command runs, each in a process of its own."""

import sys

from lightning_rl.run.processes.child import Child, last_lines

_ERROR = "lightning-rl: "


def start_command(*command: str) -> Child:
    """Start ``lightning-rl`` with these arguments, and keep its output for :func:`last_words`."""
    return Child([sys.executable, "-m", "lightning_rl", *command], log=True)


def last_words(child: Child) -> str:
    """Return a command's error message, or else its last lines, after a colon; "" without any."""
    output = child.printed(20_000)
    lines = output.decode(errors="replace").splitlines()
    errors = [place for place, line in enumerate(lines) if line.startswith(_ERROR)]
    if not errors:
        return last_lines(output, 3)
    said = " ".join(line.strip() for line in lines[errors[-1] :])
    return f": {said.removeprefix(_ERROR)[:600]}"
