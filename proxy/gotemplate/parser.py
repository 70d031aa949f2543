"""A text in Go's template language becomes a tree.

Rules:
1. The language is that of Go's text/template, with its trim markers, its scopes and
   its error texts. Complex numbers are refused.
2. A name of a function or a variable that does not exist is an error here, before
   anything is rendered.
3. A source is bounded in length and in depth: so are reading it and walking its tree.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from proxy.gotemplate.lexer import Token, failure, quoted, tokens
from proxy.gotemplate.nodes import (
    Action,
    Body,
    Branch,
    Call,
    Chain,
    Command,
    Dot,
    Field,
    Function,
    If,
    Jump,
    Literal,
    Node,
    Operand,
    Pipe,
    Range,
    TemplateError,
    Text,
    Tree,
    Variable,
)

MAX_SOURCE_CHARS = 1 << 19
MAX_DEPTH = 60
"""Of control structures and parentheses within one another."""

_CLOSING = ("end", "else")
_CONTROL = ("if", "with", "range", "template", "block", "break", "continue", "define")
_CONSTANTS = {"true": True, "false": False, "nil": None}
_ESCAPE = re.compile(
    r"""\\(?:(?P<simple>[abfnrtv\\'"])|(?P<octal>[0-7]{3})
        |x(?P<hex>[0-9a-fA-F]{2})|u(?P<short>[0-9a-fA-F]{4})
        |U(?P<long>[0-9a-fA-F]{8})|(?P<bad>.))""",
    re.VERBOSE,
)
_SIMPLE = dict(zip("abfnrtv\\'\"", "\a\b\f\n\r\t\v\\'\"", strict=True))
_INT64_LIMIT = 2**63


def parse(source: str, functions: Collection[str]) -> Tree:
    """Read a template that may call these functions. Raises TemplateError."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"template: : longer than {MAX_SOURCE_CHARS} characters")
    return _Parser(source, functions).parse()


class _Parser:
    """Reads one template."""

    def __init__(self, source: str, functions: Collection[str]) -> None:
        self._source = source
        self._functions = functions
        self._tokens = tokens(source)
        # the mutable state
        self._back: list[Token] = []
        self._variables = ["$"]
        self._depth = 0
        self._loops = 0
        self._defined: dict[str, Body] = {}

    def parse(self) -> Tree:
        body, closing = self._body(is_top=True)
        if closing.kind != "end":
            raise self._fail(closing, f"unexpected {{{{{closing.text}}}}}")
        return Tree(self._source, body, self._defined)

    def _next(self) -> Token:
        return self._back.pop() if self._back else next(self._tokens)

    def _next_word(self) -> Token:
        token = self._next()
        return self._next() if token.kind == "space" else token

    def _fail(self, token: Token, message: str) -> TemplateError:
        return failure(self._source, token.at, message)

    def _unexpected(self, token: Token, context: str) -> TemplateError:
        if token.kind == "end":
            return self._fail(token, "unexpected EOF")
        shown = f"<{token.text}>" if token.text in _CONTROL else quoted(token.text)
        return self._fail(token, f"unexpected {shown} in {context}")

    def _expect(self, kind: str, context: str) -> Token:
        token = self._next_word()
        if token.kind != kind:
            raise self._unexpected(token, context)
        return token

    # -- nodes

    def _body(self, *, is_top: bool = False) -> tuple[Body, Token]:
        """Read nodes up to `end` or `else`, or at the top up to the end."""
        nodes: list[Node] = []
        while True:
            token = self._next()
            if token.kind == "text":
                if token.text:
                    nodes.append(Text(token.text))
                continue
            if token.kind == "end":
                if is_top:
                    return tuple(nodes), token
                raise self._fail(token, "unexpected EOF")
            word = self._next_word()
            if word.text in _CLOSING:
                return tuple(nodes), word
            if word.text == "define" and is_top:
                self._define(word)
            else:
                nodes.append(self._action(word))

    def _action(self, word: Token) -> Node:
        read: Callable[[Token], Node]
        match word.text:
            case "if" | "with":
                read = self._if
            case "range":
                read = self._range
            case "template":
                return self._call(word)
            case "block":
                read = self._block
            case "break" | "continue":
                return self._jump(word)
            case _:
                self._back.append(word)
                return Action(self._pipe("command"))
        self._enter(word)
        node = read(word)
        self._depth -= 1
        return node

    def _enter(self, token: Token) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._fail(token, f"more than {MAX_DEPTH} levels within one another")

    def _if(self, word: Token) -> If:
        num_variables = len(self._variables)
        branches: list[Branch] = []
        otherwise: Body = ()
        while True:
            pipe = self._pipe(word.text)
            body, closing = self._body()
            branches.append(Branch(pipe, body))
            if closing.text == "end":
                self._expect("right", "end")
                break
            follows = self._next_word()
            if follows.text != word.text:  # it is not {{ else if }}
                self._back.append(follows)
                otherwise = self._else()
                break
        del self._variables[num_variables:]
        return If(tuple(branches), otherwise, sets_dot=word.text == "with")

    def _else(self) -> Body:
        self._expect("right", "else")
        body, closing = self._body()
        if closing.text != "end":
            raise self._fail(closing, "expected end; found {{else}}")
        self._expect("right", "end")
        return body

    def _range(self, word: Token) -> Range:
        num_variables = len(self._variables)
        pipe = self._pipe("range")
        self._loops += 1
        body, closing = self._body()
        self._loops -= 1
        otherwise: Body = ()
        if closing.text == "else":
            otherwise = self._else()
        else:
            self._expect("right", "end")
        del self._variables[num_variables:]
        return Range(pipe, body, otherwise)

    def _call(self, word: Token) -> Call:
        name = self._name("template clause")
        follows = self._next_word()
        pipe = None
        if follows.kind != "right":
            self._back.append(follows)
            pipe = self._pipe("template clause")
        return Call(name, pipe, word.at, word.stop)

    def _block(self, word: Token) -> Call:
        name = self._name("block clause")
        pipe = self._pipe("block clause")
        self._defined[name] = self._own_body()
        return Call(name, pipe, word.at, word.stop)

    def _define(self, word: Token) -> None:
        name = self._name("define clause")
        self._expect("right", "define clause")
        self._enter(word)
        self._defined[name] = self._own_body()
        self._depth -= 1

    def _own_body(self) -> Body:
        """Read the body of another template: it sees no variables from outside."""
        outside = self._variables, self._loops
        self._variables, self._loops = ["$"], 0
        body, closing = self._body()
        if closing.text != "end":
            raise self._fail(closing, f"unexpected {{{{{closing.text}}}}}")
        self._expect("right", "end")
        self._variables, self._loops = outside
        return body

    def _name(self, context: str) -> str:
        token = self._expect("string", context)
        return self._unquote(token)

    def _jump(self, word: Token) -> Jump:
        self._expect("right", f"{{{{{word.text}}}}}")
        if not self._loops:
            raise self._fail(word, f"{{{{{word.text}}}}} outside {{{{range}}}}")
        return Jump(word.text == "break")

    # -- values

    def _pipe(self, context: str, *, closing: str = "right") -> Pipe:
        names, is_assignment = self._declaration(context)
        commands: list[Command] = []
        while True:
            token = self._next_word()
            if closing in (token.kind, token.text):
                break
            self._back.append(token)
            commands.append(self._command(context))
        if not commands:
            raise self._fail(token, f"missing value for {context}")
        for stage, command in enumerate(commands[1:], 2):
            if isinstance(command.args[0], Literal | Dot):
                raise self._fail(
                    token, f"non executable command in pipeline stage {stage}"
                )
        start = commands[0].args[0].start
        return Pipe(start, token.at, tuple(commands), names, is_assignment)

    def _declaration(self, context: str) -> tuple[tuple[str, ...], bool]:
        """Read `$x :=`, `$x =` or, for a range, `$i, $x :=`, where one is there."""
        names: list[str] = []
        while True:
            token = self._next_word()
            if token.kind != "variable":
                if names:
                    raise self._fail(token, "range can only initialize variables")
                self._back.append(token)
                return (), False
            read = [token, self._next()]
            if read[-1].kind == "space":
                read.append(self._next())
            names.append(token.text)
            match read[-1].text:
                case ":=":
                    self._variables += names
                    return tuple(names), False
                case "=":
                    return tuple(names), True
                case "," if context == "range" and len(names) == 1:
                    continue
                case ",":
                    raise self._fail(token, f"too many declarations in {context}")
                case _:
                    pass
            if len(names) > 1:
                raise self._unexpected(read[-1], context)
            self._back += reversed(read)
            return (), False

    def _command(self, context: str) -> Command:
        args: list[Operand] = []
        while True:
            token = self._next_word()
            if token.kind == "right" or token.text in (")", "|"):
                if not args:
                    raise self._unexpected(token, context)
            else:
                args.append(self._operand(token, context))
                token = self._next()
                if token.kind == "space":
                    continue
            if token.kind == "right" or token.text == ")":
                self._back.append(token)
            elif token.text != "|":
                raise self._unexpected(token, "operand")
            if isinstance(args[0], Literal) and args[0].value is None:
                raise self._fail(token, "nil is not a command")
            return Command(tuple(args))

    def _operand(self, token: Token, context: str) -> Operand:
        operand = self._term(token, context)
        names: list[str] = []
        while (follows := self._next()).kind == "field":
            names.append(follows.text[1:])
        self._back.append(follows)
        if not names:
            return operand
        stop = follows.at
        if isinstance(operand, Field | Variable):
            return replace(operand, stop=stop, names=(*operand.names, *names))
        if isinstance(operand, Literal | Dot):
            shown = self._source[operand.start : operand.stop]
            raise self._fail(token, f"unexpected . after term {quoted(shown)}")
        return Chain(operand.start, stop, operand, tuple(names))

    def _term(self, token: Token, context: str) -> Operand:
        start, stop, text = token.at, token.stop, token.text
        match token.kind:
            case "field":
                return Field(start, stop, (text[1:],))
            case "variable":
                if text not in self._variables:
                    raise self._fail(token, f"undefined variable {quoted(text)}")
                return Variable(start, stop, text)
            case "string":
                return Literal(start, stop, self._unquote(token))
            case "char":
                return Literal(start, stop, ord(self._unquote(token)[:1] or "\0"))
            case "number":
                return Literal(start, stop, self._number(token))
            case "word" if text in _CONSTANTS:
                return Literal(start, stop, _CONSTANTS[text])
            case "word" if text not in (*_CONTROL, *_CLOSING):
                if text not in self._functions:
                    raise self._fail(token, f"function {quoted(text)} not defined")
                return Function(start, stop, text)
            case "sign" if text == ".":
                return Dot(start, stop)
            case "sign" if text == "(":
                self._enter(token)
                pipe = self._pipe("parenthesized pipeline", closing=")")
                self._depth -= 1
                return replace(pipe, start=start, stop=pipe.stop + 1)
            case _:
                pass
        raise self._unexpected(token, context)

    def _unquote(self, token: Token) -> str:
        if token.text.startswith("`"):
            return token.text[1:-1].replace("\r", "")

        def unescape(match: re.Match[str]) -> str:
            kind, text = match.lastgroup, match.group(match.lastgroup or 0)
            if kind == "simple":
                return _SIMPLE[text]
            code = int(text, 8 if kind == "octal" else 16) if kind != "bad" else -1
            if not 0 <= code < 0x110000 or 0xD800 <= code < 0xE000:
                raise self._fail(token, "invalid syntax")
            return chr(code)

        return _ESCAPE.sub(unescape, token.text[1:-1])

    def _number(self, token: Token) -> int | float:
        text = token.text
        sign = -1 if text[0] == "-" else 1
        digits = text.lstrip("+-")
        try:
            if digits[1:2].lower() in ("x", "b", "o") or digits.isdecimal():
                is_octal = digits.isdecimal() and digits.startswith("0")
                value = sign * int(digits, 8 if is_octal else 0)
                if not -_INT64_LIMIT <= value < _INT64_LIMIT:
                    raise self._fail(token, "integer overflow")
                return value
            if set(digits) & set(".eE"):
                return sign * float(digits)
            return sign * int(digits, 0)
        except ValueError:
            raise self._fail(token, f"bad number syntax: {quoted(text)}") from None
