"""Limits of one request to an AgentServer."""

from dataclasses import dataclass, field

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least
from lightning_rl.vision.limits import PictureAccess, PictureLimits


@configurable
@dataclass(frozen=True)
class RequestLimits:
    """Limits of a request to an :class:`AgentServer`; a refusal names the limit.

    Args:
        max_bytes: maximum size of the body. The default holds some two million tokens of text.
        max_answers: maximum number of completions: ``n`` times the number of prompts.
        max_seconds: time limit for reading the request and tokenizing its chat, which delays no
            other session; generation has no limit.
        max_wait_s: seconds within which a connection must send a whole request, or it is closed. A
            connection that had an answer may be kept for the next request.
        client_templates: whether a request may bring a chat template (``chat_template``). It is a
            program: each is rendered in a separate process, within ``max_seconds``, ``max_bytes``
            of text and 1 GiB of memory.
        pictures: limits of each picture, and of their number in a chat.
        picture_hosts: hosts outside the public internet that a picture's URL may name, such as
            ``["localhost"]``. Clients may not name files.

    Raises:
        ConfigError: for values out of range.
    """

    max_bytes: int = 8 * 2**20
    max_answers: int = 128
    max_seconds: float = 60.0
    max_wait_s: float = 60.0
    client_templates: bool = False
    pictures: PictureLimits = PictureLimits()
    picture_hosts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_at_least(1, max_bytes=self.max_bytes, max_answers=self.max_answers)
        require_at_least(0.001, max_seconds=self.max_seconds, max_wait_s=self.max_wait_s)

    @property
    def picture_access(self) -> PictureAccess:
        """The sources that a client's pictures may name."""
        return PictureAccess(files=False, private_hosts=False, hosts=tuple(self.picture_hosts))
