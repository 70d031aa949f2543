"""Tools and their calls: Ollama's words in, llama-server's words out, and back.

Rules:
1. A tool keeps what Ollama knows of tools; other keys (`strict`, `default`,
   `additionalProperties`) are dropped, as by Ollama, so that they reach no prompt.
2. Names stand in the order in which the client or the model gave them.
3. Arguments are an object in Ollama's words and a JSON string in llama-server's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.errors import UpstreamError
from proxy.ollama.gojson import Fields, is_too_deep
from proxy.ollama.schema_bounds import check_schema

_STRUCT = "ChatRequest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool, asked for by a model."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""
    index: int = 0
    """Its place among the calls of its message."""

    def to_engine(self) -> dict[str, Any]:
        """Tell it in the words of llama-server."""
        call_id = {"id": self.call_id} if self.call_id else {}
        arguments = orjson.dumps(self.arguments).decode()
        return {
            **call_id,
            "index": self.index,
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }

    def to_client(self) -> dict[str, Any]:
        """Tell it in the words of Ollama."""
        call_id = {"id": self.call_id} if self.call_id else {}
        return {
            **call_id,
            "function": {
                "index": self.index,
                "name": self.name,
                "arguments": dict(self.arguments),
            },
        }


def parse_call(value: object) -> ToolCall:
    """Read an entry of a message's `tool_calls`. Raises RequestError (400)."""
    fields = Fields.of(value, _STRUCT, path="messages.tool_calls.")
    function = Fields.of(
        fields.anything("function"), _STRUCT, path="messages.tool_calls.function."
    )
    return ToolCall(
        call_id=fields.text("id"),
        index=function.integer("index"),
        name=function.text("name"),
        arguments=function.mapping("arguments", "map[string]interface {}"),
    )


def parse_tool(value: object) -> dict[str, Any]:
    """Read an entry of `tools`, for llama-server. Raises RequestError (400)."""
    check_schema(value)
    fields = Fields.of(value, _STRUCT, path="tools.")
    function = Fields.of(fields.anything("function"), _STRUCT, path="tools.function.")
    parameters = Fields.of(
        function.anything("parameters"), _STRUCT, path="tools.function.parameters."
    )
    return {
        "type": fields.text("type") or "function",
        **_given(items=fields.anything("items")),
        "function": {
            "name": function.text("name"),
            **_given(description=function.text("description")),
            "parameters": {
                "type": parameters.text("type") or "object",
                **_given(
                    **{"$defs": parameters.anything("$defs")},
                    items=parameters.anything("items"),
                    required=_strings(parameters, "required"),
                ),
                "properties": _properties(parameters),
            },
        },
    }


def _properties(fields: Fields) -> dict[str, Any]:
    given = fields.mapping("properties", "map[string]api.ToolProperty")
    path = f"{fields.path}properties."
    return {name: _property(value, path) for name, value in given.items()}


def _property(value: object, path: str) -> dict[str, Any]:
    fields = Fields.of(value, _STRUCT, path=path)
    any_of = fields.array("anyof", "[]api.ToolProperty")
    has_types = isinstance(fields.anything("type"), list)
    return _given(
        anyOf=[_property(entry, f"{path}anyOf.") for entry in any_of],
        type=_strings(fields, "type") if has_types else fields.text("type"),
        items=fields.anything("items"),
        description=fields.text("description"),
        enum=fields.array("enum", "[]interface {}"),
        properties=_properties(fields),
        required=_strings(fields, "required"),
    )


def _strings(fields: Fields, name: str) -> list[str]:
    values = fields.array(name, "[]string")
    for value in values:
        if not isinstance(value, str):
            raise fields.refuse(name, value, "string")
    return values


def _given(**fields: object) -> dict[str, Any]:
    """Leave out what is empty."""
    return {
        name: value for name, value in fields.items() if value not in (None, "", [], {})
    }


@dataclass(slots=True)
class _Growing:
    """A call whose pieces are still coming."""

    call_id: str = ""
    name: str = ""
    arguments: str = ""


class CallCollector:
    """Puts calls together out of the pieces that a stream brings."""

    def __init__(self) -> None:
        # the mutable state
        self._calls: dict[int, _Growing] = {}

    def add(self, pieces: Sequence[Mapping[str, Any]]) -> None:
        """Take in the `tool_calls` of one event.

        Raises TypeError, KeyError or AttributeError for another shape.
        """
        for piece in pieces:
            call = self._calls.setdefault(piece["index"], _Growing())
            function = piece.get("function") or {}
            call.call_id += piece.get("id") or ""
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""

    def finish(self, *, is_cut_off: bool) -> tuple[ToolCall, ...]:
        """Return all calls in their order.

        Where the reply was cut off, a call that is not whole is left out. Raises
        UpstreamError for other arguments that are no JSON object.
        """
        finished: list[ToolCall] = []
        for index, call in sorted(self._calls.items()):
            try:
                arguments = orjson.loads(call.arguments.strip() or "{}")
            except orjson.JSONDecodeError:
                arguments = None
            if isinstance(arguments, dict) and not is_too_deep(arguments):
                finished.append(
                    ToolCall(
                        call_id=call.call_id,
                        index=index,
                        name=call.name,
                        arguments=arguments,
                    )
                )
            elif not is_cut_off:
                name = orjson.dumps(call.name).decode()
                raise UpstreamError(
                    500, f"llama-server returned invalid tool call arguments for {name}"
                )
        return tuple(finished)
