"""What a model is able to do, in Ollama's words: completion, tools, thinking, ...

Rules:
1. The chat template decides about tools and thinking, and a runner that has tried the
   template out knows better about tools than its text.
2. The template that counts is the one that the runner renders with; before one was up
   it is that of the model file.
3. `insert` needs the tokens of fill-in-the-middle, or a TEMPLATE with a place for a
   suffix; `vision` and `audio` a projector
   that the runner has loaded.
4. A field that the model, or kvbus, cannot serve is refused in Ollama's own words,
   never ignored.
"""

from enum import StrEnum
from functools import lru_cache

from proxy.errors import RequestError
from proxy.llamacpp.embeddings import is_embedding_model
from proxy.ollama.backend import ServedModel
from proxy.ollama.fill_in import fill_tokens
from proxy.ollama.model_template import reads
from proxy.ollama.modelfile import own_template
from proxy.ollama.protocol import ChatRequest, GenerateRequest, quoted


class Ability(StrEnum):
    """As in the `capabilities` of /api/show, in the order in which they are listed."""

    COMPLETION = "completion"
    TOOLS = "tools"
    INSERT = "insert"
    VISION = "vision"
    AUDIO = "audio"
    EMBEDDING = "embedding"
    THINKING = "thinking"


_THINKING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("enable_thinking",),
    ("<|channel|>", "analysis"),
)
"""A template with all marks of one of these lines belongs to a model that thinks."""

_SPLIT_AT_THINKING = ("content.split('</think>')", 'content.split("</think>")')

_REGISTRY = "registry.ollama.ai"


def abilities_of(model: ServedModel) -> tuple[Ability, ...]:
    """Return all that a model is able to do, in Ollama's order."""
    return tuple(ability for ability in Ability if is_able(model, ability))


def is_able(model: ServedModel, ability: Ability) -> bool:
    """Tell whether a model has one ability; cheap, but for `insert`."""
    facts, props = model.facts, model.props
    if is_embedding_model(facts):
        return ability is Ability.EMBEDDING
    match ability:
        case Ability.EMBEDDING:
            return False
        case Ability.COMPLETION:
            return True
        case Ability.INSERT:
            return fill_tokens(facts) is not None or reads(
                model.modelfile.template, "suffix"
            )
        case Ability.TOOLS | Ability.THINKING if own_template(model):
            return False  # the engine parses replies by its chat template only
        case Ability.TOOLS:
            return props.renders_tools if props else mentions_tools(facts.chat_template)
        case Ability.THINKING:
            return mentions_thinking((props or facts).chat_template)
        case Ability.VISION | Ability.AUDIO:
            if props is not None:
                return ability in props.modalities
            projector = model.projector.metadata if model.projector else {}
            return bool(projector.get(f"clip.has_{ability}_encoder"))


def mentions_tools(template: str) -> bool:
    """Tell whether a chat template has a place for tools."""
    return "tools" in template or "tool_call" in template


@lru_cache(maxsize=64)
def mentions_thinking(template: str) -> bool:
    """Tell whether a chat template is that of a model that thinks.

    >>> mentions_thinking("{% if enable_thinking is false %}...")
    True
    """
    if any(all(mark in template for mark in marks) for marks in _THINKING_MARKS):
        return True
    # Templates of this kind cut the thinking of earlier messages off.
    cuts = any(split in template for split in _SPLIT_AT_THINKING)
    return cuts and "reasoning_content" not in template


def check_generates(model: ServedModel, name_as_sent: str, *, what: str) -> None:
    """Refuse to `chat` or `generate` with what makes embeddings only.

    Raises RequestError (400).
    """
    if not is_able(model, Ability.COMPLETION):
        raise RequestError(400, f"{quoted(name_as_sent)} does not support {what}")


def check_inserts(model: ServedModel) -> None:
    """Refuse to fill in with a model that cannot. Raises RequestError (400)."""
    if not is_able(model, Ability.INSERT):
        raise _lacks(model.name, Ability.INSERT)


def check_sees(model: ServedModel, name_as_sent: str) -> None:
    """Refuse images for a model without a projector. Raises RequestError (400)."""
    if not is_able(model, Ability.VISION):
        raise RequestError(400, f"{quoted(name_as_sent)} does not support images")


def check_supported(request: GenerateRequest | ChatRequest, model: ServedModel) -> None:
    """Refuse what the model, or kvbus, cannot do. Raises RequestError (400)."""
    if not 0 <= request.top_logprobs <= 20:
        raise RequestError(400, "top_logprobs must be between 0 and 20")
    is_chat = isinstance(request, ChatRequest)
    check_generates(model, request.model, what="chat" if is_chat else "generate")
    if isinstance(request, ChatRequest):
        _check_chat(request, model)
    else:
        _check_generate(request, model)
    if request.has_images:
        check_sees(model, request.model)
    if request.think and not is_able(model, Ability.THINKING):
        raise RequestError(400, f"{quoted(request.model)} does not support thinking")


def _check_generate(request: GenerateRequest, model: ServedModel) -> None:
    if request.raw and (request.template or request.system or request.has_context):
        raise RequestError(
            400, "raw mode does not support template, system, or context"
        )
    if request.raw and request.has_images:
        raise RequestError(400, "raw mode does not support images here")
    if request.suffix:
        check_inserts(model)
    is_special = request.suffix or request.template or request.has_context
    if request.has_images and is_special:
        raise RequestError(
            400, "images do not go together with suffix, template, or context here"
        )


def _check_chat(request: ChatRequest, model: ServedModel) -> None:
    if request.calls_tools and not is_able(model, Ability.TOOLS):
        raise _lacks(model.name, Ability.TOOLS)


def _lacks(full_name: str, ability: Ability) -> RequestError:
    space = "" if "/" in full_name else "library/"
    return RequestError(
        400, f"{_REGISTRY}/{space}{full_name} does not support {ability}"
    )
