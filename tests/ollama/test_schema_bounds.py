"""Schemas and grammars that could end an engine."""

import pytest

from proxy.errors import RequestError
from proxy.ollama.protocol import parse_chat, parse_format
from proxy.ollama.schema_bounds import (
    MAX_GRAMMAR_BRACKETS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_SCHEMA_ITEMS,
    MAX_SCHEMA_OBJECTS,
    MAX_SCHEMA_VALUES,
    check_grammar,
    check_schema,
    check_triggers,
)


def chain(num_objects: int) -> dict[str, object]:
    """Make a schema of so many objects, each of which refers to the next."""
    last = num_objects - 3
    names = {f"a{at}": {"$ref": f"#/$defs/a{at + 1}"} for at in range(last)}
    return {"$defs": {**names, f"a{last}": {}}, "$ref": "#/$defs/a0"}


def test_the_bounds_themselves_are_allowed() -> None:
    """What is exactly as large as it may be passes, and what is no schema too."""
    check_schema(chain(MAX_SCHEMA_OBJECTS))
    check_schema({"items": {"minItems": 1}, "maxItems": MAX_SCHEMA_ITEMS - 1})
    check_schema({"maxItems": "9" * 99, "minItems": True, "properties": {"a": -1e308}})
    check_schema([None, "x", 1e308])
    check_grammar("(" * MAX_GRAMMAR_BRACKETS)
    check_grammar(None)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (chain(MAX_SCHEMA_OBJECTS + 1), "1000 objects, not 1001"),
        ({"type": "array", "minItems": 10**8}, "100000, not 100000000"),
        ({"maxItems": float("inf")}, "100000, not inf"),
        ({"allOf": [{"maxItems": 60_000}, {"items": {"maxItems": 60_000}}]}, "120000"),
        ({"properties": dict.fromkeys(map(str, range(2000)), True)}, "not 2002"),
        ({"enum": ["x"] * (MAX_SCHEMA_VALUES + 1)}, "may hold 100000 values"),
    ],
)
def test_larger_schemas_are_refused(schema: dict[str, object], says: str) -> None:
    """A 400 says which bound, in `format` and in the schema of a tool."""
    for check in (check_schema, parse_format):
        with pytest.raises(RequestError, match=says) as caught:
            check(schema)
        assert caught.value.status == 400
    if says.endswith("1001"):
        body = b'{"tools":[{"function":{"parameters":{"$defs":[%b]}}}]}'
        with pytest.raises(RequestError, match="1000 objects"):
            parse_chat(body % b",".join([b"{}"] * MAX_SCHEMA_OBJECTS))


@pytest.mark.parametrize(
    "grammar", ["(" * (MAX_GRAMMAR_BRACKETS + 1), "x" * (MAX_GRAMMAR_CHARACTERS + 1)]
)
def test_larger_grammars_are_refused(grammar: str) -> None:
    """Too many brackets, or too many characters."""
    with pytest.raises(RequestError, match="a grammar may have"):
        check_grammar(grammar)


def test_triggers_of_a_grammar_are_no_patterns() -> None:
    """A word or a token may trigger it; 12 characters of a pattern stop an engine."""
    check_triggers(None)
    check_triggers([{"type": 1, "value": "x"}, {"value": "x"}, {"type": 0}, 5])
    for kind in (2, 3, "2"):
        with pytest.raises(RequestError, match="not patterns"):
            check_triggers([{"type": kind, "value": "(a|b|.)*Z"}])
