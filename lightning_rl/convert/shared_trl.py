"""What the configurations of all of TRL's trainers have: the model, the trainer, checkpoints."""

from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from lightning_rl.convert.conversion import Conversion, Given, Left, as_list, instance, table
from lightning_rl.models.pretrained import REFUSED

TRL = table("trl")


@cache
def defaults_of_bases() -> dict[str, Any]:
    """Return the defaults of transformers' TrainingArguments; a full dump sets what differs."""
    from transformers import TrainingArguments

    return {
        f.name: f.default_factory() if f.default_factory is not MISSING else f.default
        for f in fields(TrainingArguments)
    }


def put_model(given: Given, result: Conversion) -> None:
    """Set the model, and how it is loaded."""
    result.put_model(given["model_name_or_path"])
    result.carry(
        given,
        {
            "gradient_checkpointing": "model.loading.gradient_checkpointing",
            "trust_remote_code": "model.loading.trust_remote_code",
        },
    )
    _model_kwargs(given, result)


def _model_kwargs(given: Given, result: Conversion) -> None:
    kwargs = dict(given["model_init_kwargs"] or {})
    if given["model_revision"] not in (None, "main"):
        kwargs["revision"] = given["model_revision"]
    for name in [name for name in kwargs if name in REFUSED]:
        value = kwargs.pop(name)
        result.left.append(Left(f"model_init_kwargs.{name}", value, REFUSED[name]))
    if kwargs:
        result.put("model.loading.model_kwargs", kwargs)


def put_adapters(given: Given, result: Conversion) -> None:
    """Set the LoRA, if one is trained."""
    if not given["use_peft"]:
        return
    targets = given["lora_target_modules"]
    if not targets:
        result.leave(given, "lora_target_modules")
    result.put_lora(given["lora_r"], given["lora_alpha"], targets or "all-linear")
    options: dict[str, Any] = {name: True for name in ("use_rslora", "use_dora") if given[name]}
    if given["lora_modules_to_save"]:
        options["modules_to_save"] = as_list(given["lora_modules_to_save"])
    if options:
        result.put("model.lora.options", options)
    _quantization(given, result)
    if given["lora_dropout"]:  # on by default
        result.leave(given, "lora_dropout")


def _quantization(given: Given, result: Conversion) -> None:
    if given["load_in_8bit"]:
        result.put_class("model.lora.quantization", "Int8")
    elif given["load_in_4bit"]:
        double = bool(given["use_bnb_nested_quant"])
        result.put_class("model.lora.quantization", "NF4", double=double)
        if given["bnb_4bit_quant_type"] != "nf4":
            result.leave(given, "bnb_4bit_quant_type")


def put_trainer(given: Given, result: Conversion, devices: int) -> None:
    """Set the seed, devices, precision and loggers."""
    result.config["seed_everything"] = given["seed"]
    result.put("trainer.accelerator", "cpu" if given["use_cpu"] else "auto")
    result.put("trainer.devices", devices)
    if given["output_dir"] is not None:
        result.put("trainer.default_root_dir", str(given["output_dir"]))
    half = given.look("fp16")
    if half:
        result.leave(given, "fp16")
    if given["bf16"] or half or given["bf16"] is None:
        result.put("trainer.precision", "bf16-mixed")
    arguments = {"save_dir": str(given.look("output_dir") or ".")}
    run_name = given.look("run_name")
    named = {} if run_name is None else {"name": run_name}
    loggers = {
        "tensorboard": instance("TensorBoardLogger", **arguments, **named),
        "wandb": instance("WandbLogger", **arguments, **named),
        "mlflow": instance("MLFlowLogger", **({"experiment_name": run_name} if named else {})),
    }
    result.put_loggers(given, "report_to", loggers, {"none", "all"})
    if "logger" in result.config["trainer"]:
        given.cover("run_name")


def ending(given: Given, result: Conversion, steps: int) -> list[dict[str, Any]]:
    """Return the callbacks that save, export and report; ``steps`` optimizer steps an iteration."""
    callbacks = []
    if strategy(given, "save_strategy") == "steps" and given.look("save_steps") >= 1:
        every = max(1, round(given["save_steps"] / steps))
        options: dict[str, Any] = {"every_n_iterations": every}
        if given["save_total_limit"]:
            options["keep_last"] = given["save_total_limit"]
        if given["metric_for_best_model"]:
            options["monitor"] = str(given["metric_for_best_model"])
            options["mode"] = "min" if given["greater_is_better"] is False else "max"
            result.missing.append(
                "IterationCheckpoint.monitor: TRL's name of the metric; ours are reward/mean, "
                "sft/val_loss, ..."
            )
        callbacks.append(instance("IterationCheckpoint", **options))
    callbacks += [instance("HFExport"), instance("RunReport")]
    if not given["disable_tqdm"]:
        callbacks.insert(-1, instance("RLProgressBar"))
    return callbacks


def strategy(given: Given, key: str) -> str:
    """Return when it evaluates or saves: ``no``, ``steps`` or ``epoch``."""
    return str(given[key]).rpartition(".")[2].lower()
