"""The tree of a text in Go's template language.

Rules:
1. Operands have a value; `start` and `stop` are their place in the source, in
   characters. Nodes are written or done.
2. Everything is immutable: one tree serves all requests at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class TemplateError(Exception):
    """A template that is wrong, with the place of the fault, in the words of Go."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Base of what has a value."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Literal(Operand):
    """A string, a number or a boolean; None is nil."""

    value: str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Dot(Operand):
    """`.`."""


@dataclass(frozen=True, slots=True)
class Field(Operand):
    """`.A.B`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Variable(Operand):
    """`$x.A.B`."""

    name: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Function(Operand):
    """The name of a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Chain(Operand):
    """`(...).A.B`."""

    operand: Operand
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """An operand, or a function with its arguments."""

    args: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pipe(Operand):
    """Commands of which each gets the value of the one before as its last argument."""

    commands: tuple[Command, ...]
    names: tuple[str, ...] = ()
    """Variables that get the value."""
    is_assignment: bool = False
    """Whether they exist already."""


@dataclass(frozen=True, slots=True)
class Text:
    """What is written as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class Action:
    """`{{ pipe }}`."""

    pipe: Pipe


@dataclass(frozen=True, slots=True)
class Branch:
    """What is done if a value is not empty."""

    pipe: Pipe
    body: "Body"


@dataclass(frozen=True, slots=True)
class If:
    """`{{ if }}`, or `{{ with }}` where the value becomes the dot."""

    branches: tuple[Branch, ...]
    otherwise: "Body"
    sets_dot: bool


@dataclass(frozen=True, slots=True)
class Range:
    """`{{ range }}`."""

    pipe: Pipe
    body: "Body"
    otherwise: "Body"


@dataclass(frozen=True, slots=True)
class Call:
    """`{{ template "name" pipe }}`."""

    name: str
    pipe: Pipe | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Jump:
    """`{{ break }}` or `{{ continue }}`."""

    is_break: bool


Node = Text | Action | If | Range | Call | Jump
Body = tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """A whole template."""

    source: str
    root: Body
    defined: Mapping[str, Body]
    """The templates that it defines, by name."""


def place(source: str, at: int) -> str:
    r"""Tell line and column of a place as Go does: from 1, and from 0 in bytes.

    >>> place("a\nbcd", 4)
    '2:2'
    """
    line = source.count("\n", 0, at) + 1
    column = len(source[source.rfind("\n", 0, at) + 1 : at].encode())
    return f"{line}:{column}"


def names_of(tree: Tree) -> frozenset[str]:
    """Return the names of fields and variables that are read, in lower case.

    Like Ollama it does not look into `(...).Field`.
    Raises TemplateError for a call without a value, which Ollama refuses.
    """
    names: set[str] = set()
    pending: list[Any] = [*tree.root]
    for body in tree.defined.values():
        pending += body
    while pending:
        match pending.pop():
            case If(branches, otherwise):
                pending += otherwise
                for branch in branches:
                    pending += [branch.pipe, *branch.body]
            case Range(pipe, body, otherwise):
                pending += [pipe, *body, *otherwise]
            case Call(pipe=None):
                raise TemplateError("undefined template specified")
            case Action(pipe) | Call(pipe=pipe):
                pending.append(pipe)
            case Pipe(commands=commands):
                pending += [arg for command in commands for arg in command.args]
            case Field(names=found):
                names.update(found)
            case Variable(name=name, names=found):
                names.update((name, *found))
            case _:
                pass
    return frozenset(name.lower() for name in names)
