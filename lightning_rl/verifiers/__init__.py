"""Environments for verifiers: hosted under a Python of their own, played by our models."""

from lightning_rl.config.names import surface

__getattr__, __dir__, __all__ = surface(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
