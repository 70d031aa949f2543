"""Options and keep_alive."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import RequestError
from proxy.ollama.options import SamplingOptions, parse_keep_alive, parse_options


def test_defaults_are_ollamas() -> None:
    """Without options the sampling values are those that Ollama documents."""
    assert parse_options({}) == SamplingOptions(
        num_ctx=None,
        num_keep=4,
        num_predict=-1,
        seed=-1,
        top_k=40,
        top_p=0.9,
        min_p=0.0,
        typical_p=1.0,
        repeat_last_n=64,
        temperature=0.8,
        repeat_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        stop=(),
    )


def test_given_values_count() -> None:
    """Given values replace the defaults; floats for integers lose their fraction."""
    options = parse_options(
        {
            "num_ctx": 2048.9,
            "num_predict": 5,
            "temperature": 0,
            "stop": ["a", "b"],
            "seed": None,
            "mirostat": "unknown",
            "Top_K": 3,
        }
    )
    assert options.num_ctx == 2048
    assert options.num_predict == 5
    assert options.temperature == 0.0
    assert options.stop == ("a", "b")
    assert options.seed == -1
    assert options.top_k == 40


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_ctx", "4096", 'option "num_ctx" must be of type integer'),
        ("num_ctx", True, 'option "num_ctx" must be of type integer'),
        ("seed", 1e300, 'option "seed" must be of type integer'),
        ("num_gpu", "all", 'option "num_gpu" must be of type integer'),
        ("temperature", "hot", 'option "temperature" must be of type float32'),
        ("temperature", math.inf, 'option "temperature" must be of type float32'),
        ("use_mmap", 1, 'option "use_mmap" must be of type boolean'),
        ("stop", "a", 'option "stop" must be of type array'),
        ("stop", [1], 'option "stop" must be of an array of strings'),
    ],
)
def test_wrong_types_are_refused(name: str, value: object, text: str) -> None:
    """A value of the wrong type gives Ollama's text and its status 500."""
    with pytest.raises(RequestError) as caught:
        parse_options({name: value})
    assert (caught.value.status, caught.value.message) == (500, text)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (90, 90.0),
        (0.5, 0.5),
        (-1, math.inf),
        ("0", 0.0),
        ("-0", 0.0),
        ("90s", 90.0),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("300ms", 0.3),
        ("+2s", 2.0),
        ("-1m", math.inf),
    ],
)
def test_keep_alive_forms(value: object, seconds: float | None) -> None:
    """Numbers are seconds, strings Go durations, negative ones mean for ever."""
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("300", 'time: missing unit in duration "300"'),
        ("-1", 'time: missing unit in duration "-1"'),
        ("", 'time: invalid duration ""'),
        ("-", 'time: invalid duration "-"'),
        ("ever", 'time: invalid duration "ever"'),
        ("5 m", 'time: unknown unit " m" in duration "5 m"'),
        ("3d", 'time: unknown unit "d" in duration "3d"'),
        ("1h-3m", 'time: unknown unit "h-" in duration "1h-3m"'),
        ("9999999999h", 'time: invalid duration "9999999999h"'),
        (True, "Unsupported type: 'bool'"),
        ([], "Unsupported type: '[]interface {}'"),
        ({}, "Unsupported type: 'map[string]interface {}'"),
    ],
)
def test_bad_keep_alive_is_refused(value: object, text: str) -> None:
    """A keep_alive that Go cannot read is refused in its words."""
    with pytest.raises(RequestError) as caught:
        parse_keep_alive(value)
    assert (caught.value.status, caught.value.message) == (400, text)


@given(st.text())
def test_any_string_is_read_or_refused(text: str) -> None:
    """Whatever the string, keep_alive is a number of seconds or a clean refusal."""
    try:
        seconds = parse_keep_alive(text)
    except RequestError as exc:
        seconds = exc.status
    assert seconds is not None
    assert seconds >= 0
