"""What a request asks for, and its answer, independent of the API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Call, Message, Placed, Row
from lightning_rl.serving.chat_format import ChatFormat, ChatFormats
from lightning_rl.serving.chats import ChatReader, RequestChat
from lightning_rl.serving.errors import RequestError, unknown_model, unsupported
from lightning_rl.serving.limits import RequestLimits

DEFAULT_MODEL = "policy"
"""What clients call the model of the role ``""``."""


@dataclass(slots=True)
class Terms:
    """What is needed to read a session's requests.

    Args:
        formats: ways to write chats.
        sampling: holds where a request says nothing.
        client_sampling: whether requests may change sampling settings.
        models: the roles that may be asked for, by the names that clients use.
        limits: bounds of a request.
        known: settings that were asked for before, by what they change: a client repeats them.
        chats: reads the session's chats.
    """

    formats: ChatFormats
    sampling: Sampling
    client_sampling: bool
    models: dict[str, str]
    limits: RequestLimits
    known: dict[str, Sampling] = field(default_factory=dict)
    chats: ChatReader = field(init=False)

    def __post_init__(self) -> None:
        self.chats = ChatReader(self.limits)

    def role_of(self, model: str) -> str:
        """The role (policy) that a request names as its model.

        Raises:
            RequestError: if there is none of that name.
        """
        if model not in self.models:
            raise unknown_model(model, list(self.models))
        return self.models[model]

    def form_of(
        self, tools: Sequence[dict[str, Any]], options: Mapping[str, Any], template: str = ""
    ) -> ChatFormat:
        """How chats with these tools and variables of the template are written.

        ``template`` is the client's own, in place of the model's.

        Raises:
            RequestError: if the template cannot write them, or the client may not bring it.
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
    """Prompts, and how often and how each is to be continued.

    ``prompts`` are token ids: given, or those of ``chat``, written as ``form`` says, with the
    pictures ``placed`` in it. ``must_call`` is empty, the name of the tool that has to be called,
    or ``*`` for any.
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
    """One completion, as tokens and as what a client reads.

    The first ``start`` tokens of ``row`` were its prompt, as they were then: when the session ends,
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
        """The tokens that it continues."""
        return self.row.prompt_ids + self.row.token_ids[: self.start]

    @property
    def text(self) -> str:
        """Its text beside its calls."""
        return str(self.message["content"])


@dataclass(slots=True)
class Wanted:
    """Which parts of an answer a client wants, and in which form."""

    stream: bool = False
    usage: bool = True
    logprobs: bool = False
    token_ids: bool = False


def usage_of(answers: Sequence[Answer]) -> tuple[int, int]:
    """Tokens read and written; a prompt counts once, however many answers it has."""
    read = {answer.prompt: len(answer.row.prompt_ids) + answer.start for answer in answers}
    return sum(read.values()), sum(len(answer.completion.token_ids) for answer in answers)
