"""Test what ``benchmarks.gpu.peers`` works out: lengths that end by lot, operations, ratios."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.peers.__main__ import PEAK_FLOPS, sides_of, summary_of
from benchmarks.gpu.peers.model import bias_for, expected_length
from benchmarks.gpu.peers.task import Lines, Task, following, lines_of, process_seconds
from benchmarks.gpu.peers.watch import model_flops


def test_the_mean_length_is_that_of_a_geometric_law_cut_at_the_longest():
    odds = torch.full((3, 2), math.log(0.25 / 0.75), dtype=torch.double)
    slopes = torch.ones_like(odds)
    # P(end) = 1/4 at each of 5 tokens: (1 - (3/4)^5) / (1/4), though 3 of them were seen.
    assert expected_length(odds, slopes, 0.0, 5) == pytest.approx(4 * (1 - 0.75**5))
    # P(end) = 1/2 takes ln 3 more.
    bias = bias_for(odds, slopes, 2 * (1 - 0.5**5), 5)
    assert bias == pytest.approx(math.log(3), abs=1e-9)


def test_operations_are_counted_by_hand():
    config = SimpleNamespace(
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=3,
        vocab_size=10,
    )
    # Queries and outputs 4 x 6 each, keys and values 4 x 3 each, three matrices of 4 x 6.
    found = model_flops(config, 9, [(2, [3, 4])])
    assert found["layers"] == 6 * 2 * (2 * 24 + 2 * 12 + 3 * 24) * 9
    assert found["head"] == 6 * 10 * 4 * 7
    pairs = 2 * 2 / 2 + 3 * (2 + 1.5) + 4 * (2 + 2)
    assert found["attention"] == 12 * 2 * 2 * 3 * pairs


def iteration(side, phase, wall_s, **more):
    return {"side": side, "phase": phase, "wall_s": wall_s, "written": 100} | more


def test_the_last_line_leaves_out_what_warms_up_and_what_was_not_reached():
    update = {"update_s": 2.0, "passed": 150, "flops": PEAK_FLOPS, "peak_gib": 30.0}
    lines = [
        iteration("full/ours", "lot", 9.0, **update | {"update_s": 7.0}),
        {"side": "full/ours", "start_s": 40.0, "stages": {"import": 20.0}, "vllm": {}},
        iteration("full/ours", "lot", 2.0, **update),
        iteration("full/trl", "lot", 50.0),
        iteration("full/trl", "lot", 6.0),
        iteration("full/trl", "lot", 8.0),
        iteration("full/trl-best", "lot", 5.0),
    ]
    records = [
        {"side": "full/ours", "outcome": "pass"},
        {"side": "full/trl-best", "outcome": "fail"},
        {"skipped": "lora/ours", "why": "9 s are left"},
    ]
    summary = summary_of(lines, records, "cuda")
    assert (summary["ratio_full"], summary["ratio_full_best"], summary["ratio_lora"]) == (
        3.5,
        None,
        None,
    )
    assert (summary["update_tokens_s"], summary["update_written_s"]) == (75.0, 50.0)
    assert (summary["mfu"], summary["peak_gib"], summary["start_s"]) == (0.5, 30.0, 40.0)
    assert summary["stages"] == {"import": 20.0}
    assert summary["skipped"] == {"lora/ours": "9 s are left"}
    assert summary["failed"] == ["full/trl-best"]
    assert summary_of([], [], "cuda")["start_s"] is None
    assert summary_of(lines, records, "cpu")["mfu"] is None


def test_sides_come_in_turns_and_trl_has_its_defaults_first():
    sides = sides_of({"full": Task("qwen3-0.6b")}, {"use_liger_kernel": True})
    assert [side.name for side in sides] == [
        "full/model",
        "full/ours",
        "full/trl",
        "full/trl-best",
    ]
    assert [dict(side.task.trl) for side in sides[2:]] == [{}, {"use_liger_kernel": True}]
    for side in sides:
        json.dumps(side.check.options)


def test_lines_are_told_while_a_side_writes_them(tmp_path):
    told = []
    with following(lines_of(tmp_path, "full/ours"), told.append):
        lines = Lines(Bench("cpu", tmp_path, tmp_path / "record"), "full/ours")
        lines.tell(wall_s=1.23456, parts={"sync_s": 0.123456})
        lines.tell(written=3)
    assert told == [
        {"side": "full/ours", "wall_s": 1.235, "parts": {"sync_s": 0.1235}},
        {"side": "full/ours", "written": 3},
    ]


def test_a_process_knows_its_age():
    assert 0 < process_seconds() < 1e7
