"""What the routes that generate nothing tell: facts of the models, in Ollama's words.

Pure: model facts in, JSON-ready values out.

Rules:
1. `digest` is the SHA-256 of the model file where that is known, else the content
   digest that kvbus keys KV by; 64 hex characters either way.
2. `expires_at` is local time. For a keep-alive without end it lies centuries ahead,
   as Ollama's does.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from proxy.durations import NANOSECONDS
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.ollama.abilities import abilities_of
from proxy.ollama.backend import ServedModel
from proxy.ollama.modelfile import own_template, shown_parameters, shown_text
from proxy.ollama.translate import format_time

_FOREVER_NS = 2**63 - 1
"""Go's longest duration: Ollama adds it to now for `keep_alive: -1`."""


def tags_reply(models: Iterable[ServedModel]) -> dict[str, Any]:
    """Make the answer of /api/tags, newest model first."""
    newest_first = sorted(models, key=lambda model: -model.facts.mtime_ns)
    return {"models": [_tag(model) for model in newest_first]}


def ps_reply(models: Iterable[ServedModel], *, time_ns: int) -> dict[str, Any]:
    """Make the answer of /api/ps of the models that are loaded, the lasting first."""
    lasting_first = sorted(models, key=lambda model: -model.remaining_seconds)
    return {
        "models": [
            {
                "name": model.name,
                "model": model.name,
                "size": model.loaded_bytes,
                "digest": _digest(model.facts),
                "details": _details(model.facts),
                "expires_at": _local_time(time_ns, after=model.remaining_seconds),
                "size_vram": model.vram_bytes,
                "context_length": model.context_tokens,
            }
            for model in lasting_first
        ]
    }


def show_reply(model: ServedModel) -> dict[str, Any]:
    """Make the answer of /api/show."""
    facts, modelfile = model.facts, model.modelfile
    template = own_template(model) or (model.props or facts).chat_template
    texts = {
        "license": "\n".join(modelfile.licenses) or facts.license,
        "modelfile": shown_text(model, template),
        "parameters": shown_parameters(modelfile),
        "template": template,
        "system": modelfile.system,
    }
    lists = {
        "messages": list(modelfile.messages),
        "projector_info": _metadata(model.projector) if model.projector else {},
    }
    return {
        **{name: text for name, text in texts.items() if text or name == "template"},
        "details": _details(facts),
        "model_info": _metadata(facts),
        **{name: value for name, value in lists.items() if value},
        "capabilities": list(abilities_of(model)),
        "modified_at": format_time(facts.mtime_ns),
    }


def _metadata(facts: ModelFacts) -> dict[str, Any]:
    return {
        name: [] if isinstance(value, list) else value
        for name, value in sorted(facts.metadata.items())
    }


def _tag(model: ServedModel) -> dict[str, Any]:
    facts = model.facts
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": format_time(facts.mtime_ns),
        "size": facts.size_bytes,
        "digest": _digest(facts),
        "details": {
            **_details(facts),
            "context_length": facts.context_length,
            "embedding_length": facts.embedding_length,
        },
        "capabilities": list(abilities_of(model)),
    }


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": facts.parameter_size,
        "quantization_level": facts.quantization_level,
    }


def _local_time(time_ns: int, *, after: float) -> str:
    """Write the time `after` so many seconds as Go does, with the offset of here."""
    delay_ns = min(after * NANOSECONDS, _FOREVER_NS)
    seconds, fraction = divmod(time_ns + int(delay_ns), NANOSECONDS)
    there = datetime.fromtimestamp(seconds, UTC).astimezone()
    digits = f".{fraction:09d}".rstrip("0").rstrip(".")
    offset = there.strftime("%z")
    zone = f"{offset[:3]}:{offset[3:5]}" if offset.strip("+-0") else "Z"
    return f"{there:%Y-%m-%dT%H:%M:%S}{digits}{zone}"


def _digest(facts: ModelFacts) -> str:
    return facts.file_sha256 or facts.content_digest
