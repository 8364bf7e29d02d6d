"""The ways through the house are gone to their ends, and count what is called on them."""

import pytest

from benchmarks.house.counts import ways
from benchmarks.house.modules import ROOT

pytestmark = pytest.mark.slow

ON_THE_WAY = {
    "prompt_to_token": {"collect/loader.py", "agents/base.py", "engines/hf/decoding.py"},
    "batch_to_backward": {"data/batch.py", "algos/advantages.py", "algos/losses.py"},
    "step_to_engine": {"callbacks/weight_sync.py", "sync/base.py", "engines/hf/engine.py"},
    "env_step_to_loss": {"envs/gym_collector.py", "envs/algos/steps.py", "algos/losses.py"},
    "call_to_row": {"serving/app.py", "agents/episode.py", "agents/rows.py"},
}
"""Some files without which it could not be done; where modules move, these move."""
NOT_THERE = {
    "prompt_to_token": "algos/losses.py",  # later
    "batch_to_backward": "engines/hf/decoding.py",  # earlier, and in other threads
    "step_to_engine": "data/batch.py",
    "env_step_to_loss": "engines/base.py",
    "call_to_row": "serving/program_agent.py",  # imported, but not called
}


def test_what_is_called_between_two_ends_is_counted_and_nothing_else(capsys):
    counts = ways(ROOT)
    told = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    for name, files in ON_THE_WAY.items():
        entered = told[name].split(" > ")
        assert files <= set(entered), name
        assert NOT_THERE[name] not in entered
        assert counts[f"files_{name}"] == len(set(entered)) == len(entered)
        above = [file for file in entered if not file.startswith("run/")]
        assert counts[f"files_{name}_above_run"] == len(above) < len(entered)
