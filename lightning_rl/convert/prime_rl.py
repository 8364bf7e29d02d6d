"""Conversion of prime-rl's ``rl.toml``: one function per topic that both libraries configure."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from lightning_rl.convert import learning_prime_rl as learning
from lightning_rl.convert.checked import check_parts
from lightning_rl.convert.conversion import Conversion, Given, instance, table
from lightning_rl.convert.hydra import flat
from lightning_rl.convert.older_prime_rl import renamed
from lightning_rl.errors import ConfigError

PRIME_RL = table("prime_rl")
_EVAL, _VLLM = "orchestrator.eval.", "inference.vllm."
_LORA, _TRAIN, _SAMPLING = "trainer.model.lora.", learning.TRAIN, learning.SAMPLING
_SECTIONS = ("trainer", "orchestrator")
_WHOLE = {row.theirs for row in PRIME_RL.values() if row.kind == "mapping"}
_SHARED = {
    ".".join(parts[:n])
    for parts in (name.split(".") for name in PRIME_RL)
    for n in range(1, 1 + len(parts))
    if parts[0] not in (*_SECTIONS, "inference", "deployment")
}
"""Names that ``trainer`` and ``orchestrator`` have of their own, too, and their tables."""

_ZERO = {"type": "advantage_range", "reject_min": 0, "reject_max": 0}
"""The gate that leaves out groups without a spread, which are those without an advantage."""


def convert_prime_rl(
    values: Mapping[str, Any], over: Mapping[str, Any] | None = None
) -> Conversion:
    """Convert the tables of an ``rl.toml``; its defaults are filled in.

    Args:
        values: its tables, nested as the file has them.
        over: values by dotted names that count more than the file's.

    Raises:
        ConfigError: if it is another file, a value is of the wrong kind, the batch does not divide
            evenly, or the converted settings are refused.
    """
    if not {name.partition(".")[0] for name in values} & set(_SECTIONS):
        raise ConfigError(
            f"{', '.join(values)[:80]}: an rl.toml of prime-rl has [trainer] and [orchestrator]; "
            "put the tables of its separate files under these names into one"
        )
    given = Given(_named(values) | dict(over or {}), PRIME_RL, {})
    result = Conversion()
    result.put("trainer.max_epochs", 1)
    _model(given, result)
    _batches(given, result, _sources(given, result))
    _sampling(given, result)
    _engine(given, result)
    learning.carry(given, result)
    _trainer(given, result)
    _callbacks(given, result)
    result.leave_rest(given)
    check_parts(result)
    return result


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by the table's names; a component's own count more than shared ones."""
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for name, value in renamed(_flat(values), PRIME_RL).items():
        section, _, rest = name.partition(".")
        joined = section in _SECTIONS and name not in PRIME_RL
        joined = joined and (rest in _SHARED or rest.partition(".")[0] in PRIME_RL)
        (own if joined else shared)[rest if joined else name] = value
    return shared | own


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested names by dots. TOML has no null: prime-rl reads the text ``None`` as one."""
    found = flat(dict(values), prefix, _WHOLE)
    said = {name: value for name, value in found.items() if name not in _SECTIONS}  # empty tables
    return {name: None if value == "None" else value for name, value in said.items()}


def _model(given: Given, result: Conversion) -> None:
    result.put_model(given["model.name"])
    result.carry(given, {"trainer.model.trust_remote_code": "model.loading.trust_remote_code"})
    result.put("model.loading.gradient_checkpointing", given["trainer.model.ac"] is not None)
    if given["trainer.model.compile"] is not None:
        result.put("model.compile", True)
    if given.has("trainer.model.lora"):
        targets = given[_LORA + "target_modules"]
        result.put_lora(given[_LORA + "rank"], given[_LORA + "alpha"], targets)
        if given[_LORA + "modules_to_save"]:
            saved = {"modules_to_save": given[_LORA + "modules_to_save"]}
            result.put("model.lora.options", saved)


def _batches(given: Given, result: Conversion, size: int) -> None:
    """Set the batch, of which prime-rl makes one optimizer step, and how far ahead it is written.

    Raises:
        ConfigError: if the batch is not a whole number of groups.
    """
    rollouts = given["orchestrator.batch_size"]
    if rollouts % size:
        raise ConfigError(
            f"orchestrator.batch_size={rollouts} is not a multiple of group_size={size}"
        )
    result.put("data.group_size", size)
    result.put("data.groups_per_iteration", rollouts // size)
    result.put("model.update.minibatches", 1)
    result.put("model.update.ppo_epochs", 1)
    ahead = {"max_staleness": given["orchestrator.max_off_policy_steps"], "abort_stale": True}
    if (most := given["orchestrator.concurrency.max_inflight"]) is not None:
        ahead["max_groups_in_flight"] = max(1, most // size)
    result.put_class("data.collector", "AsyncCollector", **ahead)


def _sampling(given: Given, result: Conversion) -> None:
    longest = given[_SAMPLING + "max_completion_tokens"] or given["seq_len"]
    drawn = {"max_tokens": longest, "temperature": given[_SAMPLING + "temperature"]}
    result.put("data.sampling", drawn)
    if not given.has("orchestrator.eval"):
        return
    names = ("temperature", "top_p", "top_k", "min_p")
    sampling = {n: v for n in names if (v := given[f"{_EVAL}sampling.{n}"]) is not None}
    if "top_k" in sampling:
        sampling["top_k"] = max(0, sampling["top_k"])
    longest = given[_EVAL + "sampling.max_completion_tokens"] or longest
    result.put("data.evaluation.sampling", {"max_tokens": longest} | sampling)
    result.put("data.evaluation.samples", given[_EVAL + "group_size"])


def _sources(given: Given, result: Conversion) -> int:
    """Set the environments, a single one or the sets of a mixture; return the size of a group.

    Raises:
        ConfigError: if there is none to train on, or one has no name.
    """
    size = int(given["orchestrator.group_size"])
    train = [_set(given, result, _TRAIN, source) for source in given[_TRAIN + "source"] or []]
    if not train:
        raise ConfigError("orchestrator.train.source: name an environment to train on")
    if len(train) == 1:
        result.put("data.train_prompts", train[0]["prompts"])
        result.put("data.agent", train[0]["agent"])
        size = train[0].get("group_size", size)
    else:
        result.put_class("data.train_prompts", "Mixture", sets=train)
    if given.has("orchestrator.eval"):
        held = [_set(given, result, _EVAL, source) for source in given[_EVAL + "source"] or []]
        result.put_class("data.evaluation.prompts", "Mixture", sets=held)
    return size


def _set(given: Given, result: Conversion, place: str, source: dict[str, Any]) -> dict[str, Any]:
    """Return a source as a set of a mixture."""
    prefix = f"{place}source."
    own = Given(_flat(source, prefix), PRIME_RL, {})
    env = dict(own[prefix + "env"] or {})
    taskset = env.get("taskset")
    if not isinstance(taskset, dict) or not isinstance(name := taskset.get("id"), str):
        raise ConfigError(f'{prefix}env: name its environment: env = {{taskset = {{id = "..."}}}}')
    env["taskset"] = {key: value for key, value in taskset.items() if key != "id"}
    options = {key: value for key, value in env.items() if value != {}}
    python = f"build/{name}"
    hosted = {"environment": name, "python": python} | ({"options": options} if options else {})
    description = f"python {python}: a virtual environment with verifiers and the package of {name}"
    result.missing += [] if description in result.missing else [description]
    prompts = deepcopy(hosted)
    written: dict[str, Any] = {"name": own[prefix + "name"] or name}
    if place == _EVAL:
        limit = own[prefix + "num_examples"] or given[_EVAL + "num_examples"]
        prompts |= {"limit": limit} if limit > 0 else {}
    else:
        written["weight"] = float(own[prefix + "ratio"])
        _gates(own, result)
    written["prompts"] = instance("VerifiersPrompts", **prompts)
    written["agent"] = instance("VerifiersAgent", **hosted)
    if size := own[prefix + "group_size"]:
        written["group_size"] = size
    result.left += own.left()
    return written


def _gates(own: Given, result: Conversion) -> None:
    name = _TRAIN + "source.curriculum.gates"
    for gate in (own[name] or {}).values():
        result.put("data.selection.filters", [instance("RewardSpread")])
        if gate not in ({"type": "advantage_range"}, _ZERO):
            result.leave(own, name)


def _engine(given: Given, result: Conversion) -> None:
    """Set servers on the GPUs after the trainer's, or those that already run."""
    arguments: dict[str, Any] = {}
    if given.has("inference"):
        shared = given[_VLLM + "tensor_parallel_size"]
        first = given["deployment.num_train_gpus"]
        replicas = given[_VLLM + "data_parallel_size"] or max(
            1, given["deployment.num_infer_gpus"] // shared
        )
        starts = range(first, first + replicas * shared, shared)
        devices = [",".join(map(str, range(at, at + shared))) for at in starts]
        arguments |= {"replicas": replicas, "devices": devices, "tensor_parallel_size": shared}
        arguments["gpu_memory_utilization"] = given[_VLLM + "gpu_memory_utilization"]
        for same in ("max_model_len", "max_num_seqs", "enable_prefix_caching"):
            if given[_VLLM + same] is not None:
                arguments[same] = given[_VLLM + same]
        if given[_VLLM + "dtype"] != "auto":
            arguments["dtype"] = given[_VLLM + "dtype"]
        if given[_VLLM + "enforce_eager"]:
            arguments["options"] = {"enforce_eager": True}
    else:
        url = str(given["orchestrator.model.client.base_url"]).rstrip("/")
        arguments["urls"] = [url.removesuffix("/v1")]
    result.put_class("data.engine", "VLLMServer", **arguments)


def _trainer(given: Given, result: Conversion) -> None:
    result.put("trainer.accelerator", "auto")
    result.put("trainer.devices", given["deployment.num_train_gpus"])
    result.choose(given, "deployment.type")
    if nodes := given["deployment.num_train_nodes"]:
        result.put("trainer.num_nodes", nodes)
    result.put("trainer.precision", "bf16-mixed")
    result.remarks.append("prime-rl's trainer computes in bfloat16 (mixed), with float32 weights")
    result.put("data.iterations_per_epoch", given["max_steps"] or 100)
    if given["max_steps"] is None:
        result.missing.append("data.iterations_per_epoch: prime-rl would go on; it is 100 now")
    directory, name = given["output_dir"], given["run.name"]
    result.put("trainer.default_root_dir", directory if name is None else f"{directory}/{name}")
    if given.has("monitors.wandb"):
        wandb = {"project": given["monitors.wandb.project"]}
        wandb["name"] = given["monitors.wandb.name"] or name
        result.put("trainer.logger", [instance("WandbLogger", **wandb)])


def _callbacks(given: Given, result: Conversion) -> None:
    callbacks = [instance("WeightSync")]
    if given.has("orchestrator.eval"):
        first = not given[_EVAL + "skip_first_step"]
        every = {"every_n_iterations": given[_EVAL + "interval"], "before_training": first}
        callbacks.append(instance("Evaluate", **every))
    if given.has("ckpt"):
        saved = {"every_n_iterations": given["ckpt.interval"] or 0}
        if given["ckpt.keep_last"]:
            saved["keep_last"] = given["ckpt.keep_last"]
        callbacks.append(instance("IterationCheckpoint", **saved))
    callbacks += [instance("HFExport"), instance("RLProgressBar"), instance("RunReport")]
    result.put("trainer.callbacks", callbacks)
