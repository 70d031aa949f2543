"""The functions that templates may call: Go's own, and those that Ollama adds.

Rules:
1. What a function reads and makes is paid for from the budget of its rendering, before
   it is made: no call is dear.
2. Strings are measured, indexed and cut in bytes of UTF-8, as in Go.
3. `call`, `js` and methods are not there: no template of a model has use for them.
"""

import datetime
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote_plus

from proxy.gotemplate.format import format_values
from proxy.gotemplate.nodes import TemplateError
from proxy.gotemplate.values import (
    PrintedAsJson,
    Struct,
    Value,
    is_true,
    type_name,
    write,
    write_json,
)

MAX_STEPS = 1_000_000
MAX_TEXT_CHARS = 1 << 24
_CHARS_OF_A_STEP = 256
_STEPS_OF_JSON = 16

_TYPESCRIPT = {
    "string": "string", "number": "number", "integer": "number", "boolean": "boolean",
    "array": "any[]", "object": "Record<string, any>", "null": "null",
}  # fmt: skip

_Number = TypeVar("_Number", int, float, str)


class LimitError(TemplateError):
    """A rendering that takes too many steps, or makes too much text."""


class CallError(Exception):
    """A function that cannot do what it was called for; the caller adds the place."""


class Budget:
    """What one rendering may still cost."""

    def __init__(
        self, *, steps: int = MAX_STEPS, text_chars: int = MAX_TEXT_CHARS
    ) -> None:
        # the mutable state
        self._steps = steps
        self._text_chars = text_chars

    def step(self, count: int = 1) -> None:
        """Pay for so many steps. Raises LimitError."""
        self._steps -= count
        if self._steps < 0:
            raise LimitError("template: the template takes too many steps")

    def read(self, num_chars: int) -> None:
        """Pay for looking at so much text, or so many entries. Raises LimitError."""
        self.step(num_chars // _CHARS_OF_A_STEP)

    def make(self, text: str) -> str:
        """Pay for a text that was made. Raises LimitError."""
        self._text_chars -= len(text)
        if self._text_chars < 0:
            raise LimitError("template: the template makes too much text")
        return text


Arguments = Sequence[Value]


@dataclass(frozen=True, slots=True)
class GoFunction:
    """A function, and with how many arguments it may be called."""

    run: Callable[[Budget, Arguments], Value]
    least: int
    most: int | None


def check_count(name: str, function: GoFunction, count: int) -> None:
    """Refuse a call with a wrong number of arguments. Raises CallError."""
    if count >= function.least and (function.most is None or count <= function.most):
        return
    least = "at least " if function.most is None else ""
    raise CallError(
        f"wrong number of args for {name}: want {least}{function.least} got {count}"
    )


def _len(budget: Budget, args: Arguments) -> int:
    (value,) = args
    match value:
        case str():
            budget.read(len(value))
            return len(value) if value.isascii() else len(_bytes(value))
        case list() | dict():
            return len(value)
        case None:
            raise CallError("error calling len: len of nil pointer")
        case _:
            raise CallError(f"error calling len: len of type {type_name(value)}")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _index(budget: Budget, args: Arguments) -> Value:
    value, *keys = args
    for key in keys:
        match value:
            case dict():
                if not isinstance(key, str):
                    raise CallError(
                        "error calling index: value has type "
                        f"{type_name(key)}; should be string"
                    )
                value = value.get(key)
            case list():
                value = value[_position("index", key, len(value) - 1)]
            case str():
                budget.read(len(value))
                encoded = _bytes(value)
                value = encoded[_position("index", key, len(encoded) - 1)]
            case None:
                raise CallError("error calling index: index of untyped nil")
            case _:
                raise CallError(
                    f"error calling index: can't index item of type {type_name(value)}"
                )
    return value


def _position(name: str, key: Value, last: int) -> int:
    """Check an index. Raises CallError."""
    if isinstance(key, bool) or not isinstance(key, int):
        shown = "nil" if key is None else f"type {type_name(key)}"
        raise CallError(f"error calling {name}: cannot index slice/array with {shown}")
    if not 0 <= key <= last:
        raise CallError(f"error calling {name}: index out of range: {key}")
    return key


def _slice(budget: Budget, args: Arguments) -> Value:
    value, *keys = args
    if value is None:
        raise CallError("error calling slice: slice of untyped nil")
    if not isinstance(value, str | list):
        raise CallError(
            f"error calling slice: can't slice item of type {type_name(value)}"
        )
    if isinstance(value, str) and len(keys) == 3:
        raise CallError("error calling slice: cannot 3-index slice a string")
    budget.read(len(value))
    whole = _bytes(value) if isinstance(value, str) else value
    ends = [_position("slice", key, len(whole)) for key in keys]
    start, stop = (*ends, 0)[0], ends[1] if len(ends) > 1 else len(whole)
    if ends != sorted(ends):
        first = ends[0] if ends[0] > ends[1] else ends[1]
        second = ends[1] if ends[0] > ends[1] else ends[2]
        raise CallError(f"error calling slice: invalid slice index: {first} > {second}")
    if isinstance(whole, bytes):
        return budget.make(whole[start:stop].decode("utf-8", "replace"))
    part = whole[start:stop]
    return type(value)(part) if isinstance(value, PrintedAsJson) else part


def _equal(budget: Budget, args: Arguments) -> bool:
    if len(args) < 2:
        raise CallError("error calling eq: missing argument for comparison")
    first, *others = args
    return any(_are_equal(budget, first, other) for other in others)


def _are_equal(budget: Budget, first: Value, second: Value) -> bool:
    if first is None or second is None:
        return first is second
    for value in (first, second):
        if isinstance(value, list | dict):
            raise CallError(
                f"error calling eq: non-comparable type {write(value)}: "
                f"{type_name(value)}"
            )
    if type(first) is not type(second):
        raise CallError(
            "error calling eq: incompatible types for comparison: "
            f"{type_name(first)} and {type_name(second)}"
        )
    if isinstance(first, str):
        budget.read(len(first))
    return bool(first == second)


def _not_equal(budget: Budget, args: Arguments) -> bool:
    return not _are_equal(budget, *args)


def _compare(name: str, judge: Callable[[int], bool]) -> GoFunction:
    def run(budget: Budget, args: Arguments) -> bool:
        first, second = args
        for value in args:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise CallError(f"error calling {name}: invalid type for comparison")
        if type(first) is not type(second):
            raise CallError(
                f"error calling {name}: incompatible types for comparison: "
                f"{type_name(first)} and {type_name(second)}"
            )
        if isinstance(first, str):
            budget.read(len(first))
            first, second = _bytes(first), _bytes(second)
        return judge((first > second) - (first < second))

    return GoFunction(run, 2, 2)


def _print(budget: Budget, args: Arguments) -> str:
    parts: list[str] = []
    for at, value in enumerate(args):
        if at and not isinstance(value, str) and not isinstance(args[at - 1], str):
            parts.append(" ")
        parts.append(budget.make(write(value)))
    return "".join(parts)


def _println(budget: Budget, args: Arguments) -> str:
    return " ".join([budget.make(write(value)) for value in args]) + "\n"


def _printf(budget: Budget, args: Arguments) -> str:
    pattern, *values = args
    if not isinstance(pattern, str):
        raise CallError(
            f"wrong type for value; expected string; got {type_name(pattern)}"
        )
    budget.read(len(pattern))
    return "".join(map(budget.make, format_values(pattern, values)))


def _json(budget: Budget, args: Arguments) -> str:
    budget.step(_STEPS_OF_JSON)
    return budget.make(write_json(args[0]))


def _html(budget: Budget, args: Arguments) -> str:
    shown = ["<no value>" if value is None else value for value in args]
    escaped = html.escape(_print(budget, shown), quote=False)
    escaped = escaped.replace('"', "&#34;").replace("'", "&#39;")
    return budget.make(escaped.replace("\0", "\ufffd"))


def _urlquery(budget: Budget, args: Arguments) -> str:
    return budget.make(quote_plus(_print(budget, args), safe="~", errors="replace"))


def _day(days_ago: int) -> GoFunction:
    def run(budget: Budget, args: Arguments) -> str:
        now = datetime.datetime.now().astimezone()
        return (now - datetime.timedelta(days=days_ago)).strftime("%Y-%m-%d")

    return GoFunction(run, 0, None)


def _to_typescript_type(budget: Budget, args: Arguments) -> str:
    budget.step()
    value = args[0]
    if not isinstance(value, Struct) or "AnyOf" not in value.fields:
        return "any"
    if value.fields["AnyOf"]:
        return " | ".join(
            _to_typescript_type(budget, [entry]) for entry in value.fields["AnyOf"]
        )
    types = [_TYPESCRIPT.get(name, "any") for name in value.fields["Type"]]
    return " | ".join(types) or "any"


FUNCTIONS: dict[str, GoFunction] = {
    # the evaluation of `and` and `or` stops early, which is up to the caller
    "and": GoFunction(lambda _, args: args[-1], 1, None),
    "or": GoFunction(lambda _, args: args[-1], 1, None),
    "not": GoFunction(lambda _, args: not is_true(args[0]), 1, 1),
    "len": GoFunction(_len, 1, 1),
    "index": GoFunction(_index, 1, None),
    "slice": GoFunction(_slice, 1, 4),
    "eq": GoFunction(_equal, 1, None),
    "ne": GoFunction(_not_equal, 2, 2),
    "lt": _compare("lt", lambda sign: sign < 0),
    "le": _compare("le", lambda sign: sign <= 0),
    "gt": _compare("gt", lambda sign: sign > 0),
    "ge": _compare("ge", lambda sign: sign >= 0),
    "print": GoFunction(_print, 0, None),
    "println": GoFunction(_println, 0, None),
    "printf": GoFunction(_printf, 1, None),
    "html": GoFunction(_html, 0, None),
    "urlquery": GoFunction(_urlquery, 0, None),
    "json": GoFunction(_json, 1, 1),
    "currentDate": _day(0),
    "yesterdayDate": _day(1),
    "toTypeScriptType": GoFunction(_to_typescript_type, 1, 1),
}
