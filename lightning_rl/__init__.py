"""Reinforcement-learning post-training of language models, in plain Lightning.

Importing this package is quick: names are loaded when first used, vLLM only when an engine starts.
Here are the names that most runs need. Others are in ``lightning_rl.callbacks`` (guards too),
``lightning_rl.extend`` (what parts of your own derive from, and variants of parts that few runs
need), ``lightning_rl.serving``, ``lightning_rl.envs``, ``lightning_rl.games`` and
``lightning_rl.errors``.
"""

from lightning_rl.config.names import surface

__getattr__, __dir__, __all__ = surface(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
