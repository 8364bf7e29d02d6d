"""Test what a stranger's file can do, and where a secret could be found."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from http.server import HTTPServer
from pathlib import Path

import pytest
import torch
import yaml

from lightning_rl.cli import main
from lightning_rl.cli.trust import TRUSTED, require_trusted, split_options
from lightning_rl.errors import ConfigError
from tests.support.bad_configs import CONFIG, complaint
from tests.support.serving import Quiet, serving

OWN = {"class_path": "lightning_rl.OverlongPenalty", "init_args": {"max_tokens": 4, "buffer": 2}}
"""A reward that is no stranger's."""
SECRET = "sk-never-to-be-seen-4711"


# --------------------------------------------------------------------------------- trusted only


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.exec",
        "subprocess.Popen",
        "torch.load",
        "torch.hub.load",
        "recipes.sort_digits.reward.exact_match",
        # What trusted modules have imported is not theirs.
        "lightning_rl.run.seeding.os.system",
        "lightning_rl.rewards.pool.subprocess.Popen",
        "lightning_rl.cli.rerun.run.torch.load",
        "torch.optim.lr_scheduler.warnings.warn",
        "lightning_rl.rewards.pool.os.system",
        "lightning_rl.rewards.pool.os",
        # Theirs, but for this library's own use: it runs a column of the data right here.
        "lightning_rl.rewards.program_judge.ProgramJudge",
        "lightning_rl.cli.main",
        "lightning_rl.config.hints.import_object",
        "lightning.pytorch.cli.LightningCLI",
        "lightning.pytorch.cli.instantiate_module",
        "lightning.pytorch.utilities.model_helpers.get_torchvision_model",
    ],
)
def test_no_other_code_can_be_named(name):
    hidden = {"data": {"init_args": {"options": {"anything": [{"class_path": name}]}}}}
    with pytest.raises(ConfigError, match=r"options\.anything\[0\]\.class_path.*not among the tru"):
        require_trusted(hidden, TRUSTED)


@pytest.mark.parametrize(
    "value",
    [
        "PolicyModule",
        "lightning_rl.callbacks.Evaluate",
        "lightning.pytorch.loggers.CSVLogger",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "runs/train.jsonl",
        "train.jsonl",
        "Qwen/Qwen2.5-0.5B",
        "1.5",
        "Hello. How are you?",
        "30m",
    ],
)
def test_the_library_and_plain_values_can(value):
    require_trusted({"model": {"init_args": {"x": [value]}}}, TRUSTED)


def test_what_is_refused_is_not_imported(workplace):
    (workplace / "evil_module.py").write_text("raise SystemExit('it ran')\n")
    for option in ("--data.rewards+=evil_module.f", "--model evil_module.Model"):
        status, message = complaint(f"--trust my_rewards {option}")
        assert (status, "add --trust evil_module" in message) == (2, True)
    assert "evil_module" not in sys.modules


def test_other_ways_to_run_code_are_refused(workplace):
    (workplace / "part.yaml").write_text("class_path: evil_module.Model\n")
    for tree, words in (
        ({"options": {"trust_remote_code": True}}, r"options\.trust_remote_code: True runs code"),
        ({"weights_only": False}, "weights_only: false unpickles"),
        ({"model": "part.yaml"}, "pass it with --config"),
    ):
        with pytest.raises(ConfigError, match=words):
            require_trusted(tree, TRUSTED)
    require_trusted({"trust_remote_code": False, "weights_only": True, "x": "no.yaml"}, TRUSTED)


ENGINE = "data.init_args.engine.init_args"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        # A text that the parser reads as YAML is looked into.
        ({"rewards": '["os.system"]'}, r"rewards\[0\]: 'os.system' is not among"),
        ({"callbacks": '{"class_path": "os.system"}'}, r"callbacks\.class_path: 'os.system'"),
        ({"options": '{"worker_cls": "evil"}'}, r"options\.worker_cls: 'evil' may run code"),
        ({"trust_remote_code": "yes"}, "True runs code"),
        ({"weights_only": "off"}, "false unpickles"),
        # What trusted classes hand on.
        ({"environment": {"LD_PRELOAD": "./evil.so"}}, r"environment\.LD_PRELOAD: './evil.so' may"),
        ({"environment": {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."}}, r"environment\.PYTHONPATH"),
        ({"options": {"tool_parser_plugin": "./x.py"}}, r"options\.tool_parser_plugin"),
        ({"options": {"worker_extension_cls": "evil"}}, r"options\.worker_extension_cls"),
        ({"ray_options": {"runtime_env": {"py_modules": ["."]}}}, r"ray_options\.runtime_env"),
        ({"address": "10.0.0.9:6379"}, r"address: '10.0.0.9:6379': a Ray cluster can run"),
        ({"model_kwargs": {"attn_implementation": "evil/kernel"}}, r"model_kwargs\.attn_impl"),
        ({"model_kwargs": {"trust_remote_code": True}}, "True runs code"),
        ({"ckpt_path": "https://evil.example/x.ckpt"}, "ckpt_path: .* would be unpickled"),
        ({"r": {"class_path": "PythonTests", "init_args": {"sandbox": False}}}, "unprotected"),
    ],
)  # fmt: skip
def test_arguments_that_hand_code_on_are_refused(tree, words):
    with pytest.raises(ConfigError, match=words):
        require_trusted(tree, TRUSTED)


def test_harmless_arguments_are_not():
    require_trusted(
        {
            "environment": {"OMP_NUM_THREADS": "1"},
            "options": {"enforce_eager": True, "block_size": 32},
            "ray_options": {"num_cpus": 2},
            "address": "127.0.0.1:6379",
            "model_kwargs": {"dtype": "bfloat16"},
            "judge": {"class_path": "OpenAIJudge", "init_args": {"options": {"top_k": 1}}},
            "tests": {"class_path": "PythonTests", "init_args": {"sandbox": True}},
        },
        TRUSTED,
    )


def agent(name: str, **arguments) -> dict:
    return {"agent": {"class_path": name, "init_args": arguments}}


def env(kind: str, **arguments) -> dict:
    return {"env": {"class_path": kind, "init_args": arguments}}


COMMANDS = [
    (agent("ProgramAgent", command="touch ran"), "command: 'touch ran' may be run"),
    (agent("ProgramAgent", command=["touch", "ran"]), "command[0]: 'touch' may be run"),
    (agent("ProgramAgent", command="a", env={"PATH": "."}), "may be run"),
    (agent("ScriptAgent", script="./evil.py"), "script: './evil.py' may be run"),
    (agent("ScriptAgent", script="a", python="./evil.sh"), "may be run"),
    (agent("ScriptAgent", script="a", preload=["evil"]), "may be run"),
    (agent("ScriptAgent", script="a", env={"PYTHONPATH": "."}), "may be run"),
    (env("Gym", name="evil:Env"), "name: 'evil:Env' names a module to import before the colon"),
    (env("PooledGym", name="evil:Env"), "name: 'evil:Env' names a module to import"),
    (env("Gym", name="A-v0", arguments={"file": "x"}), "arguments.file: 'x' may be run"),
    (env("TorchRLEnv", make="./evil"), "make: './evil' would be imported"),
]


@pytest.mark.parametrize(("given", "words"), COMMANDS)
def test_no_command_and_no_script_is_run(given, words, workplace, capsys):
    arguments = CONFIG["data"]["init_args"] | {"rewards": [OWN], **given}
    data = {"class_path": "RLDataModule", "init_args": arguments}
    model = CONFIG["model"]
    if "env" in given:
        data = {"class_path": "EnvDataModule", "init_args": given}
        model = {"class_path": "ActorCriticModule"}
    (workplace / "bad.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    assert main(["check", "--config", "bad.yaml", "--trusted_only"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") <= 2
    assert not (workplace / "ran").exists()


def test_lightnings_own_classes_say_what_they_take_too(workplace, capsys):
    trainer = CONFIG["trainer"] | {
        "profiler": {"class_path": "PyTorchProfiler", "init_args": {"filename": "x"}}
    }
    data = CONFIG["data"] | {"init_args": CONFIG["data"]["init_args"] | {"rewards": [OWN]}}
    config = CONFIG | {"trainer": trainer, "data": data}
    (workplace / "bad.yaml").write_text(yaml.safe_dump(config))
    assert main(["check", "--config", "bad.yaml", "--trusted_only"]) == 2
    assert "PyTorchProfiler.filename is not known to be safe for texts" in capsys.readouterr().err


def test_a_module_that_is_trusted_may_be_given_any_text(workplace, capsys):
    (workplace / "mine.py").write_text(
        "from lightning_rl import SingleTurn\n"
        "class Own(SingleTurn):\n"
        "    def __init__(self, motto: str):\n"
        "        self.motto = motto\n"
    )
    arguments = CONFIG["data"]["init_args"] | {"rewards": [OWN], **agent("mine.Own", motto="x")}
    config = CONFIG | {"data": {"class_path": "RLDataModule", "init_args": arguments}}
    (workplace / "good.yaml").write_text(yaml.safe_dump(config))
    assert main(["check", "--config", "good.yaml", "--trust", "mine"]) == 0, capsys.readouterr()


EVIL = "open('ran', 'w').close()\n"
ATTACKS = {
    "--data.rewards+=lightning_rl.rewards.pool.os.system": "os.system' is not among the trusted",
    "--data.rewards+=evil_module.f": "--trust evil_module",
    "--data.rewards+=lightning_rl.rewards.program_judge.ProgramJudge": "not among the trusted",
    "--trainer.callbacks+=evil_module.Callback": "--trust evil_module",
    '--trainer.callbacks=\'[{"class_path": "evil_module.Callback"}]\'': "--trust evil_module",
    "--trainer.callbacks+=part.txt": "'part.txt' is a configuration file, which is not read here",
    "--data.engine part.txt": "there is no module 'part'",
    "--ckpt_path named.ckpt": "'evil_module.Model' is not among",
    "--data.agent ProgramAgent --data.agent.command 'touch ran'": "may be run",
}
STRANGER = """
import json, shlex, sys
from pathlib import Path
place, attacks = sys.argv[1], json.loads(sys.argv[2])
sys.argv = ["lightning-rl"]
import lightning_rl
assert Path(lightning_rl.__file__).is_relative_to(place), lightning_rl.__file__
from tests.support.bad_configs import complaint
print("\\n" + json.dumps({attack: complaint(f"--trusted_only {attack}") for attack in attacks}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a directory with what a wheel of this checkout installs, and the tests' helpers."""
    root, copy = Path(__file__).parents[2], tmp_path_factory.mktemp("copy")
    for name in ("lightning_rl", "callbacks", "recipes"):
        shutil.copytree(root / name, copy / name, symlinks=True,
                        ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(root / name, copy)
    build = "from setuptools import build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True,
                          check=True)  # fmt: skip
    place = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(copy / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(place)
    (place / "tests").symlink_to(root / "tests")
    (place / "benchmarks").symlink_to(root / "benchmarks")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_strangers_folder_runs_nothing_however_we_are_installed(installed, workplace, kind):
    data = CONFIG["data"] | {"init_args": CONFIG["data"]["init_args"] | {"rewards": [OWN]}}
    (workplace / "good.yaml").write_text(yaml.safe_dump(CONFIG | {"data": data}))
    for name in ("evil_module", "yaml", "sitecustomize"):  # the last two shadow what is imported
        (workplace / f"{name}.py").write_text(EVIL)
    (workplace / "part.txt").write_text("class_path: evil_module.Model\n")
    parts = {"_class_path": "evil_module.Model"}
    torch.save({"state_dict": {}, "hyper_parameters": parts}, workplace / "named.ckpt")
    root = Path(__file__).parents[2]
    place = installed if kind == "wheel" else root
    path = [str(installed)] if kind == "wheel" else [p for p in sys.path if p == str(root)]
    arguments = [sys.executable, "-P", "-c", STRANGER, str(place), json.dumps(list(ATTACKS))]
    done = subprocess.run(arguments, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    wrong = {a: answers[a] for a, words in ATTACKS.items() if words not in answers[a][1]}
    assert not wrong
    assert {status for status, _ in answers.values()} == {2}
    assert not (workplace / "ran").exists()


def test_options_are_taken_out():
    rest, trusted = split_options(["--data.x", "1", "--trust", "mine", "--trust=their.part"])
    assert (rest, trusted) == (["--data.x", "1"], [*TRUSTED, "mine", "their.part"])
    assert split_options(["--trusted_only"]) == ([], list(TRUSTED))
    assert split_options(["--data.x", "1"]) == (["--data.x", "1"], None)
    with pytest.raises(ConfigError, match="--trust needs a module's name"):
        split_options(["--trust"])


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self):
        return (open, (self.file, "w"))


def test_a_checkpoint_runs_nothing_and_names_nothing(workplace):
    torch.save({"state_dict": {}, "hyper_parameters": {"x": Payload("ran")}}, "pickled.ckpt")
    status, message = complaint("--ckpt_path pickled.ckpt")
    assert (status, "Traceback" in message) == (2, False)
    assert not Path("ran").exists()
    torch.save({"state_dict": {}, "hyper_parameters": {"_class_path": "os.system"}}, "named.ckpt")
    status, message = complaint("--trust my_rewards --ckpt_path named.ckpt")
    assert status == 2
    assert "named.ckpt: _class_path: 'os.system' is not among the trusted modules" in message


# -------------------------------------------------------------------------------------- secrets


class Echo(Quiet):
    """A judge that shows what it was sent, and fails on every fourth request."""

    def do_POST(self) -> None:
        self.body()
        seen = self.server.seen  # type: ignore[attr-defined]
        seen.append(self.headers["Authorization"])
        said = f"you sent {self.headers['Authorization']}. Score: {len(seen) % 10}"
        body = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        fails = len(seen) % 4 == 0
        self.send(400 if fails else 200, (said if fails else json.dumps(body)).encode())


@pytest.mark.slow
def test_a_key_is_in_no_file_of_a_run(workplace, monkeypatch, capsys):
    monkeypatch.setenv("MY_JUDGE_KEY", SECRET)
    server = HTTPServer(("127.0.0.1", 0), Echo)
    server.seen = []  # type: ignore[attr-defined]
    model = {
        "class_path": "OpenAIJudge",
        "init_args": {
            "base_url": f"http://127.0.0.1:{server.server_port}/v1",
            "model": "grader",
            "api_key_env": "MY_JUDGE_KEY",
        },
    }
    judge = {"judge": model, "retries": 0}
    data = CONFIG["data"]["init_args"] | {
        "rewards": [{"class_path": "lightning_rl.LLMJudge", "init_args": judge}],
        "max_failed_share": 1.0,
    }
    del data["evaluation"]
    logger = [
        {"class_path": name, "init_args": {"save_dir": "runs", "name": "", "version": "all"}}
        for name in ("TensorBoardLogger", "CSVLogger")
    ]
    trainer = CONFIG["trainer"] | {
        "enable_checkpointing": True,
        "logger": logger,
        "callbacks": ["WeightSync", "RunReport", "PreviewTable", "RolloutRecorder"],
    }
    whole = CONFIG | {"data": CONFIG["data"] | {"init_args": data}, "trainer": trainer}
    Path("judged.yaml").write_text(yaml.safe_dump(whole))
    with serving(server):
        assert main(["fit", "--config", "judged.yaml"]) == 0
    assert set(server.seen) == {f"Bearer {SECRET}"}  # type: ignore[attr-defined]
    files = [file for file in (workplace / "runs").rglob("*") if file.is_file()]
    kinds = {file.suffix for file in files}
    assert {".ckpt", ".yaml", ".jsonl", ".json", ".csv", ".parquet"} <= kinds
    assert any("tfevents" in file.name for file in files)
    assert [file.name for file in files if SECRET.encode() in file.read_bytes()] == []
    checkpoint = torch.load(next(f for f in files if f.suffix == ".ckpt"), weights_only=True)
    assert SECRET not in repr(checkpoint)
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
