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
        retry: bool = False,
    ) -> None:
        self.message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
        super().__init__(self.message)
        self.param = param
        self.code = code
        self.status = status
        self.retry = retry
        """Whether clients should retry the same request later."""


def unsupported(name: str, value: Any, fix: str) -> RequestError:
    """A field of the real API that has no meaning here."""
    return RequestError(
        f"{name}={value!r:.80} is not supported here; {fix}",
        param=name,
        code="unsupported_parameter",
    )


def unknown_model(name: str, known: list[str]) -> RequestError:
    """No role has that name."""
    return RequestError(
        f"The model `{name:.80}` does not exist; there are: {', '.join(known)}",
        param="model",
        code="model_not_found",
        status=404,
    )


def too_large(size: int, most: int) -> RequestError:
    """The body exceeds ``RequestLimits.max_bytes``."""
    return RequestError(
        f"The request has {size} bytes; this server takes {most} at most. Send a shorter "
        "history, or raise limits.max_bytes",
        code="too_large",
        status=413,
    )


def too_many(count: int, prompts: int, most: int) -> RequestError:
    """The request asks for more completions than ``RequestLimits.max_answers``."""
    return RequestError(
        f"n={count} for {prompts} prompts asks for {count * prompts} completions; this server "
        f"gives {most} at most. Send several requests, or raise limits.max_answers",
        param="n",
        code="too_many",
    )


def too_slow(seconds: float) -> RequestError:
    """A request that took longer than ``RequestLimits.max_seconds`` to read."""
    return RequestError(
        f"It took more than {seconds:g} s to read and tokenize the request; send less at once, or "
        "raise limits.max_seconds",
        code="too_slow",
    )


def other_request(key: str) -> RequestError:
    """Another request already used this key."""
    return RequestError(
        f"Idempotency-Key {key!r:.80} was sent with another request before; send exactly the same "
        "body again, or use a new key",
        param="Idempotency-Key",
        code="idempotency_error",
    )


def too_long(longest: int, tokens: int, param: str) -> RequestError:
    """A prompt that leaves no room for a completion."""
    return RequestError(
        f"This model's maximum context length is {longest} tokens. However, your {param} resulted "
        f"in {tokens} tokens. Please reduce the length of the {param}.",
        param=param,
        code="context_length_exceeded",
    )


def unknown_key() -> RequestError:
    """No session has this key, or none was sent."""
    return RequestError(
        "Incorrect API key provided; use the one that this program was started with",
        code="invalid_api_key",
        status=401,
    )


def session_over() -> RequestError:
    """The rollout that the key belongs to has ended."""
    return RequestError(
        "The rollout that this key belongs to is over; nothing more is generated for it",
        code="session_over",
        status=503,
    )


def engine_failed(error: BaseException) -> RequestError:
    """The engine failed, not the client: the run gets the error too, and ends or retries."""
    return RequestError(f"The engine failed: {error}", code="engine_error", status=500)


def aborted() -> RequestError:
    """The engine ended a completion early; its rollout will be repeated later."""
    return RequestError("The engine was interrupted", code="engine_interrupted", status=503)
