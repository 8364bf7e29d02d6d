"""Test the files of packs: archives as a stranger may forge them, trees, texts, and verdicts."""

import math
import os
import pickle
import stat
import zipfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_rl.cli import main
from lightning_rl.cli.pack.archive import extract_archive, write_archive
from lightning_rl.cli.pack.base import Base
from lightning_rl.cli.pack.configuration import anonymous, write_code
from lightning_rl.cli.pack.observation import BatchRow, Observation, verdict
from lightning_rl.cli.pack.rollouts import packed
from lightning_rl.cli.pack.trees import read_tree, write_tree
from lightning_rl.cli.rerun.compare import IterationRerun
from lightning_rl.cli.rerun.run import KeptWeights
from lightning_rl.data.rollouts.log import Outcome
from lightning_rl.errors import CheckpointError, DataError

ABOUT = (
    '{"format": 1, "iteration": 1, "processes": 1, "environment": {}, "bases": {}, '
    '"median_grad_norm": null, "left_out": []}'
)
GOOD = {
    "pack.json": ABOUT,
    "config.yaml": "model: {}\n",
    "expected.json": "{}",
    "rerun/versions.jsonl": "",
}


class Evil:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("it_ran",)


def archive(path: Path, members: dict[str, str | bytes], how: int = zipfile.ZIP_DEFLATED) -> Path:
    """Write a zip archive with these members and no checks."""
    with zipfile.ZipFile(path, "w", how) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def link(path: Path) -> Path:
    archive(path, GOOD)
    with zipfile.ZipFile(path, "a") as file:
        member = zipfile.ZipInfo("models/0/config.json")
        member.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(member, "/etc/passwd")
    return path


def cut(path: Path) -> Path:
    archive(path, GOOD)
    path.write_bytes(path.read_bytes()[:-40])
    return path


def twice(path: Path) -> Path:
    archive(path, GOOD)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as file:
        file.writestr("config.yaml", "model: {}\n")
    return path


def without(name: str) -> dict[str, str]:
    return {member: content for member, content in GOOD.items() if member != name}


FORGED = {
    "a path out of the directory": ({**GOOD, "../evil.json": ""}, "is none of those"),
    "a whole path": ({**GOOD, "/tmp/evil.json": ""}, "is none of those"),
    "a hidden path": ({**GOOD, "models/0/../../x.json": ""}, "is none of those"),
    "a pickle": ({**GOOD, "models/0/pytorch_model.bin": b"x"}, "is none of those"),
    "a checkpoint": ({**GOOD, "checkpoints/iteration_1.ckpt": b"x"}, "is none of those"),
    "a bomb": ({**GOOD, "checkpoint.json": b" " * (2**27 + 1)}, "expands to 134,217,729 bytes"),
    "a compressed file of weights": ({**GOOD, "checkpoint.safetensors": b" " * 999}, "compressed"),
    "a member that is missing": (without("config.yaml"), "lacks its member config.yaml"),
    "no pack.json": (without("pack.json"), "lacks its member pack.json"),
    "JSON that is none": ({**GOOD, "pack.json": "{'format': 1}"}, "pack.json is damaged"),
    "a list": ({**GOOD, "pack.json": "[]"}, "pack.json is damaged"),
    "an iteration that is none": (
        {**GOOD, "pack.json": ABOUT.replace('"iteration": 1', '"iteration": "1"')},
        "must be positive",
    ),
    "thousands of processes": (
        {**GOOD, "pack.json": ABOUT.replace('"processes": 1', '"processes": 5000')},
        "processes is 5000, but must be at most 64",
    ),
    "a base's weights in no member": (
        {**GOOD, "pack.json": ABOUT.replace('"bases": {}', '"bases": {"../x": {"w": "ab"}}')},
        "was written without the weights of None",
    ),
    "another format": (
        {**GOOD, "pack.json": ABOUT.replace('"format": 1', '"format": 2')},
        "has format 2, but this release reads format 1",
    ),
}


@pytest.mark.parametrize(("members", "says"), FORGED.values(), ids=list(FORGED))
def test_a_forged_archive_is_refused(members, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = archive(tmp_path / "step.zip", members)
    assert main(["unpack", str(file), "--out", "out", "--run"]) == 2
    assert says in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"here", "step.zip"}
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    ("forge", "says"),
    [(link, "is a link"), (cut, "is not a pack, or damaged"), (twice, "is there twice")],
)
def test_a_forged_archive_of_good_names_is_refused(forge, says, tmp_path):
    with pytest.raises(DataError, match=says):
        extract_archive(forge(tmp_path / "step.zip"), tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


def test_weights_are_put_back_into_members_only(tmp_path):
    """Whatever names, shapes or precision they have there, and nothing else is written."""
    (tmp_path / "model").mkdir()
    (tmp_path / "parts").mkdir()
    weight, other = torch.arange(4.0).bfloat16(), torch.tensor([3, 4])
    save_file({"a": weight, "b": other}, tmp_path / "model/model.safetensors")
    held = {"first": weight, "same": weight.float(), "not": weight + 1}
    save_file(held, tmp_path / "parts/checkpoint.safetensors")
    base = Base(str(tmp_path / "model"))
    bases = base.leave_out(tmp_path / "parts")
    assert bases.keys() == {"checkpoint.safetensors"}
    assert bases["checkpoint.safetensors"].keys() == {"first", "same"}
    assert load_file(tmp_path / "parts/checkpoint.safetensors").keys() == {"not"}
    base.put_back(tmp_path / "parts", {"bases": bases})
    back = load_file(tmp_path / "parts/checkpoint.safetensors")
    assert back.keys() == held.keys()
    assert all(torch.equal(back[n], held[n]) and back[n].dtype == held[n].dtype for n in held)
    for member in ("../model/model.safetensors", "models/0/model.safetensors", "pack.json"):
        with pytest.raises(DataError, match="lacks its member"):
            base.put_back(tmp_path / "parts", {"bases": {member: {"first": "ab12"}}})


def test_what_was_written_is_extracted(tmp_path):
    parts = tmp_path / "parts"
    (parts / "rerun").mkdir(parents=True)
    for name, content in GOOD.items():
        (parts / name).write_text(content)
    (parts / "notes.txt").write_text("not a member")
    write_archive(parts, tmp_path / "step.zip")
    about = extract_archive(tmp_path / "step.zip", tmp_path / "again")
    assert about["iteration"] == 1
    found = {
        p.relative_to(tmp_path / "again").as_posix() for p in (tmp_path / "again").rglob("*.*")
    }
    assert found == set(GOOD)


# ---------------------------------------------------------------- trees


def test_a_tree_comes_back_as_it_was(tmp_path):
    weight = torch.arange(6.0).view(2, 3)
    tree = {
        "state_dict": {
            "embed": weight,
            "head": weight,
            "row": weight[1],
            "step": torch.tensor(3.0),
        },
        "optimizer_states": [{0: {"betas": (0.9, 0.999), "nan": math.nan, "inf": -math.inf}}],
        "bits": torch.zeros(3, dtype=torch.bfloat16),
        "none": [None, True, 2**70, "text"],
    }
    write_tree(tree, tmp_path / "checkpoint")
    back = read_tree(tmp_path / "checkpoint")
    state = back["state_dict"]
    assert all(torch.equal(state[name], tree["state_dict"][name]) for name in tree["state_dict"])
    assert state["head"] is state["embed"]  # tied weights are written once
    assert back["bits"].dtype == torch.bfloat16
    [group] = back["optimizer_states"]
    assert group[0]["betas"] == (0.9, 0.999)
    assert math.isnan(group[0]["nan"])
    assert group[0]["inf"] == -math.inf
    assert back["none"] == tree["none"]


def test_a_value_that_only_a_pickle_holds_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.made is a Evil, which a pack cannot hold"):
        write_tree({"state": {"made": Evil()}}, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"tensor": "there", "float": "nan"}', "too many values"),
        ('{"tensor": "elsewhere"}', "elsewhere"),
        ('{"class_path": "os.system"}', "'class_path' is no kind of value"),
        ('{"float": "1.0"}', "'float' is no kind of value"),
        ("[NaN]", "NaN is not valid JSON"),
        ("[" * 100 + "]" * 100, "nested more than"),
    ],
)
def test_json_that_is_no_tree_is_refused(text, says, tmp_path):
    write_tree({"there": torch.zeros(2)}, tmp_path / "checkpoint")
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        read_tree(tmp_path / "checkpoint")


def test_a_pickle_in_place_of_safetensors_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tree({"there": torch.zeros(2)}, tmp_path / "checkpoint")
    (tmp_path / "checkpoint.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="do not hold a checkpoint"):
        read_tree(tmp_path / "checkpoint")
    assert not (tmp_path / "it_ran").exists()


# ---------------------------------------------------------------- texts


def test_folders_hosts_and_secrets_are_removed():
    tree = {
        "model": "/home/me/models/small",
        "text": "see ~/notes.txt, and/or a/b",
        "url": "http://me:word@node7.lab:8000/v1",
        "here": "http://localhost:8000/v1",
        "hub": "Qwen/Qwen2.5-0.5B",
    }
    assert anonymous(tree) == {
        "model": "small",
        "text": "see notes.txt, and/or a/b",
        "url": "http://***@host:8000/v1",
        "here": "http://localhost:8000/v1",
        "hub": "Qwen/Qwen2.5-0.5B",
    }


def test_texts_are_hashed_and_tokens_stay(make_rollout):
    rollout = make_rollout([5, 6], [7, 8], columns={"answer": "7"}, reward=1.0)
    rollout = replace(rollout, completion=[{"role": "assistant", "content": "7"}], error="slow")
    hashed = packed(rollout, hashed=True)
    seven = "7902699be42c8a8e46fbbb4501726517e86b22c56a189f7625a6da49081b2451"
    assert hashed.prompt.columns == {"answer": seven}
    assert hashed.completion == [{"role": "assistant", "content": seven}]
    assert len(hashed.error) == len(hashed.prompt.prompt) == 64
    assert (hashed.rows, hashed.reward, hashed.id) == (rollout.rows, rollout.reward, rollout.id)
    assert packed(rollout, hashed=False) == rollout


# ---------------------------------------------------------------- verdicts


def rerun(weights: str, loss: float, before: str = "a") -> IterationRerun:
    """Return iteration 3, recorded with loss 2 and weights "a"."""
    diverged = 2 if before != "a" else None if weights == "a" else 3
    return IterationRerun(
        kept=KeptWeights(2, Path("iteration_2.ckpt")),
        recorded=Outcome(3, {"w": "a"}, {"policy/loss": 2.0}),
        again=Outcome(3, {"w": weights}, {"policy/loss": loss}),
        diverged_at=diverged,
        checkpoint=None,
        checkpoint_differs=None,
        environment={},
    )


def seen(column: float = 1.0, gradient: float = 3.0, noise: float = 0.0, change: float = 0.1):
    """Return an observation of two parameters, of which "k" has no gradient but for rounding."""
    gradients = [{"w": gradient, "k": noise}]
    changes = {"w": change, "k": 0.1 + 1e3 * noise}
    return Observation({"advantages": torch.tensor([0.5, column])}, gradients, changes)


AT_TOKEN_1 = "different: column advantages, rollout 3/0, token 1"
ROWS = {"": [BatchRow("3/0", prompt_length=0, length=2)]}


@pytest.mark.parametrize(
    ("now", "made", "says", "same"),
    [
        (seen(), rerun("a", 2.0), "equal to the bit", True),
        (
            seen(gradient=3.0003),
            rerun("b", 2.0),
            "equal to rounding (largest relative difference 0.0001, in gradient of w in optimizer "
            "step 1)",
            True,
        ),
        (
            seen(),
            rerun("b", 2.0),
            "equal to rounding (largest relative difference 0, in w)",
            True,
        ),
        (
            seen(noise=1e-5),  # which Adam makes a whole step of
            rerun("b", 2.0),
            "equal to rounding (largest relative difference 3.3e-06, in gradient of k in "
            "optimizer step 1)",
            True,
        ),
        (
            seen(column=1.1, gradient=4.0),
            rerun("b", 9.0),
            AT_TOKEN_1,
            False,
        ),
        (
            seen(gradient=3.01),
            rerun("b", 2.0),
            "different: gradient of w in optimizer step 1",
            False,
        ),
        (seen(change=0.2), rerun("b", 2.0), "different: change of w", False),
        (seen(), rerun("b", 2.1), "different: metric policy/loss", False),
        (
            seen(column=math.nan),
            rerun("b", 2.0),
            AT_TOKEN_1,
            False,
        ),
        (seen(), rerun("b", 2.0, before="c"), "different: the weights before the update", False),
    ],
)
def test_rounding_is_told_from_a_fault(now, made, says, same):
    assert verdict(seen(), now, made, ROWS) == (says, same)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        [],
        {"columns": {"a": 1.0}, "gradients": [], "changes": {}},
        {"columns": {}, "gradients": [3], "changes": {}},
        {"columns": {}, "gradients": [], "changes": {"w": "much"}},
    ],
)
def test_what_is_no_observation_is_refused(tree):
    with pytest.raises(DataError, match="holds no observation"):
        Observation.of(tree)


# ---------------------------------------------------------------- code


def test_the_users_own_code_is_written_without_secrets(tmp_path, monkeypatch):
    key = "hf_" + "Ab3" * 11
    (tmp_path / "packed_loss.py").write_text(f'KEY = "{key}"\n\n\nclass Loss:\n    pass\n')
    (tmp_path / "packed_more.py").write_text("def more():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("packed_more")
    tree = {
        "loss": {"class_path": "packed_loss.Loss"},
        "learner": "packed_more.more",
        "optimizer": {"class_path": "torch.optim.AdamW"},
        "advantage": {"class_path": "lightning_rl.GRPO"},
        "texts": ["Hello. How are you?", "never_imported.name"],
    }
    assert write_code(tree, tmp_path / "code") == ["packed_loss", "packed_more"]
    text = (tmp_path / "code/packed_loss.py").read_text()
    assert text.startswith('KEY = "***"\n')
    assert sorted(p.name for p in (tmp_path / "code").iterdir()) == [
        "packed_loss.py",
        "packed_more.py",
    ]
