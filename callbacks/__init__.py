"""Callbacks: everything in a run besides learning. Each is a class that a YAML line selects."""

from lightning_rl.config.names import surface
from lightning_rl.errors import ImportNameError

# Under another name each class would be there twice, and isinstance fail.
if __name__ != "lightning_rl.callbacks":
    raise ImportNameError(
        f"callbacks/ is the package lightning_rl.callbacks, but was imported as {__name__!r}; "
        "write `from lightning_rl.callbacks import Evaluate`, or lightning_rl.callbacks.evaluate"
    )

__getattr__, __dir__, __all__ = surface(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
