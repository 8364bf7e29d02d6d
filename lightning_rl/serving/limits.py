"""What one request may ask of an AgentServer."""

from dataclasses import dataclass, field

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least
from lightning_rl.vision.limits import PictureAccess, PictureLimits


@configurable
@dataclass(frozen=True)
class RequestLimits:
    """Bounds of a request to an :class:`AgentServer`; beyond them it is refused, naming the bound.

    Args:
        max_bytes: of its body. The default holds some two million tokens of text.
        max_answers: completions that it may ask for: ``n`` times its prompts.
        max_seconds: to read it and to write its chat in tokens, which other requests do not wait
            for; what is generated takes the time it takes.
        max_wait_s: seconds until a connection must have sent a whole request, or it is closed. One
            that had an answer with its key may be kept for the next.
        client_templates: whether a request may bring a chat template (``chat_template``). It is a
            program: each is rendered in a process of its own, within ``max_seconds``, ``max_bytes``
            of text and 1 GiB of memory.
        pictures: bounds of each picture, and of their number in a chat.
        picture_hosts: hosts that a picture's URL may name although they are not of the public
            internet, such as ``["localhost"]``. Clients name no files.

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
        """What a client's pictures may name."""
        return PictureAccess(files=False, private_hosts=False, hosts=tuple(self.picture_hosts))
