"""What a llama-server says of the prompts that it takes (`/props`).

Rules:
1. A field that an older or other server lacks is not an error: it is then not known
   to be able to do that.

>>> read_props({"chat_template": "...", "chat_template_caps": {"supports_tools": True}})
RunnerProps(chat_template='...', renders_tools=True, modalities=frozenset())
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunnerProps:
    """How a runner makes prompts, and of what."""

    chat_template: str
    """In Jinja: the file's, or what the runner was started with."""
    renders_tools: bool
    """Whether the template, tried out, has a place for tools."""
    modalities: frozenset[str]
    """What it takes beside text: `vision`, `audio`."""


def read_props(props: Mapping[str, Any]) -> RunnerProps:
    """Read the answer of GET /props."""
    template = props.get("chat_template")
    template = template if isinstance(template, str) else ""
    caps = props.get("chat_template_caps")
    if isinstance(caps, dict):
        renders_tools = bool(caps.get("supports_tools"))
    else:
        renders_tools = "tools" in template
    given = props.get("modalities")
    modalities = given.items() if isinstance(given, dict) else ()
    return RunnerProps(
        chat_template=template,
        renders_tools=renders_tools,
        modalities=frozenset(name for name, has in modalities if has),
    )
