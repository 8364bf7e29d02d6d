"""``lightning-rl view``: writes runs to one HTML file, or serves them while they go on."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lightning_rl.cli.process import CommandParser
from lightning_rl.cli.view.page import build_page
from lightning_rl.cli.view.runs import find_runs, is_rollout_file, read_run
from lightning_rl.data.rollouts.files import VIEW
from lightning_rl.errors import ConfigError, DiskError, require_at_least


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: if an option has an invalid value.
    """
    parser = CommandParser(
        "view", "Write one self-contained HTML file: curves, step times, rollouts by token."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, help="run directories, folders of some, or rollout files"
    )
    parser.add_argument(
        "--out", type=Path, help=f"the file to write (default: {VIEW} in the first RUN)"
    )
    parser.add_argument(
        "--rollouts", type=int, default=2000, help="show the last N of each run (default: 2000)"
    )
    parser.add_argument(
        "--follow", action="store_true", help="serve a page, here only, that grows as the runs do"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port of --follow (default: a free one)"
    )
    parsed = parser.parse_args(arguments)
    require_at_least(1, rollouts=parsed.rollouts)
    if parsed.follow and parsed.out:
        raise ConfigError("--follow writes no file; leave out --out, or --follow")
    if parsed.port and not parsed.follow:
        raise ConfigError(f"--port {parsed.port} is for --follow; add that, or leave out --port")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Write the file and print its path, or serve the page until Ctrl-C; returns 0."""
    options = parse_arguments(arguments)
    if options.follow:
        _serve(options)
    else:
        _write_page(options)
    return 0


def _serve(options: argparse.Namespace) -> None:
    from lightning_rl.cli.view.server import PageServer

    server = PageServer(options.runs, options.rollouts, options.port)
    with server, suppress(KeyboardInterrupt):
        server.following.since(0)  # tells what is missing, and reads what is there
        print(f"open {server.address} (Ctrl-C ends)", flush=True)
        server.serve_forever()


def _write_page(options: argparse.Namespace) -> None:
    paths = [path for given in options.runs for path in find_runs(given)]
    runs = [read_run(path, options.rollouts) for path in paths]
    first = options.runs[0]
    out: Path = options.out or (first.parent if is_rollout_file(first) else first) / VIEW
    if out.is_dir():
        raise ConfigError(f"out={str(out)!r} is a directory; pass the path of a file")
    page = build_page(runs)
    try:
        _write(out, page)
    except OSError as error:
        raise DiskError(
            f"{out} cannot be written ({error.strerror}); choose another file with --out"
        ) from error
    shown = sum(len(run.rollouts) for run in runs)
    total = sum(run.rollouts_total for run in runs)
    more = "" if shown == total else f" of {total} (more: --rollouts N)"
    size = f"{out.stat().st_size / 2**20:.1f} MiB"
    print(f"runs: {len(runs)}, rollouts: {shown}{more}, {size}: {out}")


def _write(out: Path, page: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    for path in (partial, out):  # a link in a stranger's run must not be written through
        if path.is_symlink():
            path.unlink()
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
