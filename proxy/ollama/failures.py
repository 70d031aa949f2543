"""Which HTTP answer an exception becomes.

Rules:
1. A client gets the status and text of a `RequestError` as they are, and a runner's
   refusal with the runner's status and its body as a string, as from Ollama.
2. What is a fault of ours becomes `internal error`, without details: they go to the
   log, and the log holds no text of a prompt.
3. Unknown paths and verbs are answered as Ollama's router does, in plain text.
"""

import logging
from dataclasses import dataclass

from aiohttp import web

from proxy.errors import KvbusError, RequestError, UpstreamError
from proxy.go_json import to_json
from proxy.ollama.translate import error_reply

logger = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
"""What the observer is told where nobody is left to read a status."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One error as the client sees it."""

    status: int
    message: str
    kind: str
    """The class of the exception: for counting, never sent."""


def to_failure(exc: Exception) -> Failure:
    """Tell what the client sees of an exception; logs what is our fault."""
    kind = type(exc).__name__
    match exc:
        case RequestError():
            return Failure(exc.status, exc.message, kind)
        case UpstreamError():
            status = exc.status if 400 <= exc.status < 600 else 502
            return Failure(status, exc.body, kind)
        case KvbusError():
            return Failure(500, str(exc), kind)
        case web.HTTPRequestEntityTooLarge():
            return Failure(413, "request body too large", kind)
        case web.HTTPException():
            return Failure(exc.status, exc.reason, kind)
        case _:
            logger.error("internal error while answering", exc_info=exc)
            return Failure(500, f"internal error ({kind}): see the log", kind)


def json_response(value: object, *, status: int = 200) -> web.Response:
    """Answer with one JSON object."""
    content_type = "application/json"
    if status == 200:
        content_type += "; charset=utf-8"
    return web.Response(
        status=status, body=to_json(value), headers={"Content-Type": content_type}
    )


def failure_response(failure: Failure) -> web.Response:
    """Answer with Ollama's error object."""
    return json_response(error_reply(failure.message), status=failure.status)


def plain_response(status: int, text: str) -> web.Response:
    """Answer as Ollama's router does by itself."""
    return web.Response(
        status=status, body=text.encode(), headers={"Content-Type": "text/plain"}
    )
