"""How an HTTP request below `/v1` becomes a turn, and its answer a reply.

Rules:
1. Checks are made in Ollama's order: body, model, messages, and then sharing.
2. Each generating request goes by a turn: lease, restore, forward, commit. Its body
   goes to the runner as it came, less what would let it leave its slot.
3. When the client goes, this task is cancelled, and with it the turn.
4. Every generating request is told to the observer once at its start and once at its
   end, whatever happened between.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from proxy.ollama import sharing
from proxy.ollama.abilities import check_generates, check_sees
from proxy.ollama.backend import (
    Catalog,
    RelayTurn,
    RelayTurnSource,
    RequestObserver,
    ServedModel,
    TurnRequest,
)
from proxy.ollama.embedding_handlers import beside_the_loop
from proxy.ollama.failures import json_response, to_failure
from proxy.ollama.handlers import ReusePolicy, share_all
from proxy.ollama.protocol import model_not_found
from proxy.prefix.hashing import TokenIds
from proxy.v1 import anthropic, listing
from proxy.v1.bodies import (
    check_bounds,
    read_object,
    take_model,
    within_context,
    without_taken_out,
)
from proxy.v1.exchange import Exchange
from proxy.v1.failures import Dialect, error_response
from proxy.v1.gathering import Gathering, as_stream, can_gather
from proxy.v1.messages_answer import MessagesAnswer
from proxy.v1.questions import (
    Ask,
    Question,
    ask_chat,
    ask_completion,
    ask_messages,
    ask_responses,
    fill_in_gap,
    find_prompt,
    tokenize,
)
from proxy.v1.responses_answer import ResponsesAnswer
from proxy.v1.translators import Translator, Unchanged

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


MakeTranslator = Callable[[ServedModel, TokenIds], Translator]


def _pass_on(model: ServedModel, token_ids: TokenIds) -> Translator:
    return Unchanged()


def _to_responses(model: ServedModel, token_ids: TokenIds) -> Translator:
    return ResponsesAnswer(model=model.name)


def _to_messages(model: ServedModel, token_ids: TokenIds) -> Translator:
    return MessagesAnswer(num_prompt_tokens=len(token_ids))


@dataclass(frozen=True, slots=True)
class _Route:
    """A route that generates."""

    path: str
    ask: Ask
    translator: MakeTranslator = _pass_on
    """What turns the runner's answer into this route's words."""
    dialect: Dialect = Dialect.OPENAI
    what: str = "chat"
    """What it does, where a model that cannot is refused."""


_ROUTES = (
    _Route("/v1/chat/completions", ask_chat),
    _Route("/v1/completions", ask_completion, what="generate"),
    _Route("/v1/responses", ask_responses, _to_responses),
    _Route("/v1/messages", ask_messages, _to_messages, Dialect.ANTHROPIC),
)


def _question(route: _Route, body: dict[str, Any]) -> Question:
    """Read a body. Raises RequestError."""
    check_bounds(body)
    return route.ask(without_taken_out(body))


class V1Api:
    """The routes of OpenAI's and Anthropic's APIs."""

    def __init__(
        self,
        catalog: Catalog,
        turns: RelayTurnSource,
        *,
        observer: RequestObserver,
        response_headers: bool = False,
        reuse_policy: ReusePolicy = share_all,
    ) -> None:
        """Answer for the models of `catalog`.

        With `response_headers` replies tell in `X-KVBus-...` what was reused.
        """
        self._catalog = catalog
        self._turns = turns
        self._observer = observer
        self._response_headers = response_headers
        self._reuse_policy = reuse_policy

    def routes(self) -> list[web.RouteDef]:
        """List all routes."""
        return [
            web.get("/v1/models", self._handle_models),
            web.get("/v1/models/{model:.+}", self._handle_model),
            web.post("/v1/messages/count_tokens", self._handle_count),
            *(web.post(route.path, self._handler(route)) for route in _ROUTES),
        ]

    async def _handle_models(self, request: web.Request) -> web.Response:
        return json_response(listing.list_object(self._catalog.models()))

    async def _handle_model(self, request: web.Request) -> web.Response:
        try:
            model = self._resolve(request.match_info["model"])
        except Exception as exc:  # the root of a request: nothing may escape
            return error_response(Dialect.OPENAI, to_failure(exc))
        return json_response(listing.model_object(model))

    async def _handle_count(self, request: web.Request) -> web.Response:
        """Count the tokens of a prompt for `/v1/messages`."""
        try:
            body = await read_object(request)
            model = self._resolve(take_model(body))
            anthropic.check_messages_body({"max_tokens": 1, **body})
            check_bounds(body)
            with model.in_use():
                await model.wait_ready()
                token_ids = await tokenize(model, anthropic.to_chat(body))
        except Exception as exc:  # the root of a request: nothing may escape
            return error_response(Dialect.ANTHROPIC, to_failure(exc))
        return json_response({"input_tokens": len(token_ids)})

    def _resolve(self, name: str) -> ServedModel:
        model = self._catalog.resolve(name)
        if model is None:
            raise model_not_found(name)
        return model

    def _handler(self, route: _Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            exchange = Exchange(route.path, route.dialect, self._observer)
            self._observer.started(route.path)
            try:
                return await self._serve(request, route, exchange)
            except Exception as exc:  # the root of a request: nothing may escape
                return await exchange.end_in_failure(exc)
            except asyncio.CancelledError:
                exchange.note_client_gone()
                raise
            finally:
                self._observer.finished(exchange.outcome())

        return handle

    async def _serve(
        self, request: web.Request, route: _Route, exchange: Exchange
    ) -> web.StreamResponse:
        """Do what was asked; raises whatever stands in its way."""
        body = await read_object(request)
        model = self._resolve(take_model(body))
        exchange.model = model.name
        check_generates(model, take_model(body), what=route.what)
        question = await beside_the_loop(
            lambda: _question(route, body), num_bytes=len(await request.read())
        )
        reuse = self._reuse_policy(request, body.get(sharing.FIELD))
        with model.in_use():
            await model.wait_ready()
            if question.has_images:
                check_sees(model, take_model(body))
            question = await fill_in_gap(model, question)
            token_ids = await find_prompt(model, question)
            asked = within_context(question.body, context_tokens=model.context_tokens)
            gathering = None
            if not question.is_streamed and can_gather(question.path, asked):
                asked, gathering = as_stream(asked), Gathering(question.path)
            turn_request = TurnRequest(
                model=model,
                token_ids=token_ids,
                path=question.path,
                body=asked,
                route=route.path,
                reuse=question.allowed(reuse),
            )
            async with self._turns.turn(turn_request) as turn:
                translator = route.translator(model, token_ids)
                headers = self._reuse_headers(turn)
                return await exchange.relay(
                    request, turn, translator, headers, gathering=gathering
                )

    def _reuse_headers(self, turn: RelayTurn) -> dict[str, str]:
        if not self._response_headers:
            return {}
        return {
            "X-KVBus-Decision": turn.decision,
            "X-KVBus-Restored-Tokens": str(turn.restored_tokens),
        }
