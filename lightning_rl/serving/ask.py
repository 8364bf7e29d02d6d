"""Requests and answers in a form independent of the API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Call, Message, Placed, Row
from lightning_rl.serving.chat_format import ChatFormat, ChatFormats
from lightning_rl.serving.chats import ChatReader, RequestChat
from lightning_rl.serving.errors import RequestError, unsupported
from lightning_rl.serving.kept_responses import KeptResponses
from lightning_rl.serving.limits import RequestLimits

DEFAULT_MODEL = "policy"
"""The model name of the role ``""``, for clients."""


@dataclass(slots=True)
class Terms:
    """The settings for reading a session's requests.

    Args:
        formats: makes the chat formats.
        sampling: default sampling settings.
        client_sampling: whether requests may change sampling settings.
        models: the roles that clients may ask for, by model name.
        limits: limits of a request.
        chats: reads the session's chats.
        responses: the session's responses, which later requests may name.
    """

    formats: ChatFormats
    sampling: Sampling
    client_sampling: bool
    models: dict[str, str]
    limits: RequestLimits
    chats: ChatReader = field(init=False)
    responses: KeptResponses = field(default_factory=KeptResponses)

    def __post_init__(self) -> None:
        self.chats = ChatReader(self.limits)

    def role_of(self, model: str) -> str:
        """Return the role (policy) that a request names as its model.

        Raises:
            RequestError: if there is no role of that name.
        """
        if model not in self.models:
            raise RequestError(
                f"The model `{model:.80}` does not exist; there are: {', '.join(self.models)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return self.models[model]

    def form_of(
        self, tools: Sequence[dict[str, Any]], options: Mapping[str, Any], template: str = ""
    ) -> ChatFormat:
        """Return the format of chats with these tools and template variables.

        ``template`` is the client's, instead of the model's.

        Raises:
            RequestError: if the template cannot render them, or clients may not send templates.
        """
        if template and not self.limits.client_templates:
            raise unsupported(
                "chat_template",
                template,
                "it is a program; use the model's, or set limits.client_templates: true",
            )
        try:
            return self.formats.of(tools, options, template)
        except ConfigError as error:
            raise RequestError(str(error), param="tools" if tools else "messages") from error


@dataclass(slots=True)
class Ask:
    """Prompts to continue, with the number of answers and their settings.

    ``prompts`` are token ids: given directly, or of ``chat`` in the format ``form``, with the
    pictures ``placed`` in it. ``must_call`` is empty, the name of the tool that must be called,
    or ``*`` for any. ``stream``, ``usage``, ``logprobs`` and ``token_ids`` say how, and which
    parts of its answers, a client wants.
    """

    model: str
    role: str
    sampling: Sampling
    count: int = 1
    chat: RequestChat = field(default_factory=RequestChat)
    form: ChatFormat | None = None
    prompts: list[list[int]] = field(default_factory=list)
    may_call: bool = True
    must_call: str = ""
    parallel: bool = True
    placed: list[Placed] = field(default_factory=list)
    stream: bool = False
    usage: bool = True
    logprobs: bool = False
    token_ids: bool = False

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that may be called."""
        return [] if self.form is None else self.form.tools

    @property
    def tool_choice(self) -> str | None:
        """``auto``, ``none``, ``required`` or the name of a tool; None without tools."""
        if not self.tools:
            return None
        if self.must_call:
            return "required" if self.must_call == "*" else self.must_call
        return "auto" if self.may_call else "none"


@dataclass(slots=True)
class Answer:
    """One completion, as tokens and in the form that a client reads.

    The first ``start`` tokens of ``row``, a snapshot, were its prompt: when the session ends,
    rows may be cut anew while answers are still being written. ``prompt`` is the place of its
    prompt in the request. ``message`` is in the form of chat
    templates, with arguments of calls as objects. ``finish_reason`` is ``stop``, ``length`` or
    ``tool_calls``; ``ended_by`` the string that ended it, if one did.
    """

    row: Row = field(repr=False)
    start: int
    prompt: int
    completion: Completion
    call: Call
    message: Message
    finish_reason: str
    ended_by: str | None = None

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's tokens."""
        return self.row.prompt_ids + self.row.token_ids[: self.start]

    @property
    def text(self) -> str:
        """The text outside the calls."""
        return str(self.message["content"])


def usage_of(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the numbers of tokens read and written; a prompt counts once for all its answers."""
    read = {answer.prompt: len(answer.row.prompt_ids) + answer.start for answer in answers}
    return sum(read.values()), sum(len(answer.completion.token_ids) for answer in answers)
