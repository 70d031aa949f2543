"""What a client of Ollama asks for: bytes in, frozen requests out.

Rules:
1. Parsing needs no model. What depends on the model (its name, what it is able to
   do) is checked after it was found, see `abilities`. Types of options and the format
   come last: Ollama reports errors in this order.
2. Fields that Ollama does not know are ignored, as it does.
3. `shift` decides whether a single prompt that does not fit may be cut, and whether a
   reply goes on past the context. Where it is not given, that depends on the model.
4. `thinking` of earlier messages is dropped, as Ollama drops it for models whose
   template is their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.errors import RequestError
from proxy.ollama.gojson import Fields, decode
from proxy.ollama.images import parse_images, parts_of
from proxy.ollama.options import parse_keep_alive
from proxy.ollama.schema_bounds import check_schema
from proxy.ollama.tools import ToolCall, parse_call, parse_tool

_THINK_LEVELS = ("low", "medium", "high", "max")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """What `/api/generate` and `/api/chat` have in common."""

    model: str
    """The name as sent: replies echo it."""
    stream: bool
    options: Mapping[str, Any]
    """Not yet checked: see `parse_options`."""
    format: Any
    """Not yet checked: see `parse_format`."""
    keep_alive_seconds: float | None
    think: bool | str | None
    logprobs: bool
    top_logprobs: int
    debug_render_only: bool
    truncate: bool
    """Whether what does not fit may be left out of the prompt."""
    shift: bool | None
    """Whether the beginning of what the model reads may be left out: of a single
    prompt, and while it replies. None: as is usual for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(InferenceRequest):
    """A body of POST /api/generate."""

    prompt: str
    suffix: str
    system: str
    template: str
    context: tuple[int, ...]
    """Token ids that come before the prompt."""
    images: tuple[str, ...] = ()
    """As data URLs."""
    raw: bool

    @property
    def is_empty(self) -> bool:
        """Whether it only loads or unloads the model."""
        return not self.prompt

    @property
    def has_context(self) -> bool:
        """Whether it goes on after an earlier reply."""
        return bool(self.context)

    def messages(self) -> list[dict[str, Any]]:
        """Tell the conversation that a prompt which is not raw stands for."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [
            *system,
            {"role": "user", "content": _content(self.prompt, self.images)},
        ]

    @property
    def has_images(self) -> bool:
        """Whether the model has to see something."""
        return bool(self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    tool_name: str = ""
    tool_call_id: str = ""
    images: tuple[str, ...] = ()
    """As data URLs."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(InferenceRequest):
    """A body of POST /api/chat."""

    conversation: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    """In the words of llama-server."""

    @property
    def is_empty(self) -> bool:
        """Whether it only loads or unloads the model."""
        return not self.conversation

    def messages(self) -> list[dict[str, Any]]:
        """Tell the conversation in the words of llama-server."""
        return [_wire_message(message) for message in self.conversation]

    @property
    def has_images(self) -> bool:
        """Whether the model has to see something."""
        return any(message.images for message in self.conversation)

    @property
    def calls_tools(self) -> bool:
        """Whether tools are offered, or called in the conversation."""
        return bool(self.tools) or any(
            message.tool_calls for message in self.conversation
        )

    @property
    def is_about_tools(self) -> bool:
        """Whether tools are offered, called, or have given a result."""
        return self.calls_tools or any(
            message.role == "tool" for message in self.conversation
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRequest:
    """A body of POST /api/show."""

    model: str


def _content(text: str, images: tuple[str, ...]) -> str | list[dict[str, Any]]:
    return parts_of(images, text=text) if images else text


def _wire_message(message: ChatMessage) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "role": message.role,
        "content": _content(message.content, message.images),
    }
    if message.tool_name:
        wire["name"] = message.tool_name
    if message.tool_call_id:
        wire["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        wire["tool_calls"] = [call.to_engine() for call in message.tool_calls]
    return wire


def parse_generate(body: bytes) -> GenerateRequest:
    """Read a body of /api/generate. Raises RequestError (400)."""
    fields = Fields.of(decode(body), "GenerateRequest")
    context = fields.array("context", "[]int")
    for entry in context:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise fields.refuse("context", entry, "int")
    return GenerateRequest(
        **_common_fields(fields),
        prompt=fields.text("prompt"),
        suffix=fields.text("suffix"),
        system=fields.text("system"),
        template=fields.text("template"),
        context=tuple(context),
        images=parse_images(fields),
        raw=fields.flag("raw"),
    )


def parse_chat(body: bytes) -> ChatRequest:
    """Read a body of /api/chat. Raises RequestError (400)."""
    fields = Fields.of(decode(body), "ChatRequest")
    conversation = tuple(
        _parse_message(entry) for entry in fields.array("messages", "[]api.Message")
    )
    return ChatRequest(
        **_common_fields(fields),
        conversation=conversation,
        tools=tuple(map(parse_tool, fields.array("tools", "api.Tools"))),
    )


def parse_show(body: bytes) -> ShowRequest:
    """Read a body of /api/show. Raises RequestError (400)."""
    fields = Fields.of(decode(body), "ShowRequest")
    fields.flag("verbose")
    name = fields.text("model") or fields.text("name")
    if not name:
        raise RequestError(400, "model is required")
    return ShowRequest(model=name)


def _common_fields(fields: Fields) -> dict[str, Any]:
    """Read the fields of InferenceRequest, by its names."""
    return {
        "model": fields.text("model"),
        "stream": fields.flag("stream", default=True),
        "options": fields.mapping("options", "map[string]interface {}"),
        "format": fields.anything("format"),
        "keep_alive_seconds": parse_keep_alive(fields.anything("keep_alive")),
        "think": _parse_think(fields.anything("think")),
        "logprobs": fields.flag("logprobs"),
        "top_logprobs": fields.integer("top_logprobs"),
        "debug_render_only": fields.flag("_debug_render_only"),
        "truncate": fields.flag("truncate", default=True),
        "shift": None if fields.anything("shift") is None else fields.flag("shift"),
    }


def _parse_message(value: object) -> ChatMessage:
    fields = Fields.of(value, "ChatRequest", path="messages.")
    fields.text("thinking")
    return ChatMessage(
        role=fields.text("role").lower(),
        content=fields.text("content"),
        tool_name=fields.text("tool_name"),
        tool_call_id=fields.text("tool_call_id"),
        images=parse_images(fields),
        tool_calls=tuple(map(parse_call, fields.array("tool_calls", "[]api.ToolCall"))),
    )


def _parse_think(value: object) -> bool | str | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise RequestError(
            400,
            'think must be a boolean or string ("high", "medium", "low", "max", '
            "true, or false)",
        )
    if value not in _THINK_LEVELS:
        raise RequestError(
            400,
            f'invalid think value: {quoted(value)} (must be true, false, "high", '
            '"medium", "low", or "max")',
        )
    return value


def parse_format(value: object) -> dict[str, Any] | None:
    """Read `format` as a JSON Schema; None for free text.

    Raises RequestError (500, as Ollama) for anything but "json" or an object, and
    (400) for a schema that is too large.
    """
    match value:
        case None | "":
            return None
        case "json":
            return ANY_OBJECT
        case dict():
            check_schema(value)
            return value
        case _:
            shown = orjson.dumps(value).decode()
            raise RequestError(
                500,
                f'invalid format: {shown}; expected "json" or a valid JSON Schema '
                "object",
            )


def check_model_given(request: GenerateRequest | ChatRequest) -> None:
    """Refuse a request that names no model, in the words of its route."""
    if request.model:
        return
    if isinstance(request, ChatRequest):
        raise RequestError(400, "model is required")
    raise model_not_found("")


def model_not_found(name: str) -> RequestError:
    """Make the answer for a model that is not served here."""
    return RequestError(404, f"model '{name}' not found")


def is_unload(request: GenerateRequest | ChatRequest) -> bool:
    """Whether the request only asks to unload the model."""
    return request.is_empty and request.keep_alive_seconds == 0


def quoted(text: str) -> str:
    """Write a text between quotation marks, as Go does for `%q`."""
    return orjson.dumps(text).decode()
