"""A streamed answer of `/v1/responses` with what clients need to follow it.

The engine's events lack the places that OpenAI's own have, and its client library
stops without them. Rules:
1. Every event gets its `sequence_number`; events of an item its `output_index`, and
   events of a part its `content_index`. Nothing else of an event is changed.
2. `response.created` carries a whole response object, and one `response.in_progress`
   follows it at once: those of the engine tell of a progress that kvbus asked for.
3. The arguments of a call are told in one piece before its item is done.
"""

import time
from collections.abc import Iterator
from typing import Any

import orjson

from proxy.v1.failures import responses_error
from proxy.v1.translators import event, is_comment, read_events

_PART_EVENTS = ("response.content_part.", "response.output_text.", "response.reasoning")


class ResponsesAnswer:
    """Completes the events of one answer."""

    def __init__(self, *, model: str) -> None:
        """Begin an answer of the model that is served under this name."""
        self._model = model
        # the mutable state
        self._sequence_number = 0
        self._places: dict[str, int] = {}
        """The output index of each item by its id."""

    def events(self, events: bytes) -> bytes:
        """Complete whole events."""
        if is_comment(events):
            return events
        return b"".join(
            self._write(completed)
            for fields in read_events(events)
            for completed in self._complete(fields)
        )

    def whole(self, body: bytes) -> bytes:
        """Return it: an answer in one piece lacks nothing."""
        return body

    def failure(self, message: str) -> bytes:
        """Make an `error` event."""
        return self._write(responses_error(message))

    def _write(self, fields: dict[str, Any]) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return event(fields["type"], {**fields, "sequence_number": number})

    def _complete(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "error" in fields:
            error = orjson.dumps({"error": fields["error"]}).decode()
            yield responses_error(error)
            return
        kind = fields["type"]
        match kind:
            case "response.created":
                response = {**self._empty_response(), **fields["response"]}
                yield {**fields, "response": response}
                yield {"type": "response.in_progress", "response": response}
                return
            case "response.in_progress":
                return
            case "response.output_item.added":
                self._places[fields["item"]["id"]] = len(self._places)
            case _:
                pass
        item = fields.get("item", {})
        place = self._places.get(fields.get("item_id", item.get("id", "")))
        if place is not None:
            fields["output_index"] = place
        if kind.startswith(_PART_EVENTS):
            fields["content_index"] = 0
        if kind == "response.output_item.done" and item["type"] == "function_call":
            yield {
                "type": "response.function_call_arguments.done",
                "item_id": item["id"],
                "output_index": place,
                "name": item["name"],
                "arguments": item["arguments"],
            }
        yield fields

    def _empty_response(self) -> dict[str, Any]:
        return {
            "created_at": int(time.time()),
            "model": self._model,
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
        }
