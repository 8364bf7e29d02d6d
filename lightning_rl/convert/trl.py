"""Conversion of TRL's GRPOConfig, and of others: one function per topic of both libraries."""

import math
from collections.abc import Mapping
from typing import Any

from lightning_rl.convert import (
    async_trl as asynchronous,
    distillation_trl as distillation,
    learning_trl as learning,
)
from lightning_rl.convert.checked import check_parts
from lightning_rl.convert.conversion import (
    Conversion,
    Given,
    Left,
    instance,
    prompts_from,
)
from lightning_rl.convert.data_trl import put_data, put_heldout, put_rewards
from lightning_rl.convert.learning_trl import Updates
from lightning_rl.convert.peft import with_adapters
from lightning_rl.convert.shared_trl import (
    TRL,
    defaults_of_bases,
    ending,
    put_adapters,
    put_model,
    put_trainer,
    strategy,
)
from lightning_rl.convert.trainers_trl import SUPERVISED, require_known, trainer_of_options
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import SAMPLED_BY

_DEFAULTS = {**distillation.DEFAULTS, asynchronous.NAME: asynchronous.DEFAULTS}
"""Where a trainer's configuration has other defaults than a GRPOConfig, by the trainer's name."""


def convert_trl(
    values: Mapping[str, Any],
    devices: int = 1,
    eval_prompts: str | None = None,
    trainer: str | None = None,
) -> Conversion:
    """Convert a configuration of TRL, with what TRL's own scripts read in addition to it.

    A GRPOConfig that names a teacher is read as a DistillationConfig, or one of its relatives, and
    one with options of an AsyncGRPOConfig as that.

    Args:
        values: values by name, as in its YAML or ``to_dict()``; defaults may be left out.
        devices: number of training processes, which TRL gets from its launcher.
        eval_prompts: file or folder of held-out prompts; None: the data set's test split.
        trainer: its trainer, as ``trainer_of`` names it; None: the one whose options these are, a
            GRPOTrainer if they may be its.

    Raises:
        ConfigError: if convert does not read this trainer's configuration, no name is known, a
            value is of the wrong kind, batches do not divide evenly, or the converted settings are
            refused.
    """
    require_known(values)
    values = with_adapters(values)
    trainer = trainer or trainer_of_options(values, "grpo")
    if trainer in SUPERVISED:
        return SUPERVISED[trainer].convert(values, devices, eval_prompts)
    if trainer not in _DEFAULTS:
        raise ConfigError(
            f"{trainer}: convert reads the configurations of TRL's trainers "
            f"{', '.join([*_DEFAULTS, *SUPERVISED])}"
        )
    if trainer == "grpo" and asynchronous.TELLING & values.keys():
        trainer = asynchronous.NAME
    values = distillation.with_teacher(_DEFAULTS[trainer] | values)
    given = Given(values, TRL, defaults_of_bases())
    result = Conversion()
    result.put("trainer.max_epochs", 1)
    put_model(given, result)
    unlike = {
        "torch_compile": "model.compile",
        "cast_lm_head_to_fp32": "model.loading.cast_lm_head_to_fp32",
    }
    result.carry(given, unlike)
    put_adapters(given, result)
    put_data(given, result)
    _sampling(given, result)
    _engine(given, result)
    updates = _batches(given, result, devices)
    total = _length(given, result, updates.steps)
    if distillation.distils(given):
        distillation.carry(given, result)
    else:
        put_rewards(given, result)
        if trainer == asynchronous.NAME:
            asynchronous.carry(given, result)
        else:
            learning.carry(given, result, updates)
    learning.put_optimizer(given, result, total)
    result.put("model.update.max_grad_norm", given["max_grad_norm"] or None)
    put_trainer(given, result, devices)
    _callbacks(given, result, updates.steps, eval_prompts)
    result.leave_rest(given)
    check_parts(result)
    return result


def _sampling(given: Given, result: Conversion) -> None:
    result.put("data.sampling.max_tokens", given["max_completion_length"])
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = given[name]
        if name == "temperature" or value != TRL[name].default:
            # vLLM's -1 for all tokens
            result.put(f"data.sampling.{name}", max(0, value or 0) if name == "top_k" else value)
    if given["chat_template_kwargs"]:
        result.put("data.chat_template_kwargs", given["chat_template_kwargs"])
    extra = given["generation_kwargs"] or {}
    names = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens", "stop_strings": "stop"}
    known = {"max_tokens", "stop", *SAMPLED_BY}
    for name, value in extra.items():
        ours = names.get(name, name)
        if ours not in known:
            result.left.append(
                Left(f"generation_kwargs.{name}", value, "scoring does not reproduce it")
            )
            continue
        result.put(
            f"data.sampling.{ours}",
            [value] if ours == "stop" and isinstance(value, str) else value,
        )


def _engine(given: Given, result: Conversion) -> None:
    if not given["use_vllm"]:
        result.put_class("data.engine", "TransformersEngine")
        result.remarks.append(
            "use_vllm false is TransformersEngine; VLLMLocal, the default here, is usually faster"
        )
        return
    arguments: dict[str, Any] = {}
    if given["vllm_max_model_length"] is not None:
        arguments["max_model_len"] = given["vllm_max_model_length"]
    if given["vllm_mode"] == "server":
        url = given["vllm_server_base_url"]
        host, port = given["vllm_server_host"], given["vllm_server_port"]
        host = "127.0.0.1" if host == "0.0.0.0" else host
        arguments["urls"] = [url or f"http://{host}:{port}"]
        arguments["start_timeout_s"] = float(given["vllm_server_timeout"])
        result.put_class("data.engine", "VLLMServer", **arguments)
        result.remarks.append(
            "the server is vLLM's own, started as docs/sync.md shows, not `trl vllm-serve`"
        )
        return
    arguments["gpu_memory_utilization"] = given["vllm_gpu_memory_utilization"]
    if given["vllm_enable_sleep_mode"]:
        arguments["sleep_level"] = 2
    if given["vllm_model_impl"] != "vllm":
        arguments["options"] = {"model_impl": given["vllm_model_impl"]}
    result.put_class("data.engine", "VLLMLocal", **arguments)


def _batches(given: Given, result: Conversion, devices: int) -> Updates:
    """Set the sizes of batches; return the updates of an iteration."""
    completions = given["per_device_train_batch_size"] * devices
    accumulated, group_size = given["gradient_accumulation_steps"], given["num_generations"]
    size, steps = given["generation_batch_size"], given["steps_per_generation"]
    if steps is None:
        steps = accumulated if size is None else size // completions
    generated = completions * steps
    minibatches = steps / accumulated
    if minibatches < 1:  # a gradient is accumulated over several generations
        generated, minibatches = completions * accumulated, 1
        result.remarks.append(
            f"steps_per_generation {steps} is less than gradient_accumulation_steps {accumulated}: "
            "here all completions of one optimizer step are generated together"
        )
    if generated % group_size:
        raise ConfigError(
            f"{generated} completions per iteration do not divide into groups of num_generations="
            f"{group_size}; set the number of processes by --devices"
        )
    groups = generated // group_size
    if minibatches != int(minibatches) or minibatches > groups:
        chosen = max(1, min(groups, round(minibatches)))
        result.remarks.append(
            f"{minibatches:g} optimizer steps a pass are {chosen} here: a minibatch is made of "
            f"whole groups, of which an iteration has {groups}"
        )
        minibatches = chosen
    result.put("data.group_size", group_size)
    result.put("data.groups_per_iteration", groups)
    result.put("model.update.minibatches", int(minibatches))
    result.put("model.update.ppo_epochs", given["num_iterations"])
    return Updates(int(minibatches), given["num_iterations"], accumulated * devices)


def _length(given: Given, result: Conversion, steps: int) -> int | None:
    """Set the length of the run; return its optimizer steps, if the file has them."""
    if given["max_steps"] > 0:
        iterations = math.ceil(given["max_steps"] / steps)
        result.put("data.iterations_per_epoch", iterations)
        return iterations * steps
    result.missing.append(
        f"data.iterations_per_epoch: num_train_epochs {given['num_train_epochs']:g} x prompts / "
        "groups_per_iteration (it is 100 now), with trainer.max_epochs 1"
    )
    result.put("data.iterations_per_epoch", 100)
    return None


def _callbacks(given: Given, result: Conversion, steps: int, heldout: str | None) -> None:
    callbacks = [asynchronous.weight_sync(given)]
    if strategy(given, "eval_strategy") != "no":
        every = given["eval_steps"] or given.look("logging_steps")
        callbacks.append(
            instance(
                "Evaluate",
                every_n_iterations=max(1, round(every / steps)),
                before_training=bool(given["eval_on_start"]),
            )
        )
        samples = given["num_generations_eval"] or given.look("num_generations")
        result.put("data.evaluation.samples", samples)
        put_heldout(given, result, heldout)
    elif heldout is not None:
        result.put("data.evaluation.prompts", prompts_from(heldout, given["dataset_test_split"]))
        result.remarks.append(
            "eval_strategy no: the held-out prompts are read by `lightning-rl validate`; for "
            "evaluations while it trains, add the callback Evaluate"
        )
    if given["log_completions"]:
        count = given["num_completions_to_print"]
        shown = {} if count is None else {"num_rollouts": count}
        callbacks.append(instance("PreviewTable", **shown))
    callbacks += ending(given, result, steps)
    result.put("trainer.callbacks", callbacks)
