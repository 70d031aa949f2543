"""Which routes of Ollama are known but not served, and what to do instead.

One table. A route that gets served loses its line here and gains a handler in
`OllamaApi.routes`; nothing else changes.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from aiohttp import web

from proxy.ollama.failures import json_response

_STATUS = 501


class ErrorShape(Enum):
    """How the clients of a route expect an error to look."""

    OLLAMA = "ollama"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One route that is answered with 501 and advice."""

    method: str
    path: str
    advice: str
    shape: ErrorShape = ErrorShape.OLLAMA


_MODEL_FILES = (
    "kvbus serves the models that it was started with: put the model file in place "
    "and restart kvbus with --model"
)
_CLOUD = "kvbus has no account and reaches no cloud"

REFUSALS = (
    Refusal("POST", "/api/pull", _MODEL_FILES),
    Refusal("POST", "/api/push", _MODEL_FILES),
    Refusal("POST", "/api/create", _MODEL_FILES),
    Refusal("POST", "/api/copy", _MODEL_FILES),
    Refusal("DELETE", "/api/delete", _MODEL_FILES),
    Refusal("POST", "/api/blobs/{digest}", _MODEL_FILES),
    Refusal("HEAD", "/api/blobs/{digest}", _MODEL_FILES),
    Refusal("POST", "/api/me", _CLOUD),
    Refusal("POST", "/api/signout", _CLOUD),
    Refusal("DELETE", "/api/user/keys/{key}", _CLOUD),
    Refusal("POST", "/api/experimental/web_search", _CLOUD),
    Refusal("POST", "/api/experimental/web_fetch", _CLOUD),
    Refusal("GET", "/api/experimental/model-recommendations", _CLOUD),
    Refusal(  # of Ollama's own clients alone
        "POST",
        "/v1/systemone",
        "scoring models are not served: ask /api/chat, with a format",
    ),
    Refusal(
        "POST",
        "/v1/audio/transcriptions",
        "audio is not served",
        ErrorShape.OPENAI,
    ),
)


def refusal_routes() -> list[web.RouteDef]:
    """Make the routes of the table."""
    return [
        web.route(refusal.method, refusal.path, _handler(refusal))
        for refusal in REFUSALS
    ]


def _handler(refusal: Refusal) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        # The body stays unread: it may be a model file.
        return json_response(error_body(refusal), status=_STATUS)

    return handle


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Make the error object in the shape that the route's clients read."""
    match refusal.shape:
        case ErrorShape.OLLAMA:
            return {"error": refusal.advice}
        case ErrorShape.OPENAI:
            return {
                "error": {
                    "message": refusal.advice,
                    "type": "api_error",
                    "param": None,
                    "code": None,
                }
            }
