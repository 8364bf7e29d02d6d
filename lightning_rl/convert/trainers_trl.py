"""Which of TRL's trainers a configuration, a command or a script is for."""

import re
from collections.abc import Mapping
from typing import Any

from lightning_rl.convert import distillation_trl as distillation
from lightning_rl.convert.conversion import ParameterRow
from lightning_rl.convert.peft import KEY
from lightning_rl.convert.shared_trl import TRL, defaults_of_bases
from lightning_rl.convert.supervised_trl import SUPERVISED
from lightning_rl.errors import ConfigError

_NAMED = re.compile(
    r"online_?dpo|iterative_?sft|nash_?md|a2po|orpo|cpo|tpo|xpo|bco|prm|rloo|(?<![a-z])ppo"
    r"|sdft|sdpo|iw_?opd|gmpo|async_?distillation|server_?distillation|distillation|gkd|gold"
    r"|async_?grpo|grpo|sft|dpo|kto|reward"
)
_NEMO_RL = {"grpo", "policy", "data", "cluster"}
"""Sections of a NeMo-RL configuration."""


def trainer_of(text: str) -> str | None:
    """Return the trainer that a command, script, class or file is called after.

    None if it is called after none, or several.
    """
    found = {name.replace("_", "") for name in _NAMED.findall(text.lower().replace("-", "_"))}
    return found.pop() if len(found) == 1 else None


def trainer_of_options(values: Mapping[str, Any], called: str) -> str:
    """Return the trainer that has most of these options; among several the one of this name.

    Raises:
        ConfigError: if several have the same, and none is that.
    """
    if distillation.names_trainer(values):
        return "grpo"
    tables = {"grpo": TRL, **{name: one.rows for name, one in SUPERVISED.items()}}
    options = {n: v for n, v in values.items() if n not in defaults_of_bases()}
    counts = {name: sum(_has(t, n, v) for n, v in options.items()) for name, t in tables.items()}
    most = [name for name, count in counts.items() if count == max(counts.values())]
    hint = trainer_of(called)
    if hint is not None and (hint in most or hint not in tables):
        return hint
    if len(most) == 1:
        return most[0]
    raise ConfigError(
        f"{', '.join(values)[:80]}: the trainers {', '.join(most)} of TRL all have these options; "
        f"say whose they are: --trainer {most[0]}"
    )


def require_known(values: Mapping[str, Any]) -> None:
    """Refuse names of a library other than TRL.

    Raises:
        ConfigError: if most names are no options of a trainer that convert reads.
    """
    known = {*defaults_of_bases(), *TRL, KEY}
    known = known.union(*(one.rows for one in SUPERVISED.values()))
    others = [name for name in values if name.partition(".")[0] not in known]
    if 2 * len(others) > len(values):
        count = "no parameter" if len(others) == len(values) else "few parameters"
        nemo = " (it looks like NeMo-RL's)" if values.keys() >= _NEMO_RL else ""
        raise ConfigError(
            f"{', '.join(others)[:80]}: {count} of TRL's trainers among these{nemo}; convert reads "
            "configurations of TRL, verl and prime-rl"
        )


def _has(table: Mapping[str, ParameterRow], name: str, value: Any) -> bool:
    """Return True if it is an option there, and may have this value."""
    values = table[name].values if name in table else None
    said = value[0] if isinstance(value, list) and len(value) == 1 else value
    return values is not None and (not values or said in values)
