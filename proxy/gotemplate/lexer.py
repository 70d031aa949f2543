"""A text in Go's template language becomes tokens.

Rules:
1. Trim markers and comments are dealt with here: nobody else sees them.
2. What a token must be followed by is checked, as by Go: `1a` or `.A$b` are errors.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from proxy.gotemplate.nodes import TemplateError

_WHITE = " \t\r\n"
_TERMINATORS = (*_WHITE, ".", ",", "|", ":", ")", "(", "}}")
_PATTERN = re.compile(
    r"""(?P<right>[ \t\r\n]+-\}\}|\}\})
      | (?P<space>[ \t\r\n]+)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|`[^`]*`)
      | (?P<char>'(?:[^'\\\n]|\\.[^'\n]*)')
      | (?P<number>[+-]?(?:0[xXbBoO][0-9a-fA-F_]+
            |(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9]+)?))
      | (?P<field>\.[^\W\d]\w*)
      | (?P<variable>\$\w*)
      | (?P<word>[^\W\d]\w*)
      | (?P<sign>:=|[!#-&(-/:-@\[-_{-~])
    """,
    re.VERBOSE,
)
_UNFINISHED = {
    '"': "unterminated quoted string",
    "`": "unterminated raw quoted string",
    "'": "unterminated character constant",
    "": "unclosed action",
}


class Token(NamedTuple):
    """One word of the language, or a text outside of it."""

    kind: str
    """`text`, `left`, `end`, or as in the pattern."""
    text: str
    at: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.at + len(self.text)


def failure(source: str, at: int, message: str) -> TemplateError:
    """Make the error of a fault at a place."""
    line = source.count("\n", 0, at) + 1
    return TemplateError(f"template: :{line}: {message}")


def quoted(text: str) -> str:
    """Write a word of the source in an error."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def tokens(source: str) -> Iterator[Token]:
    """Yield what a template consists of. Raises TemplateError."""
    at, trims = 0, False
    while True:
        opening = source.find("{{", at)
        text = source[at : opening if opening >= 0 else len(source)]
        text = text.lstrip(_WHITE) if trims else text
        if opening < 0:
            yield Token("text", text, at)
            yield Token("end", "", len(source))
            return
        at = opening + 2
        if source.startswith(tuple("-" + white for white in _WHITE), at):
            text = text.rstrip(_WHITE)
            at += 2
        yield Token("text", text, opening - len(text))
        if source.startswith("/*", at):
            at, trims = _skip_comment(source, at)
            continue
        yield Token("left", "{{", opening)
        for token in _action_tokens(source, at):
            yield token
            at, trims = token.stop, token.text != "}}"


def _skip_comment(source: str, at: int) -> tuple[int, bool]:
    """Return where the text goes on, and whether white space is skipped there."""
    stop = source.find("*/", at + 2) + 2
    if stop < 2:
        raise failure(source, at, "unclosed comment")
    right = _PATTERN.match(source, stop)
    if right is None or right.lastgroup != "right":
        raise failure(source, at, "comment ends before closing delimiter")
    return right.end(), right.group() != "}}"


def _action_tokens(source: str, at: int) -> Iterator[Token]:
    """Yield the tokens up to and with the closing delimiter."""
    opened = 0
    while True:
        match = _PATTERN.match(source, at)
        if match is None or match.lastgroup is None:
            character = source[at : at + 1]
            reason = _UNFINISHED.get(
                character,
                f"unrecognized character in action: {_code_point(character)}",
            )
            raise failure(source, at, reason)
        kind, text = match.lastgroup, match.group()
        opened += (text == "(") - (text == ")")
        if opened < 0:
            raise failure(source, at, "unexpected right paren")
        if kind == "right" and opened:
            raise failure(source, at, "unclosed left paren")
        at = match.end()
        if (
            kind in ("number", "field", "variable", "word")
            and not source.startswith(_TERMINATORS, at)
            and at < len(source)
        ):
            if kind == "number":
                bad = re.compile(r"[\w.+-]*").match(source, match.start())
                shown = bad.group() if bad else text
                raise failure(source, at, f"bad number syntax: {quoted(shown)}")
            raise failure(source, at, f"bad character {_code_point(source[at])}")
        yield Token(kind, text, match.start())
        if kind == "right":
            return


def _code_point(character: str) -> str:
    code = ord(character or "\0")
    return f"U+{code:04X} '{character}'" if character.isprintable() else f"U+{code:04X}"
