"""Errors of a client's request, each with the status and message of the real APIs."""

from typing import Any

from lightning_rl.errors import LightningRLError

_LONGEST = 1000
"""Maximum characters of a message: it may quote a request of megabytes."""


class RequestError(LightningRLError):
    """An error that answers a request; ``param`` names the field, ``code`` the kind of error."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        self.message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
        super().__init__(self.message)
        self.param = param
        self.code = code
        self.status = status


def unsupported(name: str, value: Any, fix: str) -> RequestError:
    """A field of the real API that has no meaning here."""
    return RequestError(
        f"{name}={value!r:.80} is not supported here; {fix}",
        param=name,
        code="unsupported_parameter",
    )


def session_over() -> RequestError:
    """The rollout that the key belongs to has ended."""
    return RequestError(
        "The rollout that this key belongs to is over; nothing more is generated for it",
        code="session_over",
        status=503,
    )
