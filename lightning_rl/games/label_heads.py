"""Heads for supervised training: they map a body's features to outputs that labels are held
against.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.layers import output
from lightning_rl.errors import DataError, require_at_least


class LabelHead(nn.Module, ABC):
    """Maps features to predictions of labels; like a body, it is built once the data are known."""

    @abstractmethod
    def build(self, features: int) -> None:
        """Build the layers for feature vectors of this size."""

    @abstractmethod
    def check(self, labels: Tensor, source: str) -> None:
        """Check all labels of the data set called ``source``.

        Raises:
            DataError: if the head cannot learn a label; the message names the first such row.
        """

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """Return outputs (N, ...) for features (N, F)."""

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each row, (N,)."""

    @abstractmethod
    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return metrics by name, each with one value (M,) per row it applies to; epochs log the
        means.
        """

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Return further metrics, computed from an epoch's means."""
        return {}


@configurable
class ClassHead(LabelHead):
    """Predicts one of n classes, trained by cross-entropy.

    It measures ``accuracy``, the accuracy on each class as ``accuracy_class_0`` and so on, and
    the lowest of these as ``accuracy_worst``.

    Args:
        classes: n, the number of classes.

    Raises:
        ConfigError: if ``classes`` is less than 2.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        require_at_least(2, classes=classes)
        self.classes = classes

    def build(self, features: int) -> None:
        self.layer = output(features, self.classes)

    def check(self, labels: Tensor, source: str) -> None:
        if labels.is_floating_point() or labels.ndim != 1:
            raise DataError(
                f"{source}: the labels are {labels.dtype} of shape {tuple(labels.shape)}, but "
                "classes must be one integer per row; give integers, or use NumberHead"
            )
        bad = ((labels < 0) | (labels >= self.classes)).nonzero()
        if len(bad):
            row = int(bad[0])
            raise DataError(
                f"{source}: the label of row {row} is {int(labels[row])}, but with "
                f"classes={self.classes} it must be in [0, {self.classes}); raise classes"
            )

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.layer(features)
        return logits

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="none")

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        right = (outputs.argmax(-1) == labels).float()
        own = {f"accuracy_class_{c}": right[labels == c] for c in range(self.classes)}
        return {"accuracy": right} | own

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        own = [value for name, value in means.items() if name.startswith("accuracy_class_")]
        return {"accuracy_worst": min(own)} if own else {}


@configurable
class NumberHead(LabelHead):
    """Predicts numbers, trained by half of the squared error; it measures ``absolute_error``.

    Args:
        size: numbers per label.

    Raises:
        ConfigError: if ``size`` is less than 1.
    """

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        require_at_least(1, size=size)
        self.size = size

    def build(self, features: int) -> None:
        self.layer = output(features, self.size)

    def check(self, labels: Tensor, source: str) -> None:
        width = 1 if labels.ndim == 1 else labels.shape[-1]
        if not labels.is_floating_point() or labels.ndim > 2 or width != self.size:
            raise DataError(
                f"{source}: the labels are {labels.dtype} of shape {tuple(labels.shape)}, but with "
                f"size={self.size} they must be floats, {self.size} per row; set size, or "
                "use ClassHead for integers"
            )

    def forward(self, features: Tensor) -> Tensor:
        numbers: Tensor = self.layer(features)
        return numbers

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * self._errors(outputs, labels).square().sum(-1)

    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"absolute_error": self._errors(outputs, labels).abs().mean(-1)}

    @staticmethod
    def _errors(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs - labels.reshape(outputs.shape)
