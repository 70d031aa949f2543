"""Go's way to read JSON."""

import doctest

import orjson
import pytest

from proxy.errors import RequestError
from proxy.ollama import gojson
from proxy.ollama.gojson import MAX_DEPTH, Fields, decode


def refusal(body: bytes) -> str:
    """Decode what must be refused; return the text."""
    with pytest.raises(RequestError) as caught:
        decode(body)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "missing request body"),
        (b" \r\n\t", "missing request body"),
        (b"hello", "invalid character 'h' looking for beginning of value"),
        (b"{", "unexpected EOF"),
        (b'{"a": ', "unexpected EOF"),
        (b'{"a": "b', "unexpected EOF"),
        (b'{"a": [1, 2', "unexpected EOF"),
        (b"{a: 1}", "invalid character 'a' looking for beginning of object key string"),
        (b'{"a" 1}', "invalid character '1' after object key"),
        (b'{"a": 1 "b"}', "invalid character '\"' after object key:value pair"),
        (b'{"a": NaN}', "invalid character 'N' looking for beginning of value"),
        (b'{"a": -Infinity}', "invalid character 'I' in numeric literal"),
        (b'{"a": "\n"}', "invalid character '\\n' in string literal"),
        (b'{"a": "\\x"}', "invalid character '\\\\' in string escape code"),
        ("\ufeff{}".encode(), "invalid character 'ï' looking for beginning of value"),
        (b"'a'", "invalid character '\\'' looking for beginning of value"),
        (b'{"a":1,}', "invalid character '}' looking for beginning of object key"),
        (b"[" * 100_000, "exceeded max depth"),
    ],
)
def test_syntax_errors_have_gos_texts(body: bytes, text: str) -> None:
    """A body that is no JSON is refused in the words of Go's decoder."""
    assert refusal(body).startswith(text)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": 1} and more', {"a": 1}),
        (b'{"a": 1}{"a": 2}', {"a": 1}),
        (b'  {"a": "\xff\xfe"}', {"a": "\ufffd\ufffd"}),
        (b'{"a": "\\ud83d"}', {"a": "\ufffd"}),
        (b'{"\\ude00": "\\ude00\\ud83dx"}', {"\ufffd": "\ufffd\ufffdx"}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"a": "\\u0000"}', {"a": "\0"}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b"null", None),
        (b'{"a": ' + b"9" * 5000 + b"} x", {"a": float("inf")}),
    ],
)
def test_odd_bodies_are_read_as_go_reads_them(body: bytes, value: object) -> None:
    """The first value counts, and what is no UTF-8 is replaced, not refused."""
    assert decode(body) == value


def test_fields_match_in_any_case() -> None:
    """Names match in any case, null is not given, the later of two counts."""
    fields = Fields.of(
        decode(b'{"MODEL": "a", "stream": null, "Raw": true, "model": "b"}'), "S"
    )
    assert fields.text("model") == "b"
    assert fields.flag("stream", default=True)
    assert fields.flag("raw")
    assert fields.text("missing") == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "json: cannot unmarshal array into Go value of type api.ChatRequest"),
        ("x", "json: cannot unmarshal string into Go value of type api.ChatRequest"),
        (1, "json: cannot unmarshal number into Go value of type api.ChatRequest"),
        (True, "json: cannot unmarshal bool into Go value of type api.ChatRequest"),
    ],
)
def test_only_objects_have_fields(value: object, text: str) -> None:
    """A body that is another JSON value is refused by its type."""
    with pytest.raises(RequestError) as caught:
        Fields.of(value, "ChatRequest")
    assert caught.value.message == text


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_what_is_read_can_be_written(opening: bytes, closing: bytes) -> None:
    """The deepest value that is read can be written down; one level more is refused."""
    deepest = opening * MAX_DEPTH + b"1" + closing * MAX_DEPTH
    assert orjson.loads(orjson.dumps([[decode(deepest)]])) == [[decode(deepest)]]
    beside = b'{"a":%b,"b":[[1],[2]]}'
    assert refusal(beside % deepest) == "exceeded max depth"
    assert decode(b"[%b]" % b",".join([b"[[[1]]]"] * 1000)) == [[[[1]]]] * 1000


def test_worked_example() -> None:
    """The example in the module's docstring holds."""
    assert doctest.testmod(gojson).failed == 0
