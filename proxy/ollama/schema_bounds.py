"""Which schemas and grammars an engine is given.

An engine makes a grammar of a JSON Schema by code that recurses along references and
writes out repetitions. A few kilobytes of a request could end its process, and with
it the requests of all others, or take all memory of the machine.

Rules:
1. The bounds are far beyond what clients send, and well below what ends an engine:
   measured, one dies of 2,000 objects that refer to one another, of 50,000 brackets
   in a grammar, and takes 14 GB for 100,000,000 items.
2. What is beyond them is refused before any engine hears of it; nothing is cut.
"""

from proxy.errors import RequestError

MAX_SCHEMA_OBJECTS = 1000
MAX_SCHEMA_ITEMS = 100_000
"""The sum of all `minItems` and `maxItems`: each is written out."""

MAX_GRAMMAR_BRACKETS = 10_000
MAX_GRAMMAR_CHARACTERS = 400_000

_ITEM_BOUNDS = ("minItems", "maxItems")


def check_schema(schema: object) -> None:
    """Refuse a JSON Schema that is too large. Raises RequestError (400).

    What is no schema is not looked into: the engine knows better what it is.
    """
    num_objects, num_items = 0, 0.0
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            num_objects += 1
            num_items += sum(map(_count, map(value.get, _ITEM_BOUNDS)))
            left += value.values()
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
