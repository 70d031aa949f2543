"""`/v1/embeddings`: OpenAI's shape of what `/api/embed` does.

Rules:
1. An input is a text, a list of texts, the token ids of a text, or a list of those.
   Token ids are taken as they are: no special tokens are put around them.
2. As in Ollama an input that is too long is cut, and vectors have unit length.
"""

import base64
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from proxy.errors import RequestError
from proxy.llamacpp.embeddings import EmbeddingOptions, EngineEmbeddings, Input
from proxy.ollama.backend import Catalog, RequestObserver
from proxy.ollama.embedding_handlers import EmbeddingExchange, beside_the_loop
from proxy.ollama.embeddings import not_found, numbers, of_unit_length
from proxy.ollama.failures import Failure, json_response
from proxy.ollama.gojson import Fields
from proxy.ollama.protocol import model_not_found
from proxy.v1.bodies import read_object
from proxy.v1.failures import Dialect, error_response

PATH = "/v1/embeddings"

_FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True, kw_only=True)
class V1EmbedRequest:
    """A body of /v1/embeddings."""

    model: str
    inputs: tuple[Input, ...]
    dimensions: int
    """0: all that the model has."""
    is_base64: bool


def parse_request(body: dict[str, Any]) -> V1EmbedRequest:
    """Read a body. Raises RequestError (400, 404 without a model)."""
    fields = Fields.of(body, "EmbedRequest")
    name, encoding = fields.text("model"), fields.text("encoding_format")
    dimensions = fields.integer("dimensions")
    if encoding and encoding.lower() not in _FORMATS:
        raise RequestError(
            400,
            f"Invalid value for 'encoding_format' = {encoding}. Supported values: "
            "['float', 'base64'].",
        )
    inputs = _inputs(fields.anything("input"))
    if not name:
        raise model_not_found("")
    return V1EmbedRequest(
        model=name,
        inputs=inputs,
        dimensions=dimensions,
        is_base64=encoding.lower() == "base64",
    )


def _inputs(value: object) -> tuple[Input, ...]:
    match value:
        case None | []:
            raise RequestError(400, "invalid input")
        case str():
            return (value,)
        case list() if all(isinstance(entry, str) for entry in value):
            return tuple(value)
        case list() if _are_ids(value):
            return (value,)
        case list() if all(isinstance(entry, list) for entry in value):
            if all(map(_are_ids, value)):
                return tuple(value)
    raise RequestError(400, "invalid input type")


def _are_ids(value: list[Any]) -> bool:
    return all(type(entry) is int for entry in value)


def list_object(wanted: V1EmbedRequest, made: EngineEmbeddings) -> dict[str, Any]:
    """Make the answer. Raises RequestError (400)."""
    vectors = of_unit_length(made.vectors, wanted.dimensions)
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "embedding": (
                    base64.b64encode(vector.astype("<f4").tobytes()).decode()
                    if wanted.is_base64
                    else numbers(vector)
                ),
                "index": index,
            }
            for index, vector in enumerate(vectors)
        ],
        "model": wanted.model,
        "usage": {"prompt_tokens": made.num_tokens, "total_tokens": made.num_tokens},
    }


class V1Embeddings:
    """The route."""

    def __init__(self, catalog: Catalog, *, observer: RequestObserver) -> None:
        self._catalog = catalog
        self._observer = observer

    def routes(self) -> list[web.RouteDef]:
        """List the route."""
        return [web.post(PATH, self._handle)]

    async def _handle(self, request: web.Request) -> web.Response:
        exchange = EmbeddingExchange(PATH)
        return await exchange.run(
            self._observer, self._answer(request, exchange), respond=_respond
        )

    async def _answer(
        self, request: web.Request, exchange: EmbeddingExchange
    ) -> web.Response:
        wanted = parse_request(await read_object(request))
        model = self._catalog.resolve(wanted.model)
        if model is None:
            raise not_found(wanted.model)
        exchange.model = model.name
        made = await exchange.embed(model, wanted.inputs, EmbeddingOptions())
        return await beside_the_loop(
            lambda: json_response(list_object(wanted, made)), num_bytes=made.num_bytes
        )


def _respond(failure: Failure) -> web.Response:
    return error_response(Dialect.OPENAI, failure)
