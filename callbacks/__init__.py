"""Callbacks: everything around learning. Each is one class that a YAML line selects."""

from lightning_rl.callbacks.evaluate import Evaluate
from lightning_rl.callbacks.export import HFExport
from lightning_rl.callbacks.preview import PreviewTable
from lightning_rl.callbacks.progress import RLProgressBar
from lightning_rl.callbacks.report import RunReport
from lightning_rl.callbacks.rollout_writer import RolloutWriter
from lightning_rl.callbacks.timer import StepTimer
from lightning_rl.callbacks.weight_sync import WeightSync
from lightning_rl.hooks import RLCallback

__all__ = [
    "Evaluate",
    "HFExport",
    "PreviewTable",
    "RLCallback",
    "RLProgressBar",
    "RolloutWriter",
    "RunReport",
    "StepTimer",
    "WeightSync",
]
