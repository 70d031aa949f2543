"""What one request says about sharing its KV, as a `ReuseOptions`.

It is said in `options.mooncake` (in bodies of `/v1`: a field `mooncake` of its own), or
in the header `X-KVBus-Options`: a JSON object with the same keys, or pairs
`key=value` with `;` or `,` between them. Rules:
1. Nothing of it is forwarded; a key of the body outranks the same key of the header.
2. Every key is known and every value checked, also where sharing is switched off:
   what is wrong is a `RequestError` (400) that names the key.
3. A namespace is any text of at most `MAX_NAMESPACE_BYTES`; it is quoted nowhere.
4. `X-KVBus-Bypass: 1` outranks everything: nothing is read and nothing written.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web

from proxy.errors import RequestError
from proxy.ollama.backend import ReuseOptions
from proxy.store.base import MAX_REPLICAS

FIELD = "mooncake"
OPTIONS_HEADER = "X-KVBus-Options"
BYPASS_HEADER = "X-KVBus-Bypass"

KEYS = (
    "enable",
    "namespace",
    "read",
    "write",
    "block_size",
    "transport",
    "replica_num",
    "soft_pin",
)
MAX_NAMESPACE_BYTES = 256
"""In UTF-8."""
MIN_BLOCK_TOKENS = 16
MAX_BLOCK_TOKENS = 1024

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


class SharingPolicy:
    """Reads what requests say; knows the transports of the store."""

    def __init__(self, transports: Callable[[], Sequence[str]]) -> None:
        """Ask `transports` at each request that names one; empty: there is no store."""
        self._transports = transports

    def __call__(self, request: web.Request, given: object = None) -> ReuseOptions:
        """Return what a request allows; `given` is what its body says, or None.

        Raises RequestError (400).
        """
        values = {**_read_headers(request), **_read_object(given, f"option {FIELD!r}")}
        options = self._read(values)
        if _is_bypassed(request):
            options = replace(options, read=False, write=False)
        return options

    def _read(self, values: Mapping[str, Any]) -> ReuseOptions:
        is_enabled = _flag(values, "enable", default=True)
        reads = _flag(values, "read", default=True)
        writes = _flag(values, "write", default=True)
        self._check_transport(values)
        block_size = None
        if "block_size" in values:
            block_size = _integer(
                values, "block_size", MIN_BLOCK_TOKENS, MAX_BLOCK_TOKENS
            )
            if block_size & (block_size - 1):
                raise _wrong("block_size", "a power of two")
        return ReuseOptions(
            namespace=_namespace(values),
            read=is_enabled and reads,
            write=is_enabled and writes,
            block_size=block_size,
            replica_num=_integer(values, "replica_num", 1, MAX_REPLICAS),
            soft_pin=_flag(values, "soft_pin", default=False),
        )

    def _check_transport(self, values: Mapping[str, Any]) -> None:
        transport = values.get("transport")
        if transport is None:
            return
        if not isinstance(transport, str):
            raise _wrong("transport", "a string")
        known = self._transports()
        if transport not in known:
            has = f"the store has {', '.join(known)}" if known else "there is no store"
            raise RequestError(
                400, f'option "{FIELD}.transport" is none that exists: {has}'
            )


def _namespace(values: Mapping[str, Any]) -> str:
    namespace = values.get("namespace", "")
    if not isinstance(namespace, str):
        raise _wrong("namespace", "a string")
    try:
        num_bytes = len(namespace.encode())
    except UnicodeEncodeError as exc:  # bytes of a header that are no UTF-8
        raise _wrong("namespace", "text in UTF-8") from exc
    if num_bytes > MAX_NAMESPACE_BYTES:
        raise _wrong("namespace", f"at most {MAX_NAMESPACE_BYTES} bytes long")
    return namespace


def _flag(values: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise _wrong(key, "true or false")
    return value


def _integer(values: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = values.get(key, least)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(key, "an integer")
    if not least <= value <= most:
        raise _wrong(key, f"from {least} to {most}")
    return value


def _wrong(key: str, kind: str) -> RequestError:
    return RequestError(400, f'option "{FIELD}.{key}" must be {kind}')


def _read_object(given: object, place: str) -> dict[str, Any]:
    """Return the keys that are given; null is "not given"."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RequestError(400, f"{place} must be an object")
    for key in given:
        if key not in KEYS:
            near = difflib.get_close_matches(key[:40], KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(KEYS)}"
            shown = orjson.dumps(f"{FIELD}.{key[:40]}").decode()
            raise RequestError(400, f"option {shown} is not known; {hint}")
    return {key: value for key, value in given.items() if value is not None}


def _read_headers(request: web.Request) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in request.headers.getall(OPTIONS_HEADER, ()):
        for key, value in _read_header(text).items():
            if key in values:
                raise RequestError(400, f"{OPTIONS_HEADER} has {key} twice")
            values[key] = value
    return values


def _read_header(text: str) -> dict[str, Any]:
    place = f"the header {OPTIONS_HEADER}"
    if text.lstrip().startswith("{"):
        try:
            return _read_object(orjson.loads(text), place)
        except (orjson.JSONDecodeError, UnicodeEncodeError) as exc:
            raise RequestError(400, f"{place} is not a JSON object") from exc
    pairs: dict[str, str] = {}
    for part in filter(None, map(str.strip, re.split("[;,]", text))):
        key, equals, value = map(str.strip, part.partition("="))
        if not equals:
            raise RequestError(400, f"{place} wants a JSON object, or key=value; ...")
        if key in pairs:
            raise RequestError(400, f"{place} has a key twice")
        pairs[key] = value
    return {key: _typed(key, text) for key, text in _read_object(pairs, place).items()}


def _typed(key: str, text: str) -> object:
    """Return the value that a pair's text stands for; as it is where it is none."""
    match key:
        case "namespace" | "transport":
            return text
        case "block_size" | "replica_num":
            is_number = text.isascii() and text.isdigit() and len(text) < 10
            return int(text) if is_number else text
        case _:
            return _read_word(text)


def _read_word(text: str) -> object:
    word = text.lower()
    return True if word in _TRUE else False if word in _FALSE else text


def _is_bypassed(request: web.Request) -> bool:
    word = _read_word(request.headers.get(BYPASS_HEADER, ""))
    if not isinstance(word, bool):
        raise RequestError(400, f"the header {BYPASS_HEADER} must be 1 or 0")
    return word
