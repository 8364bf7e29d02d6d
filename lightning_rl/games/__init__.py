"""Games: several agents that learn at once, by protocols, as roles or stage by stage."""

from lightning_rl.config.names import surface

__getattr__, __dir__, __all__ = surface(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
