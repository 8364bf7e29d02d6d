"""Count the house: how large it is, and whether imports run in one direction only.

    python -m benchmarks.house
    python -m benchmarks.house --at 4badfb1     (the same of another commit)
    python -m benchmarks.house --no-ways        (without the tiny trainings of ways.py)
    python -m benchmarks.house --picture docs/images/house.svg

An import counts wherever it stands: at the top of a file, in a function, or for type checkers only.
``ORDER`` is the library's floor plan: a room may import those that stand before it, and no other. A
unit test holds the code against it, and the picture in docs/architecture.md too.

``rooms`` are all folders of ``lightning_rl/``, those in others included, and the files at its root;
``spine_rooms`` those of the floor plan in which the spine is; ``arrows`` the pairs of rooms of
which one imports the other (``floor_arrows``: of what ``ORDER`` names, without folders in others).
The spine, the wings ``serving``, ``envs`` and ``games``, and the rest are as ``parts.py``
says; ``core_lines`` are those of all but the optional rooms. ``shared_names`` are the names of
classes that stand in two modules. ``files_*`` are entered on a way, see ``ways.py``;
``*_above_run`` leaves out the helpers of ``run/``, which are called everywhere, and of which a busy
machine may call one more. The last line is JSON.
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.house.counts import captions, checkout, measure, ways
from benchmarks.house.modules import FLOORS, ROOT, modules_of
from benchmarks.house.parts import shared_names
from benchmarks.house.picture import draw


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.house",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--at", help="a commit; default: the files as they are")
    parser.add_argument("--no-ways", action="store_true", help="do not run it")
    parser.add_argument("--picture", type=Path, help="write the floor plan there, as SVG")
    args = parser.parse_args()
    if args.picture is not None:
        args.picture.write_text(draw(FLOORS, captions(ROOT)))
    with tempfile.TemporaryDirectory() as folder:
        root = ROOT if args.at is None else checkout(args.at, folder)
        counts = measure(root)
        library = modules_of(root, "lightning_rl", "callbacks")
        for name, places in shared_names(library, root).items():
            print(f"{name} is a class in {', '.join(places)}")
        if not args.no_ways:
            counts |= ways(root)
    for name, count in counts.items():
        print(f"{name:>28} {count}")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
