"""How a TEMPLATE, a model's own or that of one request, makes a prompt.

Rules:
1. A template that reads `.Messages` gets the whole conversation; one that does not is
   written once for each turn, with `.System`, `.Prompt` and `.Response`, and the last
   time only up to its `.Response`. One that has neither ends in `.Response`.
2. Neighbouring messages of one role are one message, with a blank line between; results
   of tools stay apart.
3. Whole numbers in arguments and schemas are floats, as Go reads JSON.
4. A template that cannot be read or rendered is a RequestError (400) with its place.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from proxy.errors import RequestError
from proxy.gotemplate import nodes
from proxy.gotemplate.evaluation import (
    LimitError,
    TemplateError,
    Tree,
    compile_template,
    render,
)
from proxy.gotemplate.functions import Budget
from proxy.gotemplate.values import (
    JsonDict,
    JsonList,
    Struct,
    TypeNames,
    Value,
)
from proxy.ollama.protocol import ChatMessage

_RESPONSE = "Response"
_NOWHERE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template is asked to make a prompt of."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    think: bool | str | None = None


class TooMuchTextError(RequestError):
    """A conversation that is too long to be rendered at all."""


async def render_conversation(source: str, wanted: Conversation) -> str:
    """Make the prompt of a conversation. Raises RequestError (400)."""
    return await asyncio.to_thread(_rendered, source, wanted)


async def render_insert(
    source: str, *, prompt: str, suffix: str, think: bool | str | None
) -> str:
    """Make the prompt for what lies between two texts. Raises RequestError (400)."""
    data = {"Prompt": prompt, "Suffix": suffix, _RESPONSE: "", **_thinking(think)}

    def write() -> str:
        return render(_read(source).whole, data)

    return await asyncio.to_thread(_told, write)


def reads(source: str, name: str) -> bool:
    """Tell whether a template reads a field, whatever its case; False if it is bad."""
    try:
        return name.lower() in _read(source).names
    except TemplateError:
        return False


def check_template(source: str) -> None:
    """Refuse a template that cannot be read. Raises RequestError (400)."""
    _told(lambda: _read(source).whole.source)


def merge_neighbours(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    r"""Make one message of neighbouring ones of one role (rule 2).

    >>> said = [ChatMessage(role="user", content=text) for text in ("a", "b")]
    >>> [message.content for message in merge_neighbours(said)]
    ['a\n\nb']
    """
    merged: list[ChatMessage] = []
    joined: list[list[str]] = []
    for message in messages:
        if merged and message.role == merged[-1].role != "tool":
            joined[-1].append(message.content)
        else:
            merged.append(message)
            joined.append([message.content])
    return [
        replace(message, content="\n\n".join(texts))
        for message, texts in zip(merged, joined, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Template:
    """A template that was read."""

    whole: Tree
    opening: Tree
    """Up to `.Response`."""
    names: frozenset[str]


@lru_cache(maxsize=64)
def _read(source: str) -> _Template:
    tree = compile_template(source)
    names = nodes.names_of(tree)
    if not names & {"messages", "response"}:
        response = nodes.Field(_NOWHERE, _NOWHERE, (_RESPONSE,))
        pipe = nodes.Pipe(_NOWHERE, _NOWHERE, (nodes.Command((response,)),))
        tree = replace(tree, root=(*tree.root, nodes.Action(pipe)))
    opening, _ = _cut(tree.root)
    return _Template(tree, replace(tree, root=opening), names)


def _told(write: Callable[[], str]) -> str:
    """Turn errors of a template into those of a request."""
    try:
        return write()
    except LimitError as exc:
        raise TooMuchTextError(400, str(exc)) from None
    except TemplateError as exc:
        raise RequestError(400, str(exc)) from None


def _rendered(source: str, wanted: Conversation) -> str:
    def write() -> str:
        template = _read(source)
        messages = merge_neighbours(wanted.messages)
        if "messages" not in template.names:
            return _turn_by_turn(template, messages, wanted.think)
        systems = [m.content for m in wanted.messages if m.role == "system"]
        data = {
            "System": "\n\n".join(systems),
            "Messages": [_message(message) for message in messages],
            "Tools": JsonList(map(_tool, wanted.tools)),
            _RESPONSE: "",
            **_thinking(wanted.think),
        }
        return render(template.whole, data)

    return _told(write)


def _turn_by_turn(
    template: _Template, messages: Sequence[ChatMessage], think: bool | str | None
) -> str:
    budget = Budget()
    written: list[str] = []
    turn = {"System": "", "Prompt": "", _RESPONSE: ""}

    def write(tree: Tree) -> None:
        written.append(render(tree, {**turn, **_thinking(think)}, budget=budget))
        turn.update(dict.fromkeys(turn, ""))

    for message in messages:
        match message.role:
            case "system":
                if turn["Prompt"] or turn[_RESPONSE]:
                    write(template.whole)
                turn["System"] = message.content
            case "user":
                if turn[_RESPONSE]:
                    write(template.whole)
                turn["Prompt"] = message.content
            case "assistant":
                turn[_RESPONSE] = message.content
            case _:
                pass
    write(template.opening)
    return "".join(written)


def _cut(body: nodes.Body) -> tuple[nodes.Body, bool]:
    """Keep what stands before `.Response`, and it; tell whether it was there."""
    kept: list[nodes.Node] = []
    for node in body:
        whole, is_cut = _cut_node(node)
        if whole is not None:
            kept.append(whole)
        if is_cut:
            return tuple(kept), True
    return tuple(kept), False


def _cut_node(node: nodes.Node) -> tuple[nodes.Node | None, bool]:
    match node:
        case nodes.Action(pipe):
            return _cut_action(node, pipe)
        case nodes.If(branches, otherwise):
            kept: list[nodes.Branch] = []
            for branch in branches:
                body, is_cut = _cut(branch.body)
                kept.append(replace(branch, body=body))
                if is_cut:
                    return replace(node, branches=tuple(kept), otherwise=()), True
            otherwise, is_cut = _cut(otherwise)
            return replace(node, otherwise=otherwise), is_cut
        case nodes.Range(body=body, otherwise=otherwise):
            body, is_cut = _cut(body)
            if is_cut:
                return replace(node, body=body, otherwise=()), True
            otherwise, is_cut = _cut(otherwise)
            return replace(node, otherwise=otherwise), is_cut
        case _:
            return node, False


def _cut_action(
    node: nodes.Action, pipe: nodes.Pipe
) -> tuple[nodes.Action | None, bool]:
    """Cut within one action as Ollama does: it goes if a command is left empty."""
    for command in pipe.commands:
        for at, arg in enumerate(command.args):
            if isinstance(arg, nodes.Field) and _RESPONSE in arg.names:
                if command is not pipe.commands[-1]:
                    return None, True
                cut = replace(command, args=command.args[: at + 1])
                commands = (*pipe.commands[:-1], cut)
                return nodes.Action(replace(pipe, commands=commands)), True
    return node, False


def _thinking(think: bool | str | None) -> dict[str, Value]:
    level = think if isinstance(think, str) else "medium" if think else ""
    return {"Think": bool(think), "ThinkLevel": level, "IsThinkSet": think is not None}


def _message(message: ChatMessage) -> Struct:
    fields = {
        "Role": message.role,
        "Content": message.content,
        "Thinking": "",
        "Images": [],
        "ToolCalls": [
            _struct(
                "template.templateToolCall",
                ID=call.call_id,
                Function=_struct(
                    "template.templateToolCallFunction",
                    Index=call.index,
                    Name=call.name,
                    Arguments=JsonDict(_as_go(call.arguments)),
                ),
            )
            for call in message.tool_calls
        ],
        "ToolName": message.tool_name,
        "ToolCallID": message.tool_call_id,
    }
    return _struct("*template.templateMessage", **fields)


def _struct(go_type: str, **fields: Value) -> Struct:
    written = {name: value if value != [] else None for name, value in fields.items()}
    return Struct(go_type, fields, written)


def _tool(tool: Mapping[str, Any]) -> Struct:
    """Make the value of a tool that is told in the words of llama-server."""
    function = tool["function"]
    parameters = function["parameters"]
    given = {name: _as_go(value) for name, value in parameters.items()}
    properties = JsonDict(
        {name: _property(value) for name, value in parameters["properties"].items()}
    )
    parameters = Struct(
        "template.templateToolFunctionParameters",
        {
            "Type": given["type"],
            "Defs": given.get("$defs"),
            "Items": given.get("items"),
            "Required": given.get("required", []),
            "Properties": properties,
        },
        {**given, "properties": properties},
    )
    described = {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": parameters,
    }
    function = Struct(
        "template.templateToolFunction",
        {name.capitalize(): value for name, value in described.items()},
        described,
    )
    items = {"items": _as_go(tool["items"])} if "items" in tool else {}
    return Struct(
        "template.templateTool",
        {"Type": tool["type"], "Items": items.get("items"), "Function": function},
        {"type": tool["type"], **items, "function": function},
        prints_json=True,
    )


def _property(value: Mapping[str, Any]) -> Struct:
    """Make the value of a parameter of a tool."""
    types = value.get("type", [])
    nested = {name: _property(v) for name, v in value.get("properties", {}).items()}
    given: dict[str, Value] = {
        "anyOf": [_property(entry) for entry in value.get("anyOf", ())],
        "type": TypeNames([types] if isinstance(types, str) else types),
        "items": _as_go(value.get("items")),
        "description": value.get("description", ""),
        "enum": _as_go(value.get("enum", [])),
        "properties": Struct("*api.ToolPropertiesMap", {}, nested) if nested else None,
        "required": value.get("required", []),
    }
    return Struct(
        "api.ToolProperty",
        {name[0].upper() + name[1:]: entry for name, entry in given.items()},
        {name: entry for name, entry in given.items() if entry not in (None, "", [])},
    )


def _as_go(value: Any) -> Value:  # noqa: ANN401 - JSON
    """Read JSON as Go does (rule 3)."""
    match value:
        case bool():
            return value
        case int():
            return float(value)
        case list():
            return [_as_go(entry) for entry in value]
        case Mapping():
            return {name: _as_go(entry) for name, entry in value.items()}
        case _:
            return value
