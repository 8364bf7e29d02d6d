"""Agents that are programs, which call their models through an OpenAI- or Anthropic-like API."""

from lightning_rl.config.names import surface

__getattr__, __dir__, __all__ = surface(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
