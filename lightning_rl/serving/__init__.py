"""Agents that are programs: an HTTP endpoint like OpenAI's and Anthropic's answers their calls."""

from lightning_rl.config.names import surface

__getattr__, __dir__, __all__ = surface(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
