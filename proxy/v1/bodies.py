"""What a client of `/v1` has sent: its body, checked as far as that is ours to do.

Rules:
1. A body is one JSON object, plain or in zstd; what is wrong with it is a
   `RequestError` before any runner hears of it.
2. Fields that would let a request leave its slot, or make KV inexact, are taken out.
   All other fields go to the runner as they came: it knows more of them than we do.
3. What could end the runner's process, or take all of its memory, does not reach it.
"""

import asyncio
import io
from collections.abc import Iterator, Mapping
from typing import Any

import zstandard
from aiohttp import web

from proxy.errors import RequestError
from proxy.ollama import sharing
from proxy.ollama.gojson import decode, kind_of
from proxy.ollama.schema_bounds import check_grammar, check_schema, check_triggers

MAX_UNPACKED_BYTES = 20 << 20
"""Ollama's own bound on a body in zstd, after decompression."""

READ_IN_THREAD_BYTES = 1 << 20
"""Larger bodies are read beside the event loop: streams of others go on."""

TAKEN_OUT = ("id_slot", "n", "n_cmpl", "n_cache_reuse", sharing.FIELD)
"""A slot of the client's choice; more than one reply, which the engine decodes in
slots of other requests; chunks of KV that are moved to other positions; and what is
said to kvbus alone."""

_SCHEMAS = (
    "json_schema", "response_format", "text", "output_config", "output_format",
)  # fmt: skip
"""Fields that are a JSON Schema, or hold one."""

_WINDOWS = ("repeat_last_n", "dry_penalty_last_n")

_MEDIA_TYPES = frozenset(
    {"image", "image_url", "input_image", "input_audio", "audio_url", "input_file"}
    | {"video_url", "input_video", "document", "media_marker"}
)


async def read_object(request: web.Request) -> dict[str, Any]:
    """Return the JSON object that a request carries. Raises RequestError."""
    body = await request.read()
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("identity", "", "zstd"):
        raise RequestError(400, f"bodies in {coding!r} are not read: use zstd, or none")
    is_packed = coding == "zstd"
    if is_packed or len(body) > READ_IN_THREAD_BYTES:
        return await asyncio.to_thread(_read, body, is_packed=is_packed)
    return _read(body, is_packed=False)


def _read(body: bytes, *, is_packed: bool) -> dict[str, Any]:
    value = decode(unpack(body) if is_packed else body)
    if not isinstance(value, dict):
        raise RequestError(400, f"the body must be a JSON object, not {kind_of(value)}")
    return value


def unpack(body: bytes) -> bytes:
    """Return the content of a body in zstd. Raises RequestError."""
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_UNPACKED_BYTES)
    try:
        with reader.stream_reader(io.BytesIO(body), read_across_frames=True) as stream:
            content = stream.read(MAX_UNPACKED_BYTES + 1)
    except zstandard.ZstdError as exc:
        raise RequestError(400, "the body is not valid zstd") from exc
    if len(content) > MAX_UNPACKED_BYTES:
        raise RequestError(413, "request body too large")
    return content


def take_model(body: dict[str, Any]) -> str:
    """Return the model that a body names. Raises RequestError."""
    name = body.get("model")
    if name is None or name == "":
        raise RequestError(400, "model is required")
    if not isinstance(name, str):
        raise RequestError(400, f"model must be a string, not {kind_of(name)}")
    return name


def without_taken_out(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body less the fields of `TAKEN_OUT`."""
    return {name: value for name, value in body.items() if name not in TAKEN_OUT}


def check_bounds(body: Mapping[str, Any]) -> None:
    """Refuse what could end the engine's process. Raises RequestError (400)."""
    for name in _SCHEMAS:
        check_schema(body.get(name))
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        check_schema(tool)
    check_grammar(body.get("grammar"))
    check_triggers(body.get("grammar_triggers"))


def within_context(body: Mapping[str, Any], *, context_tokens: int) -> dict[str, Any]:
    """Return a body that has no window longer than the context.

    It means the same, but the engine makes room for as many tokens as it is told.
    """
    longer = {
        name: context_tokens
        for name in _WINDOWS
        if isinstance(body.get(name), int | float) and body[name] > context_tokens
    }
    return {**body, **longer}


def has_images(messages: object) -> bool:
    """Tell whether media among messages, or items, are images.

    Raises RequestError (400) for one that would have to be fetched from elsewhere:
    the runner would ask any address for a client.
    """
    is_image = False
    for part in _media(messages):
        address = part.get("image_url")
        is_image = is_image or address is not None
        if isinstance(address, dict):
            address = address.get("url")
        if isinstance(address, str) and not address.startswith("data:"):
            raise RequestError(400, "invalid image input: only data URLs are read")
    return is_image


def has_media(messages: object) -> bool:
    """Tell whether messages, or items, hold anything but text: at any depth."""
    return next(_media(messages), None) is not None


def _media(messages: object) -> Iterator[dict[str, Any]]:
    unseen = [messages]
    while unseen:
        match unseen.pop():
            case list(parts):
                unseen += parts
            case dict(part) if _is_media(part.get("type")):
                yield part
            case dict(fields):
                unseen += (fields.get("content"), fields.get("output"))
            case _:
                pass


def _is_media(kind: object) -> bool:
    return isinstance(kind, str) and kind in _MEDIA_TYPES
