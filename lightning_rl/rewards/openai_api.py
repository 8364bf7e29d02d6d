"""OpenAIAPI: requests to a server that speaks OpenAI's API, and what its refusals mean."""

import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from lightning_rl.errors import ConfigError, LightningRLError, require_at_least
from lightning_rl.rewards.remote import ServerError, retry

T = TypeVar("T")

OPENAI_URL = "https://api.openai.com/v1"
RETRY_STATUSES = {408, 409, 425, 429}
"""Client errors (4xx) that another attempt may get over: too early, too many, in conflict."""


class APIRefusal(LightningRLError):
    """A server cannot be asked, or refuses; asking again would not help. ``status`` is HTTP's."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class OpenAIAPI:
    """A server's address and key; each call is one attempt.

    Args:
        base_url: up to and with ``/v1``.
        api_key_env: name of the environment variable that holds the key, which is read when asking
            and stored nowhere; None: no key.

    Raises:
        ConfigError: for an address that is not http(s).
    """

    def __init__(self, base_url: str, api_key_env: str | None = None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={base_url!r} must begin with http:// or https://")
        self.base_url = base_url.rstrip("/")
        self.api_key_env = api_key_env

    async def chat(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """The text of a chat completion's first choice, and its ``finish_reason``.

        Raises:
            ServerError: if it is no chat completion; and as :meth:`call`.
        """
        answer = await self.post("/chat/completions", body)
        try:
            choice = answer["choices"][0]
            return str(choice["message"]["content"] or ""), str(choice.get("finish_reason"))
        except (LookupError, TypeError, AttributeError) as error:
            text = json.dumps(answer)
            raise ServerError(f"{self.base_url} sent no chat completion: {text:.200}") from error

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        """Post ``body`` as JSON; see :meth:`call`."""
        return await self.call("POST", path, json=body, **options)

    async def get(self, path: str, **params: str) -> Any:
        """Get what stands under a path; see :meth:`call`."""
        return await self.call("GET", path, params=params)

    async def call(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        """The JSON that the server answers; ``options`` are aiohttp's.

        Raises:
            APIRefusal: if another attempt would not help.
            ServerError: if it may, as after too many requests, or what is no answer of an API.
        """
        import aiohttp

        key, url = self._key(), self.base_url + path
        headers = {**(headers or {}), **({} if key is None else {"Authorization": f"Bearer {key}"})}
        # One session per call: sessions belong to an event loop, and who asks may outlive loops.
        async with (
            aiohttp.ClientSession(trust_env=True) as session,
            session.request(method, url, headers=headers, **options) as response,
        ):
            text = await response.text(errors="replace")
            text = text if key is None else text.replace(key, "***")  # it may be shown
            if response.status >= 400:
                problem = f"{url} answered {response.status}: {text:.200}"
                if response.status < 500 and response.status not in RETRY_STATUSES:
                    raise APIRefusal(problem, response.status)
                raise ServerError(problem, asked_wait(response.headers.get("Retry-After")))
            try:
                return await response.json(content_type=None)
            except ValueError as error:
                raise ServerError(f"{url} sent no JSON: {text:.200}") from error

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise APIRefusal(
                f"api_key_env={self.api_key_env!r} names an environment variable that is not set; "
                f"set it to the key of {self.base_url}"
            )
        return key


class PatientAPI(OpenAIAPI):
    """One that can be asked again, where a request failed in a way that may pass.

    Args:
        base_url: up to and with ``/v1``.
        api_key_env: as of :class:`OpenAIAPI`.
        retries: attempts after the first.
        timeout_s: seconds per attempt.
        first_wait_s: seconds before the first retry, at most; each next wait is twice as long.

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
        """Await ``call()``, of one request or several, and again after what may pass.

        Raises:
            TimeoutError: if the last attempt took longer than ``timeout_s``.
            APIRefusal: at once.
            Exception: whatever else the last attempt raised.
        """
        import aiohttp

        passing = (ServerError, aiohttp.ClientError)
        return await retry(call, self.retries, self.timeout_s, self.first_wait_s, on=passing)


def asked_wait(retry_after: str | None) -> float:
    """Seconds that a server asks to wait for, in numbers or as a date (RFC 9110, 10.2.3)."""
    if retry_after is None:
        return 0.0
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return 0.0
