"""The values of Go's templates, and how Go writes them.

Values are None (nil, or not there), bool, int, float, str, lists, dicts with names as
keys, and structs. Rules:
1. A dict gives None for a name that it lacks; a struct refuses one.
2. Texts are as fmt and encoding/json write them: numbers of a float64, sorted keys,
   `<`, `>` and `&` escaped in JSON.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson

from proxy.go_json import to_json

Value = Any
"""See the module."""

_FIRST_LONG_EXPONENT = 6
_LEAST_LONG_IN_JSON = 1e21
_ESCAPES = dict(zip('\a\b\f\n\r\t\v\\"', ("\\" + c for c in 'abfnrtv\\"'), strict=True))


@dataclass(frozen=True, slots=True)
class Struct:
    """A value with a fixed set of fields."""

    go_type: str
    fields: Mapping[str, Value]
    json_fields: Mapping[str, Value]
    """As it is written in JSON, in this order."""
    prints_json: bool = False
    """Whether it is printed as JSON."""


class PrintedAsJson:
    """Base of lists and dicts that are printed as JSON."""

    __slots__ = ()


class JsonList(PrintedAsJson, list[Value]):
    """A list that is printed as JSON."""

    __slots__ = ()


class JsonDict(PrintedAsJson, dict[str, Value]):
    """A dict that is printed as JSON."""

    __slots__ = ()


class TypeNames(list[str]):
    """The types of a tool's parameter: one of them is printed, and written, alone."""

    __slots__ = ()


def type_name(value: Value) -> str:
    """Name a value's type in errors."""
    match value:
        case None:
            return "<nil>"
        case bool():
            return "bool"
        case int():
            return "int"
        case float():
            return "float64"
        case str():
            return "string"
        case list():
            return "[]interface {}"
        case dict():
            return "map[string]interface {}"
        case Struct():
            return value.go_type
        case _:
            return type(value).__name__


def is_true(value: Value) -> bool:
    """Tell whether a value is not empty, as `if` has it."""
    return True if isinstance(value, Struct) else bool(value)


def write_json(value: Value) -> str:
    """Write a value as encoding/json does."""
    return to_json(_plain(value)).decode("utf-8", "replace")


def _plain(value: Value) -> Any:  # noqa: ANN401 - JSON
    match value:
        case Struct():
            return {name: _plain(entry) for name, entry in value.json_fields.items()}
        case TypeNames():
            return value[0] if len(value) == 1 else list(value)
        case list():
            return [_plain(entry) for entry in value]
        case dict():
            return {name: _plain(value[name]) for name in sorted(value)}
        case float():
            if value.is_integer() and abs(value) < _LEAST_LONG_IN_JSON:
                return orjson.Fragment(str(int(value)).encode())
            return value
        case str():
            return value.encode("utf-8", "replace").decode()
        case _:
            return value


def write(value: Value) -> str:
    """Write a value as `{{ value }}` and `%v` do.

    >>> write([1, 2.5, "a", None, {"b": True}])
    '[1 2.5 a <nil> map[b:true]]'
    """
    match value:
        case str():
            return value
        case None:
            return "<nil>"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return write_float(value)
        case TypeNames():
            return f"[{' '.join(value)}]" if len(value) > 1 else "".join(value)
        case PrintedAsJson():
            return write_json(value)
        case list():
            return f"[{' '.join(map(write, value))}]"
        case dict():
            pairs = (f"{name}:{write(value[name])}" for name in sorted(value))
            return f"map[{' '.join(pairs)}]"
        case Struct(prints_json=True):
            return write_json(value)
        case Struct():
            return "{" + " ".join(map(write, value.fields.values())) + "}"
        case _:
            return str(value)


def write_float(value: float) -> str:
    """Write a float64 as `%v` does: the shortest text that stands for it.

    >>> write_float(20.0), write_float(1e6), write_float(1234.5), write_float(1e-5)
    ('20', '1e+06', '1234.5', '1e-05')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
    number = Decimal(repr(value)).normalize()
    exponent = number.adjusted() if number else 0
    if -4 <= exponent < _FIRST_LONG_EXPONENT:
        return f"{number:f}"
    mantissa = number.scaleb(-exponent)
    return f"{mantissa:f}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"


def quote(text: str) -> str:
    r"""Write a text as `%q` does.

    >>> print(quote('a "b"\n\x01'))
    "a \"b\"\n\x01"
    """
    return '"' + "".join(map(_quoted_character, text)) + '"'


def _quoted_character(character: str) -> str:
    escape = _ESCAPES.get(character)
    if escape is not None:
        return escape
    code = ord(character)
    if character.isprintable():
        return character
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
