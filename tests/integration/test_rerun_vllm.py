"""A run on vLLM, with one turn, several and branches; its rollouts and iterations done again."""

import json
import re
import sys

import pytest
import yaml

from lightning_rl.cli import main
from lightning_rl.cli.rerun.compare import rerun_iteration
from lightning_rl.cli.rerun.rollouts import rerun_rollout
from lightning_rl.cli.rerun.run import RecordedRun
from lightning_rl.data.rollouts.files import open_rollouts
from tests.support.recorded_run import stand_in

pytest.importorskip("vllm")

CODE = """
from lightning_rl.extend import Agent, Environment, Episode, Reply

class Again(Environment):
    def __init__(self, prompt):
        self.told = []

    def step(self, turn):
        self.told.append(turn)
        return Reply("".join(self.told) + "=", reward=0.5, done=len(self.told) == 3)

class Calls(Agent):
    async def run(self, rollout, engine, sampling):
        episode, own = Episode(rollout), rollout.prompt.token_ids
        _, first = await episode.call(engine, own, sampling)
        _, second = await episode.call(engine, [*own, *first.token_ids, 2, 5], sampling)
        await episode.call(engine, [*own, 2, *second.token_ids[:2]], sampling, "critic")
        episode.end()
        return rollout

def sevens(completions, completion_ids, **columns):
    return [text.count("7") / len(ids) for text, ids in zip(completions, completion_ids)]
"""

ECHOING = {
    "class_path": "MultiTurn",
    "init_args": {"environment": "done_again.Again", "max_turns": 4, "max_turn_tokens": 2},
}


def config(model: str, turns: str) -> dict:
    prompts = {"class_path": "JSONLPrompts", "init_args": {"path": "train.jsonl"}}
    return {
        "model": {
            "class_path": "PolicyModule",
            "init_args": {
                "model": model,
                "advantage": "TreeRLOO",
                "update": {"minibatches": 2},
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
            },
        },
        "data": {
            "class_path": "RLDataModule",
            "init_args": {
                "train_prompts": prompts,
                "rewards": ["done_again.sevens"],
                "engine": {"class_path": "VLLMLocal", "init_args": {"max_model_len": 64}},
                "agent": AGENTS[turns],
                "plan": BRANCHES if turns == "branches" else None,
                "sampling": {"max_tokens": 12},
                "group_size": 4,
                "groups_per_iteration": 4,
                "iterations_per_epoch": 3,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": ""}},
            "callbacks": ["WeightSync"],
        },
    }


AGENTS = {
    "single": {"class_path": "SingleTurn"},
    "branches": ECHOING,
    "calls": {"class_path": "done_again.Calls"},
}
BRANCHES = {
    "class_path": "Branching",
    "init_args": {"at": {"class_path": "FixedCalls", "init_args": {"numbers": [2]}}},
}


@pytest.mark.parametrize(
    "turns",
    ["branches", *(pytest.param(turns, marks=pytest.mark.slow) for turns in ("single", "calls"))],
)
def test_a_run_is_done_again(turns, tiny_model, tmp_path, monkeypatch, capsys):
    stand_in(tmp_path, monkeypatch)
    monkeypatch.delitem(sys.modules, "done_again", raising=False)  # of the other case
    rows = [json.dumps({"prompt": f"{n}="}) + "\n" for n in range(30, 42)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    (tmp_path / "done_again.py").write_text(CODE)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(str(tiny_model), turns)))
    assert main(["fit", "--config", "config.yaml"]) == 0

    run = RecordedRun(tmp_path / "runs" / "version_0")
    # Nothing but the last version was kept, so both begin with the initial weights.
    iteration = rerun_iteration(run, 3)
    assert iteration.kept.version == 0
    assert iteration.checkpoint is not None
    assert iteration.equal, iteration.lines()
    rollouts = run.log.rollouts(3)
    recorded = max(rollouts, key=lambda r: (r.fork is not None, r.length))
    assert all(recorded.loss_mask) == (turns == "single")
    assert len(recorded.rows) == 1 + (turns == "calls")
    [rerun] = rerun_rollout(run, recorded.id)
    assert rerun.generated
    assert rerun.equal, rerun.lines()
    assert rerun.again.loss_mask == recorded.loss_mask
    assert rerun.gap < 1e-4
    if turns != "single":
        capsys.readouterr()
        assert main(["rerun", str(run.path), "--rollout", recorded.id, "--calls"]) == 0
        said = capsys.readouterr().out
        assert said.count(" tokens, equal") == len(recorded.calls) == 3
        assert f"call 1, seed {recorded.seed}: " in said
        [scored, *_] = rerun_rollout(run, recorded.id, version=2)
        assert not scored.generated
        assert scored.gap < 1e-4
    if turns == "branches":
        goes_on_otherwise(run, {r.id: r for r in rollouts}, recorded, capsys)


def goes_on_otherwise(run, rollouts, branch, capsys):
    """Require that a rollout forked again is what its branch was, and further ones are others."""
    trunk = rollouts[f"{branch.group_id}/{branch.sample_index}"]
    arguments = ["--rollout", trunk.id, "--branch", "2", "--count", "3", "--out", "what_if.jsonl"]
    assert main(["rerun", str(run.path), *arguments]) == 0
    said = capsys.readouterr().out
    assert f"rollout {trunk.id} forked before call 2 of {len(trunk.calls)}" in said
    assert said.count(" more call") == 4
    assert re.search(
        r"mean reward of 3 branches [\d.]+; the recorded answer's reward [\d.]+ differs from it by "
        r"[+-]",
        said,
    )
    first, *others = [found.rollout for found in open_rollouts("what_if.jsonl").read()]
    assert (first.id, first.token_ids) == (branch.id, branch.token_ids)
    assert (first.reward, first.logprobs) == (
        branch.reward,
        pytest.approx(branch.logprobs, abs=1e-4),
    )
    shared = trunk.calls[0].stop
    for other in others:
        assert other.token_ids[:shared] == trunk.token_ids[:shared]
        assert other.calls[1].seed not in {trunk.calls[1].seed, first.calls[1].seed}
