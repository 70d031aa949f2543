"""JSON as Go's encoder writes it."""

import orjson

_GO_ESCAPES = (
    (b"<", b"\\u003c"),
    (b">", b"\\u003e"),
    (b"&", b"\\u0026"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def to_json(value: object) -> bytes:
    """Write a value as Go does."""
    line = orjson.dumps(value)
    for character, escape in _GO_ESCAPES:
        if character in line:
            line = line.replace(character, escape)
    return line
