"""Give a configuration of prime-rl 0.7 or 0.8 the names that its keys have had since."""

from collections.abc import Collection, Mapping
from typing import Any

_TRAIN = "orchestrator.train."
_INFLIGHT = "orchestrator.concurrency.max_inflight"
_TABLES = {
    "wandb": "monitors.wandb",
    "ckpt.resume_step": "resume.step",
    "clean_output_dir": "clean",
    "inference.model.name": "inference.vllm.model",
    "inference.model": "inference.vllm",
    "inference.vllm_extra": "inference.vllm",
    "inference.parallel.tp": "inference.vllm.tensor_parallel_size",
    "inference.parallel.dp": "inference.vllm.data_parallel_size",
    "inference": "inference.vllm",
    "orchestrator.max_inflight_rollouts": _INFLIGHT,
    "orchestrator.max_inflight_episodes": _INFLIGHT,
    "orchestrator.env": _TRAIN + "source",
    "orchestrator.sampling": _TRAIN + "sampling",
    "orchestrator.train.env": _TRAIN + "source",
    "orchestrator.eval.env": "orchestrator.eval.source",
}
"""Keys and tables by their older names; of ``inference`` those that are in the table."""
_GATE = {"curriculum": {"gates": {"zero_advantage": {"type": "advantage_range"}}}}
_WORDS = {"max_tokens": "max_completion_tokens", "rollouts_per_example": "group_size"}


def renamed(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return flat values under today's names, of which ``known`` are in the table.

    Filters of groups without an advantage become gates of their environments, and environments get
    today's shape.
    """
    new = {_today(name, known): value for name, value in values.items()}
    gated = [f for f in _taken(new, "orchestrator.pre_batch_filters") if f.get("enforce")]
    for place in (_TRAIN + "source", "orchestrator.eval.source"):
        if isinstance(sources := new.get(place), list):
            gate = _GATE if gated and place.startswith(_TRAIN) else {}
            new[place] = [gate | _source(s) if isinstance(s, dict) else s for s in sources]
    for filtered in _taken(new, "orchestrator.post_batch_filters"):
        new[_TRAIN + "filter_zero_advantages"] = filtered.get("enforce", True)
    ahead = new.pop("orchestrator.oversampling_factor", None) or 1.0
    size = new.get("orchestrator.batch_size", 128)
    numbers = isinstance(ahead, int | float) and isinstance(size, int)
    if new.keys() != values.keys() and _INFLIGHT not in new and numbers:  # its default was another
        new[_INFLIGHT] = int(size * ahead)
    return new


def _today(name: str, known: Collection[str]) -> str:
    """Return a key's name today; components have tables of their own like the shared ones."""
    start, _, word = name.rpartition(".")
    if start.startswith("orchestrator"):
        name = f"{start}.{_WORDS.get(word, word)}"
    if name in known:
        return name
    for component in ("", "trainer.", "orchestrator."):
        for old, table in _TABLES.items():
            if f"{name}.".startswith(f"{component}{old}."):
                new = f"{component}{table}{name[len(component + old) :]}"
                return new if old != "inference" or new in known else name
    return name


def _source(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment, whose task set and harness were beside its name, with both below."""
    new = {_WORDS.get(name, name): value for name, value in source.items()}
    if "env" in new or not new.keys() & {"id", "taskset"}:
        return new
    if "taskset" not in new:
        arguments = new.pop("args", None)
        new["taskset"] = {"id": new["id"]} | (arguments if isinstance(arguments, dict) else {})
    agent = {}
    if isinstance(harness := new.pop("harness", None), dict):
        agent = {"runtime": harness["runtime"]} if "runtime" in harness else {}
        agent["harness"] = {name: value for name, value in harness.items() if name != "runtime"}
    env = {"taskset": new.pop("taskset")} | ({"agent": agent} if agent else {})
    return {**new, "env": env}


def _taken(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Take the filters of zero advantages out of a list, and those that only count."""
    listed = values.get(name)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        return []
    if rest := [f for f in listed if f.get("type") != "zero_advantage" and f.get("enforce")]:
        values[name] = rest
    else:
        del values[name]
    return [f for f in listed if f.get("type") == "zero_advantage"]
