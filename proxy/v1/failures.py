"""How errors look to the clients of OpenAI's and of Anthropic's API.

Rules:
1. Status and text are those that a native route would give; only the shape differs.
   Of a runner's error object its message is shown, not the object as a string.
2. A stream that has begun ends with one event that the client's library raises, and
   never with the mark of a stream that is complete.
"""

import secrets
from enum import Enum
from typing import Any

import orjson
from aiohttp import web

from proxy.go_json import to_json
from proxy.ollama.failures import Failure

_OPENAI_TYPES = {400: "invalid_request_error", 404: "not_found_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OTHER_TYPE = "api_error"


class Dialect(Enum):
    """Whose words a route speaks."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


def error_object(dialect: Dialect, *, status: int, message: str) -> dict[str, Any]:
    """Make the error object of an answer."""
    text = readable(message)
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, _OTHER_TYPE)
        return {
            "type": "error",
            "error": {"type": kind, "message": text},
            "request_id": f"req_{secrets.token_hex(12)}",
        }
    kind = _OPENAI_TYPES.get(status, _OTHER_TYPE)
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


def error_response(dialect: Dialect, failure: Failure) -> web.Response:
    """Answer with an error object."""
    value = error_object(dialect, status=failure.status, message=failure.message)
    return web.Response(
        status=failure.status,
        body=to_json(value),
        headers={"Content-Type": "application/json"},
    )


def responses_error(message: str) -> dict[str, Any]:
    """Make the event of the Responses API that says why a stream ends, unnumbered."""
    return {
        "type": "error",
        "code": "server_error",
        "message": readable(message),
        "param": None,
    }


def readable(message: str) -> str:
    """Return the message within a runner's error object; other text as it is."""
    if not message.startswith("{"):
        return message
    try:
        error = orjson.loads(message).get("error")
    except orjson.JSONDecodeError:
        return message
    text = error.get("message") if isinstance(error, dict) else error
    return text if isinstance(text, str) else message
