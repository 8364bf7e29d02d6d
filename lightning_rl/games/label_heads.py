"""Heads of supervised training: what is made of a body's features, and held against labels."""

from abc import ABC, abstractmethod

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.config.arguments import configurable
from lightning_rl.envs.networks.layers import output
from lightning_rl.errors import DataError, require_at_least


class LabelHead(nn.Module, ABC):
    """Makes of features what labels are; like a body, it is built when the data are known."""

    @abstractmethod
    def build(self, features: int) -> None:
        """Make the layers."""

    @abstractmethod
    def check(self, labels: Tensor, source: str) -> None:
        """Look at all labels of a data set, of that name.

        Raises:
            DataError: for such as it cannot learn; naming the first.
        """

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """Outputs (N, ...) of features (N, F)."""

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """A loss of each row, (N,)."""

    @abstractmethod
    def measure(self, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Metrics by name, each with a value for some rows, (M,); the epoch's means are logged."""

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Further metrics, of those means."""
        return {}


@configurable
class ClassHead(LabelHead):
    """One of n classes, by cross-entropy.

    It measures ``accuracy``, ``accuracy_class_0`` and so on of the rows of each class, and
    ``accuracy_worst``, the least of these.

    Args:
        classes: n.

    Raises:
        ConfigError: for less than 2.
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
                f"{source}: labels are {labels.dtype} of shape {tuple(labels.shape)}, and classes "
                "are integers, one for each row; give those, or use NumberHead"
            )
        bad = ((labels < 0) | (labels >= self.classes)).nonzero()
        if len(bad):
            row = int(bad[0])
            raise DataError(
                f"{source}: the label of row {row} is {int(labels[row])}, and with "
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
    """Numbers, by half of the squared error; it measures ``absolute_error``.

    Args:
        size: numbers per label.

    Raises:
        ConfigError: for less than 1.
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
                f"{source}: labels are {labels.dtype} of shape {tuple(labels.shape)}, and with "
                f"size={self.size} they must be floats, {self.size} for each row; set size, or "
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
