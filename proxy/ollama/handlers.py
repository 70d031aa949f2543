"""How an HTTP request of Ollama's API becomes a turn, and a turn a reply.

Rules:
1. Checks are made in Ollama's order: body, model, abilities, options, format, length.
2. When the client goes, this task is cancelled, and with it the turn.
3. Every generating request is told to the observer once at its start and once at its
   end, whatever happened between.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

from aiohttp import web

from proxy.ollama import listing, sharing, translate
from proxy.ollama.abilities import check_supported
from proxy.ollama.backend import (
    Catalog,
    RequestObserver,
    ReuseOptions,
    ServedModel,
    Turn,
    TurnRequest,
    TurnSource,
)
from proxy.ollama.failures import json_response
from proxy.ollama.modelfile import with_parameters
from proxy.ollama.options import parse_options
from proxy.ollama.prompts import prepare
from proxy.ollama.protocol import (
    ChatRequest,
    GenerateRequest,
    check_model_given,
    is_unload,
    model_not_found,
    parse_chat,
    parse_generate,
    parse_show,
)
from proxy.ollama.refusals import refusal_routes
from proxy.ollama.replies import (
    Progress,
    TurnReply,
    end_in_failure,
    send_stream,
    send_whole,
)
from proxy.ollama.translate import ReplyKind

CLAIMED_VERSION = "0.33.0"
"""The Ollama whose API this is. Clients gate features on it, and some of them split
it at the dots and want numbers, so it is a plain release and not our own version."""

PARSE_IN_THREAD_BYTES = 1 << 20
"""Larger bodies are parsed beside the event loop: streams of others go on."""

_ROOT_TEXT = "Ollama is running"

Parsed = TypeVar("Parsed", GenerateRequest, ChatRequest)
ReusePolicy = Callable[[web.Request, object], ReuseOptions]


def share_all(request: web.Request, given: object) -> ReuseOptions:
    """Let every request read and write the KV of one namespace."""
    return ReuseOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """How the front answers."""

    version: str = CLAIMED_VERSION
    response_headers: bool = False
    """Whether replies tell in `X-KVBus-...` headers what was reused."""


class OllamaApi:
    """The routes of Ollama's HTTP API."""

    def __init__(
        self,
        catalog: Catalog,
        turns: TurnSource,
        *,
        observer: RequestObserver,
        options: ApiOptions | None = None,
        reuse_policy: ReusePolicy = share_all,
    ) -> None:
        self._catalog = catalog
        self._turns = turns
        self._observer = observer
        self._options = options or ApiOptions()
        self._reuse_policy = reuse_policy

    def routes(self) -> list[web.RouteDef]:
        """List all routes, those included that are only refused with advice."""
        return [
            web.get("/", self._handle_root),
            web.get("/api/version", self._handle_version),
            web.get("/api/tags", self._handle_tags),
            web.get("/api/ps", self._handle_ps, allow_head=False),
            web.get("/api/status", self._handle_status, allow_head=False),
            web.post("/api/show", self._handle_show),
            web.post("/api/generate", self._handle_generate),
            web.post("/api/chat", self._handle_chat),
            *refusal_routes(),
        ]

    async def _handle_root(self, request: web.Request) -> web.Response:
        return web.Response(text=_ROOT_TEXT)

    async def _handle_version(self, request: web.Request) -> web.Response:
        return json_response({"version": self._options.version})

    async def _handle_status(self, request: web.Request) -> web.Response:
        return json_response({"cloud": {"disabled": True, "source": "config"}})

    async def _handle_tags(self, request: web.Request) -> web.Response:
        return json_response(listing.tags_reply(self._catalog.models()))

    async def _handle_ps(self, request: web.Request) -> web.Response:
        running = [
            model for model in self._catalog.models() if self._catalog.is_running(model)
        ]
        return json_response(listing.ps_reply(running, time_ns=time.time_ns()))

    async def _handle_show(self, request: web.Request) -> web.Response:
        wanted = parse_show(await request.read())
        return json_response(listing.show_reply(self._resolve(wanted.model)))

    async def _handle_generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_generate, ReplyKind.GENERATE)

    async def _handle_chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat, ReplyKind.CHAT)

    def _resolve(self, name: str) -> ServedModel:
        model = self._catalog.resolve(name)
        if model is None:
            raise model_not_found(name)
        return model

    async def _answer(
        self,
        request: web.Request,
        parse: Callable[[bytes], Parsed],
        kind: ReplyKind,
    ) -> web.StreamResponse:
        """Serve one generating request and tell the observer of it."""
        progress = Progress(kind)
        use = ExitStack()
        self._observer.started(kind.value)
        try:
            wanted = await _read_request(request, parse)
            return await self._serve(request, wanted, progress, use)
        except Exception as exc:  # the root of a request: nothing may escape
            return await end_in_failure(progress, exc)
        except asyncio.CancelledError:
            progress.note_client_gone()
            raise
        finally:
            use.close()
            self._observer.finished(progress.outcome())

    async def _serve(
        self,
        request: web.Request,
        wanted: GenerateRequest | ChatRequest,
        progress: Progress,
        use: ExitStack,
    ) -> web.StreamResponse:
        """Do what was asked; raises whatever stands in its way before the reply.

        The model is kept loaded until `use` is closed.
        """
        kind = progress.kind
        check_model_given(wanted)
        model = self._resolve(wanted.model)
        progress.model = model.name
        if is_unload(wanted):
            await model.unload()
            return _load_response(wanted, progress, done_reason="unload")
        check_supported(wanted, model)
        options = parse_options(with_parameters(wanted.options, model.modelfile))
        reuse = self._reuse_policy(request, wanted.options.get(sharing.FIELD))
        use.enter_context(model.in_use(wanted.keep_alive_seconds))
        await _wait_ready(model, progress)
        if wanted.is_empty:
            return _load_response(wanted, progress, done_reason="load")
        prompt = await prepare(wanted, model, options=options)
        if wanted.debug_render_only:
            return _rendered_response(wanted, progress, prompt.text)
        turn_request = TurnRequest(
            model=model,
            token_ids=prompt.token_ids,
            path=prompt.path,
            body=prompt.body,
            route=kind.value,
            reuse=reuse if prompt.is_text else _share_nothing(reuse),
        )
        async with self._turns.turn(turn_request) as turn:
            progress.turn = turn
            reply = TurnReply(
                turn,
                progress,
                reader=prompt.reader(wanted),
                context=prompt.context,
                observer=self._observer,
                model_as_sent=wanted.model,
            )
            headers = self._reuse_headers(turn)
            if wanted.stream:
                return await send_stream(request, reply, headers)
            return await send_whole(request, reply, headers)

    def _reuse_headers(self, turn: Turn) -> dict[str, str]:
        if not self._options.response_headers:
            return {}
        return {
            "X-KVBus-Decision": turn.decision,
            "X-KVBus-Restored-Tokens": str(turn.restored_tokens),
            "X-KVBus-Request-Id": turn.request_id,
        }


async def _read_request(
    request: web.Request, parse: Callable[[bytes], Parsed]
) -> Parsed:
    body = await request.read()
    if len(body) > PARSE_IN_THREAD_BYTES:
        return await asyncio.to_thread(parse, body)
    return parse(body)


def _share_nothing(reuse: ReuseOptions) -> ReuseOptions:
    return replace(reuse, read=False, write=False)


async def _wait_ready(model: ServedModel, progress: Progress) -> None:
    """Wait for the model as Ollama does when it loads it, and note how long."""
    started = time.monotonic()
    await model.wait_ready()
    progress.load_seconds = time.monotonic() - started


def _rendered_response(
    wanted: GenerateRequest | ChatRequest, progress: Progress, text: str
) -> web.Response:
    """Show the prompt instead of having it continued."""
    return json_response(
        translate.rendered_reply(
            progress.kind, model=wanted.model, time_ns=time.time_ns(), prompt=text
        )
    )


def _load_response(
    wanted: GenerateRequest | ChatRequest, progress: Progress, *, done_reason: str
) -> web.Response:
    """Answer a request that loads or unloads: one object, streamed or not."""
    progress.done_reason = done_reason
    return json_response(
        translate.load_reply(
            progress.kind,
            model=wanted.model,
            time_ns=time.time_ns(),
            done_reason=done_reason,
        )
    )
