"""What a picture may be, and what its source may name."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import require_at_least


@configurable
@dataclass(frozen=True)
class PictureLimits:
    """Bounds of pictures; what is beyond them is refused before it is decoded.

    Args:
        max_pixels: width times height, as the file's header has them. Decoding takes 3 bytes a
            pixel.
        max_bytes: of the file.
        max_per_prompt: pictures in one prompt or chat.
        timeout_s: seconds for all of a download, however often it is tried.
        retries: attempts after the first, where a download failed in a way that may pass.

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
    """What the source of a picture may name: by default all that this process can read.

    Args:
        files: whether it may name files.
        private_hosts: whether a URL may lead to addresses that are not of the public internet,
            such as this machine, its network, or a cloud's metadata service. Where it may not,
            proxies are not used: what they reach cannot be known.
        hosts: names and addresses that URLs may name whatever they lead to.
    """

    files: bool = True
    private_hosts: bool = True
    hosts: Sequence[str] = ()

    def reaches_all(self, host: str) -> bool:
        """Whether a host may be asked wherever its name leads."""
        return self.private_hosts or host in self.hosts


OWN = PictureAccess()
"""Of sources in the user's own data."""
