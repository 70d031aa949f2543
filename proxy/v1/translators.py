"""How a runner's answer becomes the client's: mostly it is the same bytes.

Rules:
1. An answer in OpenAI's words reaches the client byte for byte.
2. Pieces of a stream are whole server-sent events; several may come at once, and
   they go on in one piece too.
3. Comments, by which the engine shows that it is alive, reach the client too.
4. After `failure` nothing follows.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from proxy.v1.failures import Dialect, error_object


class Translator(Protocol):
    """Turns one answer of a runner into the client's words."""

    def events(self, events: bytes) -> bytes:
        """Turn whole events of a stream."""
        ...

    def whole(self, body: bytes) -> bytes:
        """Turn an answer that came in one piece."""
        ...

    def failure(self, message: str) -> bytes:
        """Make the last event of a stream that broke off."""
        ...


class Unchanged:
    """Passes everything on."""

    def events(self, events: bytes) -> bytes:
        """Return them."""
        return events

    def whole(self, body: bytes) -> bytes:
        """Return it."""
        return body

    def failure(self, message: str) -> bytes:
        """Make an event with an error object."""
        value = error_object(Dialect.OPENAI, status=500, message=message)
        return b"data: " + orjson.dumps(value) + b"\n\n"


def read_events(events: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the data lines of whole events."""
    for line in events.split(b"\n"):
        if line.startswith(b"data: {"):
            yield orjson.loads(line[6:])


def is_comment(events: bytes) -> bool:
    """Tell whether what came holds no event, but comments."""
    return events.startswith(b":") and b"\ndata:" not in events


def event(name: str, fields: dict[str, Any]) -> bytes:
    """Write one named event, whose `type` is its name."""
    data = orjson.dumps({"type": name, **fields})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
