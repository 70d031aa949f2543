"""Which schemas and grammars an engine is given.

An engine makes a grammar of a JSON Schema by code that recurses along references and
writes out repetitions. A few kilobytes of a request could end its process, and with
it the requests of all others, or take all memory of the machine.

Rules:
1. The bounds are far beyond what clients send, and well below what ends an engine:
   measured, one dies of 2,000 objects that refer to one another, of 50,000 brackets
   in a grammar, and takes 14 GB for 100,000,000 items.
2. What is beyond them is refused before any engine hears of it; nothing is cut. No
   more of it is looked at than that takes.
3. Triggers of a grammar may be words and tokens, but not patterns: an engine tries them
   on the whole reply, for each token, by code that recurses and backtracks. Twelve
   characters are enough to keep it busy for minutes.
"""

from collections.abc import Iterator

from proxy.errors import RequestError

MAX_SCHEMA_OBJECTS = 1000
MAX_SCHEMA_ITEMS = 100_000
"""The sum of all `minItems` and `maxItems`: each is written out."""

MAX_GRAMMAR_BRACKETS = 10_000
MAX_GRAMMAR_CHARACTERS = 400_000

MAX_SCHEMA_VALUES = 100_000
"""Names, texts and numbers; they cost an engine a second."""

_ITEM_BOUNDS = ("minItems", "maxItems")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""In these `true` and `false` are schemas, as costly as objects."""

_WORD_TRIGGERS = (0, 1)
"""llama.cpp, common/common.h: common_grammar_trigger_type; 2 and 3 are patterns."""


def check_schema(schema: object) -> None:
    """Refuse a JSON Schema that is too large. Raises RequestError (400).

    What is no schema is not looked into: the engine knows better what it is.
    """
    num_objects, num_values, num_items = 0, 0, 0.0
    for value in _parts_of(schema):
        num_values += len(value)
        if num_values > MAX_SCHEMA_VALUES:
            raise RequestError(
                400, f"a JSON schema may hold {MAX_SCHEMA_VALUES} values"
            )
        if isinstance(value, dict):
            num_objects += 1 + _count_flags(value)
            num_items += sum(map(_count, map(value.get, _ITEM_BOUNDS)))
    if num_objects > MAX_SCHEMA_OBJECTS:
        raise RequestError(
            400,
            f"a JSON schema may hold {MAX_SCHEMA_OBJECTS} objects, not {num_objects}",
        )
    if num_items > MAX_SCHEMA_ITEMS:
        raise RequestError(
            400,
            f"all minItems and maxItems of a JSON schema may add up to"
            f" {MAX_SCHEMA_ITEMS}, not {num_items:.0f}",
        )


def _parts_of(schema: object) -> "Iterator[dict[str, object] | list[object]]":
    """Yield all objects and arrays, one at a time."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            yield value
            left += value.values() if isinstance(value, dict) else value


def _count_flags(schema: "dict[str, object]") -> int:
    maps = [schema.get(name) for name in _MAPS_OF_SCHEMAS]
    return sum(
        isinstance(value, bool)
        for each in maps
        if isinstance(each, dict)
        for value in each.values()
    )


def _count(bound: object) -> float:
    if not isinstance(bound, int | float) or isinstance(bound, bool):
        return 0.0
    return max(0.0, float(bound))


def check_grammar(grammar: object) -> None:
    """Refuse a grammar that is too large. Raises RequestError (400)."""
    if not isinstance(grammar, str):
        return
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            400, f"a grammar may have {MAX_GRAMMAR_CHARACTERS} characters"
        )
    if grammar.count("(") > MAX_GRAMMAR_BRACKETS:
        raise RequestError(400, f"a grammar may have {MAX_GRAMMAR_BRACKETS} brackets")


def check_triggers(triggers: object) -> None:
    """Refuse triggers of a grammar that are patterns. Raises RequestError (400).

    What is no trigger is the engine's to refuse.
    """
    for trigger in triggers if isinstance(triggers, list) else ():
        kind = trigger.get("type", 0) if isinstance(trigger, dict) else 0
        if kind not in _WORD_TRIGGERS:
            raise RequestError(400, "grammar_triggers may be words, but not patterns")
