"""Test seeds of a command: one that was drawn is told and kept."""

import copy
import json
import logging

import pytest
import yaml

from lightning_rl.cli import main
from lightning_rl.run.seeding import drawn_seed
from tests.support.bad_configs import CONFIG, furnish
from tests.support.recorded_run import stand_in

pytestmark = pytest.mark.slow


@pytest.fixture
def workplace(tiny_model, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    furnish(tmp_path, tiny_model)
    config = copy.deepcopy(CONFIG)
    config["trainer"] |= {
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": ""}},
        "callbacks": ["WeightSync", "RunReport"],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def fit(workplace, seed, version: int):
    assert main(["fit", "--config", "config.yaml", "--seed_everything", str(seed)]) == 0
    run = workplace / "runs" / f"version_{version}"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kept = ("reward/mean", "policy/loss", "policy/grad_norm", "rollout/tokens_mean")
    saved = yaml.safe_load((run / "config.yaml").read_text())["seed_everything"]
    return saved, [{name: row.get(name) for name in kept} for row in rows]


def test_true_draws_a_seed_says_it_and_keeps_it(workplace, caplog):
    with caplog.at_level(logging.INFO):
        drawn, rows = fit(workplace, "true", 0)
    assert f"seed_everything=true: drew {drawn}; set this number to repeat the run" in caplog.text
    again, same = fit(workplace, drawn, 1)
    assert (again, same) == (drawn, rows)
    assert drawn_seed() != drawn_seed()  # once in 4,294,967,296 times they are equal


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_does_not_take_is_refused(workplace, capsys, seed):
    assert main(["fit", "--config", "config.yaml", "--seed_everything", str(seed)]) == 2
    assert f"seed_everything={seed} must be in [0, 4294967295]" in capsys.readouterr().err
