"""Our runs of ``benchmarks.peers`` and ``benchmarks.wall`` are the same in each layout.

Slow: every layout is a command of its own, which starts processes and trains.
"""

import json

import pytest

from benchmarks.peers.layouts import Layout, run_ours
from benchmarks.peers.tasks import Task

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_two_processes_make_together_the_batch_of_one(tiny_model, tmp_path):
    prompts = tmp_path / "train.jsonl"
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(100, 200)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Task("tiny", tiny_model, prompts, iterations=2)
    one, two = (run_ours(task, 0, Layout(processes=count)) for count in (1, 2))
    assert one["completions"] == two["completions"] == [256, 256]
    assert one["tokens"][0] == two["tokens"][0]  # the very same rollouts; later ones by rounding
    assert [set(part) for part in two["parts"]] == [{"generate", "train", "iteration"}] * 2
    assert len(two["cpu_s"]) == 2
