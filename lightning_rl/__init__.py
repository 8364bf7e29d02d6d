"""Reinforcement-learning post-training of language models, in plain Lightning.

Importing this package is quick: names are loaded when first used, vLLM only when an engine starts.
"""

from typing import Any

from lightning_rl.config import names

__all__ = sorted(names.MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in names.MODULE_OF:
        raise AttributeError(f"module 'lightning_rl' has no attribute {name!r}")
    return names.public(name)


def __dir__() -> list[str]:
    return __all__
