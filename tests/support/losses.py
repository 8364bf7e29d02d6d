"""Provide policy losses that every test of losses goes through."""

import inspect

import lightning_rl as rl
from lightning_rl.algos.losses import PolicyLoss


def public_losses() -> list[PolicyLoss]:
    """Return every public policy loss with its defaults, apart from those that need a teacher.

    So a new loss is covered as soon as it is public.
    """
    classes = (getattr(rl, name) for name in dir(rl))
    losses = [c for c in classes if inspect.isclass(c) and issubclass(c, PolicyLoss)]
    return [c() for c in losses if not c.needs_teacher]
