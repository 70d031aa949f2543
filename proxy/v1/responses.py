"""A request of OpenAI's Responses API: mended for the runner, and as chat messages.

llama-server serves `/v1/responses` itself. Rules:
1. What it would refuse or pass over though clients rely on it is mended: reasoning
   that comes back without its text, assistant messages without a type, the schema of
   an answer. All else goes to it as it came.
2. The chat messages are what the runner makes of a (mended) request. They only serve
   to find the prompt: where they are wrong, reuse is lost and nothing else.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def mend(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body that the runner understands as its sender meant it."""
    mended = dict(body)
    if isinstance(body.get("input"), list):
        mended["input"] = [new for item in body["input"] for new in _mend_item(item)]
    return mended | _format(body.get("text"))


def _format(text: object) -> dict[str, Any]:
    """Say in the chat API's words what form an answer shall have."""
    match text:
        case {"format": {"type": "json_schema", "schema": dict(schema)}}:
            wrapper = {"schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": wrapper}}
        case {"format": {"type": "json_object"}}:
            return {"response_format": {"type": "json_object"}}
        case _:
            return {}


def _mend_item(item: object) -> Iterator[object]:
    match item:
        case {"type": "reasoning", **rest}:
            text = _reasoning_text(rest)
            if text:
                content = [{"type": "reasoning_text", "text": text}]
                yield {"type": "reasoning", "summary": [], **rest, "content": content}
        case {"role": "assistant", "content": content, **rest} if "type" not in rest:
            yield {"type": "message", "role": "assistant", "content": content, **rest}
        case _:
            yield item


def _reasoning_text(item: Mapping[Any, Any]) -> str:
    """Return what was thought, from wherever the client has kept it."""
    for place in ("content", "summary"):
        parts = item.get(place)
        if isinstance(parts, list):
            text = "".join(map(_text, parts))
            if text:
                return text
    kept = item.get("encrypted_content")
    return kept if isinstance(kept, str) else ""


def _text(part: object) -> str:
    match part:
        case {"text": str(text)}:
            return text
        case _:
            return ""


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat body that the runner makes of a mended body."""
    chat = dict(body)
    given = chat.pop("input", "")
    messages: list[dict[str, Any]] = []
    if "instructions" in chat:
        instructions = chat.pop("instructions")
        messages.append({"role": "system", "content": instructions or ""})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            if isinstance(item, dict):
                _add_item(messages, item)
    chat["messages"] = messages
    tools = chat.pop("tools", None)
    functions = [*_functions(tools)] if isinstance(tools, list) else []
    if functions:
        chat["tools"] = functions
    if "max_output_tokens" in chat:
        chat["max_tokens"] = chat.pop("max_output_tokens")
    reasoning = chat.pop("reasoning", None)
    if isinstance(reasoning, dict) and "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _functions(tools: list[object]) -> Iterator[dict[str, Any]]:
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "function":
            fields = {name: tool[name] for name in tool if name != "type"}
            yield {"type": "function", "function": {**fields, "strict": True} | fields}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add what one item says: to the assistant's message before it, or as a new one."""
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    match item:
        case {"role": "user" | "system" | "developer"}:
            rest = {k: v for k, v in item.items() if k not in ("type", "status")}
            messages.append({**rest, "content": _parts(content)})
        case {"role": "assistant", "type": "message"}:
            said = _assistant(messages)
            before = said.get("content")
            said["content"] = [
                *(before if isinstance(before, list) else []),
                *_parts(content),
            ]
        case {"type": "function_call"}:
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {
                    "name": item.get("name"),
                    "arguments": item.get("arguments"),
                },
            }
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output"}:
            output = item.get("output")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": _parts(output) if isinstance(output, list) else output,
                }
            )
        case {"type": "reasoning"}:
            said = _assistant(messages)
            said.setdefault("content", [])
            said["reasoning_content"] = _reasoning_text(item)
        case _:
            pass  # the runner refuses it


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that stands last, or a new one."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _parts(content: object) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        return []
    return [{"type": "text", "text": _text(part)} for part in content]
