"""What a model's Modelfile adds to requests, and how it is shown.

Rules:
1. SYSTEM is put first where a request has no system message of its own; MESSAGE entries
   come before what a client sends, and `context` of /api/generate suppresses them.
2. A PARAMETER holds where a request does not state the option. `num_ctx` is none of
   them: the runners were started with it.
3. TEMPLATE makes the prompts where the model file has no chat template. Where it has
   one that goes first: it makes the prompts of all routes, so that they share KV.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import orjson

from proxy.ollama.backend import ServedModel
from proxy.ollama.protocol import ChatRequest, GenerateRequest
from proxy.ollama_folder import Modelfile

_OF_LOADING = "num_ctx"
_NAME_WIDTH = 30


def own_template(model: ServedModel) -> str:
    """Return the TEMPLATE that makes the prompts of a model; empty if none does."""
    modelfile = model.modelfile
    is_used = not model.facts.chat_template and not modelfile.needs_ollama
    return modelfile.template if is_used else ""


def with_parameters(
    options: Mapping[str, Any], modelfile: Modelfile
) -> Mapping[str, Any]:
    """Add the PARAMETERs that a request's options do not state."""
    stated = {name: value for name, value in options.items() if value is not None}
    defaults = {
        name: value
        for name, value in modelfile.parameters.items()
        if name != _OF_LOADING
    }
    return {**defaults, **stated}


def with_messages(
    wanted: GenerateRequest | ChatRequest, modelfile: Modelfile
) -> Sequence[dict[str, Any]]:
    """Return the messages of a request, SYSTEM and MESSAGE entries among them."""
    messages = wanted.messages()
    earlier = [dict(message) for message in modelfile.messages]
    has_system = bool(messages) and messages[0]["role"] == "system"
    if isinstance(wanted, GenerateRequest):
        head = messages[:1] if has_system else _system(modelfile)
        rest = messages[1:] if has_system else messages
        return [*head, *([] if wanted.has_context else earlier), *rest]
    return [*([] if has_system else _system(modelfile)), *earlier, *messages]


def _system(modelfile: Modelfile) -> list[dict[str, Any]]:
    if not modelfile.system:
        return []
    return [{"role": "system", "content": modelfile.system}]


def shown_parameters(modelfile: Modelfile) -> str:
    """Write the PARAMETERs as /api/show does: a line for each value."""
    return "\n".join(
        f"{name:<{_NAME_WIDTH}} {orjson.dumps(value).decode()}"
        for name, value in _parameters(modelfile)
    )


def shown_text(model: ServedModel, template: str) -> str:
    """Write a Modelfile; files by their names alone, not where they lie."""
    modelfile = model.modelfile
    lines = ["# The model is served from this file"]
    if modelfile.source:
        lines = [
            f"# {modelfile.source}",
            *(f"# {layer.kind}: sha256-{layer.sha256}" for layer in modelfile.layers),
        ]
        if modelfile.template and modelfile.template != template:
            lines.append("# The TEMPLATE is that of the model file, not Ollama's")
    lines.append(f"FROM {PurePath(model.facts.path).name}")
    if model.projector is not None:
        lines.append(f"FROM {PurePath(model.projector.path).name}")
    if template:
        lines.append(f'TEMPLATE """{template}"""')
    if modelfile.system:
        lines.append(f'SYSTEM """{modelfile.system}"""')
    lines += [
        f"PARAMETER {name} {orjson.dumps(value).decode()}"
        for name, value in _parameters(modelfile)
    ]
    lines += [
        f'MESSAGE {message["role"]} """{message["content"]}"""'
        for message in modelfile.messages
    ]
    lines += [f'LICENSE """{text}"""' for text in modelfile.licenses]
    return "\n".join(lines) + "\n"


def _parameters(modelfile: Modelfile) -> Iterator[tuple[str, Any]]:
    """Yield each value of each PARAMETER."""
    for name, value in sorted(modelfile.parameters.items()):
        for each in value if isinstance(value, list) else [value]:
            yield name, each
