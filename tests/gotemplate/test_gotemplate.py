"""Go's template language: what it writes, what it refuses, and that it ends."""

import doctest
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.gotemplate import evaluation, format, nodes, values
from proxy.gotemplate.evaluation import (
    Budget,
    LimitError,
    TemplateError,
    compile_template,
    render,
)

DATA: dict[str, Any] = {
    "Name": "Ann",
    "Empty": "",
    "Two": [{"a": 1.0}, {"a": 2.5}],
    "None": [],
    "Map": {"b": "x", "a": "y"},
    "True": True,
}


def made(source: str, **limits: int) -> str:
    """Render a template with the usual data."""
    return render(compile_template(source), DATA, budget=Budget(**limits))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        # white space and comments
        ("a {{- 1 -}} b", "a1b"),
        ("a {{ 1 -}}\n\n b{{/* no */}} c", "a 1b c"),
        ("a {{- /* no\n */ -}} b", "ab"),
        ('{{ `}}` }}{{ "{{" }}', "}}{{"),
        # constants
        (
            "{{ 0x1F }} {{ 1_000 }} {{ 017 }} {{ 0b11 }} {{ -5 }} {{ 'a' }}",
            "31 1000 15 3 -5 97",
        ),
        (
            "{{ 1e3 }} {{ .5 }} {{ 1.50 }} {{ 1e6 }} {{ 1e-7 }}",
            "1000 0.5 1.5 1e+06 1e-07",
        ),
        (r'{{ "a\t\x41\u00e9\101\"" }}{{ `raw\n` }}', 'a\tAéA"raw\\n'),
        ("{{ true }}{{ false }}", "truefalse"),
        # fields and variables
        (
            "{{ .Name }} {{ .Nope }} {{ .Map.b }} {{ .Map.c }}",
            "Ann <no value> x <no value>",
        ),
        ("{{ $x := 1 }}{{ if true }}{{ $x = 2 }}{{ $x := 3 }}{{ end }}{{ $x }}", "2"),
        ("{{ with .Map }}{{ .b }}{{ $.Name }}{{ end }}", "xAnn"),
        ("{{ (index .Two 1).a }}", "2.5"),
        # control
        ("{{ if .Empty }}1{{ else if .Nope }}2{{ else }}3{{ end }}", "3"),
        ("{{ with .Empty }}1{{ else with .Name }}{{ . }}{{ end }}", "Ann"),
        ("{{ range $i, $x := .Two }}{{ $i }}={{ $x.a }};{{ end }}", "0=1;1=2.5;"),
        ("{{ range $k, $v := .Map }}{{ $k }}{{ $v }}{{ end }}", "aybx"),
        (
            "{{ range .None }}1{{ else }}none{{ end }}{{ range .Nope }}2{{ end }}",
            "none",
        ),
        (
            "{{ range 5 }}{{ if eq . 1 }}{{ continue }}{{ end }}{{ if eq"
            " . 3 }}{{ break }}{{ end }}{{ . }}{{ end }}",
            "02",
        ),
        ('{{ define "t" }}<{{ . }}>{{ end }}{{ template "t" .Name }}', "<Ann>"),
        ('{{ block "t" .Name }}<{{ . }}>{{ end }}', "<Ann>"),
        # pipelines and functions
        ('{{ .Name | printf "%s-%s" "a" | len }}', "5"),
        ("{{ and 1 0 2 }} {{ or 0 .Empty 3 }} {{ not .Name }}", "0 3 false"),
        ("{{ and 0 (index .Two 9) }}{{ or 1 (index .Two 9) }}", "01"),
        (
            '{{ eq .Name "Bob" "Ann" }} {{ ne 1 2 }} {{ eq .Nope "x" }}',
            "true true false",
        ),
        (
            '{{ lt 1 2 }} {{ le 2 2 }} {{ gt "b" "a" }} {{ ge 1.5 2.5 }}',
            "true true true false",
        ),
        ('{{ len "é" }} {{ slice "héllo" 3 }} {{ index "abc" 1 }}', "2 llo 98"),
        ("{{ len (slice .Two 1) }} {{ len .Map }}", "1 2"),
        ("{{ print 1 2 .Name 3 }}|{{ println 1 .Name }}", "1 2Ann3|1 Ann\n"),
        (
            '{{ json .Two }} {{ json "<&>" }} {{ .Map }}',
            '[{"a":1},{"a":2.5}] "\\u003c\\u0026\\u003e" map[a:y b:x]',
        ),
        (
            '{{ html "<a href=\'x\'>" }} {{ urlquery "a b&c" }}',
            "&lt;a href=&#39;x&#39;&gt; a+b%26c",
        ),
    ],
)
def test_what_is_written(source: str, text: str) -> None:
    """As Go writes it; Go itself has written these."""
    assert made(source) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('{{ printf "%d %s %q %v %t" 1 "a" "b\\n" 2.5 true }}', '1 a "b\\n" 2.5 true'),
        (
            '{{ printf "%5d|%-5s|%05d|%+d|%x|%X|%c" 42 "ab" 42 5 "hi" 255 65 }}',
            "   42|ab   |00042|+5|6869|FF|A",
        ),
        (
            '{{ printf "%6.2f|%e|%08.3f|%*d" 3.14159 1.5 3.14159 4 7 }}',
            "  3.14|1.500000e+00|0003.142|   7",
        ),
        (
            '{{ printf "%d" "x" }} {{ printf "%s" 5 }} {{ printf "%s" }}',
            "%!d(string=x) %!s(int=5) %!s(MISSING)",
        ),
        (
            '{{ printf "a" 1 }} {{ printf "%" }} {{ printf "%%" }}',
            "a%!(EXTRA int=1) %!(NOVERB) %",
        ),
    ],
)
def test_printf(source: str, text: str) -> None:
    """What is wrong is written into the text, as by Go."""
    assert made(source) == text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ .Name", ":1: unclosed action"),
        ("{{ if .Name }}x", ":1: unexpected EOF"),
        ("x{{ end }}", ":1: unexpected {{end}}"),
        ("{{ if }}x{{ end }}", ":1: missing value for if"),
        ("{{}}", ":1: missing value for command"),
        ("\n\n{{ $x }}", ':3: undefined variable "$x"'),
        ("{{ nope }}", ':1: function "nope" not defined'),
        ('{{ "a }}', ":1: unterminated quoted string"),
        ("{{ ( .Name }}", ":1: unclosed left paren"),
        ("{{ .Name ) }}", ":1: unexpected right paren"),
        ("{{ 1a }}", ':1: bad number syntax: "1a"'),
        ("{{ .A$b }}", ":1: bad character U+0024 '$'"),
        ("{{ @ }}", ':1: unexpected "@" in command'),
        ('{{ .Name | "a" }}', ":1: non executable command in pipeline stage 2"),
        ("{{ break }}", ":1: {{break}} outside {{range}}"),
        ("{{ nil }}", ":1: nil is not a command"),
        ("{{/* x }}", ":1: unclosed comment"),
        ("{{ range $a, $b, $c := .Two }}{{ end }}", ":1: too many declarations"),
        ("{{ 99999999999999999999 }}", ":1: integer overflow"),
        ('{{ "\\q" }}', ":1: invalid syntax"),
    ],
)
def test_what_cannot_be_read(source: str, says: str) -> None:
    """The error names the line."""
    with pytest.raises(TemplateError) as caught:
        compile_template(source)
    assert str(caught.value).startswith(f"template: {says}")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ .Name.First }}", "can't evaluate field First in type string"),
        ("{{ len 5 }}", "<len 5>: error calling len: len of type int"),
        ("{{ len 1 2 }}", "<len>: wrong number of args for len: want 1 got 2"),
        ("{{ index .Two 9 }}", "error calling index: index out of range: 9"),
        ('{{ index .Two "a" }}', "cannot index slice/array with type string"),
        ("{{ index .Nope 1 }}", "error calling index: index of untyped nil"),
        ("{{ slice .Two 2 1 }}", "invalid slice index: 2 > 1"),
        ('{{ eq 1 "a" }}', "incompatible types for comparison: int and string"),
        ("{{ eq .Two .Two }}", "error calling eq: non-comparable type"),
        ("{{ lt true false }}", "error calling lt: invalid type for comparison"),
        ("{{ range .Name }}{{ end }}", "range can't iterate over Ann"),
        ("{{ .Name 1 }}", "Name is not a method but has arguments"),
        ('{{ template "t" . }}', 'template "t" not defined'),
        ("{{ range $x = .Two }}{{ end }}", "undefined variable"),
    ],
)
def test_what_cannot_be_rendered(source: str, says: str) -> None:
    """The error names line and column."""
    with pytest.raises(TemplateError) as caught:
        made(f"\n{source}")
    message = str(caught.value)
    assert message.startswith("template: :2")
    assert says in message


LOOPS = {
    "steps": "{{ range 1000000 }}{{ range 1000000 }}{{ end }}{{ end }}",
    "calls": '{{ define "a" }}{{ range 9 }}{{ template "a" . }}{{ end }}{{ end }}'
    '{{ template "a" . }}',
    "doubling": '{{ $x := "aa" }}{{ range 99 }}{{ $x = print $x $x }}{{ end }}',
    "output": '{{ range 99999 }}{{ printf "%1000d" . }}{{ end }}',
    "comparing": '{{ $x := "a" }}{{ range 21 }}{{ $x = print $x $x }}{{ end }}'
    '{{ $y := print $x "b" }}{{ $z := print $x "c" }}'
    "{{ range 1000000 }}{{ if eq $y $z }}{{ end }}{{ if len $y }}{{ end }}{{ end }}",
    "json": "{{ range 1000000 }}{{ if json $ }}{{ end }}{{ end }}",
    "nested": "{{ if 1 }}" * 5000,
    "parens": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long": "x" * 600_000,
    "widths": '{{ printf "%999999999999d" 1 }}{{ range 1000000 }}{{ end }}{{ .a.b }}'
    "{{ range 1000000 }}{{ end }}",
}


@pytest.mark.parametrize("kind", LOOPS)
def test_no_template_takes_long(kind: str) -> None:
    """Steps, text, depth and source are bounded, whatever the template does."""
    started = time.process_time()
    with pytest.raises(TemplateError):
        made(LOOPS[kind])
    assert time.process_time() - started < 10


def test_bounds_can_be_narrower() -> None:
    """One budget may serve several renderings."""
    assert made("abc", text_chars=3) == "abc"
    with pytest.raises(LimitError):
        made("abcd", text_chars=3)
    with pytest.raises(LimitError):
        made("{{ range 10 }}{{ end }}", steps=5)
    many = "".join(f"{{{{ $v{at} := 1 }}}}" for at in range(640))
    with pytest.raises(LimitError):  # each look-up goes through all variables
        made(many + "{{ range 100 }}{{ $v0 }}{{ end }}", steps=3000)
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(LimitError):
        render(compile_template("{{ .Deep }}"), {"Deep": deep})


_WORDS = st.sampled_from(
    [
        *("{{", "}}", "{{-", "-}}", ".", ".Name", "$x", "$", ":=", "=", "|", "(", ")"),
        *("if", "range", "end", "else", "with", "define", "template", "block", "break"),
        *('"a"', "`", "'a'", "1", "1.5", "-", "eq", "printf", '"%d"', "len", "/*"),
        *("*/", "nil", "true", "\n", "x", "é", ","),
    ]
)


@given(st.lists(_WORDS, max_size=30).map(" ".join))
def test_whatever_is_written_nothing_but_its_error_comes(source: str) -> None:
    """No text of the language's words breaks the reader or the writer."""
    try:
        made(source)
    except TemplateError as exc:
        assert str(exc).startswith(("template: ", "undefined"))  # noqa: PT017


@pytest.mark.parametrize("module", [evaluation, format, nodes, values])
def test_worked_examples(module: Any) -> None:  # noqa: ANN401
    """The examples in the docstrings hold."""
    assert doctest.testmod(module).failed == 0
