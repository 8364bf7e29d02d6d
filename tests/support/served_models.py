"""Serve a model as a user does: by ``vllm serve``, in a process of its own."""

import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from lightning_rl.engines.replicas.server_process import ListeningServer


@contextmanager
def served(model: Path, *options: str) -> Iterator[str]:
    """Yield the address of a server with this model, up to and with ``/v1``."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    usual = ["--dtype", "float32", "--kv-cache-memory-bytes", "100000000", "--enforce-eager"]
    server = ListeningServer([*command, *usual, *options], {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    try:
        while not _answers(f"{server.url}/health"):
            assert server.running, server.tail()
            time.sleep(0.5)
        yield f"{server.url}/v1"
    finally:
        server.kill()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (URLError, OSError):
        return False
