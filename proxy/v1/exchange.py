"""One generating request of `/v1`, from its receipt to the last byte of its answer.

Rules:
1. The status line goes to the client when the engine has said its first word; what
   fails until then gets a real status.
2. A piece is written and awaited before the next one is read: no stream is collected
   in memory. (The engine does not wait for its reader; it collects what is not read.)
3. The whole answer is handed to the socket before the turn ends: storing KV costs the
   client nothing.
"""

import re
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from aiohttp import web

from proxy.errors import UpstreamError
from proxy.ollama.backend import (
    Forwarded,
    RelayTurn,
    RequestObserver,
    RequestOutcome,
)
from proxy.ollama.failures import CLIENT_GONE_STATUS, to_failure
from proxy.ollama.replies import ClientGoneError
from proxy.v1.failures import Dialect, error_response
from proxy.v1.gathering import Gathering
from proxy.v1.translators import Translator

_OK_STATUS = 200
_CONTENT = re.compile(
    rb'"(?:content|reasoning_content|text|thinking|delta)":"(?!")|"tool_(?:calls|use)"'
)
"""In an event: the first words of a reply, of whatever route."""

_CUT_SHORT = ("length", "max_tokens", "incomplete")


@dataclass(slots=True)
class Exchange:
    """What one request has come to so far."""

    route: str
    dialect: Dialect
    observer: RequestObserver
    started: float = field(default_factory=time.monotonic)
    model: str = ""
    status: int = _OK_STATUS
    error: str = ""
    turn: RelayTurn | None = None
    answer: Forwarded | None = None
    translator: Translator | None = None
    response: web.StreamResponse | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None
    """Known once the whole answer is handed to the socket."""

    def outcome(self) -> RequestOutcome:
        """Freeze it for the observer."""
        turn = self.turn
        totals = self.answer.totals if self.answer else None
        reason = totals.finish_reason if totals else ""
        if reason:
            reason = "length" if reason in _CUT_SHORT else "stop"
        return RequestOutcome(
            route=self.route,
            model=self.model,
            status=self.status,
            error=self.error,
            done_reason=reason,
            request_id=turn.request_id if turn else "",
            decision=turn.decision if turn else "",
            reason=turn.reason if turn else "",
            restored_tokens=turn.restored_tokens if turn else 0,
            num_prompt_tokens=totals.prompt_tokens if totals else 0,
            num_cached_tokens=totals.cached_tokens if totals else 0,
            num_decoded_tokens=totals.decoded_tokens if totals else 0,
            first_token_seconds=self.first_token_seconds,
            total_seconds=self.total_seconds or time.monotonic() - self.started,
        )

    def note_client_gone(self) -> None:
        """Note a client that left, unless it had got everything before."""
        if self.total_seconds is None:
            self.status, self.error = CLIENT_GONE_STATUS, "ClientGone"

    async def relay(
        self,
        request: web.Request,
        turn: RelayTurn,
        translator: Translator,
        headers: Mapping[str, str],
        *,
        gathering: Gathering | None = None,
    ) -> web.StreamResponse:
        """Pass the engine's answer on, in one piece where it is to be gathered.

        Raises UpstreamError for an error answer and RunnerGone for one that breaks
        off, which may be after the first piece: see `end_in_failure`. Raises
        ClientGoneError.
        """
        self.turn, self.translator = turn, translator
        async with turn.forward() as answer:
            self.answer = answer
            async with aclosing(answer.chunks()) as chunks:
                if answer.status != _OK_STATUS or not answer.is_event_stream:
                    body = b"".join([chunk async for chunk in chunks])
                    if answer.status != _OK_STATUS:
                        raise UpstreamError(
                            answer.status, body.decode(errors="replace")
                        )
                    return await self._send_whole(request, body, headers)
                if gathering is not None:
                    async for chunk in chunks:
                        gathering.feed(chunk)
                    return await self._send_whole(request, gathering.whole(), headers)
                response = self.response = web.StreamResponse(
                    headers={
                        "Content-Type": "text/event-stream",
                        "Cache-Control": "no-cache",
                        "X-Accel-Buffering": "no",
                        **headers,
                    }
                )
                try:
                    await response.prepare(request)
                    async for chunk in chunks:
                        piece = translator.events(chunk)
                        if self.first_token_seconds is None:
                            self._look_for_text(piece)
                        if piece:
                            await response.write(piece)
                except ConnectionResetError as exc:
                    raise ClientGoneError from exc
            await self._end(response)
        return response

    async def _send_whole(
        self, request: web.Request, body: bytes, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        assert self.translator is not None
        response = self.response = web.Response(
            body=self.translator.whole(body),
            headers={"Content-Type": "application/json", **headers},
        )
        with suppress(ConnectionResetError):
            await response.prepare(request)
        await self._end(response)
        return response

    async def _end(self, response: web.StreamResponse) -> None:
        try:
            await response.write_eof()
        except ConnectionResetError:
            self.note_client_gone()
        else:
            self.total_seconds = time.monotonic() - self.started

    def _look_for_text(self, piece: bytes) -> None:
        if _CONTENT.search(piece):
            self.first_token_seconds = time.monotonic() - self.started
            self.observer.first_token(
                self.route, model=self.model, seconds=self.first_token_seconds
            )

    async def end_in_failure(self, exc: Exception) -> web.StreamResponse:
        """Answer a request that failed, with what is still possible.

        Before the first piece that is an error with its status, after it one event.
        """
        response = self.response
        if isinstance(exc, ClientGoneError):
            assert response is not None
            self.note_client_gone()
            return response
        failure = to_failure(exc)
        self.error = failure.kind
        if response is None or not response.prepared:
            self.status = failure.status
            return error_response(self.dialect, failure)
        if self.total_seconds is None and self.translator is not None:
            with suppress(ConnectionResetError):
                await response.write(self.translator.failure(failure.message))
            await self._end(response)
        return response
