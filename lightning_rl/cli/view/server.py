"""The server of ``lightning-rl view --follow``: one page and its data, for this machine's user."""

import re
import secrets
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_rl.cli.view.blocks import compact_json
from lightning_rl.cli.view.following import Following
from lightning_rl.cli.view.page import build_followed_page
from lightning_rl.errors import ConfigError

HOST = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer(ThreadingHTTPServer):
    """Serves the page of some runs on the loopback interface, at ``address``.

    Args:
        paths: runs, folders of some, or rollout files.
        max_rollouts: how many of each run are shown.
        port: 0 for any that is free.

    Raises:
        ConfigError: if the port cannot be had.
    """

    def __init__(self, paths: Sequence[Path], max_rollouts: int, port: int = 0) -> None:
        self.following = Following(paths, max_rollouts)
        self.page = build_followed_page([str(path) for path in paths]).encode()
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port={port} cannot be served ({error}); choose another, or leave --port out"
            ) from error

    @property
    def address(self) -> str:
        """The page's address, which nobody can guess."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10  # a browser may open a connection and ask for nothing
    server_version, sys_version = "lightning-rl", ""

    def do_GET(self) -> None:
        """Answer with the page, or with what is new in the runs; there is nothing else."""
        path, _, query = self.path.partition("?")
        secret = f"/{self.server.token}/"
        given, name = path[: len(secret)], path[len(secret) :]
        cursor = re.fullmatch(r"since=(\d{1,9})", query, re.ASCII)
        knows = secrets.compare_digest(given.encode(errors="surrogatepass"), secret.encode())
        if not (knows and self._is_local()):
            self._send(404, "text/plain", b"")
        elif name == "" and not query:
            self._send(200, "text/html; charset=utf-8", self.server.page)
        elif name == "data" and cursor:
            new = self.server.following.since(int(cursor[1]))
            self._send(200, "application/json", compact_json(new))
        else:
            self._send(404, "text/plain", b"")

    def _is_local(self) -> bool:
        """Return False for a name that a stranger's DNS could have pointed at this machine."""
        try:
            return urlsplit(f"//{self.headers['Host']}").hostname in (HOST, "localhost")
        except ValueError:
            return False

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """Send the headers that keep the page to this browser, also with errors."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *arguments: object) -> None:
        """Write nothing: a log would hold the token."""
