"""List what the command line makes of each part of Lightning, one case or two for each.

A case is what it adds to a good configuration of two iterations (``bad_configs.CONFIG``), the word
that the run shall deserve, and how many iterations it trains.
"""

from dataclasses import dataclass

WORKS, REFUSED, WARNS = "works", "refused", "warns"
NEEDS = "needs a package"
"""It is refused without the package, whose name the message says."""


@dataclass(frozen=True)
class Case:
    """One command line: its options, and what comes of it.

    ``says`` is in the message of a run that is refused or warns.
    """

    word: str
    options: tuple[str, ...]
    iterations: int | None = 2
    says: str = ""
    package: str = ""


def works(*options: str, iterations: int | None = 2) -> Case:
    return Case(WORKS, options, iterations)


def refused(says: str, *options: str) -> Case:
    return Case(REFUSED, options, None, says)


def flag(name: str, value: str, iterations: int | None = 2) -> Case:
    return works(f"--trainer.{name}={value}", iterations=iterations)


def no_flag(name: str, value: str, *others: str) -> Case:
    return refused(f"trainer.{name}=", f"--trainer.{name}={value}", *others)


FLAGS = {
    "accelerator": [flag("accelerator", "auto")],
    "strategy": [
        flag("strategy", "auto"),
        no_flag("strategy", "ddp_spawn", "--trainer.devices=2"),
    ],
    "devices": [flag("devices", "1")],
    "num_nodes": [flag("num_nodes", "1")],
    "precision": [flag("precision", "bf16-mixed"), no_flag("precision", "64-true")],
    "logger": [flag("logger", "{class_path: CSVLogger, init_args: {save_dir: logs}}")],
    "callbacks": [flag("callbacks", "[WeightSync]")],
    "fast_dev_run": [flag("fast_dev_run", "true", None)],
    "max_epochs": [flag("max_epochs", "2", 4)],
    "min_epochs": [flag("min_epochs", "1")],
    "max_steps": [flag("max_steps", "1", 1)],
    "min_steps": [flag("min_steps", "1")],
    "max_time": [flag("max_time", "01:00:00:00")],
    "limit_train_batches": [
        flag("limit_train_batches", "1", 1),
        no_flag("limit_train_batches", "0"),
    ],
    "limit_val_batches": [no_flag("limit_val_batches", "0.5")],
    "limit_test_batches": [no_flag("limit_test_batches", "3")],
    "limit_predict_batches": [no_flag("limit_predict_batches", "3")],
    "overfit_batches": [flag("overfit_batches", "1", 1)],
    "val_check_interval": [no_flag("val_check_interval", "0.5")],
    "check_val_every_n_epoch": [no_flag("check_val_every_n_epoch", "2")],
    "num_sanity_val_steps": [
        flag("num_sanity_val_steps", "0"),
        no_flag("num_sanity_val_steps", "1"),
    ],
    "log_every_n_steps": [flag("log_every_n_steps", "1")],
    "enable_checkpointing": [flag("enable_checkpointing", "true")],
    "enable_progress_bar": [flag("enable_progress_bar", "true")],
    "enable_model_summary": [flag("enable_model_summary", "true")],
    "accumulate_grad_batches": [no_flag("accumulate_grad_batches", "2")],
    "gradient_clip_val": [no_flag("gradient_clip_val", "0.5")],
    "gradient_clip_algorithm": [no_flag("gradient_clip_algorithm", "value")],
    "deterministic": [flag("deterministic", "true")],
    "benchmark": [flag("benchmark", "true")],
    "inference_mode": [flag("inference_mode", "false")],
    "use_distributed_sampler": [flag("use_distributed_sampler", "false")],
    "profiler": [flag("profiler", "simple")],
    "detect_anomaly": [flag("detect_anomaly", "true")],
    "barebones": [flag("barebones", "true")],
    "plugins": [
        flag("plugins", "[TorchCheckpointIO]"),
        refused(
            "trainer.plugins=",
            "--trainer.plugins=[{class_path: lightning.pytorch.plugins.FSDPPrecision, "
            "init_args: {precision: 32-true}}]",
        ),
    ],
    "sync_batchnorm": [Case(WARNS, ("--trainer.sync_batchnorm=true",), 2, "no effect")],
    "reload_dataloaders_every_n_epochs": [no_flag("reload_dataloaders_every_n_epochs", "1")],
    "default_root_dir": [flag("default_root_dir", "elsewhere")],
    "enable_autolog_hparams": [flag("enable_autolog_hparams", "false")],
    "model_registry": [no_flag("model_registry", "mine/model")],
}


def added(name: str, arguments: str = "") -> str:
    return f"--trainer.callbacks+={{class_path: {name}, init_args: {{{arguments}}}}}"


def callback(name: str, arguments: str = "", *options: str, iterations: int = 2) -> Case:
    return works(added(name, arguments), *options, iterations=iterations)


def no_callback(name: str, arguments: str = "", *options: str) -> Case:
    return refused(f"trainer.callbacks: {name}: ", added(name, arguments), *options)


_SAVES = "--trainer.enable_checkpointing=true"
_LOGS = "--trainer.logger={class_path: CSVLogger, init_args: {save_dir: logs}}"
_SHOWS = ("--trainer.enable_progress_bar=true", "--trainer.enable_model_summary=true")

CALLBACKS = {
    "BackboneFinetuning": [no_callback("BackboneFinetuning")],
    "BaseFinetuning": [no_callback("BaseFinetuning")],
    "BasePredictionWriter": [callback("BasePredictionWriter", "write_interval: batch")],
    "BatchSizeFinder": [no_callback("BatchSizeFinder")],
    "Callback": [callback("lightning.pytorch.callbacks.Callback")],
    "Checkpoint": [callback("Checkpoint", "", _SAVES)],
    "DeviceStatsMonitor": [callback("DeviceStatsMonitor", "cpu_stats: true", _LOGS)],
    "EMAWeightAveraging": [callback("EMAWeightAveraging", "decay: 0.5")],
    "EarlyStopping": [
        callback(
            "EarlyStopping",
            "monitor: reward/mean, mode: max, stopping_threshold: -1.0",
            iterations=1,
        )
    ],
    "GradientAccumulationScheduler": [
        no_callback("GradientAccumulationScheduler", "scheduling: {0: 2}")
    ],
    "LambdaCallback": [callback("LambdaCallback")],
    "LearningRateFinder": [no_callback("LearningRateFinder")],
    "LearningRateMonitor": [callback("LearningRateMonitor", "logging_interval: step", _LOGS)],
    "ModelCheckpoint": [
        Case(
            WARNS,
            (added("ModelCheckpoint", "every_n_train_steps: 1, dirpath: saved"), _SAVES),
            2,
            "every_n_train_steps counts optimizer steps",
        )
    ],
    "ModelPruning": [no_callback("ModelPruning", "pruning_fn: l1_unstructured, amount: 0.5")],
    "ModelSummary": [callback("ModelSummary", "max_depth: 2", *_SHOWS)],
    "OnExceptionCheckpoint": [no_callback("OnExceptionCheckpoint", "dirpath: failed", _SAVES)],
    "ProgressBar": [callback("ProgressBar", "", *_SHOWS)],
    "RichModelSummary": [callback("RichModelSummary", "max_depth: 2", *_SHOWS)],
    "RichProgressBar": [callback("RichProgressBar", "refresh_rate: 2", *_SHOWS)],
    "SpikeDetection": [no_callback("SpikeDetection")],
    "StochasticWeightAveraging": [no_callback("StochasticWeightAveraging", "swa_lrs: 0.1")],
    "TQDMProgressBar": [callback("TQDMProgressBar", "refresh_rate: 2", *_SHOWS)],
    "ThroughputMonitor": [
        callback("ThroughputMonitor", "batch_size_fn: my_rewards.rollouts, window_size: 2", _LOGS)
    ],
    "Timer": [callback("Timer", "duration: '01:00:00:00'")],
    "WeightAveraging": [callback("WeightAveraging")],
}

_TORCH = "torch.optim.lr_scheduler."


def scheduler(name: str, arguments: str = "") -> str:
    return f"--model.lr_scheduler={{class_path: {_TORCH}{name}, init_args: {{{arguments}}}}}"


def schedule(name: str, arguments: str = "") -> Case:
    return works(scheduler(name, arguments))


SCHEDULERS = {
    "LambdaLR": [schedule("LambdaLR", "lr_lambda: my_rewards.factor")],
    "MultiplicativeLR": [schedule("MultiplicativeLR", "lr_lambda: my_rewards.factor")],
    "StepLR": [schedule("StepLR", "step_size: 1")],
    "MultiStepLR": [schedule("MultiStepLR", "milestones: [1]")],
    "ConstantLR": [schedule("ConstantLR")],
    "LinearLR": [schedule("LinearLR")],
    "ExponentialLR": [schedule("ExponentialLR", "gamma: 0.5")],
    "SequentialLR": [works("--model.lr_scheduler=my_rewards.sequential")],
    "CosineAnnealingLR": [schedule("CosineAnnealingLR", "T_max: 2")],
    "ChainedScheduler": [works("--model.lr_scheduler=my_rewards.chained")],
    "ReduceLROnPlateau": [
        works(
            "--model.lr_scheduler={class_path: lightning.pytorch.cli.ReduceLROnPlateau, "
            "init_args: {monitor: MONITOR, mode: max}}"
        ),
        refused("set class_path: lightning.pytorch.cli", scheduler("ReduceLROnPlateau")),
    ],
    "CyclicLR": [schedule("CyclicLR", "base_lr: 0.001, max_lr: 0.01, cycle_momentum: false")],
    "CosineAnnealingWarmRestarts": [schedule("CosineAnnealingWarmRestarts", "T_0: 1")],
    "OneCycleLR": [
        schedule("OneCycleLR", "max_lr: 0.01, total_steps: 9"),
        refused("schedule ends after 1", scheduler("OneCycleLR", "max_lr: 0.01, total_steps: 1")),
    ],
    "PolynomialLR": [schedule("PolynomialLR")],
    "LRScheduler": [refused("lr_scheduler", scheduler("LRScheduler"))],
    "a function": [
        works("--model.lr_scheduler=my_rewards.chained"),
        refused("lr_scheduler returned None", "--model.lr_scheduler=my_rewards.nothing"),
    ],
}
_SCHEDULES_SAY = {
    "LambdaLR": "lr_lambda is the import path of a function",
    "MultiplicativeLR": "lr_lambda is the import path of a function",
    "SequentialLR": "made by a function of yours, which lr_scheduler names by its import path",
    "ChainedScheduler": "made by a function of yours, which lr_scheduler names by its import path",
    "ReduceLROnPlateau": (
        "class_path: lightning.pytorch.cli.ReduceLROnPlateau with a monitor; it steps after an "
        "iteration that recorded it, in supervised training after an epoch. torch's own names no "
        "metric, and is refused"
    ),
    "OneCycleLR": "refused if its total_steps are fewer than the optimizer steps of the run",
    "LRScheduler": "a base class",
    "a function": "annotated: (Optimizer) -> LRScheduler; refused if it returns anything else",
}

LOGGERS = {
    "CSVLogger": [flag("logger", "{class_path: CSVLogger, init_args: {save_dir: logs}}")],
    "TensorBoardLogger": [
        flag("logger", "{class_path: TensorBoardLogger, init_args: {save_dir: logs}}")
    ],
    "WandbLogger": [
        flag("logger", "{class_path: WandbLogger, init_args: {save_dir: logs, offline: true}}")
    ],
    "MLFlowLogger": [
        Case(NEEDS, ("--trainer.logger={class_path: MLFlowLogger}",), None, "mlflow", "mlflow")
    ],
    "CometLogger": [
        Case(NEEDS, ("--trainer.logger={class_path: CometLogger}",), None, "comet", "comet_ml")
    ],
    "LitLogger": [
        refused(
            "is not a Logger",
            "--trainer.logger={class_path: lightning.pytorch.loggers.LitLogger}",
        )
    ],
    "Logger": [refused("Logger", "--trainer.logger=lightning.pytorch.loggers.Logger")],
}

STRATEGIES = {
    "DDPStrategy": [flag("strategy", "DDPStrategy")],
    "DeepSpeedStrategy": [refused("deepspeed", "--trainer.strategy=DeepSpeedStrategy")],
    "FSDPStrategy": [refused("fsdp", "--trainer.strategy=FSDPStrategy")],
    "ModelParallelStrategy": [flag("strategy", "ModelParallelStrategy")],
    "ParallelStrategy": [refused("parallelstrategy", "--trainer.strategy=ParallelStrategy")],
    "SingleDeviceStrategy": [
        flag("strategy", "{class_path: SingleDeviceStrategy, init_args: {device: cpu}}")
    ],
    "Strategy": [refused("Strategy", "--trainer.strategy=lightning.pytorch.strategies.Strategy")],
}


def plugin(name: str, arguments: str = "") -> str:
    path = f"lightning.pytorch.plugins.{name}"
    return f"--trainer.plugins=[{{class_path: {path}, init_args: {{{arguments}}}}}]"


PLUGINS = {
    "AsyncCheckpointIO": [works(plugin("AsyncCheckpointIO"), _SAVES)],
    "CheckpointIO": [refused("CheckpointIO", plugin("CheckpointIO"))],
    "TorchCheckpointIO": [works(plugin("TorchCheckpointIO"), _SAVES)],
    "XLACheckpointIO": [refused("Not a valid subclass", plugin("XLACheckpointIO"))],
    "BitsandbytesPrecision": [
        refused("only supported on CUDA", plugin("BitsandbytesPrecision", "mode: nf4"))
    ],
    "DeepSpeedPrecision": [
        refused("trainer.plugins=", plugin("DeepSpeedPrecision", "precision: 32-true"))
    ],
    "DoublePrecision": [refused("trainer.precision=", plugin("DoublePrecision"))],
    "HalfPrecision": [works(plugin("HalfPrecision", "precision: bf16-true"))],
    "MixedPrecision": [works(plugin("MixedPrecision", "precision: bf16-mixed, device: cpu"))],
    "Precision": [works(plugin("Precision"))],
    "TransformerEnginePrecision": [
        refused(
            "Not a valid subclass",
            plugin("TransformerEnginePrecision", "weights_dtype: torch.bfloat16"),
        )
    ],
    "FSDPPrecision": [refused("trainer.plugins=", plugin("FSDPPrecision", "precision: 32-true"))],
    "XLAPrecision": [refused("Not a valid subclass", plugin("XLAPrecision"))],
    "LayerSync": [refused("LayerSync", plugin("LayerSync"))],
    "TorchSyncBatchNorm": [Case(WARNS, (plugin("TorchSyncBatchNorm"),), 2, "no effect")],
}

CASES = {
    "flags": FLAGS,
    "callbacks": CALLBACKS,
    "schedulers": SCHEDULERS,
    "loggers": LOGGERS,
    "strategies": STRATEGIES,
    "plugins": PLUGINS,
}

_BASE = "a base class"
SAYS = {
    "schedulers": _SCHEDULES_SAY,
    "loggers": {
        "WandbLogger": "as in Lightning; see Logging for its tables and files",
        "MLFlowLogger": "mlflow; see Logging",
        "CometLogger": "comet_ml",
        "LitLogger": "Lightning 2.6 has it for Fabric alone: it is no logger of the Trainer",
        "Logger": _BASE,
    },
    "strategies": {
        "DDPStrategy": "see Train on several processes",
        "ModelParallelStrategy": "see Train on several processes",
        "DeepSpeedStrategy": "use ShardedStrategy",
        "FSDPStrategy": "use ShardedStrategy",
        "Strategy": _BASE,
        "ParallelStrategy": _BASE,
    },
    "plugins": {
        "CheckpointIO": _BASE,
        "LayerSync": _BASE,
        "Precision": "float32, as without it",
        "HalfPrecision": "precision bf16-true; see Train on a GPU for its master weights",
        "MixedPrecision": "precision bf16-mixed",
        "DoublePrecision": "no engine computes in float64",
        "TorchSyncBatchNorm": "has no effect: a language model has no batch normalisation",
        "BitsandbytesPrecision": "set model.lora.quantization instead, see LoRA",
        "DeepSpeedPrecision": "belongs to a strategy that is not supported",
        "FSDPPrecision": "belongs to a strategy that is not supported; use ShardedStrategy",
        "XLACheckpointIO": "TPUs are not supported",
        "XLAPrecision": "TPUs are not supported",
        "TransformerEnginePrecision": "needs its package; no engine computes in its formats",
    },
}
"""The page's further words on them; ``lightning_flags`` tells of the others."""


def word_of(cases: list[Case]) -> str:
    """Return the table's word: that of its cases, or ``partly`` if some work and some do not."""
    found = {case.word for case in cases}
    return found.pop() if len(found) == 1 else "partly"
