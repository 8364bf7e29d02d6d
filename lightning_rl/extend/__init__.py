"""What parts of your own derive from, take or call; ``docs/extend`` has a page for each."""

from lightning_rl.config.names import surface

__getattr__, __dir__, __all__ = surface(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
