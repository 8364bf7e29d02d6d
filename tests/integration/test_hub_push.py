"""HFExport pushes to a hub on the loopback, with the real client; no token is written anywhere.

Slow: each case trains, exports and pushes in a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from itertools import repeat
from pathlib import Path

import pytest

from tests.support.hub_writes import WritableHub
from tests.support.serving import serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOKEN = "hf_a_secret_of_the_tests"
RUN = """
import sys
from pathlib import Path

from lightning_rl.callbacks import Evaluate, HFExport, RunReport, WeightSync
from tests.support.small_run import data_module, grpo, trainer_of

model, path, every, repository, devices = sys.argv[1:]
export = HFExport(str(Path(path) / "model"), int(every), push_to_hub=repository)
callbacks = [WeightSync(), Evaluate(1), export, RunReport()]
trainer = trainer_of(Path(path), callbacks, devices=int(devices))
trainer.fit(grpo(model), data_module(iterations_per_epoch=2))
"""


@pytest.fixture
def hub():
    hub = WritableHub(TOKEN)
    with serving(hub):
        yield hub


def run(hub, model, path, every=0, repository="me/sevens", processes=1, **environment):
    """Run in processes of its own: the client reads its environment when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    (path / "run.py").write_text(RUN)
    started = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(started if processes > 1 else []), path / "run.py"]
    command += [model, path, every, repository, processes]
    return subprocess.run(
        list(map(str, command)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_each_export_is_a_commit_and_the_token_is_nowhere(hub, tiny_model, tmp_path):
    done = run(hub, tiny_model, tmp_path, every=1)
    assert done.returncode == 0, done.stderr
    # The last iteration is exported on the way, and at the end.
    assert hub.messages == ["Iteration 1", "Iteration 2", "Iteration 2"]
    assert hub.private == {"me/sevens": True}
    there, files = tmp_path / "model", hub.files("me/sevens")
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        name: content for name, content in files.items() if name != ".gitattributes"
    }
    assert json.loads(files["export.json"])["iteration"] == 2
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in done.stdout + done.stderr


def test_a_push_that_is_interrupted_goes_on(hub, tiny_model, tmp_path):
    # The weights have arrived when the connection breaks; they are not sent again.
    hub.fail("POST /api/models/me/sevens/commit", "drop", 503)
    done = run(hub, tiny_model, tmp_path)
    assert done.returncode == 0, done.stderr
    assert hub.messages == ["Iteration 2"]
    assert sum(n for request, n in hub.requests.items() if request.startswith("PUT /lfs/")) == 1


def test_a_hub_that_is_gone_leaves_the_export_and_fails_the_run(hub, tiny_model, tmp_path):
    hub.fail("POST /api/models/me/sevens/commit", repeat(403))
    done = run(hub, tiny_model, tmp_path, every=1)
    assert done.returncode != 0
    assert "could not be pushed to 'me/sevens'" in done.stderr
    assert f"hf upload me/sevens {tmp_path / 'model'}" in done.stderr
    assert (tmp_path / "model/model.safetensors").exists()
    assert (tmp_path / "model_exports/iteration_1/model.safetensors").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"HF_TOKEN": "hf_another"}, "refuses access: .*; check the name"),
        ({"HF_TOKEN": ""}, "needs a token; set HF_TOKEN"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; unset it"),
        ({"repository": "me/and/you"}, "is not a valid repository name"),
    ],
)
def test_what_cannot_be_pushed_is_said_before_training(hub, tiny_model, tmp_path, given, words):
    done = run(hub, tiny_model, tmp_path, **given)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(f"ConfigError: HFExport: push_to_hub=.*{words}", last), last
    assert not (tmp_path / "model").exists()
    assert hub.messages == []


def test_a_refusal_ends_all_processes_at_once(hub, tiny_model, tmp_path):
    done = run(hub, tiny_model, tmp_path, processes=2, HF_TOKEN="")
    assert done.returncode != 0
    assert "ConfigError: rank 0: HFExport: push_to_hub='me/sevens' needs a token" in done.stderr
    assert "ConfigError: HFExport: push_to_hub='me/sevens' needs a token" in done.stderr
    assert not (tmp_path / "model").exists()
