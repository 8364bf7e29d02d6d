"""Examples of the documentation build and run; that they can be read is for test_pages.py.

Blocks of the README and the quickstart are built by ``make test``, all others by ``make test-all``.
Those of the README and the pages in "Start" also run as they stand: test_printed.py.

Slow: the scripts that pages show run as they stand, each in a process of its own.
"""

import json
import re

import pytest
import yaml

from benchmarks.support.built import Built
from lightning_rl.cli import main
from lightning_rl.data.rollouts.files import open_rollouts
from tests.support.pages import (
    FIRST_PAGES,
    ROOT,
    Block,
    blocks_in,
    cli_arguments,
    command_lines,
    configs_of,
    fit_arguments,
    per_block,
    visit,
)


def first_or_slow(blocks: list[Block]):
    """Parametrise by block; those of later pages are slow."""

    def marks(block: Block) -> list[pytest.MarkDecorator]:
        return [] if block.page in FIRST_PAGES else [pytest.mark.slow]

    found = [pytest.param(block, marks=marks(block), id=block.place) for block in blocks]
    return pytest.mark.parametrize("block", found)


@pytest.mark.slow
@per_block([block for block in blocks_in("python") if block.runs])
def test_python_runs(block, tiny_model, tmp_path, monkeypatch):
    visit(block.page, tiny_model, tmp_path, monkeypatch)
    # The same program, with the engine that it names, for one iteration.
    text = re.sub(r"iterations_per_epoch=\d\d+", "iterations_per_epoch=1", block.text)
    exec(compile(text, block.place, "exec"), {"__name__": "__main__"})


@first_or_slow([b for b in blocks_in("yaml") if "run_dir" not in yaml.safe_load(b.text)])
def test_yaml_builds_what_it_names(block, tiny_model, tmp_path, monkeypatch):
    visit(block.page, tiny_model, tmp_path, monkeypatch)
    Built(["fit", *configs_of(block)])


def commands_of(block: Block) -> list[list[str]]:
    """Return the commands of a block that build parts of a run, and do not print and end."""
    given = [cli_arguments(words) for at, words in command_lines() if at is block]
    found = [fit_arguments(arguments) for arguments in given if arguments]
    ends = ("--help", "--print_config")
    return [c for c in found if c and not any(a in ends or a.endswith(".help") for a in c)]


@first_or_slow([block for block in blocks_in("bash") if commands_of(block)])
def test_commands_build_what_they_name(block, tiny_model, tmp_path, monkeypatch):
    visit(block.page, tiny_model, tmp_path, monkeypatch)
    for arguments in commands_of(block):
        Built(arguments)


@pytest.mark.slow
def test_the_mixture_of_its_page_trains_each_set_as_it_says(
    tiny_model, tmp_path, monkeypatch, capsys
):
    visit(ROOT / "docs" / "mixtures.md", tiny_model, tmp_path, monkeypatch)
    asked = [{"prompt": f"{digit}{digit}=", "answer": f"{digit}{digit}"} for digit in range(10)]
    lines = "".join(json.dumps(row) + "\n" for row in asked)
    (tmp_path / "runs/sort_digits/train.jsonl").write_text(lines)
    configs = ["--config", "recipes/sort_digits/grpo.yaml", "--config", "mixture.yaml"]
    monitor = ["--trainer.callbacks+=IterationCheckpoint", "--trainer.callbacks.monitor"]
    quick = ["check", *configs, "--trainer.enable_checkpointing", "true", "--no_rollout", *monitor]
    assert main([*quick, "eval/spell/accuracy"]) == 0
    assert "prompts of sort (75% of the groups): 10 of 10 are short" in capsys.readouterr().out
    assert main([*quick, "eval/spel/accuracy"]) == 2
    assert "did you mean eval/spell/accuracy?" in capsys.readouterr().err
    small = ["--data.groups_per_iteration", "16", "--data.group_size", "16"]
    kept = ["--trainer.callbacks+=RolloutRecorder", "--trainer.callbacks.num_groups", "null"]
    assert main(["fit", *configs, *small, *kept, "--trainer.limit_train_batches", "2"]) == 0
    run = tmp_path / "runs/sort_digits/grpo/version_0"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward/mean" in row]
    assert len(trained) == 2
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in trained)
    assert all(row["rollout/sort/share"] + row["rollout/spell/share"] == 1 for row in trained)
    names = [n for n in rows[0] if n.startswith("eval/") and n.endswith(("accuracy", "pass@2"))]
    assert sorted(names) == ["eval/accuracy", "eval/sort/accuracy", "eval/spell/accuracy",
                             "eval/spell/pass@2"]  # fmt: skip
    rollouts = [found.rollout for found in open_rollouts(run / "recorded.jsonl").read()]
    assert len(rollouts) == 2 * 16 * 16
    of = {name: [r for r in rollouts if r.prompt.set == name] for name in ("sort", "spell")}
    assert [*map(len, of.values())] == [
        sum(256 * row[f"rollout/{name}/share"] for row in trained) for name in of
    ]
    assert {(r.sampling.temperature, *r.reward_parts) for r in of["sort"]} == {(1.0, "exact_match")}
    assert {(r.sampling.temperature, *r.reward_parts) for r in of["spell"]} == {
        (0.8, "environment")
    }
    assert all(all(r.loss_mask) for r in of["sort"])
    assert max(len(r.token_ids) for r in of["spell"]) > 1  # some first digit was right
    for rollout in of["spell"]:
        # A digit a turn, answered by "=" as long as it was right.
        assert rollout.loss_mask == [i % 2 == 0 for i in range(len(rollout.token_ids))]
        # The first tokens are special, and the digits the next ones.
        digit = 3 + int(rollout.prompt.columns["answer"][0])
        right = [token == digit for token in rollout.token_ids[::2]]
        assert right in ([False], [True, False], [True, True])
        assert rollout.reward == sum(right) / 2
    # Written again, alone, by the agent and with the sampling of its set.
    chosen = max(of["spell"], key=lambda r: (r.group_id.startswith("1/"), len(r.token_ids)))
    assert len(chosen.token_ids) > 1
    assert main(["rerun", str(run), "--rollout", chosen.id]) == 0
