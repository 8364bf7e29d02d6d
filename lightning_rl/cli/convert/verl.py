"""From verl's PPO trainer to our configuration: one function per thing that both configure."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_rl.cli.convert import verl_learning as learning
from lightning_rl.cli.convert.rows import Conversion, Given, instance, prompts_from
from lightning_rl.cli.convert.verl_rows import VERL
from lightning_rl.errors import ConfigError

_ROLLOUT, _MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."


def convert_verl(overrides: Sequence[str], rewards: Sequence[str] | None = None) -> Conversion:
    """Our configuration for verl's, as a list of ``name=value``; the last of a name counts.

    That is what Hydra keeps as ``.hydra/overrides.yaml``: only what was set. Names that are in no
    table are left out with one line.

    Raises:
        ConfigError: if batches do not work out.
    """
    values = _overrides(overrides)
    given = Given({k: v for k, v in values.items() if k in VERL}, VERL, {})
    result = Conversion()
    result.put("trainer.max_epochs", 1)
    _model(given, result)
    _data(given, result, rewards)
    _sampling(given, result)
    _engine(given, result)
    steps = learning.batches(given, result)
    total = _length(given, result)
    learning.loss(given, result)
    learning.advantage(given, result)
    learning.correction(given, result)
    learning.penalties(given, result)
    learning.optimizer(given, result, None if total is None else total * steps)
    _trainer(given, result)
    _callbacks(given, result)
    result.left += given.left()
    others = [name for name in values if name not in VERL and not name.endswith("_target_")]
    if others:
        result.remarks.append(f"in no table, and left out: {', '.join(others)}")
    return result


def _overrides(lines: Sequence[str]) -> dict[str, Any]:
    values = {}
    for line in lines:
        name, equals, value = str(line).partition("=")
        if not equals:
            raise ConfigError(f"{line!r} is no override of the form name=value")
        values[name.lstrip("+~")] = yaml.safe_load(value)
    return values


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested names joined by dots; interpolations, which follow another value, left out."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in VERL:
            found += flat(value, f"{path}.")
        elif not (isinstance(value, str) and value.startswith("${")):
            found.append((path, value))
    return found


def _model(given: Given, result: Conversion) -> None:
    path = given[_MODEL + "path"]
    if path is None:
        result.missing.append("model.model: directory or hub name of the model")
    result.put("model.model", path or "MODEL")
    if given[_MODEL + "enable_gradient_checkpointing"]:
        result.put("model.gradient_checkpointing", True)
    if given[_MODEL + "trust_remote_code"] or given["data.trust_remote_code"]:
        result.put("model.trust_remote_code", True)
    if given[_MODEL + "lora_rank"]:
        targets = given[_MODEL + "target_modules"]
        lora = {
            "rank": given[_MODEL + "lora_rank"],
            "alpha": float(given[_MODEL + "lora_alpha"]),
            "target_modules": [targets] if isinstance(targets, str) else list(targets),
        }
        result.put("model.lora", lora)


def _data(given: Given, result: Conversion, rewards: Sequence[str] | None) -> None:
    options: dict[str, Any] = {"max_prompt_tokens": given["data.max_prompt_length"]}
    given.cover("data.filter_overlong_prompts")  # always
    if given["data.prompt_key"] != "prompt":
        options["prompt_column"] = given["data.prompt_key"]
    train = dict(options)
    if not given["data.shuffle"]:
        train["shuffle"] = False
    if given["data.seed"] is not None:
        train["seed"] = given["data.seed"]
    for theirs, ours, settings in (
        ("data.train_files", "data.train_prompts", train),
        ("data.val_files", "data.eval_prompts", options),
    ):
        files = given[theirs]
        files = [files] if isinstance(files, str) else list(files or [])
        if len(files) > 1:
            result.leave(given, theirs, "the first is written; put several into one file")
        if not files and ours == "data.eval_prompts":
            continue
        if not files:
            result.missing.append("data.train_prompts: the file of prompts")
        path = files[0] if files else "PROMPTS.parquet"
        result.put(ours, prompts_from(path, None, **settings))
    if given["data.val_max_samples"] > 0:
        result.put("data.eval_limit", given["data.val_max_samples"])
    if given["algorithm.filter_groups.enable"]:
        result.put("data.filters", [instance("RewardSpread")])
        if given["algorithm.filter_groups.max_num_gen_batches"] > 0:
            result.put("data.max_rounds", given["algorithm.filter_groups.max_num_gen_batches"])
    if rewards is None:
        result.missing.append("data.rewards: import paths of your reward functions")
    result.put("data.rewards", list(rewards or ["MODULE.FUNCTION"]))


def _sampling(given: Given, result: Conversion) -> None:
    tokens = given["data.max_response_length"]
    training = {
        "max_tokens": tokens,
        "temperature": given[_ROLLOUT + "temperature"],
        "top_p": float(given[_ROLLOUT + "top_p"]),
        "top_k": max(0, given[_ROLLOUT + "top_k"]),
    }
    sampled = given[_ROLLOUT + "val_kwargs.do_sample"]
    evaluation = {
        "max_tokens": tokens,
        "temperature": given[_ROLLOUT + "val_kwargs.temperature"] if sampled else 0.0,
        "top_p": float(given[_ROLLOUT + "val_kwargs.top_p"]),
        "top_k": max(0, given[_ROLLOUT + "val_kwargs.top_k"]),
    }
    result.put("data.sampling", training)
    result.put("data.eval_sampling", evaluation)
    result.put("data.eval_samples", given[_ROLLOUT + "val_kwargs.n"])


def _engine(given: Given, result: Conversion) -> None:
    name = given[_ROLLOUT + "name"]
    if name == "hf":
        result.put_class("data.engine", "TransformersEngine")
        return
    if name != "vllm":
        result.leave(given, _ROLLOUT + "name", "VLLMLocal is written")
    arguments: dict[str, Any] = {
        "dtype": str(given[_ROLLOUT + "dtype"]),
        "gpu_memory_utilization": given[_ROLLOUT + "gpu_memory_utilization"],
        "max_num_seqs": given[_ROLLOUT + "max_num_seqs"],
        "enable_prefix_caching": given[_ROLLOUT + "enable_prefix_caching"],
    }
    if given[_ROLLOUT + "max_model_len"]:
        arguments["max_model_len"] = given[_ROLLOUT + "max_model_len"]
    if given.says(_ROLLOUT + "free_cache_engine"):
        arguments["sleep_level"] = 2 if given[_ROLLOUT + "free_cache_engine"] else None
    options: dict[str, Any] = {}
    for theirs, ours in (
        ("enforce_eager", "enforce_eager"),
        ("max_num_batched_tokens", "max_num_batched_tokens"),
    ):
        # What is not said is left to the engine.
        if given.says(_ROLLOUT + theirs):
            options[ours] = given[_ROLLOUT + theirs]
    if options:
        arguments["options"] = options
    result.put_class("data.engine", "VLLMLocal", **arguments)


def _length(given: Given, result: Conversion) -> int | None:
    """Returns the iterations of the run, where the configuration tells."""
    epochs, steps = given["trainer.total_epochs"], given["trainer.total_training_steps"]
    if steps is not None:
        result.put("data.iterations_per_epoch", steps)
        return int(steps)
    result.missing.append(
        f"data.iterations_per_epoch: trainer.total_epochs {epochs:g} x prompts / train_batch_size "
        "(it is 100 now)"
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
    loggers = given["trainer.logger"] if given.says("trainer.logger") else []
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    project, name = given["trainer.project_name"], given["trainer.experiment_name"]
    classes = {
        "wandb": instance("WandbLogger", project=project, name=name),
        "tensorboard": instance("TensorBoardLogger", save_dir=project, name=name),
        "mlflow": instance("MLFlowLogger", experiment_name=project, run_name=name),
    }
    chosen = [classes[logger] for logger in loggers if logger in classes]
    if chosen:
        result.put("trainer.logger", chosen)
    if set(loggers) - classes.keys() - {"console"}:
        result.leave(given, "trainer.logger", "write one of Lightning's loggers")


def _callbacks(given: Given, result: Conversion) -> None:
    callbacks = [instance("WeightSync")]
    first, every = bool(given["trainer.val_before_train"]), given["trainer.test_freq"]
    if every > 0:
        callbacks.append(instance("Evaluate", every_n_iterations=every, before_training=first))
        if given.look("data.val_files") is None:
            result.missing.append("data.eval_prompts: held-out prompts")
            result.put("data.eval_prompts", prompts_from("HELDOUT.parquet", None))
    if given["trainer.log_val_generations"]:
        shown = given["trainer.log_val_generations"]
        callbacks.append(instance("PreviewTable", num_rollouts=shown))
    if given["trainer.rollout_data_dir"] is not None:
        path = f"{given['trainer.rollout_data_dir']}/rollouts.jsonl"
        callbacks.append(instance("RolloutWriter", path=path))
    if given["trainer.save_freq"] > 0:
        options = {"every_n_iterations": given["trainer.save_freq"]}
        if given["trainer.max_actor_ckpt_to_keep"]:
            options["keep_last"] = given["trainer.max_actor_ckpt_to_keep"]
        callbacks.append(instance("IterationCheckpoint", **options))
    callbacks += [instance("HFExport"), instance("RLProgressBar"), instance("RunReport")]
    result.put("trainer.callbacks", callbacks)
