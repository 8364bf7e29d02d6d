"""Ask twice as the agent of ``benchmarks.kill --program``, which may be killed in between, once.

With KILL_DIR set, a third of the programs end by a SIGKILL of their own after their first call, and
leave a file there, so that they live when they are run again. Nothing but the standard library is
imported.
"""

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path


def complete(prompt: str) -> str:
    """Complete this text with the model."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/completions",
        json.dumps({"model": "policy", "prompt": prompt, "max_tokens": 8}).encode(),
        {
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["text"])


def die_once(seed: int) -> None:
    """Die once, as somebody's ``kill -9`` would have it."""
    place = os.environ.get("KILL_DIR")
    if place is None or seed % 3 or (mark := Path(place, str(seed))).exists():
        return
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    task = json.load(sys.stdin)
    first = complete(task["prompt"])
    die_once(task["seed"])
    complete(task["prompt"] + first + "=")
    print(json.dumps({"answer": first}))


if __name__ == "__main__":
    main()
