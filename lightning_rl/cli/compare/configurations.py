"""The configurations of a comparison: read whole, kept out of each other's files, and recorded."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_rl.cli.app import read
from lightning_rl.cli.requested import Tree, class_of, inside_run
from lightning_rl.config.layers import differences, flatten
from lightning_rl.config.yaml_text import dump_yaml, parse_yaml
from lightning_rl.errors import ConfigError
from lightning_rl.run.files.rundir import write_whole

_EVALUATES = ("Evaluate", "EvaluateRollouts")


class Contender(NamedTuple):
    """A configuration with all defaults, by the ``name`` that folders and tables give it.

    ``options`` are those of ``fit`` that say which code is trusted.
    """

    name: str
    tree: Tree
    options: list[str]

    def changes_to(self, other: "Contender") -> list[str]:
        """Return the keys in which another configuration differs, each with both values."""
        changes = differences(flatten(self.tree), flatten(other.tree))
        return [f"{change.key} {change.now}, not {change.then}" for change in changes]


def read_contenders(given: Sequence[str], overrides: Sequence[str], metric: str) -> list[Contender]:
    """Read configurations, each with the same overrides; ``Evaluate`` is added where it lacks.

    Args:
        given: a file each, or several that are merged in order, ``base.yaml+faster.yaml``.
        overrides: options of ``fit``.
        metric: what will be compared.

    Raises:
        ConfigError: if ``fit`` would refuse one of them, one begins from a checkpoint or
            evaluates nothing though it should, or two are equal.
    """
    contenders: list[Contender] = []
    for name, one in zip(_names(given), given, strict=True):
        request = read([*(f"--config={file}" for file in _files(one)), *overrides])
        contenders.append(Contender(name, _apart(request.tree, one, metric), request.options))
        for earlier, before in zip(given, contenders[:-1], strict=False):
            if before.tree == contenders[-1].tree:
                raise ConfigError(
                    f"{earlier} and {one} are the same configuration, whose runs would be equal "
                    "bit for bit; change what you want to compare"
                )
    return contenders


def record(folder: Path, contenders: Sequence[Contender]) -> None:
    """Write each configuration to a file, from which its runs are started.

    Raises:
        ConfigError: if runs in this folder had another configuration; names the keys.
    """
    for contender in contenders:
        file = folder / f"{contender.name}.yaml"
        if not file.exists():
            write_whole(file, dump_yaml(contender.tree))
            continue
        then = parse_yaml(file.read_text(encoding="utf-8"), str(file))
        if changes := differences(flatten(then), flatten(contender.tree)):
            raise ConfigError(
                f"{folder} holds runs of {contender.name} with another configuration "
                f"({'; '.join(map(str, changes))}); set it back, or choose another --out"
            )


def _files(given: str) -> list[str]:
    return [given] if Path(given).is_file() else given.split("+")


def _names(given: Sequence[str]) -> list[str]:
    """Return the files' names without folders and suffixes, unless two would be the same."""
    names = ["+".join(Path(file).stem for file in _files(one)) for one in given]
    if len(set(names)) == len(names):
        return names
    return [one.removesuffix(".yaml").strip("./").replace("/", "-") for one in given]


def _apart(tree: Tree, given: str, metric: str) -> Tree:
    """Return what ``fit`` reads, without places where one run would write over another's files."""
    if tree.get("ckpt_path") is not None:
        raise ConfigError(
            f"{given}: ckpt_path={tree['ckpt_path']!r}, but all runs of a comparison begin anew; "
            "remove it, or begin from the checkpoint's weights by model.model"
        )
    tree = {name: tree[name] for name in ("model", "data", "trainer")}
    trainer = tree["trainer"]
    trainer["callbacks"] = list(inside_run(trainer.get("callbacks"), lambda key, text: None))
    if any(class_of(callback) in _EVALUATES for callback in trainer["callbacks"]):
        return tree
    data = tree["data"].get("init_args") or {}
    if data.get("evaluation") or data.get("eval_episodes"):
        trainer["callbacks"].append({"class_path": "Evaluate", "init_args": {}})
    elif metric.startswith("eval/"):
        raise ConfigError(
            f"{given}: nothing is evaluated, so there is no {metric}; set data.evaluation, add the "
            "callback EvaluateRollouts, or choose another --metric"
        )
    return tree
