"""The routes of Ollama that make embeddings.

Rules:
1. Checks are made in Ollama's order: body, model, input, options.
2. When the client goes, this task is cancelled, and no further batch is sent.
3. Every request is told to the observer once at its start and once at its end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from proxy.errors import RequestError, UpstreamError
from proxy.llamacpp.embeddings import EmbeddingOptions, EngineEmbeddings, Input
from proxy.ollama.backend import Catalog, RequestObserver, RequestOutcome, ServedModel
from proxy.ollama.embeddings import (
    EmbedRequest,
    embed_reply,
    embedding_reply,
    keeps_length,
    not_found,
    of_unit_length,
    parse_embed,
    parse_embeddings,
)
from proxy.ollama.failures import (
    CLIENT_GONE_STATUS,
    Failure,
    failure_response,
    json_response,
    to_failure,
)
from proxy.ollama.options import parse_options

WORK_IN_THREAD_BYTES = 1 << 20
"""Larger bodies are read and written beside the event loop: streams go on."""

_Result = TypeVar("_Result")


@dataclass(slots=True)
class EmbeddingExchange:
    """What one request has come to so far."""

    route: str
    started: float = field(default_factory=time.monotonic)
    model: str = ""
    status: int = 200
    error: str = ""
    done_reason: str = ""
    load_seconds: float = 0.0
    num_tokens: int = 0

    def elapsed_seconds(self) -> float:
        """Time since the request was received."""
        return time.monotonic() - self.started

    def outcome(self) -> RequestOutcome:
        """Freeze it for the observer."""
        return RequestOutcome(
            route=self.route,
            model=self.model,
            status=self.status,
            error=self.error,
            done_reason=self.done_reason,
            request_id="",
            decision="",
            reason="",
            restored_tokens=0,
            num_prompt_tokens=self.num_tokens,
            num_cached_tokens=0,
            num_decoded_tokens=0,
            first_token_seconds=None,
            total_seconds=self.elapsed_seconds(),
        )

    async def run(
        self,
        observer: RequestObserver,
        answer: Awaitable[web.Response],
        *,
        respond: Callable[[Failure], web.Response],
    ) -> web.Response:
        """Await the answer, or make one of what went wrong; tell the observer."""
        observer.started(self.route)
        try:
            return await answer
        except Exception as exc:  # the root of a request: nothing may escape
            failure = to_failure(exc)
            self.status, self.error = failure.status, failure.kind
            return respond(failure)
        except asyncio.CancelledError:
            self.status, self.error = CLIENT_GONE_STATUS, "ClientGone"
            raise
        finally:
            observer.finished(self.outcome())

    async def embed(
        self,
        model: ServedModel,
        inputs: Sequence[Input],
        options: EmbeddingOptions,
        *,
        keep_alive_seconds: float | None = None,
    ) -> EngineEmbeddings:
        """Have embeddings made; nothing to embed only loads the model.

        Raises RequestError, UpstreamError.
        """
        embedder = model.embedder
        with embedder.in_use(keep_alive_seconds):
            waiting = time.monotonic()
            await embedder.wait_ready()
            self.load_seconds = time.monotonic() - waiting
            if not inputs:
                self.done_reason = "load"
                return EngineEmbeddings((), 0)
            made = await embedder.embed(inputs, options)
        self.num_tokens = made.num_tokens
        return made


class EmbeddingsApi:
    """`/api/embed` and `/api/embeddings`."""

    def __init__(self, catalog: Catalog, *, observer: RequestObserver) -> None:
        self._catalog = catalog
        self._observer = observer

    def routes(self) -> list[web.RouteDef]:
        """List the routes."""
        return [
            web.post("/api/embed", self._handle_embed),
            web.post("/api/embeddings", self._handle_embeddings),
        ]

    async def _handle_embed(self, request: web.Request) -> web.Response:
        exchange = EmbeddingExchange("/api/embed")
        return await exchange.run(
            self._observer, self._embed(request, exchange), respond=failure_response
        )

    async def _handle_embeddings(self, request: web.Request) -> web.Response:
        exchange = EmbeddingExchange("/api/embeddings")
        return await exchange.run(
            self._observer,
            self._embeddings(request, exchange),
            respond=failure_response,
        )

    async def _embed(
        self, request: web.Request, exchange: EmbeddingExchange
    ) -> web.Response:
        wanted = await _read(request, parse_embed)
        model = self._resolve(wanted, exchange)
        made = await exchange.embed(
            model,
            wanted.inputs,
            EmbeddingOptions(
                truncates=wanted.truncates, max_tokens=_max_tokens(wanted)
            ),
            keep_alive_seconds=wanted.keep_alive_seconds,
        )
        if not wanted.inputs:
            return json_response(embed_reply(wanted.model, ()))

        def respond() -> web.Response:
            reply = embed_reply(
                wanted.model,
                of_unit_length(made.vectors, wanted.dimensions),
                total_seconds=exchange.elapsed_seconds(),
                load_seconds=exchange.load_seconds,
                num_tokens=made.num_tokens,
            )
            return json_response(reply)

        return await beside_the_loop(respond, num_bytes=made.num_bytes)

    async def _embeddings(
        self, request: web.Request, exchange: EmbeddingExchange
    ) -> web.Response:
        wanted = await _read(request, parse_embeddings)
        model = self._resolve(wanted, exchange)
        options = EmbeddingOptions(
            truncates=False,
            max_tokens=_max_tokens(wanted),
            is_raw=keeps_length(model.facts),
        )
        try:
            made = await exchange.embed(
                model,
                wanted.inputs,
                options,
                keep_alive_seconds=wanted.keep_alive_seconds,
            )
            return json_response(embedding_reply(made.vectors))
        except (RequestError, UpstreamError) as exc:
            # so Ollama answers here, whatever went wrong
            raise RequestError(500, to_failure(exc).message) from exc

    def _resolve(
        self, wanted: EmbedRequest, exchange: EmbeddingExchange
    ) -> ServedModel:
        model = self._catalog.resolve(wanted.model)
        if model is None:
            raise not_found(wanted.model)
        exchange.model = model.name
        return model


def _max_tokens(wanted: EmbedRequest) -> int | None:
    """Return the context that was asked for. Raises RequestError (500)."""
    num_ctx = parse_options(wanted.options).num_ctx
    return num_ctx if num_ctx and num_ctx > 0 else None


async def _read(
    request: web.Request, parse: Callable[[bytes], EmbedRequest]
) -> EmbedRequest:
    body = await request.read()
    return await beside_the_loop(lambda: parse(body), num_bytes=len(body))


async def beside_the_loop(work: Callable[[], _Result], *, num_bytes: int) -> _Result:
    """Do a piece of work, in a thread where it has many bytes to go through."""
    if num_bytes > WORK_IN_THREAD_BYTES:
        return await asyncio.to_thread(work)
    return work()
