"""How a turn becomes a reply on the wire, and what is remembered of it.

Rules:
1. Nothing is sent before the first line exists: what fails until then is raised, and
   gets a real status. What fails later is one last line `{"error": ...}`, no `done`.
2. One line is written and awaited before the next event is read: no reply is
   collected in memory, unless it was asked for in one piece. (The engine does not wait
   for its reader; it collects what is not read.)
3. The whole reply is handed to the socket before the turn ends: storing KV costs the
   client nothing.
4. A reply that is given up closes the turn's events at once.
"""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from aiohttp import web

from proxy.durations import NANOSECONDS
from proxy.errors import RunnerGone
from proxy.ollama import translate
from proxy.ollama.backend import RequestObserver, RequestOutcome, Turn
from proxy.ollama.events import NOTHING, EventReader, Piece, TurnTotals, join
from proxy.ollama.failures import (
    CLIENT_GONE_STATUS,
    failure_response,
    json_response,
    to_failure,
)
from proxy.ollama.reply_context import ReplyContext
from proxy.ollama.translate import ReplyKind


@dataclass(slots=True)
class Progress:
    """What one request has come to so far."""

    kind: ReplyKind
    started: float = field(default_factory=time.monotonic)
    model: str = ""
    load_seconds: float = 0.0
    status: int = 200
    error: str = ""
    done_reason: str = ""
    turn: Turn | None = None
    totals: TurnTotals | None = None
    first_token_seconds: float | None = None
    response: web.StreamResponse | None = None
    """The reply, where one was begun."""
    total_seconds: float | None = None
    """Known once the whole answer is handed to the socket."""

    def elapsed_seconds(self) -> float:
        """Time since the request was received."""
        return time.monotonic() - self.started

    def note_answered(self) -> None:
        """Stop the clock: what follows (storing KV) is not the client's wait."""
        self.total_seconds = self.elapsed_seconds()

    def note_client_gone(self) -> None:
        """Note a client that left, unless it had got everything before."""
        if self.total_seconds is None:
            self.status, self.error = CLIENT_GONE_STATUS, "ClientGone"

    def outcome(self) -> RequestOutcome:
        """Freeze it for the observer."""
        turn, totals = self.turn, self.totals
        return RequestOutcome(
            route=self.kind.value,
            model=self.model,
            status=self.status,
            error=self.error,
            done_reason=self.done_reason,
            request_id=turn.request_id if turn else "",
            decision=turn.decision if turn else "",
            reason=turn.reason if turn else "",
            restored_tokens=turn.restored_tokens if turn else 0,
            num_prompt_tokens=totals.num_prompt_tokens if totals else 0,
            num_cached_tokens=totals.num_cached_tokens if totals else 0,
            num_decoded_tokens=totals.num_decoded_tokens if totals else 0,
            first_token_seconds=self.first_token_seconds,
            total_seconds=self.total_seconds or self.elapsed_seconds(),
        )


class TurnReply:
    """The reply of one turn: pieces of text and thinking, then the totals."""

    def __init__(
        self,
        turn: Turn,
        progress: Progress,
        *,
        reader: EventReader,
        observer: RequestObserver,
        model_as_sent: str,
        context: ReplyContext | None = None,
    ) -> None:
        self.progress = progress
        self._context = context
        self._reader = reader
        self._turn = turn
        self._observer = observer
        self._model = model_as_sent
        # the mutable state
        self._context_ids: Sequence[int] | None = None

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yield what is said; calls of tools and totals are known after the last one.

        Raises UpstreamError, RunnerGone.
        """
        reader = self._reader
        async with aclosing(self._turn.events()) as events:
            async for event in events:
                piece = reader.read(event)
                if self._context is not None:
                    self._context.note(event, piece)
                if piece is not NOTHING:
                    self._note_begin()
                    yield piece
                elif reader.has_calls:
                    self._note_begin()
                if reader.totals is not None:
                    self.progress.totals = reader.totals
                    self.progress.done_reason = reader.totals.done_reason
                    if self._context is not None:
                        self._context_ids = await self._context.finish(reader.totals)
                    return
        raise RunnerGone("its answer broke off")

    def _note_begin(self) -> None:
        progress = self.progress
        if progress.first_token_seconds is None:
            progress.first_token_seconds = progress.elapsed_seconds()
            self._observer.first_token(
                progress.kind.value,
                model=progress.model,
                seconds=progress.first_token_seconds,
            )

    def piece_object(self, piece: Piece) -> dict[str, object]:
        """Make a line in the middle."""
        return translate.piece_reply(
            self.progress.kind, model=self._model, time_ns=time.time_ns(), piece=piece
        )

    def final_object(self, piece: Piece) -> dict[str, object]:
        """Make the last line, or the whole reply. The totals must be known."""
        assert self.progress.totals is not None
        load_seconds = self.progress.load_seconds + self._turn.load_seconds
        return translate.final_reply(
            self.progress.kind,
            self.progress.totals,
            model=self._model,
            time_ns=time.time_ns(),
            piece=piece,
            tool_calls=self._reader.tool_calls,
            context=self._context_ids,
            total_ns=round(self.progress.elapsed_seconds() * NANOSECONDS),
            load_ns=round(load_seconds * NANOSECONDS),
        )


class ClientGoneError(ConnectionError):
    """The client closed its connection while we wrote to it."""


async def send_whole(
    request: web.Request, reply: TurnReply, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Answer with the whole reply in one object."""
    async with aclosing(reply.pieces()) as pieces:
        whole = join([piece async for piece in pieces])
    response = json_response(reply.final_object(whole))
    response.headers.update(headers)
    reply.progress.response = response
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionResetError:
        reply.progress.note_client_gone()
    else:
        reply.progress.note_answered()
    return response


async def send_stream(
    request: web.Request, reply: TurnReply, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Answer line by line.

    Raises what the turn raises, which may be after the first line: see
    `end_in_failure`. Raises ClientGoneError.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": "application/x-ndjson",
            "X-Accel-Buffering": "no",
            **headers,
        }
    )
    reply.progress.response = response

    async def send(value: Mapping[str, object], *, is_last: bool = False) -> None:
        line = translate.to_line(value)
        try:
            if not response.prepared:
                await response.prepare(request)
            await (response.write_eof(line) if is_last else response.write(line))
        except ConnectionResetError as exc:
            raise ClientGoneError from exc

    async with aclosing(reply.pieces()) as pieces:
        async for piece in pieces:
            await send(reply.piece_object(piece))
    await send(reply.final_object(NOTHING), is_last=True)
    reply.progress.note_answered()
    return response


async def end_in_failure(progress: Progress, exc: Exception) -> web.StreamResponse:
    """Answer a request that failed, with what is still possible.

    Before the first line that is an error with its status, after it one last line.
    """
    response = progress.response
    if response is None or not response.prepared:
        failure = to_failure(exc)
        progress.status, progress.error = failure.status, failure.kind
        return failure_response(failure)
    if isinstance(exc, ClientGoneError):
        progress.note_client_gone()
        return response
    failure = to_failure(exc)
    progress.error = failure.kind
    if progress.total_seconds is None:
        line = translate.to_line(translate.error_reply(failure.message))
        try:
            await response.write_eof(line)
        except ConnectionResetError:
            progress.note_client_gone()
        else:
            progress.note_answered()
    return response
