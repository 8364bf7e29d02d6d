"""Digests of the weights that an engine's processes hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Holdings:
    """Digests of the weights in one process, read from the tensors that it computes with.

    Args:
        holder: name of the process, for messages.
        digests: digest of each weight in the engine's dtype, by the name in a push.
        unread: why other weights cannot be compared, by name.
    """

    holder: str
    digests: Mapping[str, str]
    unread: Mapping[str, str] = field(default_factory=dict)
