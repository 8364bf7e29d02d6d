"""What an engine's processes say of the weights that they hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Holdings:
    """Digests of the weights in one process, read from where it computes with them.

    Args:
        holder: the process, for messages.
        digests: by the name under which a weight is pushed, in the engine's dtype.
        unread: why others cannot be compared, by name.
    """

    holder: str
    digests: Mapping[str, str]
    unread: Mapping[str, str] = field(default_factory=dict)
