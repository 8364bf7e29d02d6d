"""What each argument of Lightning's Trainer, and each of its callbacks, means for RL.

One table: a run with something that is refused does not start, and ``docs/lightning.md`` shows all
of it (``python -m tests.lightning_table`` writes it there).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import lightning.pytorch.callbacks as theirs
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rl.errors import ConfigError


class Verdict(Enum):
    """Whether something of Lightning's can be used."""

    WORKS = "works"
    PARTLY = "partly"
    """Refused with some values."""
    WARNED = "warns"
    REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """What is said about a flag or callback.

    ``used`` takes the Trainer, or the callback, and gives the value that is refused or warned of;
    None if there is none.
    """

    verdict: Verdict
    words: str
    used: Callable[[Any], Any]


def _works(words: str) -> Entry:
    return Entry(Verdict.WORKS, words, lambda _: None)


def _partly(words: str, used: Callable[[Any], Any]) -> Entry:
    return Entry(Verdict.PARTLY, words, used)


def _refused(words: str, used: Callable[[Any], Any] = lambda _: True) -> Entry:
    return Entry(Verdict.REFUSED, words, used)


def _warned(words: str, used: Callable[[Any], Any]) -> Entry:
    return Entry(Verdict.WARNED, words, used)


def _unless(name: str, *harmless: Any) -> Callable[[Trainer], Any]:
    """The Trainer's attribute, if it is none of these."""

    def used(trainer: Trainer) -> Any:
        value = getattr(trainer, name)
        return None if value in harmless else value

    return used


def _limit(name: str) -> Callable[[Trainer], Any]:
    """A limit on held-out batches, unless another flag set it."""

    def used(trainer: Trainer) -> Any:
        value = getattr(trainer, name)
        others = (trainer.fast_dev_run, trainer.overfit_batches)  # type: ignore[attr-defined]
        return None if value == 1 or value in filter(None, others) else value

    return used


def _validation_interval(trainer: Trainer) -> Any:
    seconds = trainer._val_check_time_interval  # type: ignore[attr-defined]
    if seconds is not None:
        return f"{seconds:g} s"
    value = trainer.val_check_interval
    return None if isinstance(value, float) and value == 1.0 else value


def _no_batches(trainer: Trainer) -> Any:
    return 0 if trainer.limit_train_batches == 0 else None


def _layer_sync(trainer: Trainer) -> Any:
    return True if trainer._accelerator_connector._layer_sync is not None else None


_EVALUATE = (
    "fit has no validation loop, the callback Evaluate evaluates; set its every_n_iterations"
)
_MAX_STEPS = (
    "counts optimizer steps, of which an iteration has ppo_epochs x minibatches; the iteration "
    "that reaches it is finished"
)

_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")

TRAINER: dict[str, Entry] = {
    "accelerator": _works("cpu, gpu or cuda, auto"),
    "strategy": _works(
        "one process, ddp and ModelParallelStrategy: see Train on several processes"
    ),
    "devices": _works("one training process each; they share an iteration's groups"),
    "num_nodes": _works("as in Lightning"),
    "precision": _partly(
        "32-true, bf16-mixed and bf16-true work, and the engine follows. With bf16-true the "
        "optimizer steps float32 copies of the weights (see Train on a GPU), because in 16 bits "
        "most updates of RL's small learning rates are rounded away; float16 needs a loss scale, "
        "which max_grad_norm would clip; no engine computes in float64",
        _unless("precision", *_PRECISIONS),
    ),
    "logger": _works(
        "any; false keeps the results too, in lightning_rl_runs/version_<n> of default_root_dir"
    ),
    "callbacks": _works("ours and, as the second table says, Lightning's"),
    "fast_dev_run": _works(
        "n iterations with everything, of which nothing is kept: what is written goes to a scratch "
        "directory"
    ),
    "max_epochs": _works(
        "epochs of data.iterations_per_epoch iterations; Lightning's default: 1000"
    ),
    "min_epochs": _works("EarlyStopping and max_time wait for it"),
    "max_steps": _works(_MAX_STEPS),
    "min_steps": _works("as max_steps; EarlyStopping and max_time wait for it"),
    "max_time": _works(
        "ends the run after the iteration under way; IterationCheckpoint's max_time also stops "
        "collecting, saves, and exits with status 124"
    ),
    "limit_train_batches": _partly(
        "at 0 nothing would be trained; use `lightning-rl validate` to evaluate. Another number is "
        "how many iterations an epoch has, a fraction that share of them",
        _no_batches,
    ),
    "limit_val_batches": _refused(
        "held-out prompts are one batch; data.eval_limit takes the first of them, and without the "
        "callback Evaluate there is no evaluation",
        _limit("limit_val_batches"),
    ),
    "limit_test_batches": _refused(
        "held-out prompts are one batch; data.eval_limit takes the first of them",
        _limit("limit_test_batches"),
    ),
    "limit_predict_batches": _refused(
        "`lightning-rl rollout --iterations` says how many there are",
        _limit("limit_predict_batches"),
    ),
    "overfit_batches": _works(
        "an epoch is that many iterations (a fraction: that share), and every epoch has the "
        "prompts of the first again, with new seeds"
    ),
    "val_check_interval": _refused(_EVALUATE, _validation_interval),
    "check_val_every_n_epoch": _refused(_EVALUATE, _unless("check_val_every_n_epoch", 1)),
    "num_sanity_val_steps": _partly(
        "Evaluate(before_training=True) evaluates before training; 0 is fine",
        _unless("num_sanity_val_steps", 0, 2),
    ),
    "log_every_n_steps": _works(
        "of Lightning's own monitors, in iterations; our metrics are logged in every one"
    ),
    "enable_checkpointing": _works(
        "the command line adds IterationCheckpoint; a script gets Lightning's ModelCheckpoint"
    ),
    "enable_progress_bar": _works("RLProgressBar, if it is among the callbacks"),
    "enable_model_summary": _works("as in Lightning"),
    "accumulate_grad_batches": _refused(
        "a minibatch is accumulated over packs already: model.max_tokens_per_pack bounds memory, "
        "and fewer model.minibatches make larger steps",
        _unless("accumulate_grad_batches", 1),
    ),
    "gradient_clip_val": _refused(
        "set model.max_grad_norm (default 1.0), the largest global norm",
        _unless("gradient_clip_val", None),
    ),
    "gradient_clip_algorithm": _refused(
        "gradients are clipped by their global norm, model.max_grad_norm",
        _unless("gradient_clip_algorithm", None),
    ),
    "deterministic": _works("as in Lightning"),
    "benchmark": _works("as in Lightning"),
    "inference_mode": _works("as in Lightning, for validate, test and rollout"),
    "use_distributed_sampler": _works("nothing to do: groups are shared by the ranks"),
    "profiler": _works("as in Lightning; StepTimer and the viewer show an iteration's stages"),
    "detect_anomaly": _works("as in Lightning; the guards watch for what is not finite"),
    "barebones": _works("as in Lightning; the command line adds no IterationCheckpoint then"),
    "plugins": _works("as in Lightning; of precision plugins those that precision allows"),
    "sync_batchnorm": _warned(
        "has no effect: a language model has no batch normalisation", _layer_sync
    ),
    "reload_dataloaders_every_n_epochs": _refused(
        "every iteration is collected anew already, and a resumed run would skip some",
        _unless("reload_dataloaders_every_n_epochs", 0),
    ),
    "default_root_dir": _works("where loggers, and lightning_rl_runs, begin"),
    "enable_autolog_hparams": _works("as in Lightning"),
    "model_registry": _refused(
        "IterationCheckpoint does not upload there; loggers with log_model do",
        _unless("_model_registry", None),
    ),
}
"""Every argument of ``Trainer.__init__``."""

_FREEZING = (
    "it freezes layers before the model is loaded; model.lora trains adapters alone, and "
    "value_warmup_iterations the critic alone"
)


def _counts_steps(callback: Any) -> Any:
    return callback._every_n_train_steps or None


CALLBACKS: dict[str, Entry] = {
    "BackboneFinetuning": _refused(_FREEZING),
    "BaseFinetuning": _refused(_FREEZING),
    "BasePredictionWriter": _works("gets the rollouts of `lightning-rl rollout`, each iteration's"),
    "BatchSizeFinder": _refused(
        "memory is bounded by model.max_tokens_per_pack, and a pack that does not fit is cut"
    ),
    "Callback": _works("a base class; RLCallback has more hooks"),
    "Checkpoint": _works("a base class"),
    "DeviceStatsMonitor": _works("as in Lightning; the steps are iterations"),
    "EMAWeightAveraging": _works("as WeightAveraging"),
    "EarlyStopping": _works(
        "looks at every row of metrics that holds its monitor, so patience counts evaluations for "
        "eval/accuracy, iterations for reward/mean; with check_on_train_epoch_end=True it looks "
        "at the end of epochs only. Say mode='max'"
    ),
    "GradientAccumulationScheduler": _refused(
        "a minibatch is accumulated over packs; set model.max_tokens_per_pack and model.minibatches"
    ),
    "LambdaCallback": _works("as in Lightning"),
    "LearningRateFinder": _refused(
        "it would train on a loss that means nothing across batches; begin with 1e-6 for a whole "
        "model, 1e-5 with model.lora, and watch policy/kl_ref and policy/clip_frac"
    ),
    "LearningRateMonitor": _works("as in Lightning; policy/lr is in every row anyway"),
    "ModelCheckpoint": _warned(
        "every_n_train_steps counts optimizer steps, and looks once per iteration; "
        "IterationCheckpoint(every_n_iterations=...) counts iterations. Its other triggers work",
        _counts_steps,
    ),
    "ModelPruning": _refused(
        "it prunes before the model is loaded, and the engine could not load pruned weights"
    ),
    "ModelSummary": _works("as in Lightning"),
    "OnExceptionCheckpoint": _works("as in Lightning; IterationCheckpoint saves then too"),
    "ProgressBar": _works("a base class"),
    "RichModelSummary": _works("as in Lightning"),
    "RichProgressBar": _works("as in Lightning; one step is an iteration"),
    "SpikeDetection": _refused(
        "an iteration has no single loss; NonFiniteGuard, LogprobSpikeGuard and "
        "MetricGuard(metric='policy/loss') watch for spikes"
    ),
    "StochasticWeightAveraging": _refused(
        "it takes over the learning rate, which the module steps itself; WeightAveraging and "
        "EMAWeightAveraging work"
    ),
    "TQDMProgressBar": _works("as in Lightning; one step is an iteration"),
    "ThroughputMonitor": _works(
        "as in Lightning; give batch_size_fn=lambda batch: len(batch['rollouts'])"
    ),
    "Timer": _works("as max_time"),
    "WeightAveraging": _works(
        "averages once per iteration; engine and eval/* have the current weights, and what is "
        "exported at the end is the average"
    ),
}
"""Every callback that Lightning brings."""


def refuse_flags(trainer: Trainer) -> None:
    """Refuse a Trainer with arguments or callbacks that do nothing here, or something else.

    Raises:
        ConfigError: naming the argument, its value, and what to set instead.
    """
    for message in _found(trainer, Verdict.REFUSED, Verdict.PARTLY):
        raise ConfigError(message)


def warn_of_flags(trainer: Trainer) -> None:
    """Warn of what is used without effect."""
    for message in _found(trainer, Verdict.WARNED):
        rank_zero_warn(message)


def refuse_precision(trainer: Trainer, *allowed: str) -> None:
    """Refuse a precision that is not one of ours, or ``allowed``; also of supervised training.

    Raises:
        ConfigError: naming those that work.
    """
    if trainer.precision not in (*_PRECISIONS, *allowed):
        raise ConfigError(f"trainer.precision={trainer.precision!r}: {TRAINER['precision'].words}")


def compute_dtype(trainer: Trainer) -> str:
    """What the trainer multiplies matrices in."""
    return "bfloat16" if trainer.precision.startswith("bf16-") else "float32"


def _found(trainer: Trainer, *verdicts: Verdict) -> Iterator[str]:
    """What there is to say about the flags and callbacks of these verdicts that are used."""
    for name, entry in TRAINER.items():
        if entry.verdict in verdicts and (value := entry.used(trainer)) is not None:
            yield f"trainer.{name}={value!r}: {entry.words}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name, entry in CALLBACKS.items():
            used = entry.verdict in verdicts and isinstance(callback, getattr(theirs, name))
            if used and entry.used(callback) is not None:
                yield f"trainer.callbacks: {type(callback).__name__}: {entry.words}"
