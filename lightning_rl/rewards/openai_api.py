"""OpenAIAPI: requests to a server that speaks OpenAI's API, and how its refusals are handled."""

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Protocol, TypeVar
from urllib.parse import urlsplit

from lightning_rl.config.schema import SchemaError, one_line, parsed, require_pydantic
from lightning_rl.errors import ConfigError, LightningRLError, require_at_least
from lightning_rl.rollout import of_whole_characters
from lightning_rl.run.retry import LONGEST_ASKED_S, ServerError, WaitsForFile, retry

T = TypeVar("T")

OPENAI_URL = "https://api.openai.com/v1"
RETRY_STATUSES = {408, 409, 425, 429}
"""Client errors (4xx) worth a retry: timeout, conflict, too early, too many requests."""
LARGEST_ANSWER = 64 * 2**20
"""Maximum bytes of an answer; an endless one would fill the memory."""
WITHOUT_TEXT = ("length", "content_filter")
"""Finish reasons of an answer that may have no text: it was all thought, or was withheld."""


class APIRefusal(LightningRLError):
    """A server cannot be asked, or refuses; retrying would not help. ``status`` is HTTP's."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class AnswerSchema(Protocol):
    """A dataclass of the fields to read from an answer; error messages name it by ``called``."""

    called: ClassVar[str]


A = TypeVar("A", bound=AnswerSchema)


@dataclass(frozen=True)
class _Said:
    content: str | None = None
    refusal: str | None = None


@dataclass(frozen=True)
class _Choice:
    message: _Said
    finish_reason: str | None = None


@dataclass(frozen=True)
class _ChatCompletion:
    choices: list[_Choice]
    called: ClassVar[str] = "chat completion"


class OpenAIAPI:
    """A server's address and key; each call is one attempt.

    Args:
        base_url: the server's address, up to and including ``/v1``.
        api_key_env: name of the environment variable that holds the key, which is read at each
            request and stored nowhere; None: no key.

    Raises:
        ConfigError: for an address that is not http(s), or without pydantic.
    """

    def __init__(self, base_url: str, api_key_env: str | None = None) -> None:
        require_pydantic("a client of OpenAI's API")
        _require_address(base_url)
        self.base_url = base_url.rstrip("/")
        self.api_key_env = api_key_env

    async def chat(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Return the text of a chat completion's first choice, and its ``finish_reason``.

        A refusal counts as text. An answer that was cut off or withheld may have none: "".

        Raises:
            ServerError: if the answer is no chat completion or has no text; and as :meth:`call`.
        """
        answer = await self.post("/chat/completions", _ChatCompletion, body)
        where = f"{self.base_url}/chat/completions sent no chat completion"
        if not answer.choices:
            raise ServerError(f"{where}: choices is empty")
        message, ending = answer.choices[0].message, answer.choices[0].finish_reason
        text = message.refusal if message.content is None else message.content
        if text is None and ending not in WITHOUT_TEXT:
            raise ServerError(f"{where}: choices.0.message.content is null (ended by {ending})")
        return str(of_whole_characters(text or "")), str(ending)

    async def post(self, path: str, kind: type[A], body: Any = None, **options: Any) -> A:
        """Send a POST request with ``body`` as JSON; see :meth:`call`."""
        return await self.call("POST", path, kind, json=body, **options)

    async def get(self, path: str, kind: type[A], **params: str) -> A:
        """Send a GET request; see :meth:`call`."""
        return await self.call("GET", path, kind, params=params)

    async def call(
        self,
        method: str,
        path: str,
        kind: type[A],
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> A:
        """Send a request, and return its answer validated as ``kind``; ``options`` are aiohttp's.

        Raises:
            APIRefusal: if retrying would not help.
            ServerError: if it may, e.g. after too many requests, a broken connection, or an answer
                that does not fit ``kind``.
        """
        key, url = self._key(), self.base_url + path
        headers = {**(headers or {}), **({} if key is None else {"Authorization": f"Bearer {key}"})}
        status, retry_after, text = await WaitsForFile().for_call(
            lambda: _asked(method, url, headers=headers, **options)
        )
        text = text if key is None else text.replace(key, "***")  # it may be shown
        shown = one_line(text, 200)
        if status >= 400:
            problem = f"{url} answered {status}: {shown}"
            if status < 500 and status not in RETRY_STATUSES:
                raise APIRefusal(problem, status)
            wait_s = asked_wait(retry_after)
            if wait_s > LONGEST_ASKED_S:
                problem += (
                    f"; it asks for a wait of {wait_s:.3g} s, longer than the maximum of "
                    f"{LONGEST_ASKED_S:g} s: run again then"
                )
            raise ServerError(problem, wait_s)
        try:
            return parsed(kind, text)
        except SchemaError as error:
            what = "JSON" if str(error).startswith("no JSON") else f"{kind.called}: {error}"
            raise ServerError(f"{url} sent no {what}: {shown}") from error

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise APIRefusal(
                f"api_key_env={self.api_key_env!r} names an environment variable that is not set; "
                f"set it to the key of {self.base_url}"
            )
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise APIRefusal(
                f"api_key_env={self.api_key_env!r} holds characters that no header can carry "
                "(perhaps a line break or a space at its end); set it to the key alone"
            )
        return key


class PatientAPI(OpenAIAPI):
    """An OpenAIAPI that retries requests after temporary failures.

    Args:
        base_url: the server's address, up to and including ``/v1``.
        api_key_env: as for :class:`OpenAIAPI`.
        retries: attempts after the first.
        timeout_s: seconds per attempt.
        first_wait_s: maximum seconds before the first retry; doubled for each further one.

    Raises:
        ConfigError: for values out of range, or an address that is not http(s).
    """

    def __init__(
        self,
        base_url: str,
        api_key_env: str | None,
        retries: int,
        timeout_s: float,
        first_wait_s: float,
    ) -> None:
        require_at_least(0, retries=retries, first_wait_s=first_wait_s)
        require_at_least(0.001, timeout_s=timeout_s)
        super().__init__(base_url, api_key_env)
        self.retries = retries
        self.timeout_s = timeout_s
        self.first_wait_s = first_wait_s

    async def retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await ``call()``, of one request or several, and retry after temporary failures.

        Raises:
            ServerError: if the last attempt also failed, or took longer than ``timeout_s``.
            APIRefusal: at once, without a retry.
        """
        try:
            return await retry(
                call, self.retries, self.timeout_s, self.first_wait_s, on=(ServerError,)
            )
        except TimeoutError as error:
            raise ServerError(f"{self.base_url}: {error}{self._tries}") from error
        except ServerError as error:
            if error.wait_s > LONGEST_ASKED_S:
                raise
            raise ServerError(f"{error}{self._tries}") from error

    @property
    def _tries(self) -> str:
        return f" (after {self.retries + 1} attempts)" if self.retries else ""


async def _asked(method: str, url: str, **options: Any) -> tuple[int, str | None, str]:
    """Return an answer's status, ``Retry-After`` header and text.

    Raises:
        APIRefusal: if the certificate is not accepted.
        ServerError: for any other failure of the connection.
    """
    import aiohttp

    # Who asks has a time limit. One session per call: sessions belong to an event loop, and who
    # asks may outlive loops.
    forever = aiohttp.ClientTimeout(total=None)
    try:
        async with (
            aiohttp.ClientSession(trust_env=True, timeout=forever) as session,
            session.request(method, url, **options) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_chunked(2**16):
                body += chunk
                if len(body) > LARGEST_ANSWER:
                    raise ServerError(f"{url} sent more than {LARGEST_ANSWER >> 20} MiB")
            text = body.decode("utf-8", "replace")
            return response.status, response.headers.get("Retry-After"), text
    except aiohttp.ClientSSLError as error:  # no attempt would find another certificate
        raise APIRefusal(f"{url} cannot be reached: {one_line(error)}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        why = one_line(error) or type(error).__name__
        raise ServerError(f"{url} gave no answer: {why}") from error


def asked_wait(retry_after: str | None) -> float:
    """Return the seconds that ``Retry-After`` asks for, as a number or date (RFC 9110, 10.2.3)."""
    if retry_after is None:
        return 0.0
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):  # no date, or one beyond all clocks
        return 0.0


def _require_address(base_url: str) -> None:
    try:
        parts = urlsplit(base_url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        known = False
    if not known or any(c.isspace() or not c.isprintable() for c in base_url):
        raise ConfigError(
            f"base_url={base_url!r} must begin with http:// or https:// and name a host, e.g. "
            f"{OPENAI_URL}"
        )
