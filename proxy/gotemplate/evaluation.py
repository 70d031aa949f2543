"""Go's text/template, as far as the templates of models use it.

Rules:
1. A rendering is pure: it sees its data and the date, and nothing else.
2. It is bounded in steps, in text and in depth, whatever template and data are: see
   `Budget`. It may take a second at worst, so whoever serves others meanwhile has a
   thread render.
3. Errors are in Go's words and tell line and column.

>>> template = compile_template("{{ range .Names }}[{{ . }}]{{ else }}none{{ end }}")
>>> render(template, {"Names": ["a", "b"]})
'[a][b]'
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from proxy.gotemplate import nodes
from proxy.gotemplate.functions import (
    FUNCTIONS,
    Budget,
    CallError,
    LimitError,
    check_count,
)
from proxy.gotemplate.nodes import Body, Node, Operand, Pipe, TemplateError, Tree
from proxy.gotemplate.parser import parse
from proxy.gotemplate.values import Struct, Value, is_true, type_name, write

_MAX_DEPTH = 80
"""Of bodies and parentheses within one another, across templates that call others."""
_SHOWN_CHARS = 20
_VARIABLES_OF_A_STEP = 64
_NOTHING = object()
"""In place of the value of a pipeline's last command, where there is none."""


class _Jumped(Exception):
    """`break` or `continue` on its way to the loop."""

    def __init__(self, *, is_break: bool) -> None:
        super().__init__()
        self.is_break = is_break


@lru_cache(maxsize=64)
def compile_template(source: str) -> Tree:
    """Read a template. Raises TemplateError."""
    return parse(source, FUNCTIONS)


def render(tree: Tree, data: dict[str, Value], *, budget: Budget | None = None) -> str:
    """Write what a template makes of its data (blocks). Raises TemplateError."""
    rendering = _Rendering(tree, budget or Budget())
    try:
        rendering.walk(tree.root, data, data)
    except RecursionError:
        raise LimitError("template: the data is too deep") from None
    return "".join(rendering.written)


class _Rendering:
    """One rendering."""

    def __init__(self, tree: Tree, budget: Budget) -> None:
        self._tree = tree
        self._budget = budget
        # the mutable state
        self.written: list[str] = []
        self._variables: list[tuple[str, Value]] = []
        self._depth = 0
        self._name = ""
        """Of the template that is rendered now; empty for the outermost."""

    def walk(self, body: Body, dot: Value, root: Value) -> None:
        """Write a whole template, to which `$` is `root`."""
        outside, self._variables = self._variables, [("$", root)]
        self._walk(body, dot)
        self._variables = outside

    def _fail(self, at: "Operand | nodes.Call", message: str) -> TemplateError:
        source = self._tree.source
        shown = source[at.start : at.stop].rstrip()
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}..."
        place = nodes.place(source, at.start)
        return TemplateError(
            f'template: :{place}: executing "{self._name}" at <{shown}>: {message}'
        )

    def _enter(self, at: "Operand | nodes.Call") -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._fail(at, f"exceeded maximum template depth ({_MAX_DEPTH})")

    # -- nodes

    def _walk(self, body: Body, dot: Value) -> None:
        for node in body:
            self._budget.step()
            self._walk_node(node, dot)

    def _walk_node(self, node: Node, dot: Value) -> None:
        match node:
            case nodes.Text(text):
                self.written.append(self._budget.make(text))
            case nodes.Action(pipe):
                value = self._pipe(pipe, dot)
                if not pipe.names:
                    shown = "<no value>" if value is None else write(value)
                    self.written.append(self._budget.make(shown))
            case nodes.If():
                self._walk_if(node, dot)
            case nodes.Range():
                self._walk_range(node, dot)
            case nodes.Call():
                self._walk_call(node, dot)
            case nodes.Jump(is_break):
                raise _Jumped(is_break=is_break)

    def _walk_if(self, node: nodes.If, dot: Value) -> None:
        num_variables = len(self._variables)
        self._enter(node.branches[0].pipe)
        for branch in node.branches:
            value = self._pipe(branch.pipe, dot)
            if is_true(value):
                self._walk(branch.body, value if node.sets_dot else dot)
                break
        else:
            self._walk(node.otherwise, dot)
        self._depth -= 1
        del self._variables[num_variables:]

    def _walk_range(self, node: nodes.Range, dot: Value) -> None:
        pipe = node.pipe
        num_variables = len(self._variables)
        self._enter(pipe)
        depth = self._depth
        value = self._commands(pipe, dot)
        entries = self._entries(pipe, value)
        if not pipe.is_assignment:
            self._variables += [(name, value) for name in pipe.names]
        in_loop = len(self._variables)
        is_empty = True
        for key, entry in entries:
            is_empty = False
            self._budget.step()
            bound = (key, entry) if len(pipe.names) > 1 else (entry,)
            for name, part in zip(pipe.names, bound, strict=False):
                self._assign(pipe, name, part)
            try:
                self._walk(node.body, entry)
            except _Jumped as jumped:
                self._depth = depth
                if jumped.is_break:
                    break
            finally:
                del self._variables[in_loop:]
        if is_empty:
            self._walk(node.otherwise, dot)
        self._depth -= 1
        del self._variables[num_variables:]

    def _entries(self, pipe: Pipe, value: Value) -> Iterator[tuple[Value, Value]]:
        """Yield keys and entries of what is ranged over."""
        match value:
            case list():
                return iter(tuple(enumerate(value)))
            case dict():
                self._budget.read(len(value))
                return iter(sorted(value.items()))
            case None:
                return iter(())
            case int() if not isinstance(value, bool):
                if len(pipe.names) > 1:
                    raise self._fail(
                        pipe,
                        f"can't use {value} to iterate over more than one variable",
                    )
                return ((number, number) for number in range(value))
            case _:
                raise self._fail(pipe, f"range can't iterate over {write(value)}")

    def _walk_call(self, node: nodes.Call, dot: Value) -> None:
        body = self._tree.defined.get(node.name)
        if body is None:
            raise self._fail(node, f'template "{node.name}" not defined')
        value = None if node.pipe is None else self._pipe(node.pipe, dot)
        self._enter(node)
        outside, self._name = self._name, node.name
        self.walk(body, value, value)
        self._name = outside
        self._depth -= 1

    # -- values

    def _pipe(self, pipe: Pipe, dot: Value) -> Value:
        value = self._commands(pipe, dot)
        for name in pipe.names:
            if pipe.is_assignment:
                self._assign(pipe, name, value)
            else:
                self._variables.append((name, value))
        return value

    def _commands(self, pipe: Pipe, dot: Value) -> Value:
        value: Value = _NOTHING
        for command in pipe.commands:
            self._budget.step()
            value = self._command(command.args, dot, value)
        return value

    def _assign(self, at_pipe: Pipe, name: str, value: Value) -> None:
        self._budget.step(len(self._variables) // _VARIABLES_OF_A_STEP)
        for at in range(len(self._variables) - 1, -1, -1):
            if self._variables[at][0] == name:
                self._variables[at] = (name, value)
                return
        raise self._fail(at_pipe, f"undefined variable: {name}")

    def _command(self, args: Sequence[Operand], dot: Value, final: Value) -> Value:
        first, *others = args
        if isinstance(first, nodes.Function):
            return self._call(first, others, dot, final)
        if others or final is not _NOTHING:
            if isinstance(first, nodes.Field):
                name = first.names[-1]
                raise self._fail(first, f"{name} is not a method but has arguments")
            shown = self._tree.source[first.start : first.stop]
            raise self._fail(first, f"can't give argument to non-function {shown}")
        return self._value(first, dot)

    def _call(
        self,
        function: nodes.Function,
        args: Sequence[Operand],
        dot: Value,
        final: Value,
    ) -> Value:
        name = function.name
        described = FUNCTIONS[name]
        count = len(args) + (final is not _NOTHING)
        try:
            check_count(name, described, count)
        except CallError as exc:
            raise self._fail(function, str(exc)) from None
        try:
            if name in ("and", "or"):
                return self._first_deciding(name, args, dot, final)
            values = [self._value(arg, dot) for arg in args]
            if final is not _NOTHING:
                values.append(final)
            return described.run(self._budget, values)
        except CallError as exc:
            stop = args[-1].stop if args else function.stop
            raise self._fail(replace(function, stop=stop), str(exc)) from None

    def _first_deciding(
        self, name: str, args: Sequence[Operand], dot: Value, final: Value
    ) -> Value:
        """Evaluate up to the first value that decides, as Go does."""
        value: Value = None
        for arg in args:
            value = self._value(arg, dot)
            if is_true(value) == (name == "or"):
                return value
        return value if final is _NOTHING else final

    def _value(self, operand: Operand, dot: Value) -> Value:
        self._budget.step()
        match operand:
            case nodes.Literal(value=value):
                return value
            case nodes.Dot():
                return dot
            case nodes.Field(names=names):
                return self._field(operand, dot, names)
            case nodes.Variable(name=name, names=names):
                return self._field(operand, self._variable(operand, name), names)
            case nodes.Function():
                return self._call(operand, (), dot, _NOTHING)
            case nodes.Chain(operand=inner, names=names):
                return self._field(operand, self._value(inner, dot), names)
            case Pipe():
                self._enter(operand)
                value = self._pipe(operand, dot)
                self._depth -= 1
                return value
            case _:
                raise AssertionError(operand)

    def _variable(self, operand: Operand, name: str) -> Value:
        self._budget.step(len(self._variables) // _VARIABLES_OF_A_STEP)
        for known, value in reversed(self._variables):
            if known == name:
                return value
        raise self._fail(operand, f"undefined variable: {name}")

    def _field(self, operand: Operand, value: Value, names: Sequence[str]) -> Value:
        for name in names:
            match value:
                case dict():
                    value = value.get(name)
                case Struct(fields=fields) if name in fields:
                    value = fields[name]
                case None:
                    return None
                case _:
                    raise self._fail(
                        operand,
                        f"can't evaluate field {name} in type {type_name(value)}",
                    )
        return value


__all__ = [
    "Budget",
    "LimitError",
    "TemplateError",
    "Tree",
    "compile_template",
    "render",
]
