"""Two processes (gloo): a signal to one stops both after the same update, and they go on."""

import os
from pathlib import Path

import pytest
import torch

from benchmarks import forked
from lightning_rl.run.checkpoint_io import checkpoints_in


def run(out: Path, model: Path, *rank: str) -> tuple[int, str]:
    said = model.with_name("said.txt")
    said.unlink(missing_ok=True)
    environment = os.environ | {"PL_GLOBAL_SEED": "0"}
    status = forked.run(
        "tests.integration.ddp_run", [out, model, *rank], said, environment=environment
    )
    return status, said.read_text()


@pytest.mark.timeout(900)  # three starts of two processes
@pytest.mark.parametrize("rank", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_signal_to_one_process_stops_both_and_both_go_on(tiny_model, tmp_path, rank):
    status, said = run(tmp_path / "whole", tiny_model)
    assert status == 0, said
    status, said = run(tmp_path / "stopped", tiny_model, rank)
    assert status == 143, said
    for expected in ("rank 0: ", "rank 1: ", "iteration_2.ckpt"):
        assert expected in said
    directory = tmp_path / "stopped" / "csv" / "version_0" / "checkpoints"
    assert [p.name for p in checkpoints_in(directory)] == ["iteration_2.ckpt"]
    status, said = run(tmp_path / "stopped", tiny_model)
    assert status == 0, said
    ours, theirs = (
        torch.load(checkpoints_in(d)[0])["state_dict"]
        for d in (directory, tmp_path / "whole" / "csv" / "version_0" / "checkpoints")
    )
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
