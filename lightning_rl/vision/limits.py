"""Limits of pictures, and of what their sources may name."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least


@configurable
@dataclass(frozen=True)
class PictureLimits:
    """Limits of pictures; a picture that exceeds them is refused before it is decoded.

    Args:
        max_pixels: maximum width times height, by the file's header. Decoding takes 3 bytes per
            pixel.
        max_bytes: maximum size of the file.
        max_per_prompt: maximum number of pictures in one prompt or chat.
        timeout_s: seconds for a whole download, including all attempts.
        retries: attempts after the first, if a download failed temporarily.

    Raises:
        ConfigError: for values out of range.
    """

    max_pixels: int = 32 * 2**20
    max_bytes: int = 20 * 2**20
    max_per_prompt: int = 16
    timeout_s: float = 30.0
    retries: int = 2

    def __post_init__(self) -> None:
        require_at_least(
            1,
            max_pixels=self.max_pixels,
            max_bytes=self.max_bytes,
            max_per_prompt=self.max_per_prompt,
        )
        require_at_least(0, retries=self.retries)
        require_at_least(0.001, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class PictureAccess:
    """The sources that a picture may have: by default anything that this process can read.

    Args:
        files: whether sources may name files.
        private_hosts: whether URLs may lead to addresses outside the public internet, such as this
            machine, its network, or a cloud's metadata service. If not, proxies are not used,
            because what they reach is unknown.
        hosts: names and addresses that URLs may use wherever they lead.
    """

    files: bool = True
    private_hosts: bool = True
    hosts: Sequence[str] = ()


OWN = PictureAccess()
"""Access of sources in the user's own data: unrestricted."""
