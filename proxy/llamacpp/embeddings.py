"""Embeddings as a llama-server makes them, and which models make nothing else.

Rules:
1. A model whose file names a kind of pooling, or whose architecture is that of an
   encoder, makes embeddings and no text (Ollama goes by the first).
2. Of other models an embedding is the last token's: it has seen all the others.
3. An error of the engine becomes its message in words, with its status. That an input
   is too long has a class of its own, which tells what would have fit.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from proxy.errors import UpstreamError
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.gguf_facts import ModelFacts

EMBEDDINGS_PATH = "/v1/embeddings"

Vector = npt.NDArray[np.float32]
Input = str | Sequence[int]
"""A text, or the token ids of one, special ones included."""

_ENCODERS = frozenset(
    {
        "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert",
        "jina-bert-v2", "jina-bert-v3", "eurobert", "gemma-embedding", "t5encoder",
    }
)  # fmt: skip
_NO_POOLING, _LAST_POOLING = 0, 3
"""llama.h, enum llama_pooling_type: a vector for each token, and the last one's."""

_BATCH_SIZE = re.compile(r"current batch size: (\d+)")
_NOT_A_NUMBER: Vector = np.array([np.nan], dtype=np.float32)


class InputTooLongError(UpstreamError):
    """An input has more tokens than the runner takes at once."""

    def __init__(self, status: int, message: str, *, max_tokens: int) -> None:
        super().__init__(status, message)
        self.max_tokens = max_tokens
        """What the runner says that it takes, or one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions:
    """How the inputs of one request become embeddings."""

    truncates: bool = True
    """Whether the end of an input that is too long is cut off."""
    max_tokens: int | None = None
    """A bound on the tokens of an input that is lower than the runner's."""
    is_raw: bool = False
    """Whether vectors keep the length that the model gives them."""


@dataclass(frozen=True, slots=True)
class EngineEmbeddings:
    """One vector for each input, in their order."""

    vectors: tuple[Vector, ...]
    num_tokens: int
    """Of all inputs together."""

    @property
    def num_bytes(self) -> int:
        """Memory of the vectors."""
        return sum(vector.nbytes for vector in self.vectors)


def is_embedding_model(facts: ModelFacts) -> bool:
    """Tell whether the model makes embeddings, and no text."""
    return facts.architecture in _ENCODERS or _pooling(facts) is not None


def pooling_flag(facts: ModelFacts) -> str | None:
    """Return the kind of pooling to be asked for; None: as the model's file says."""
    if _pooling(facts) not in (None, _NO_POOLING):
        return None
    return "mean" if facts.architecture in _ENCODERS else "last"


def needs_whole_batch(facts: ModelFacts) -> bool:
    """Tell whether the engine has to take an input in one batch.

    It has to where a token sees those after it, or where vectors are averaged.
    """
    if facts.architecture in _ENCODERS:
        return True
    return _pooling(facts) not in (None, _NO_POOLING, _LAST_POOLING)


def _pooling(facts: ModelFacts) -> object:
    return facts.metadata.get(f"{facts.architecture}.pooling_type")


async def embed(
    client: LlamaServerClient, inputs: Sequence[Input], *, is_raw: bool
) -> EngineEmbeddings:
    """Make the embeddings of `inputs`, of unit length unless `is_raw`.

    Raises InputTooLongError, UpstreamError, RunnerGone.
    """
    body: dict[str, Any] = {"input": list(inputs), "encoding_format": "base64"}
    if is_raw:
        body["embd_normalize"] = -1
    async with client.open_answer(EMBEDDINGS_PATH, body) as answer:
        content = await answer.read()
    if answer.status != HTTPStatus.OK:
        raise read_error(answer.status, content)
    embeddings = read_embeddings(content)
    if len(embeddings.vectors) != len(inputs):
        raise UpstreamError(502, "the runner made another number of embeddings")
    return embeddings


async def check_makes_embeddings(client: LlamaServerClient) -> None:
    """Raise UpstreamError (501) where the server was started to make none.

    It says so before it looks at the input, of which there is none.
    """
    async with client.open_answer(EMBEDDINGS_PATH, {}) as answer:
        content = await answer.read()
    if answer.status == HTTPStatus.NOT_IMPLEMENTED:
        raise read_error(answer.status, content)


def read_embeddings(content: bytes) -> EngineEmbeddings:
    """Read an answer of `/v1/embeddings`. Raises UpstreamError (502)."""
    try:
        answer = orjson.loads(content)
        entries = sorted(answer["data"], key=lambda entry: int(entry["index"]))
        vectors = tuple(_vector(entry["embedding"]) for entry in entries)
        return EngineEmbeddings(vectors, int(answer["usage"]["prompt_tokens"]))
    except (KeyError, TypeError, ValueError) as exc:
        raise UpstreamError(502, "the runner's answer holds no embeddings") from exc


def _vector(value: object) -> Vector:
    """Read a vector: base64 of little-endian floats, or numbers of older servers."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4")
    if not isinstance(value, list):
        raise TypeError("neither text nor numbers")
    if None in value:  # so JSON writes what is no number
        return _NOT_A_NUMBER
    return np.array(value, dtype=np.float32)


def read_error(status: int, content: bytes) -> UpstreamError:
    """Make the exception for an error answer."""
    message, max_tokens = content.decode(errors="replace").strip(), None
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        answer = None
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, Mapping):
        message = str(error.get("message") or message)
        if error.get("type") == "exceed_context_size_error":
            max_tokens = error.get("n_ctx")
    found = _BATCH_SIZE.search(message)
    if found is not None:
        max_tokens = int(found[1])
    if isinstance(max_tokens, int):
        return InputTooLongError(status, message, max_tokens=max_tokens)
    return UpstreamError(status, message)
