"""Go's `printf`: values written by a pattern.

Rules:
1. The verbs of texts, whole numbers, numbers and booleans are served, with flags,
   width and precision; what is wrong is written into the text, as by Go.
2. A width is bounded, so that a short pattern makes no long text.

>>> "".join(format_values("%s has %03d of %q%%", ["a", 7, "b"]))
'a has 007 of "b"%'
>>> "".join(format_values("%d %s", ["x"]))
'%!d(string=x) %!s(MISSING)'
"""

import re
from collections.abc import Iterator, Sequence

from proxy.gotemplate.values import Value, quote, type_name, write

MAX_WIDTH = 1000

_VERB = re.compile(
    r"%(?P<flags>[+\-# 0]*)(?P<width>\d+|\*)?(?:\.(?P<precision>\d+|\*)?)?(?P<verb>.)?",
    re.DOTALL,
)
_HAS_PRECISION = re.compile(r"^%[+\-# 0]*(?:\d+|\*)?\.")
_BASES = {"d": "d", "x": "x", "X": "X", "o": "o", "b": "b"}


def format_values(pattern: str, values: Sequence[Value]) -> Iterator[str]:
    """Yield the pieces of the text."""
    rest = list(values)
    at = 0
    for match in _VERB.finditer(pattern):
        yield pattern[at : match.start()]
        at = match.end()
        yield _formatted(match, rest)
    yield pattern[at:]
    if rest:
        yield f"%!(EXTRA {', '.join(map(_misplaced, rest))})"


def _formatted(match: re.Match[str], rest: list[Value]) -> str:
    """Write one verb, with the next of the values."""
    verb, flags = match["verb"], match["flags"]
    if verb is None:
        return "%!(NOVERB)"
    if verb == "%":
        return "%"
    width = _size(match["width"], rest)
    precision = _size(match["precision"], rest)
    if precision is None and _HAS_PRECISION.match(match.group()):
        precision = 0
    if not rest:
        return f"%!{verb}(MISSING)"
    value = rest.pop(0)
    if width is not None and width < 0:
        flags, width = flags + "-", -width
    text = _written(value, verb, flags, precision)
    if text is None:
        return f"%!{verb}({_misplaced(value)})"
    return _padded(text, flags, min(width or 0, MAX_WIDTH), is_number=_is_number(value))


def _misplaced(value: Value) -> str:
    """Show a value that no verb, or the wrong one, was for."""
    return "<nil>" if value is None else f"{type_name(value)}={write(value)}"


def _size(text: str | None, rest: list[Value]) -> int | None:
    """Read a width or precision; `*` takes the next value."""
    if text == "*":
        taken = rest.pop(0) if rest else None
        return taken if isinstance(taken, int) else None
    return int(text[:9]) if text else None


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _padded(text: str, flags: str, width: int, *, is_number: bool) -> str:
    missing = width - len(text)
    if missing <= 0:
        return text
    if "-" in flags:
        return text + " " * missing
    if "0" in flags:
        sign = text[:1] if is_number and text[:1] in ("+", "-", " ") else ""
        return sign + "0" * missing + text[len(sign) :]
    return " " * missing + text


def _written(value: Value, verb: str, flags: str, precision: int | None) -> str | None:
    """Write a value by a verb; None where they do not go together."""
    if verb == "T":
        return type_name(value)
    if isinstance(value, list) and verb not in ("v", "s"):
        parts = [_written(entry, verb, flags, precision) for entry in value]
        return None if None in parts else f"[{' '.join(map(str, parts))}]"
    if verb == "v":
        text = write(value)
        is_signed = "+" in flags and _is_number(value) and not text.startswith("-")
        return "+" + text if is_signed else text
    match value:
        case bool():
            return write(value) if verb == "t" else None
        case int():
            return _whole_number(value, verb, flags)
        case float():
            return _number(value, verb, flags, precision)
        case str():
            return _text(value, verb, precision)
        case None:
            return None
        case _:
            return write(value) if verb == "s" else None


def _text(value: str, verb: str, precision: int | None) -> str | None:
    if verb in ("x", "X"):
        text = value.encode("utf-8", "replace").hex()
        return text.upper() if verb == "X" else text
    cut = value if precision is None else value[:precision]
    if verb == "s":
        return cut
    return quote(cut) if verb == "q" else None


def _whole_number(value: int, verb: str, flags: str) -> str | None:
    if verb in ("c", "q", "U"):
        is_character = 0 <= value < 0x110000 and not 0xD800 <= value < 0xE000
        character = chr(value) if is_character else "\ufffd"
        match verb:
            case "c":
                return character
            case "q":
                inner = quote(character)[1:-1].replace('\\"', '"')
                return f"'{inner}'" if character != "'" else "'\\''"
            case _:
                return f"U+{value:04X}"
    if verb not in _BASES:
        return None
    prefix = {"x": "0x", "X": "0X", "o": "0"}.get(verb, "") if "#" in flags else ""
    sign = "-" if value < 0 else "+" if "+" in flags else " " if " " in flags else ""
    return f"{sign}{prefix}{abs(value):{_BASES[verb]}}"


def _number(value: float, verb: str, flags: str, precision: int | None) -> str | None:
    if verb not in "feEgGF":
        return None
    sign = "+" if "+" in flags else " " if " " in flags else ""
    if verb in "gG" and precision is None:
        text = write(value)
        return text if text.startswith(("-", "+")) else sign + text
    digits = 6 if precision is None else min(precision, MAX_WIDTH)
    python_sign = sign or "-"
    return f"{value:{python_sign}.{digits}{verb}}"
