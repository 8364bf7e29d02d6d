"""Base classes, types and functions for your own parts, and variants that few runs need.

``docs/extend`` has a page for each base class.
"""

from lightning_rl.config.names import surface

__getattr__, __dir__, __all__ = surface(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
