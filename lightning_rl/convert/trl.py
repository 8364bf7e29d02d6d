"""Conversion of TRL's GRPOConfig: one function per topic that both libraries configure."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from lightning_rl.convert import distillation_trl as distillation, learning_trl as learning
from lightning_rl.convert.checked import check_parts
from lightning_rl.convert.conversion import (
    Conversion,
    Given,
    Left,
    as_list,
    instance,
    prompts_from,
    table,
)
from lightning_rl.convert.data_trl import put_data, put_heldout, put_rewards
from lightning_rl.convert.learning_trl import Updates
from lightning_rl.convert.peft import KEY, with_adapters
from lightning_rl.errors import ConfigError
from lightning_rl.models.pretrained import REFUSED
from lightning_rl.rollout import SAMPLED_BY

TRL = table("trl")
OTHERS = {
    "SFTConfig": (
        {
            *("dataset_text_field", "packing", "packing_strategy", "eval_packing", "padding_free"),
            *("assistant_only_loss", "completion_only_loss", "max_seq_length", "dataset_kwargs"),
        },
        "SFTModule with SFTDataModule",
    ),
    "DPOConfig": (
        {
            *("rpo_alpha", "label_smoothing", "precompute_ref_log_probs", "reference_free"),
            *("f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "use_weighting"),
        },
        "DPOModule with PairDataModule",
    ),
    "KTOConfig": ({"desirable_weight", "undesirable_weight"}, "KTOModule with KTODataModule"),
    "RewardConfig": (
        {"center_rewards_coefficient"},
        "RewardModelModule with RewardPairDataModule",
    ),
}
"""TRL's configurations that are not converted: names that only they have, and our counterpart."""
NEMO_RL = {"grpo", "policy", "data", "cluster"}
"""Sections of a NeMo-RL configuration."""


def convert_trl(
    values: Mapping[str, Any], devices: int = 1, eval_prompts: str | None = None
) -> Conversion:
    """Convert a GRPOConfig, with what TRL's own script reads in addition to it.

    A configuration that names a teacher is read as a DistillationConfig, or one of its relatives.

    Args:
        values: values by name, as in its YAML or ``to_dict()``; defaults may be left out.
        devices: number of training processes, which TRL gets from its launcher.
        eval_prompts: file or folder of held-out prompts; None: the data set's test split.

    Raises:
        ConfigError: if no name is known, a value is of the wrong kind, batches do not divide
            evenly, or the converted settings are refused.
    """
    values = with_adapters(values)
    require_grpo_config(values)
    values = distillation.with_teacher(values)
    given = Given(values, TRL, _defaults_of_bases())
    result = Conversion()
    result.put("trainer.max_epochs", 1)
    _model(given, result)
    put_data(given, result)
    _sampling(given, result)
    _engine(given, result)
    updates = _batches(given, result, devices)
    total = _length(given, result, updates.steps)
    if distillation.distils(given):
        distillation.carry(given, result)
    else:
        put_rewards(given, result)
        learning.carry(given, result, updates)
    learning.put_optimizer(given, result, total)
    _trainer(given, result, devices)
    _callbacks(given, result, updates.steps, eval_prompts)
    result.leave_rest(given)
    check_parts(result)
    return result


def require_grpo_config(values: Mapping[str, Any]) -> None:
    """Refuse names and values of a library other than TRL.

    Raises:
        ConfigError: if most names are not parameters of a GRPOConfig, or one belongs only to the
            configuration of another trainer.
    """
    for config, (telling, ours) in OTHERS.items():
        # A distillation's configuration extends SFTConfig.
        found = sorted(telling & values.keys())
        if found and not distillation.names_trainer(values):
            raise ConfigError(
                f"{', '.join(found)}: it looks like TRL's {config}, which convert does not read; "
                f"write a configuration of {ours} (lightning-rl help {ours.split()[0]})"
            )
    known = _defaults_of_bases().keys() | TRL.keys() | {KEY}
    others = [name for name in values if name.partition(".")[0] not in known]
    if 2 * len(others) > len(values):
        count = "no parameter" if len(others) == len(values) else "few parameters"
        nemo = " (it looks like NeMo-RL's)" if values.keys() >= NEMO_RL else ""
        raise ConfigError(
            f"{', '.join(others)[:80]}: {count} of a GRPOConfig among these{nemo}; convert reads "
            "configurations of TRL, verl and prime-rl"
        )


@cache
def _defaults_of_bases() -> dict[str, Any]:
    """Return the defaults of transformers' TrainingArguments; a full dump sets what differs."""
    from transformers import TrainingArguments

    return {
        f.name: f.default_factory() if f.default_factory is not MISSING else f.default
        for f in fields(TrainingArguments)
    }


def _model(given: Given, result: Conversion) -> None:
    result.put_model(given["model_name_or_path"])
    result.carry(
        given,
        {
            "gradient_checkpointing": "model.gradient_checkpointing",
            "torch_compile": "model.compile",
            "trust_remote_code": "model.trust_remote_code",
            "cast_lm_head_to_fp32": "model.cast_lm_head_to_fp32",
        },
    )
    _model_kwargs(given, result)
    if given["use_peft"]:
        _lora(given, result)


def _model_kwargs(given: Given, result: Conversion) -> None:
    kwargs = dict(given["model_init_kwargs"] or {})
    if given["model_revision"] not in (None, "main"):
        kwargs["revision"] = given["model_revision"]
    for name in [name for name in kwargs if name in REFUSED]:
        value = kwargs.pop(name)
        result.left.append(Left(f"model_init_kwargs.{name}", value, REFUSED[name]))
    if kwargs:
        result.put("model.model_kwargs", kwargs)


def _lora(given: Given, result: Conversion) -> None:
    targets = given["lora_target_modules"]
    if not targets:
        result.leave(
            given,
            "lora_target_modules",
            "null lets peft choose the layers (q_proj and v_proj of most models); all-linear is "
            "written",
        )
    result.put_lora(given["lora_r"], given["lora_alpha"], targets or "all-linear")
    options: dict[str, Any] = {name: True for name in ("use_rslora", "use_dora") if given[name]}
    if given["lora_modules_to_save"]:
        options["modules_to_save"] = as_list(given["lora_modules_to_save"])
    if options:
        result.put("model.lora.options", options)
    _quantization(given, result)
    if given["lora_dropout"]:  # on by default
        result.leave(given, "lora_dropout", TRL["lora_dropout"].note)


def _quantization(given: Given, result: Conversion) -> None:
    if given["load_in_8bit"]:
        result.put_class("model.lora.quantization", "Int8")
    elif given["load_in_4bit"]:
        double = bool(given["use_bnb_nested_quant"])
        result.put_class("model.lora.quantization", "NF4", double=double)
        if given["bnb_4bit_quant_type"] != "nf4":
            result.leave(given, "bnb_4bit_quant_type", "NF4, which fits weights better, is written")


def _sampling(given: Given, result: Conversion) -> None:
    for theirs, ours in (
        ("max_completion_length", "max_tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("top_k", "top_k"),
        ("min_p", "min_p"),
        ("repetition_penalty", "repetition_penalty"),
    ):
        value = given[theirs]
        if ours in ("max_tokens", "temperature") or value != TRL[theirs].default:
            # vLLM's -1 for all tokens
            result.put(f"data.sampling.{ours}", max(0, value or 0) if ours == "top_k" else value)
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
    result.put("model.minibatches", int(minibatches))
    result.put("model.ppo_epochs", given["num_iterations"])
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


def _trainer(given: Given, result: Conversion, devices: int) -> None:
    result.config["seed_everything"] = given["seed"]
    result.put("trainer.accelerator", "cpu" if given["use_cpu"] else "auto")
    result.put("trainer.devices", devices)
    if given["output_dir"] is not None:
        result.put("trainer.default_root_dir", str(given["output_dir"]))
    half = given.look("fp16")
    if half:
        result.leave(given, "fp16", "float16 needs a loss scaler; bf16-mixed is written")
    if given["bf16"] or half or given["bf16"] is None:
        result.put("trainer.precision", "bf16-mixed")
    place = {"save_dir": str(given.look("output_dir") or ".")}
    run_name = given.look("run_name")
    named = {} if run_name is None else {"name": run_name}
    loggers = {
        "tensorboard": instance("TensorBoardLogger", **place, **named),
        "wandb": instance("WandbLogger", **place, **named),
        "mlflow": instance("MLFlowLogger", **({"experiment_name": run_name} if named else {})),
    }
    result.put_loggers(given, "report_to", loggers, {"none", "all"})
    if "logger" in result.config["trainer"]:
        given.cover("run_name")


def _callbacks(given: Given, result: Conversion, steps: int, heldout: str | None) -> None:
    callbacks = [instance("WeightSync")]
    if _strategy(given, "eval_strategy") != "no":
        every = given["eval_steps"] or given.look("logging_steps")
        callbacks.append(
            instance(
                "Evaluate",
                every_n_iterations=max(1, round(every / steps)),
                before_training=bool(given["eval_on_start"]),
            )
        )
        samples = given["num_generations_eval"] or given.look("num_generations")
        result.put("data.eval_samples", samples)
        put_heldout(given, result, heldout)
    elif heldout is not None:
        result.put("data.eval_prompts", prompts_from(heldout, given["dataset_test_split"]))
        result.remarks.append(
            "eval_strategy no: the held-out prompts are read by `lightning-rl validate`; for "
            "evaluations while it trains, add the callback Evaluate"
        )
    if given["log_completions"]:
        count = given["num_completions_to_print"]
        shown = {} if count is None else {"num_rollouts": count}
        callbacks.append(instance("PreviewTable", **shown))
    if _strategy(given, "save_strategy") == "steps" and given.look("save_steps") >= 1:
        every = max(1, round(given["save_steps"] / steps))
        options: dict[str, Any] = {"every_n_iterations": every}
        if given["save_total_limit"]:
            options["keep_last"] = given["save_total_limit"]
        if given["metric_for_best_model"]:
            options["monitor"] = str(given["metric_for_best_model"])
            options["mode"] = "min" if given["greater_is_better"] is False else "max"
            result.missing.append(
                "IterationCheckpoint.monitor: TRL's name of the metric; ours are reward/mean, "
                "eval/accuracy, ..."
            )
        callbacks.append(instance("IterationCheckpoint", **options))
    callbacks += [instance("HFExport"), instance("RunReport")]
    if not given["disable_tqdm"]:
        callbacks.insert(-1, instance("RLProgressBar"))
    result.put("trainer.callbacks", callbacks)


def _strategy(given: Given, key: str) -> str:
    return str(given[key]).rpartition(".")[2].lower()
