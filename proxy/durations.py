"""Durations as Go writes them (`1h30m`, `300ms`, `-1m`): Ollama's clients use them.

>>> parse_go_duration("1h30m"), parse_go_duration("-1.5s")
(5400.0, -1.5)
"""

import re

NANOSECONDS = 1_000_000_000

_INT64_LIMIT = 2**63
_UNIT_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "\u00b5s": 1e-6,
    "\u03bcs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)([^\d.]*)", re.ASCII)


def parse_go_duration(text: str) -> float:
    """Return the seconds that a duration means. Raises ValueError with Go's text."""
    sign, rest = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    if rest == "0":
        return 0.0
    seconds = 0.0
    position = 0
    while position < len(rest):
        part = _PART.match(rest, position)
        if part is None:
            break
        number, unit = part.groups()
        if not unit:
            raise ValueError(f'time: missing unit in duration "{text}"')
        if unit not in _UNIT_SECONDS:
            raise ValueError(f'time: unknown unit "{unit}" in duration "{text}"')
        seconds += float(number) * _UNIT_SECONDS[unit]
        position = part.end()
    if not rest or position < len(rest) or seconds * NANOSECONDS >= _INT64_LIMIT:
        raise ValueError(f'time: invalid duration "{text}"')
    return -seconds if sign == "-" else seconds
