"""Ports for servers that a test starts."""

from lightning_rl.engines.replicas.server_process import held_port


def free_port() -> int:
    """Return a TCP port of this machine on which nothing listens."""
    with held_port("127.0.0.1") as held:
        return int(held.getsockname()[1])
