"""A request of Anthropic's Messages API as one of OpenAI's chat API.

llama-server has a `/v1/messages` of its own, but that one forgets `id_slot` and
`cache_prompt`: it answers in whichever slot it likes, which may be the one that was
just restored for another request. So the request goes to `/v1/chat/completions`.

Rules:
1. The runner gets the messages that its own route would make of them.
2. Fields that OpenAI's API has no word for, and Ollama ignores, are left out.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from proxy.errors import RequestError

_SAME = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
"""Fields that mean the same on both sides, as the runner's own route takes them."""

_CHANGING = re.compile(r"(x-anthropic-billing-header:.*?cch=)\w{5}(?=;)", re.DOTALL)
"""A stamp that Claude Code puts first in its system text, new for each request: with
it no two prompts would have a prefix in common. Runners blank it too."""

_TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def check_messages_body(body: Mapping[str, Any]) -> None:
    """Refuse what lacks a needed field, in Ollama's words. Raises RequestError."""
    max_tokens = body.get("max_tokens")
    if not isinstance(max_tokens, int) or max_tokens <= 0:
        raise RequestError(400, "max_tokens is required and must be positive")
    if not body.get("messages"):
        raise RequestError(400, "messages is required")
    if not isinstance(body["messages"], list):
        raise RequestError(400, "messages must be an array")


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for `/v1/chat/completions`."""
    chat: dict[str, Any] = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = [*_system(body.get("system"))]
    for message in body["messages"]:
        chat["messages"] += _messages(message)
    if "max_tokens" in body:
        chat["max_tokens"] = body["max_tokens"]
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if isinstance(body.get("tools"), list):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    chat |= _choice(body.get("tool_choice"))
    chat |= _thinking(body.get("thinking"), chat.get("chat_template_kwargs"))
    chat |= _format(body.get("output_config"), body.get("output_format"))
    return chat


def _system(system: object) -> Iterator[dict[str, Any]]:
    if isinstance(system, str):
        yield {"role": "system", "content": _steady(system)}
    elif isinstance(system, list):
        texts = (_steady(_text(block)) for block in system)
        yield {"role": "system", "content": "".join(texts)}


def _steady(text: str) -> str:
    found = _CHANGING.match(text)  # at the very beginning: it takes linear time
    return f"{found[1]}fffff{text[found.end() :]}" if found else text


def _text(block: object) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            return ""


def _messages(message: object) -> Iterator[object]:
    """Yield the chat messages that one message becomes."""
    if not isinstance(message, dict):
        yield message  # the runner refuses it
        return
    content, role = message.get("content"), message.get("role")
    if not isinstance(content, list):
        if "content" in message or role != "assistant":
            yield message
        return
    parts: list[object] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts = ""
    for block in content:
        match block:
            case {"type": "text"}:
                parts.append({"type": "text", "text": _text(block)})
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts += thought
            case {"type": "image"}:
                parts += _image(block)
            case {"type": "tool_use"}:
                calls.append(_call(block))
            case {"type": "tool_result"}:
                results.append(_result(block))
            case _:
                pass  # not for the model: the runner passes over it too
    if parts or calls or thoughts:
        chat: dict[str, Any] = {"role": role, "content": parts or ""}
        if calls:
            chat["tool_calls"] = calls
        if thoughts:
            chat["reasoning_content"] = thoughts
        yield chat
    yield from results


def _image(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    match block.get("source"):
        case {"type": "base64", "data": str(data), **rest}:
            kind = rest.get("media_type", "image/jpeg")
            yield _image_part(f"data:{kind};base64,{data}")
        case {"type": "url", "url": str(url)}:
            yield _image_part(url)
        case _:
            pass


def _image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": block.get("id", ""),
        "type": "function",
        "function": {
            "name": block.get("name", ""),
            "arguments": orjson.dumps(block.get("input", {})).decode(),
        },
    }


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    """Make a tool's message: plain text where the result is text alone."""
    content = block.get("content")
    if isinstance(content, list):
        images = [
            part
            for piece in content
            if isinstance(piece, dict) and piece.get("type") == "image"
            for part in _image(piece)
        ]
        text = "".join(map(_text, content))
        content = [{"type": "text", "text": text}, *images] if images else text
    elif not isinstance(content, str):
        content = ""
    return {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id", ""),
        "content": content,
    }


def _tool(tool: object) -> dict[str, Any]:
    fields = tool if isinstance(tool, dict) else {}
    return {
        "type": "function",
        "function": {
            "name": fields.get("name", ""),
            "description": fields.get("description", ""),
            "parameters": fields.get("input_schema", {}),
        },
    }


def _choice(choice: object) -> dict[str, Any]:
    if not isinstance(choice, dict):
        return {}
    chat: dict[str, Any] = {}
    if choice.get("type") in _TOOL_CHOICES:
        chat["tool_choice"] = _TOOL_CHOICES[choice["type"]]
    if choice.get("disable_parallel_tool_use") is True:
        chat["parallel_tool_calls"] = False
    return chat


def _format(config: object, older: object) -> dict[str, Any]:
    """Say what form an answer shall have; `older` is the name of the beta."""
    wanted = config.get("format") if isinstance(config, dict) else None
    match wanted or older:
        case {"type": "json_schema", "schema": dict(schema)}:
            wrapper = {"schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": wrapper}}
        case _:
            return {}


def _thinking(thinking: object, template_values: object) -> dict[str, Any]:
    match thinking:
        case {"type": "enabled", **rest}:
            return {"thinking_budget_tokens": rest.get("budget_tokens", 10000)}
        case {"type": "disabled"}:
            given = template_values if isinstance(template_values, dict) else {}
            return {"chat_template_kwargs": {"enable_thinking": False, **given}}
        case _:
            return {}
