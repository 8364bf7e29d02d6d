"""Hostile calls: configuration files, options and checkpoints that are not what they should be."""

import json
import os
import socket
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from tests.support.bad_configs import CONFIG, make_model
from tests.support.hostile.call import Call, command

OWN = {"class_path": "lightning_rl.OverlongPenalty", "init_args": {"max_tokens": 4, "buffer": 2}}


def good(**changes: Any) -> dict[str, Any]:
    """Return a configuration for a tiny model, with other values at ``a__b__c`` (and ``a__0``)."""
    tree = deepcopy(CONFIG)
    tree["data"]["init_args"]["rewards"] = [OWN]
    for path, value in changes.items():
        *folders, name = (int(p) if p.isdigit() else p for p in path.split("__"))
        node: Any = tree
        for folder in folders:
            node = node.setdefault(folder, {}) if isinstance(node, dict) else node[folder]
        node[name] = value
    return tree


def played(make: Callable[[Path], object] | None, *arguments: str) -> Callable[[Path], object]:
    """Put the good configuration, its model and prompts into the folder; then run a command."""

    def play(folder: Path) -> None:
        make_model(folder / "model")
        (folder / "train.jsonl").write_text('{"prompt": "3="}\n' * 12)
        (folder / "good.yaml").write_text(yaml.safe_dump(good()))
        if make is not None:
            make(folder)
        command(*arguments)(folder)

    return play


CHECK = ("check", "--config", "good.yaml", "--no_rollout")
FIT = ("fit", "--config", "good.yaml")


def file(name: str, content: str | bytes, *says: str, right: bool = False) -> Call:
    """Return a configuration of this content, after the good one."""

    def make(folder: Path) -> None:
        (folder / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())

    return Call(name, played(make, *CHECK, "--config", "c.yaml"), says, right)


def values(name: str, *says: str, right: bool = False, **changes: Any) -> Call:
    """Return the good configuration with other values."""
    return file(name, yaml.safe_dump(good(**changes)), *says, right=right)


def options(name: str, *given: str, says: str) -> Call:
    """Return options after the good configuration."""
    return Call(name, played(None, *CHECK, *given), (says,))


def thing(name: str, make: Callable[[Path], object], *says: str, option: str = "--config") -> Call:
    """Put something else under the name of a file that an option names."""
    path = "thing.ckpt" if option == "--ckpt_path" else "thing.yaml"
    return Call(name, played(lambda f: make(f / path), *CHECK, option, path), says)


def prompts(name: str, make: Callable[[Path], object], *says: str) -> Call:
    """Put something else in the place of the prompts' file."""
    path = "data.train_prompts.path"
    return Call(name, played(lambda f: make(f / "other"), *CHECK, f"--{path}", "other"), says)


def module(name: str, content: str, *says: str, path: str = "mine.f") -> Call:
    """Return a reward of a module with this content."""

    def make(folder: Path) -> None:
        (folder / "mine.py").write_text(content)

    return Call(name, played(make, *CHECK, "--data.rewards+=" + path), says)


def dead(name: str, body: str, *says: str, right: bool = True, **changes: Any) -> Call:
    """Run with rewards that teach nothing (any more); it says so, and so does its summary."""
    more = {
        "trainer__callbacks": [{"class_path": "WeightSync"}],
        "trainer__logger": {
            "class_path": "CSVLogger",
            "init_args": {"save_dir": "runs", "name": ""},
        },
    } | changes
    more |= {"data__init_args__evaluation": None, "data__init_args__iterations_per_epoch": 5}

    def play(folder: Path) -> None:
        (folder / "mine.py").write_text(f"def f(completions, **rest):\n    {body}\n")
        (folder / "dead.yaml").write_text(yaml.safe_dump(good(**more)))
        try:
            played(None, "fit", "--config", "dead.yaml", "--data.rewards=[mine.f]")(folder)
        finally:
            summary = json.loads((folder / "runs/version_0/summary.json").read_text())
            print("summary:", summary["status"], summary["error"], summary["alarms"])

    return Call(f"dead: {name}", play, says, right, seconds=300.0)


def checkpoint(name: str, content: Any, *says: str) -> Call:
    """Return a checkpoint that holds this."""
    return thing(name, lambda path: torch.save(content, path), *says, option="--ckpt_path")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)


def _bomb_of_merges(levels: int) -> str:
    nine = [", ".join([f"*a{i}"] * 9) for i in range(levels)]
    lines = [f"a{i + 1}: &a{i + 1} {{<<: [{of}], k{i}: 1}}" for i, of in enumerate(nine)]
    return "\n".join(["a0: &a0 {x: 1}", *lines])


BOMB = (
    "{a: &a [x,x,x,x,x,x,x,x,x], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], "
    + ", ".join(
        f"{n}: &{n} [{', '.join([f'*{of}'] * 9)}]" for of, n in zip("bcdefg", "cdefgh", strict=True)
    )
    + "}"
)
HUGE = 10**30

CALLS: list[Call] = [
    # ------------------------------------------------------------------------ files as texts
    file("callbacks that hold themselves", "trainer: {callbacks: &c [*c]}", "contains itself"),
    file("a merge of itself", "model: &m {<<: *m}", "contains itself"),
    file("a merge of a number", "model: {<<: 5}", "c.yaml:1: not valid YAML"),
    file("merges of merges of merges", _bomb_of_merges(12), "more than 100,000 keys"),
    file("mappings 5,000 deep", "{a: " * 5000 + "1" + "}" * 5000, "levels deep"),
    file("lists 5,000 deep in one line", "- " * 5000 + "1", "levels deep"),
    file("UTF-16", yaml.safe_dump(good()).encode("utf-16"), "c.yaml: cannot be read"),
    file("Latin-1", "# é\nseed_everything: 1\n".encode("latin-1"), "c.yaml: cannot be read"),
    file("a byte order mark", b"\xef\xbb\xbfseed_everything: 1\n", "would start", right=True),
    file("lines of another system", b"seed_everything: 1\r\n", "would start", right=True),
    file("nothing but a comment", "# nothing\n", "c.yaml: the file is empty"),
    file("two documents", "seed_everything: 1\n---\nseed_everything: 2\n", "c.yaml:2: not valid"),
    file("tabs", "trainer:\n\tmax_epochs: 1\n", "c.yaml:2: not valid YAML"),
    file("an anchor that is not there", "seed_everything: *nowhere", "c.yaml:1: not valid YAML"),
    file("a tag that nobody knows", "seed_everything: !secret x", "c.yaml:1: not valid YAML"),
    file("a key that is a list", "? [a, b]\n: 1\n", "c.yaml:1: "),
    file("a key that is a number", "1: 2\n", "no such key"),
    file("a key that is null", "null: 2\n", "no such key"),
    file("a key that is a switch", "trainer: {on: 2}\n", "no such key"),
    file("a key that is a date", "data: {init_args: {2024-01-01: 2}}\n", "no such key"),
    file("a key that a terminal obeys", '"\\e[2Jx": 2\n', "␛[2Jx: no such key"),
    file("a value that a terminal obeys", 'data: {class_path: "\\e]0;x\\a"}', "'\\x1b]0;x\\x07'"),
    file("half a surrogate pair", 'model: {class_path: "a\\ud83db"}', "model.class_path"),
    file("a key of 100,000 letters", "k" * 100_000 + ": 1", "not valid YAML"),
    file("a word of 100,000 letters", "seed_everything: " + "k" * 100_000, "seed_everything"),
    # ------------------------------------------------------------------------ files as things
    thing("a folder", Path.mkdir, "thing.yaml: is a folder"),
    thing("a named pipe", os.mkfifo, "thing.yaml: is a named pipe"),
    thing("a socket", _socket, "thing.yaml: is a socket"),
    thing("a link to itself", lambda p: p.symlink_to(p), "thing.yaml"),
    thing("a link to a device", lambda p: p.symlink_to("/dev/zero"), "thing.yaml: is a device"),
    thing("a link to nowhere", lambda p: p.symlink_to("nowhere"), "there is no such file"),
    options("a name of 5,000 letters", "--config", "x" * 5000, says="cannot be read"),
    options("a file as a folder", "--config", "good.yaml/x", says="good.yaml/x"),
    options("an empty name", "--config=", says="--config"),
    # ------------------------------------------------------------------------ wrong shapes
    values("the model is a list", "model: expected", model=[1]),
    values("the model is a number", "model: expected", model=5),
    values("the data is null", "data: is missing", data=None),
    values("the trainer is a list", "trainer: expected keys", trainer=[]),
    values("callbacks are a mapping", "trainer.callbacks", trainer__callbacks={"a": 1}),
    values("a callback is null", "trainer.callbacks", trainer__callbacks=[None]),
    values("a callback is a number", "trainer.callbacks[0]", trainer__callbacks=[5]),
    values("a callback in a list", "trainer.callbacks[0]", trainer__callbacks=[["Evaluate"]]),
    values("class_path is a number", "model.class_path", model__class_path=5),
    values("class_path is null", "model: needs a class_path", model__class_path=None),
    values("class_path is a mapping", "model.class_path", model__class_path={"a": 1}),
    values("class_path is empty", "model.class_path", model__class_path=""),
    values("class_path is two dots", "model.class_path", model__class_path=".."),
    values("class_path ends in a dot", "model.class_path", model__class_path="torch.nn."),
    values("class_path is a module", "model.class_path: torch.nn is not a Li",
           model__class_path="torch.nn"),
    values("class_path is a function", "torch.load is a function", model__class_path="torch.load"),
    values("class_path is abstract", "engine", data__init_args__engine="Engine"),
    values("init_args is a list", "model.init_args", model__init_args=[1]),
    values("init_args is a text", "data.init_args", data__init_args="rewards"),
    values("rewards are a mapping", "rewards", data__init_args__rewards={"a": 1}),
    values("a reward is a list", "rewards[0]", data__init_args__rewards=[[OWN]]),
    values("an engine is a list", "engine", data__init_args__engine=["TransformersEngine"]),
    # ------------------------------------------------------------------------ numbers
    file("a number of 5,000 digits", "seed_everything: " + "9" * 5000, "c.yaml: not valid YAML"),
    values("groups without end", "groups_per_iteration",
           data__init_args__groups_per_iteration=HUGE),
    values("a group without end", "group_size", data__init_args__group_size=HUGE),
    values("iterations without end", "iterations_per", data__init_args__iterations_per_epoch=HUGE),
    values("completions without end", "max_tokens", data__init_args__sampling={"max_tokens": HUGE}),
    values("epochs without end", "max_epochs", trainer__max_epochs=HUGE),
    values("epochs for longer than there will be a sun", "would start", right=True,
           trainer__max_epochs=10**17),
    values("iterations for as long", "would start", right=True,
           data__init_args__iterations_per_epoch=10**17),
    values("a group of a billion", "an iteration holds all of them",
           data__init_args__group_size=10**9),
    values("micro-batches without end", "max_tokens_per_micro_batch",
           model__init_args__update__max_tokens_per_micro_batch=HUGE),
    values("a group of a half", "group_size", data__init_args__group_size=2.5),
    values("a group of yes", "group_size", data__init_args__group_size=True),
    values("a group of infinity", "group_size", data__init_args__group_size=float("inf")),
    values("a seed below 0", "seed_everything", seed_everything=-1),
    values("a seed of 30 digits", "seed_everything", seed_everything=HUGE),
    values("a billion devices", "devices=1000000000 must be <= 4096", trainer__devices=10**9),
    values("devices in words", "devices", trainer__devices="a,b"),
    values("no device of a list", "devices", trainer__devices=[]),
    values("a time that is none", "'soon')` is not a valid duration", trainer__max_time="soon"),
    values("runs in a file", "good.yaml", trainer__default_root_dir="good.yaml",
           trainer__logger=True),
    values("runs in a device", "/dev/null", trainer__default_root_dir="/dev/null",
           trainer__logger=True),
    # ------------------------------------------------------------------------ options
    options("an option without a name", "--", says="--"),
    options("an option of dots", "--..", "5", says="no such key"),
    options("an option that ends in a dot", "--data.", "5", says="data"),
    options("an option that is all value", "--=5", says="no such key"),
    options("a value that is not there", "--data.group_size", says="_size needs a value"),
    options("a value that is empty", "--data.group_size=", says="group_size"),
    options("more of a number", "--data.group_size+=5", says="group_size"),
    options("more of nothing", "--trainer.callbacks+=", says="callbacks"),
    options("inside of a number", "--seed_everything.x", "5", says="seed_everything"),
    options("inside of a list", "--data.rewards.x", "5", says="rewards[0]"),
    options("aliases of aliases", "--data.reward_weights", BOMB, says="reward_weights"),
    options("an open bracket", "--data.reward_weights", "[" * 5000, says="reward_weights"),
    # ------------------------------------------------------------------------ checkpoints
    thing("a checkpoint that is a pipe", os.mkfifo, "thing.ckpt", option="--ckpt_path"),
    Call("a checkpoint that is an empty folder",
         played(lambda f: (f / "x.ckpt").mkdir(), *FIT, "--ckpt_path", "x.ckpt"), ("x.ckpt",)),
    thing("a checkpoint that is empty", Path.touch, "is damaged", option="--ckpt_path"),
    thing("a checkpoint of zeros", lambda p: p.symlink_to("/dev/zero"), "thing.ckpt",
          option="--ckpt_path"),
    thing("half a checkpoint", lambda p: p.write_bytes(b"PK\3\4" + b"x" * 999), "is damaged",
          option="--ckpt_path"),
    checkpoint("a checkpoint that is a list", [1, 2], "thing.ckpt"),
    checkpoint("a checkpoint that is a tensor", torch.zeros(3), "thing.ckpt"),
    checkpoint("hyper-parameters that are a number", {"hyper_parameters": 5}, "thing.ckpt"),
    checkpoint("hyper-parameters of another run", {"hyper_parameters": {"colour": 5}}, "colour"),
    options("a path that is a number", "--ckpt_path", "5", says="ckpt_path: expected"),
    options("a path of a list", "--ckpt_path", "[a]", says="ckpt_path"),
    Call("a checkpoint of no server", played(None, *FIT, "--ckpt_path", "http://127.0.0.1:9/x.ckpt"),
         ("127.0.0.1:9/x.ckpt",)),
    Call("a checkpoint of no scheme", played(None, *FIT, "--ckpt_path", "foo://x.ckpt"),
         ("foo://x.ckpt",)),
    # ------------------------------------------------------------------------ prompts
    prompts("prompts in a named pipe", os.mkfifo, "'other' is a named pipe, not a file"),
    prompts("prompts in a device", lambda p: p.symlink_to("/dev/zero"), "'other' is a device"),
    prompts("prompts in a loop of links", lambda p: p.symlink_to(p), "path='other'"),
    # ------------------------------------------------------------------------ modules
    module("a module that ends well", "raise SystemExit(0)", "mine"),
    module("a module that never comes back to itself", "def f(): f()\nf()", "mine"),
    module("a module of zero bytes", "x = '\0'", "mine"),
    module("a module that imports itself", "from mine import f", "mine"),
    module("a module that asks", "f = input()", "mine"),
    module("a reward that is a number", "f = 5", "mine.f"),
    module("a reward that is a class of nothing", "class f: pass", "mine.f"),
    module("a reward that is its module", "", "mine", path="mine"),
    # ------------------------------------------------------------------------ dead rewards
    *(dead(name, f"return [{value}] * len(completions)", f"in 3 iterations in a row: {why}",
           f"ALARM (learning): nothing was learned in 5 of 5 iterations: {why}",
           "summary: completed None {'learning'")
      for name, value, why in (("always 1", 1.0, "every reward is 1 (all right)"),
                               ("always 0", 0.0, "every reward is 0 (all wrong)"))),
    *(dead(f"always raises, and {share:.0%} may fail", "raise KeyError('x')", says, "KeyError: 'x'",
           "summary: failed RewardError", right=False, data__init_args__max_failed_share=share)
      for share, says in ((0.5, "8 of 8 rollouts could not be"), (1.0, "none of 8 rollouts can"))),
    dead("a rate that breaks the model",
         "return [float(len(set(c)) > 2) for c in completions]",
         "in 3 iterations in a row: ", "ALARM (learning)", "summary: completed None {'learning'",
         model__init_args__optimizer__init_args__lr=1e3),
]  # fmt: skip
