"""Measure how long prompts take to load, and how much memory: ``python -m benchmarks.data``.

Prompts of 200 characters in a JSON-lines and in a Parquet file, with ``max_prompt_tokens``. Each is
loaded twice, in a process of its own: the first time makes what is kept beside the data, the second
finds it. Then 1000 prompts are drawn. What grew is told apart: anonymous memory, and pages of files
that the kernel may drop and that processes share. ``load_cpu_s`` is the processor's time, where
others use the machine too. The last line is JSON, with the larger figure of the two kinds of files,
the second time.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = 2000
CHARACTERS = 200
DRAWN = 1000


def write_prompts(folder: Path, count: int) -> None:
    """Write ``rows.jsonl`` and ``rows.parquet`` with the same rows."""
    import pyarrow
    import pyarrow.json
    import pyarrow.parquet

    rng = random.Random(count)
    words = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9)))
        for _ in range(WORDS)
    ]
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(count):
            text = f"{number} {' '.join(rng.choices(words, k=60))}"[:CHARACTERS]
            file.write(json.dumps({"prompt": text, "answer": str(number)}) + "\n")
    schema = pyarrow.schema([("prompt", pyarrow.string()), ("answer", pyarrow.string())])
    options = pyarrow.json.ParseOptions(explicit_schema=schema)
    with pyarrow.parquet.ParquetWriter(folder / "rows.parquet", schema) as writer:
        for batch in pyarrow.json.open_json(folder / "rows.jsonl", parse_options=options):
            writer.write_batch(batch)


def write_tokenizer(folder: Path, rows: Path) -> None:
    """Train a byte-level BPE of 4000 tokens, as pretrained models have them."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    with rows.open() as file:
        texts = [json.loads(line)["prompt"] for _, line in zip(range(5000), file, strict=False)]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=4000, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer).save_pretrained(folder)


def memory() -> dict[str, float]:
    """Return this process's MB: resident, of them anonymous and of files, and at most so far."""
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    keys = {"rss": "VmRSS", "anonymous": "RssAnon", "file": "RssFile", "peak": "VmHWM"}
    return {name: int(told[key].split()[0]) / 1024 for name, key in keys.items()}


def measure(path: Path, tokenizer: Path) -> dict[str, float]:
    """Load the prompts of a file in this process, and draw some."""
    from transformers import AutoTokenizer

    from lightning_rl import HFDatasetPrompts, JSONLPrompts, ParquetPrompts  # noqa: F401

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    kind = ParquetPrompts if path.suffix == ".parquet" else JSONLPrompts
    before, begun, used = memory(), time.perf_counter(), time.process_time()
    prompts = kind(str(path), max_prompt_tokens=512, seed=0)
    prompts.load(loaded)
    load, cpu = time.perf_counter() - begun, time.process_time() - used
    begun = time.perf_counter()
    prompts.draw(DRAWN)
    draw = time.perf_counter() - begun
    grown = {name: mb - before[name] for name, mb in memory().items()}
    return {"load_s": load, "load_cpu_s": cpu, "draw_ms": draw * 1000 / DRAWN} | {
        f"{n}_mb": mb for n, mb in grown.items()
    }


def in_a_process(path: Path, tokenizer: Path) -> dict[str, Any]:
    """Call :func:`measure` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.data", "--one", str(path), str(tokenizer)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    parser.add_argument("--one", type=Path, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.one)))
        return
    table: list[dict[str, Any]] = []
    for count in given.counts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_prompts(folder, count)
            write_tokenizer(folder / "tokenizer", folder / "rows.jsonl")
            for kind in ("jsonl", "parquet"):
                for turn in ("first", "second"):
                    result = in_a_process(folder / f"rows.{kind}", folder / "tokenizer")
                    table.append({"prompts": count, "kind": kind, "time": turn} | result)
                    print(json.dumps({k: _short(v) for k, v in table[-1].items()}), flush=True)
    second = [row for row in table if row["time"] == "second"]
    last = {
        f"{name}_1e{len(str(count)) - 1}": _short(
            max(row[name] for row in second if row["prompts"] == count)
        )
        for count in given.counts
        for name in ("load_s", "load_cpu_s", "rss_mb", "anonymous_mb")
    }
    print(json.dumps(last))


def _short(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
