r"""How Ollama, a Go program, reads a JSON body.

Clients and their tests were written against Go's decoder, so its rules are kept:

1. The first JSON value counts; bytes after it are ignored. No value at all is
   `missing request body`, a value that breaks off is `unexpected EOF`.
2. Bytes that are no UTF-8, and halves of surrogate pairs, become U+FFFD.
3. Field names match in any case; unknown fields are ignored; null is "not given".
   Of two fields of one name the later one counts.
4. A value of the wrong type is refused with Go's text, which names the field.
5. What is nested deeper than `MAX_DEPTH` is refused in Go's words. Go's own bound is
   10,000, but such a value could not be written down again.

Worked example:

    >>> body = b'{"Model": "m", "stream": null} tail'
    >>> fields = Fields.of(decode(body), "ChatRequest")
    >>> fields.text("model"), fields.flag("stream", default=True)
    ('m', True)
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Never

import orjson

from proxy.errors import RequestError

MAX_DEPTH = 200
"""The JSON writer ends at 254, and what is sent on stands a few levels deeper."""

_MISSING_BODY = "missing request body"
_UNEXPECTED_END = "unexpected EOF"
_TOO_DEEP = "exceeded max depth"

_SURROGATE = re.compile("[\ud800-\udfff]")

# Texts of Python's decoder, and where Go says that the character stands.
_PLACES = (
    ("Expecting value", "looking for beginning of value"),
    ("Illegal trailing comma before end of object", "looking for beginning of "
     "object key string"),
    ("Illegal trailing comma before end of array", "looking for beginning of value"),
    ("Expecting property name", "looking for beginning of object key string"),
    ("Expecting ':'", "after object key"),
    ("Expecting ','", "after object key:value pair"),
    ("Invalid control character", "in string literal"),
    ("Invalid \\u", "in \\u hexadecimal character escape"),
    ("Invalid \\", "in string escape code"),
)  # fmt: skip


def decode(body: bytes) -> object:
    """Read the first JSON value of `body`.

    Raises RequestError (400) with the text that Go's decoder would give.
    """
    try:
        value: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = _decode_as_go(body)
    # counting spares most bodies the look at each of their values
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and is_too_deep(value):
        raise RequestError(400, _TOO_DEEP)
    return value


def is_too_deep(value: object) -> bool:
    """Tell whether a decoded value is nested deeper than `MAX_DEPTH`."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _decode_as_go(body: bytes) -> object:
    """Read what the strict decoder refused: slower, but by Go's rules."""
    text = body.decode("utf-8", "replace")
    start = len(text) - len(text.lstrip(" \t\r\n"))
    if start == len(text):
        raise RequestError(400, _MISSING_BODY)
    decoder = json.JSONDecoder(parse_int=_read_integer, parse_constant=_refuse_constant)
    try:
        value, _ = decoder.raw_decode(text, start)
        return _well_formed(value)
    except json.JSONDecodeError as exc:
        raise RequestError(400, _syntax_text(exc)) from exc
    except RecursionError as exc:
        raise RequestError(400, _TOO_DEEP) from exc


def _read_integer(digits: str) -> int | float:
    """Read an integer; one beyond 64 bits as a float, as the strict decoder does."""
    return int(digits) if len(digits) < 20 else float(digits)


def _refuse_constant(name: str) -> Never:
    """Refuse NaN and Infinity, which Python's decoder would accept."""
    if name.startswith("-"):
        raise RequestError(400, "invalid character 'I' in numeric literal")
    raise RequestError(
        400, f"invalid character '{name[0]}' looking for beginning of value"
    )


def _well_formed(value: object) -> object:
    """Replace halves of surrogate pairs, which no UTF-8 can carry further."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_well_formed(entry) for entry in value]
    if isinstance(value, dict):
        return {_well_formed(name): _well_formed(v) for name, v in value.items()}
    return value


def _syntax_text(exc: json.JSONDecodeError) -> str:
    """Say in Go's words where the syntax broke."""
    if exc.msg.startswith("Unterminated string") or exc.pos >= len(exc.doc):
        return _UNEXPECTED_END
    # Go looks at bytes: of a longer character it shows the first one.
    byte = exc.doc[exc.pos].encode("utf-8", "replace")[:1].decode("latin-1")
    shown = {"'": "\\'", '"': '"', "\\": "\\\\"}.get(byte)
    if shown is None:
        shown = byte if byte.isprintable() else byte.encode("unicode_escape").decode()
    for start, place in _PLACES:
        if exc.msg.startswith(start):
            return f"invalid character '{shown}' {place}"
    return f"invalid character '{shown}' in the request body"


def kind_of(value: object) -> str:
    """Name the JSON type of a decoded value, as Go's errors do."""
    match value:
        case bool():
            return "bool"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case None:
            return "null"
        case _:
            return "object"


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object, read field by field with Go's types and texts."""

    struct: str
    """The Go struct that the body is decoded into: named in errors."""
    path: str
    """Where in the body this object stands, `""` or as in `messages.`."""
    values: Mapping[str, Any]
    """By lower-cased name, nulls left out."""

    @classmethod
    def of(cls, value: object, struct: str, *, path: str = "") -> "Fields":
        """Wrap a decoded value; null is an object without fields.

        Raises RequestError (400) for anything but an object or null.
        """
        if value is None:
            return cls(struct, path, {})
        if not isinstance(value, dict):
            kind = kind_of(value)
            if path:
                text = f"Go struct field {struct}.{path.rstrip('.')} of type object"
            else:
                text = f"Go value of type api.{struct}"
            raise RequestError(400, f"json: cannot unmarshal {kind} into {text}")
        return cls(
            struct,
            path,
            {name.lower(): v for name, v in value.items() if v is not None},
        )

    def refuse(self, name: str, value: object, go_type: str) -> RequestError:
        """Make the error for a field that holds another type."""
        return RequestError(
            400,
            f"json: cannot unmarshal {kind_of(value)} into Go struct field "
            f"{self.struct}.{self.path}{name} of type {go_type}",
        )

    def text(self, name: str) -> str:
        """Read a string; `""` where not given."""
        value = self.values.get(name, "")
        if not isinstance(value, str):
            raise self.refuse(name, value, "string")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Read a boolean."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, value, "bool")
        return value

    def integer(self, name: str) -> int:
        """Read a whole number; 0 where not given."""
        value = self.values.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, value, "int")
        return value

    def array(self, name: str, go_type: str) -> list[Any]:
        """Read an array of anything; empty where not given."""
        value = self.values.get(name, [])
        if not isinstance(value, list):
            raise self.refuse(name, value, go_type)
        return value

    def mapping(self, name: str, go_type: str) -> dict[str, Any]:
        """Read an object whose names are kept as they are; empty where not given."""
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            raise self.refuse(name, value, go_type)
        return value

    def anything(self, name: str) -> object:
        """Read a value of any type; None where not given."""
        return self.values.get(name)
