"""Games: several agents that learn at once, in protocols, as roles of a rollout or in stages."""

from lightning_rl.config.names import surface

__getattr__, __dir__, __all__ = surface(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
