"""What a model is able to do, in Ollama's words: completion, tools, thinking, ...

Rules:
1. The chat template decides about tools and thinking, and a runner that has tried the
   template out knows better about tools than its text.
2. The template that counts is the one that the runner renders with; before one was up
   it is that of the model file.
3. `insert` needs the tokens of fill-in-the-middle, `vision` and `audio` a projector
   that the runner has loaded.
"""

from enum import StrEnum
from functools import lru_cache

from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.ollama.backend import ServedModel


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

_FIM_KINDS = ("pre", "suf", "mid")
_FIM_TEXTS = {
    "pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "▁<PRE>",
        "<\uff5cfim▁begin\uff5c>", "<|code_prefix|>", "<|prefix|>",
    ),
    "suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "▁<SUF>",
        "<\uff5cfim▁hole\uff5c>", "<|code_suffix|>", "<|suffix|>",
    ),
    "mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>",
        "<\uff5cfim▁end\uff5c>", "<|code_middle|>", "<|middle|>",
    ),
}  # fmt: skip
"""What the engine takes for them by their text, where the file names none."""


def abilities_of(model: ServedModel) -> tuple[Ability, ...]:
    """Return all that a model is able to do, in Ollama's order."""
    return tuple(ability for ability in Ability if is_able(model, ability))


def is_able(model: ServedModel, ability: Ability) -> bool:
    """Tell whether a model has one ability; cheap, but for `insert`."""
    facts, props = model.facts, model.props
    match ability:
        case Ability.EMBEDDING:
            return is_embedding_model(facts)
        case Ability.COMPLETION:
            return not is_embedding_model(facts)
        case Ability.INSERT:
            return not is_embedding_model(facts) and has_fim_tokens(facts)
        case Ability.TOOLS:
            return props.renders_tools if props else mentions_tools(facts.chat_template)
        case Ability.THINKING:
            return mentions_thinking((props or facts).chat_template)
        case Ability.VISION | Ability.AUDIO:
            return props is not None and ability in props.modalities


def is_embedding_model(facts: ModelFacts) -> bool:
    """Tell whether the model makes embeddings, and no text."""
    return f"{facts.architecture}.pooling_type" in facts.metadata


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


def has_fim_tokens(facts: ModelFacts) -> bool:
    """Tell whether the vocabulary can say prefix, suffix and middle."""
    texts = {text for _, text in facts.control_tokens}
    return all(
        f"tokenizer.ggml.fim_{kind}_token_id" in facts.metadata
        or not texts.isdisjoint(_FIM_TEXTS[kind])
        for kind in _FIM_KINDS
    )
