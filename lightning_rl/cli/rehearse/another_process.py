"""Compares what two processes read and grade: two ranks, or a run and the process that resumes it.

Python orders sets by hashes of texts, which differ from process to process.
"""

import json
import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_rl.cli.check.command import Built, connect
from lightning_rl.cli.check.reward_trial import try_rewards
from lightning_rl.cli.rehearse.findings import Kind, RunFinding
from lightning_rl.datamodule import RLDataModule
from lightning_rl.rollout import Prompt
from lightning_rl.run.processes.child import PythonChild, last_lines

_TIMEOUT_S = 900.0
_SEED = "PYTHONHASHSEED"
_ADVICE = {
    "data.train_prompts": "sort what comes out of a set, and draw by a seed",
    "data.evaluation.prompts": "sort what comes out of a set, and draw by a seed",
    "data.rewards": "use hashlib in place of hash(), and sort what comes out of a set",
}


def seen_here(data: RLDataModule, paid: list[str]) -> dict[str, list[str]]:
    """Return what this process reads, in order, by the key of the configuration.

    Args:
        data: with its prompts loaded.
        paid: lines on what the rewards paid here; empty to leave them out.
    """
    held_out = [] if data.evaluation is None else [g[0].prompt for g in data.held_out.groups()]
    return {
        "data.train_prompts": [_digest(prompt) for _, prompt in data.train_prompts.numbered()],
        "data.evaluation.prompts": list(map(_digest, held_out)),
        "data.rewards": paid,
    }


def _digest(prompt: Prompt) -> str:
    columns = json.dumps(prompt.columns, default=lambda value: type(value).__name__)
    return sha256(f"{prompt.token_ids} {columns}".encode(errors="surrogatepass")).hexdigest()[:16]


def send_seen(connection: Connection, rewards: str, *arguments: str) -> None:
    """Send what a process of its own reads; ``rewards`` is empty to leave them out."""
    with TemporaryDirectory(prefix="lightning_rl_") as scratch:
        cli = Built(list(arguments), scratch)
        connect(cli)
        data = cli.datamodule
        data.load_prompts("fit")
        tried = try_rewards(data, data.load_tokenizer(cli.model)) if rewards else ()
        connection.send(seen_here(data, [line for verdict in tried for line in verdict.lines]))


def compare_with_another_process(
    data: RLDataModule, paid: list[str], planned: Path, options: Sequence[str]
) -> Iterator[RunFinding]:
    """Yield what another process sees differently.

    Args:
        data: this process's, with its prompts loaded.
        paid: lines on what the rewards paid here; empty to leave them out.
        planned: the file of the configuration by which ``data`` was built.
        options: further options of the command line, such as ``--trusted_only``.
    """
    env = {**os.environ, _SEED: "1" if os.environ.get(_SEED) != "1" else "2"}
    arguments = ["--config", str(planned), *options]
    child = PythonChild(send_seen, "yes" if paid else "", *arguments, env=env, log=True)
    try:
        here = seen_here(data, paid)
        there = child.connection.recv() if child.connection.poll(_TIMEOUT_S) else None
    except EOFError:
        there = None
    finally:
        child.kill()
    if there is None:
        said = last_lines(child.printed(20_000), 3)
        yield RunFinding(
            Kind.UNTRIED, "data", f"what another process reads: it gave no answer{said}"
        )
        return
    if here == there:
        what = "prompts and rewards" if paid else "prompts"
        yield RunFinding(Kind.TRIED, "", f"another process, which sees the same {what}")
    for key, ours in here.items():
        if ours == there[key]:
            continue
        pairs = zip(ours, there[key], strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(there)))
        what = "grades otherwise" if key == "data.rewards" else f"reads otherwise from row {place}"
        text = f"another process {what}, so ranks and a resumed run differ; {_ADVICE[key]}"
        yield RunFinding(Kind.FAILS, key, text)
