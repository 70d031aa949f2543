"""Requests for embeddings, and their replies: bytes in, values out.

Rules:
1. /api/embed and /v1/embeddings give vectors of unit length, also after they were cut
   to `dimensions`. /api/embeddings gives what the runner gave.
2. Nothing to embed means that the model is only to be loaded.
3. Numbers are written as Go writes them: a float32 of /api/embed by the fewest digits
   that tell it apart, one of /api/embeddings as the float64 that it has become.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from proxy.durations import NANOSECONDS
from proxy.errors import RequestError
from proxy.llamacpp.embeddings import Vector
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.ollama.gojson import Fields, decode
from proxy.ollama.options import parse_keep_alive
from proxy.ollama.protocol import model_not_found, quoted

_SMALLEST_LENGTH = 1e-12
_NOT_FINITE = "embedding contains NaN or Inf values"
_WRONG_INPUT = "invalid input type"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """A body of /api/embed, or of /api/embeddings with one input."""

    model: str
    """The name as sent: replies echo it."""
    inputs: tuple[str, ...]
    options: Mapping[str, Any]
    """Not yet checked: see `parse_options`."""
    keep_alive_seconds: float | None
    truncates: bool = True
    dimensions: int = 0
    """0: all that the model has."""


def parse_embed(body: bytes) -> EmbedRequest:
    """Read a body of /api/embed. Raises RequestError (400, 404 without a model)."""
    fields = Fields.of(decode(body), "EmbedRequest")
    truncates = fields.flag("truncate", default=True)
    dimensions = fields.integer("dimensions")
    common = _common_fields(fields)
    if not common["model"]:
        raise model_not_found("")
    return EmbedRequest(
        inputs=_texts(fields.anything("input")),
        truncates=truncates,
        dimensions=dimensions,
        **common,
    )


def parse_embeddings(body: bytes) -> EmbedRequest:
    """Read a body of /api/embeddings. Raises RequestError (400)."""
    fields = Fields.of(decode(body), "EmbeddingRequest")
    prompt = fields.text("prompt")
    common = _common_fields(fields)
    if not common["model"]:
        raise RequestError(400, "model is required")
    return EmbedRequest(inputs=(prompt,) if prompt else (), truncates=False, **common)


def _common_fields(fields: Fields) -> dict[str, Any]:
    return {
        "model": fields.text("model"),
        "options": fields.mapping("options", "map[string]interface {}"),
        "keep_alive_seconds": parse_keep_alive(fields.anything("keep_alive")),
    }


def _texts(value: object) -> tuple[str, ...]:
    match value:
        case None | "":
            return ()
        case str():
            return (value,)
        case list() if all(isinstance(entry, str) for entry in value):
            return tuple(value)
        case _:
            raise RequestError(400, _WRONG_INPUT)


def not_found(name: str) -> RequestError:
    """Make the answer for a model that is not served here."""
    return RequestError(404, f"model {quoted(name)} not found, try pulling it first")


def keeps_length(facts: ModelFacts) -> bool:
    """Tell whether /api/embeddings shows vectors as long as the model makes them.

    Ollama's runners did so for these models before embeddings were of unit length.
    """
    architecture = facts.architecture
    if f"{architecture}.pooling_type" not in facts.metadata:
        return False
    is_normalized = facts.metadata.get(f"{architecture}.normalize_embeddings")
    match architecture:
        case "bert":
            return facts.tokenizer_model != "bert" or is_normalized is False
        case "nomic-bert" | "nomic-bert-moe":
            return is_normalized is not True
        case _:
            return False


def of_unit_length(vectors: Sequence[Vector], dimensions: int = 0) -> list[Vector]:
    """Return vectors of length 1, of their first `dimensions` numbers if not 0.

    Raises RequestError (400) for one that holds something else than numbers.
    """
    whole = [_normalized(vector) for vector in vectors]
    if dimensions <= 0:
        return whole
    return [
        _normalized(vector[:dimensions]) if dimensions < len(vector) else vector
        for vector in whole
    ]


def _normalized(vector: Vector) -> Vector:
    if not np.isfinite(vector).all():
        raise RequestError(400, _NOT_FINITE)
    length = max(float(np.linalg.norm(vector.astype(np.float64))), _SMALLEST_LENGTH)
    return vector * np.float32(1 / length)


def embed_reply(
    model: str,
    vectors: Sequence[Vector],
    *,
    total_seconds: float = 0.0,
    load_seconds: float = 0.0,
    num_tokens: int = 0,
) -> dict[str, Any]:
    """Make the answer of /api/embed; what is zero is left out."""
    metrics = {
        "total_duration": int(total_seconds * NANOSECONDS),
        "load_duration": int(load_seconds * NANOSECONDS),
        "prompt_eval_count": num_tokens,
    }
    return {
        "model": model,
        "embeddings": numbers(vectors),
        **{name: value for name, value in metrics.items() if value},
    }


def numbers(vectors: Vector | Sequence[Vector]) -> orjson.Fragment:
    """Write vectors for an answer."""
    return orjson.Fragment(orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY))


def embedding_reply(vectors: Sequence[Vector]) -> dict[str, Any]:
    """Make the answer of /api/embeddings. Raises RequestError (400)."""
    for vector in vectors:
        if not np.isfinite(vector).all():
            raise RequestError(400, _NOT_FINITE)
    return {"embedding": [number for vector in vectors for number in vector.tolist()]}
