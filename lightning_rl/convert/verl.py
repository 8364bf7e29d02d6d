"""Conversion of verl's PPO trainer: one function per topic that both libraries configure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_rl.convert import learning_verl as learning
from lightning_rl.convert.checked import check_parts
from lightning_rl.convert.conversion import (
    MOST_LISTED,
    Conversion,
    Given,
    Left,
    as_list,
    instance,
    prompts_from,
    table,
)
from lightning_rl.convert.distillation_verl import other_teachers, teaches_alone
from lightning_rl.convert.hydra import parse_overrides, resolved
from lightning_rl.errors import ConfigError

VERL = table("verl")
_ACTOR, _ROLLOUT = learning.ACTOR, learning.ROLLOUT
_MODEL = "actor_rollout_ref.model."
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."
_BEFORE = {
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.overlong_buffer.": _OVERLONG,
}
"""Names, or beginnings of names, in older versions, with their present ones."""
_LAYOUT = re.compile(
    r"fsdp_config|megatron|offload|log_prob_|micro_batch|hdfs|\.checkpoint\.|ray_|profile|prefill"
    r"|teacher_models\.\w+\.(inference|num_replicas)|distillation\.n(_gpus|nodes)"
)
"""Matches names that decide where things are placed, not what is learned."""


def convert_verl(
    overrides: Mapping[str, Any] | Sequence[str], rewards: Sequence[str] | None = None
) -> Conversion:
    """Convert verl's configuration, given as values by dotted names or as a list of ``name=value``.

    The list is what Hydra keeps in ``.hydra/overrides.yaml``: only what was set; the last value of
    a name counts. Names that are in no table are left out with one line.

    Raises:
        ConfigError: if no name is known, a value is of the wrong kind, batches do not divide
            evenly, or the converted settings are refused.
    """
    values = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
    values = {_newest_name(name): value for name, value in values.items()}
    values = resolved(values, {name: row.default for name, row in VERL.items()})
    unread = {name: value for name, value in values.items() if "${" in str(value) and name in VERL}
    values = {name: value for name, value in values.items() if name not in unread}
    given = Given({k: v for k, v in values.items() if k in VERL}, VERL, {})
    result = Conversion()
    result.put("trainer.max_epochs", 1)
    _model(given, result)
    _data(given, result, rewards)
    _sampling(given, result)
    _engine(given, result)
    steps = _batches(given, result)
    total = _length(given, result)
    learning.carry(given, result, steps, None if total is None else total * steps)
    _trainer(given, result)
    _callbacks(given, result)
    data = result.config["data"]["init_args"]
    if "prompts" not in data["evaluation"]:  # nothing is held out
        del data["evaluation"]
    result.leave_rest(given)
    result.missing += other_teachers(values)
    result.missing += [
        f"{name}: {value} refers to what is not said here; verl's default is used"
        for name, value in unread.items()
    ]
    _skipped(values, result)
    check_parts(result)
    return result


def _newest_name(name: str) -> str:
    for before, now in _BEFORE.items():
        if name == before or (before.endswith(".") and name.startswith(before)):
            return now + name.removeprefix(before)
    return name


def _skipped(values: Mapping[str, Any], result: Conversion) -> None:
    """Note each value that is in no table, except those that cannot change what is learned."""
    others = [
        name
        for name, value in values.items()
        if name not in VERL
        and not name.endswith("_target_")
        and (value is not None or name.startswith("~"))
    ]
    listed = [name for name in others if not _LAYOUT.search(name)]
    if len(listed) > MOST_LISTED:
        listed = []
    result.left += [
        Left(
            name,
            values[name],
            "verl's default is used for what is removed"
            if name.startswith("~")
            else "it is in no table of counterparts",
        )
        for name in listed
    ]
    if named := [name for name in others if name not in listed]:
        result.remarks.append(f"in no table, and left out: {', '.join(named)}")


def _model(given: Given, result: Conversion) -> None:
    result.put_model(given[_MODEL + "path"])
    names = {
        _MODEL + "enable_gradient_checkpointing": "model.loading.gradient_checkpointing",
        _MODEL + "trust_remote_code": "model.loading.trust_remote_code",
        "data.trust_remote_code": "model.loading.trust_remote_code",
    }
    result.carry(given, names)
    if rank := given[_MODEL + "lora_rank"]:
        result.put_lora(rank, given[_MODEL + "lora_alpha"], given[_MODEL + "target_modules"])


def _data(given: Given, result: Conversion, rewards: Sequence[str] | None) -> None:
    options: dict[str, Any] = {"max_prompt_tokens": given["data.max_prompt_length"]}
    if given["data.prompt_key"] != "prompt":
        options["prompt_column"] = given["data.prompt_key"]
    train = dict(options)
    if not given["data.shuffle"]:
        train["shuffle"] = False
    if given["data.seed"] is not None:
        train["seed"] = given["data.seed"]
    for theirs, ours, settings in (
        ("data.train_files", "data.train_prompts", train),
        ("data.val_files", "data.evaluation.prompts", options),
    ):
        files = as_list(given[theirs])
        if len(files) > 1:
            result.leave(given, theirs, "the first is written; put several into one file")
        if not files and ours == "data.evaluation.prompts":
            continue
        if not files:
            result.missing.append("data.train_prompts: the file of prompts")
        path = files[0] if files else "PROMPTS.parquet"
        result.put(ours, prompts_from(path, None, **settings))
    if given["data.val_max_samples"] > 0:
        result.put("data.evaluation.limit", given["data.val_max_samples"])
    if given["algorithm.filter_groups.enable"]:
        if learning.group_size(given) == 1:
            result.leave(given, "algorithm.filter_groups.enable", "a group of one has no variance")
        else:
            part = _part_that_spreads(given, rewards)
            spread = instance("RewardSpread", **({} if part is None else {"part": part}))
            result.put("data.selection.filters", [spread])
        if given["algorithm.filter_groups.max_num_gen_batches"] > 0:
            most = given["algorithm.filter_groups.max_num_gen_batches"]
            result.put("data.selection.max_batches", most)
    _rewards(given, result, rewards)


def _part_that_spreads(given: Given, rewards: Sequence[str] | None) -> str | None:
    """Return the part of our reward that their filter looks at; None for the whole."""
    metric = given["algorithm.filter_groups.metric"]
    name = (rewards or ["FUNCTION"])[0].rpartition(".")[2]
    if metric in ("score", "reward"):  # which is before the overlong penalty
        return name if given[_OVERLONG + "enable"] else None
    # Of others of its kind, sums over tokens; or what the function returns beside its score.
    return None if metric in ("seq_reward", "seq_final_reward") else f"{name}/{metric}"


def _rewards(given: Given, result: Conversion, rewards: Sequence[str] | None) -> None:
    written: list[Any] = list(rewards or [])
    if rewards is None and not teaches_alone(given):
        result.missing.append("data.rewards: import paths of your reward functions")
        written = ["MODULE.FUNCTION"]
    if given[_OVERLONG + "enable"] and (buffer := given[_OVERLONG + "len"]) is None:
        result.leave(given, _OVERLONG + "enable", "overlong_buffer_cfg.len is not set")
    elif given[_OVERLONG + "enable"]:
        factor = given[_OVERLONG + "penalty_factor"]
        longest = given["reward.reward_kwargs.max_resp_len"] or given["data.max_response_length"]
        result.put("data.reward_weights", [*(1.0 for _ in written), float(factor)])
        written.append(instance("OverlongPenalty", max_tokens=longest, buffer=buffer))
    result.put("data.rewards", written)


def _sampling(given: Given, result: Conversion) -> None:
    held_out = _ROLLOUT + "val_kwargs."
    sampled = given[held_out + "do_sample"]
    for ours, place in (("data.sampling", _ROLLOUT), ("data.evaluation.sampling", held_out)):
        drawn = place == _ROLLOUT or sampled
        settings = {
            "max_tokens": given["data.max_response_length"],
            "temperature": given[place + "temperature"] if drawn else 0.0,
            "top_p": float(given[place + "top_p"]),
            "top_k": max(0, given[place + "top_k"]),
        }
        result.put(ours, settings)
    result.put("data.evaluation.samples", given[held_out + "n"])


def _engine(given: Given, result: Conversion) -> None:
    name = given[_ROLLOUT + "name"]
    if name == "hf":
        result.put_class("data.engine", "TransformersEngine")
        return
    if name != "vllm":
        result.leave(given, _ROLLOUT + "name")
    arguments: dict[str, Any] = {"dtype": str(given[_ROLLOUT + "dtype"])}
    for same in ("gpu_memory_utilization", "max_num_seqs", "enable_prefix_caching"):
        arguments[same] = given[_ROLLOUT + same]
    if given[_ROLLOUT + "max_model_len"]:
        arguments["max_model_len"] = given[_ROLLOUT + "max_model_len"]
    if given.says(_ROLLOUT + "free_cache_engine"):
        arguments["sleep_level"] = 2 if given[_ROLLOUT + "free_cache_engine"] else None
    # What is not said is left to the engine.
    said = [n for n in ("enforce_eager", "max_num_batched_tokens") if given.says(_ROLLOUT + n)]
    if options := {name: given[_ROLLOUT + name] for name in said}:
        arguments["options"] = options
    result.put_class("data.engine", "VLLMLocal", **arguments)


def _batches(given: Given, result: Conversion) -> int:
    """Set the batch sizes, which both count in prompts; return the optimizer steps per iteration.

    Raises:
        ConfigError: if a batch is not a whole number of minibatches.
    """
    prompts, size = given["data.train_batch_size"], given[_ACTOR + "ppo_mini_batch_size"]
    size = min(size, prompts)
    if prompts % size:
        raise ConfigError(
            f"data.train_batch_size={prompts} is not a multiple of ppo_mini_batch_size={size}"
        )
    result.put("data.group_size", learning.group_size(given))
    result.put("data.groups_per_iteration", prompts)
    result.put("model.update.minibatches", prompts // size)
    result.put("model.update.ppo_epochs", given[_ACTOR + "ppo_epochs"])
    if given[_ACTOR + "use_dynamic_bsz"] or given.says(_ACTOR + "ppo_max_token_len_per_gpu"):
        result.put(
            "model.update.max_tokens_per_micro_batch", given[_ACTOR + "ppo_max_token_len_per_gpu"]
        )
    return int(prompts // size * given[_ACTOR + "ppo_epochs"])


def _length(given: Given, result: Conversion) -> int | None:
    """Set the length of the run; return its iterations, if the configuration has them."""
    if (steps := given["trainer.total_training_steps"]) is not None:
        result.put("data.iterations_per_epoch", steps)
        return int(steps)
    result.missing.append(
        f"data.iterations_per_epoch: trainer.total_epochs {given['trainer.total_epochs']:g} x "
        "prompts / train_batch_size (it is 100 now)"
    )
    result.put("data.iterations_per_epoch", 100)
    return None


def _trainer(given: Given, result: Conversion) -> None:
    result.config["seed_everything"] = given[_ROLLOUT + "seed"]
    device = given["trainer.device"]
    result.put("trainer.accelerator", "cpu" if device == "cpu" else "auto")
    devices, nodes = given["trainer.n_gpus_per_node"], given["trainer.nnodes"]
    result.put("trainer.devices", devices if given.says("trainer.n_gpus_per_node") else 1)
    if nodes != 1:
        result.put("trainer.num_nodes", nodes)
    result.put("trainer.precision", "bf16-mixed")  # of verl's actor
    result.remarks.append("verl's actor computes in bfloat16 (mixed) unless its strategy says else")
    if given["trainer.default_local_dir"] is not None:
        result.put("trainer.default_root_dir", given["trainer.default_local_dir"])
    named = "trainer.project_name", "trainer.experiment_name"
    project, name = (given.look(key) for key in named)
    loggers = {
        "wandb": instance("WandbLogger", project=project, name=name),
        "tensorboard": instance("TensorBoardLogger", save_dir=project, name=name),
        "mlflow": instance("MLFlowLogger", experiment_name=project, run_name=name),
    }
    if given.says("trainer.logger"):
        result.put_loggers(given, "trainer.logger", loggers, {"console"})
    if "logger" in result.config["trainer"]:
        given.cover(*named)


def _callbacks(given: Given, result: Conversion) -> None:
    callbacks = [instance("WeightSync")]
    if (every := given["trainer.test_freq"]) > 0:
        first = bool(given["trainer.val_before_train"])
        callbacks.append(instance("Evaluate", every_n_iterations=every, before_training=first))
        if given.look("data.val_files") is None:
            result.missing.append("data.evaluation.prompts: held-out prompts")
            result.put("data.evaluation.prompts", prompts_from("HELDOUT.parquet", None))
    if given["trainer.log_val_generations"]:
        shown = given["trainer.log_val_generations"]
        callbacks.append(instance("PreviewTable", num_rollouts=shown))
    if given["trainer.rollout_data_dir"] is not None:
        callbacks.append(instance("RolloutRecorder", num_groups=None))
        result.remarks.append(
            f"trainer.rollout_data_dir {given['trainer.rollout_data_dir']}: RolloutRecorder writes "
            "all rollouts to recorded.jsonl in the run's directory"
        )
    if given["trainer.save_freq"] > 0:
        options = {"every_n_iterations": given["trainer.save_freq"]}
        if given["trainer.max_actor_ckpt_to_keep"]:
            options["keep_last"] = given["trainer.max_actor_ckpt_to_keep"]
        callbacks.append(instance("IterationCheckpoint", **options))
    callbacks += [instance("HFExport"), instance("RLProgressBar"), instance("RunReport")]
    result.put("trainer.callbacks", callbacks)
