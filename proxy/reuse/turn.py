"""A turn that holds its slot: it forwards the prompt and hears the reply.

Rules:
1. The slot is pinned and named in each forwarded body.
2. The stream stops after the engine's final event, or when its reader leaves.
3. `totals` are set exactly when the answer came to its end.
4. A runner that dies before the first word of its answer costs time only: the turn
   moves to another slot and asks again. After the first word nothing is asked twice.
5. What the slot holds of another namespace is not reused.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from proxy.errors import RunnerGone
from proxy.llamacpp.answers import END_OF_EVENT, EngineAnswer
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.totals import (
    EngineTotals,
    TotalsScanner,
    is_final,
    of_pieces,
    read_event,
)
from proxy.prefix.hashing import TokenIds
from proxy.reuse.plan import RequestedTurn
from proxy.reuse.slots import NO_TOKENS, Slot
from proxy.reuse.trace import TurnTrace

COMPLETION_PATH = "/completion"
OK_STATUS = 200

_Answer = TypeVar("_Answer")
_Word = TypeVar("_Word")


@dataclass(slots=True, eq=False)
class ActiveTurn:
    """A turn that holds its slot."""

    request: RequestedTurn
    slot: Slot
    trace: TurnTrace
    move: Callable[["ActiveTurn", RunnerGone], Awaitable[None]]
    """Takes it to another slot, prepared; raises the error where that must not be."""
    keeps_slot: bool = True
    """Whether the engine may reuse what the slot holds."""
    generated: list[int] = field(default_factory=list)
    num_events: int = 0
    """Of a streamed answer, so far."""
    held_seconds: float = 0.0
    """How long its reader was busy with them: the engine went on meanwhile."""
    is_refused: bool = False
    """Whether the runner answered with an error."""
    totals: EngineTotals | None = None
    early: list[EngineTotals] = field(default_factory=list)
    """Of the pieces of the prompt that were prefilled before it was forwarded."""
    boundaries: list[int] = field(default_factory=list)
    """Up to where they went, in tokens."""
    wanted: list[int] = field(default_factory=list)
    """Up to where they shall go."""

    @property
    def request_id(self) -> str:
        """Short, unique, safe in a header and in a log."""
        return self.trace.request_id

    @property
    def load_seconds(self) -> float:
        """How long it waited for a runner to be loaded."""
        return self.trace.stages.get("load", 0.0)

    @property
    def decision(self) -> str:
        """What was done before the prefill."""
        return str(self.trace.plan.decision)

    @property
    def reason(self) -> str:
        """Why."""
        return self.trace.plan.reason

    @property
    def restored_tokens(self) -> int:
        """How many tokens were restored from the store."""
        return self.trace.restored_tokens

    def start_over(self) -> None:
        """Forget what was prefilled for it: another slot knows nothing of that."""
        self.early.clear()
        self.boundaries.clear()
        self.wanted = []

    def take_slot(self) -> None:
        """Note that what another namespace left in the slot is gone."""
        self.slot.namespace = self.request.reuse.namespace
        self.keeps_slot = True

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Forward the prompt to the slot; yield the engine's events up to the last.

        Raises UpstreamError before the first event and RunnerGone at any time.
        """
        async with self._answered(self._ask_events, _next_event) as (events, event):
            while True:
                if is_final(event):
                    self.totals = of_pieces(read_event(event), self.early)
                    event = self._told_whole(event, self.totals)
                else:
                    self.generated += event.get("tokens", ())
                self.num_events += 1
                handed = time.monotonic()
                try:
                    yield event
                finally:
                    self.held_seconds += time.monotonic() - handed
                if self.totals is not None:
                    return
                event = await _next_event(events)

    def _told_whole(
        self, event: dict[str, Any], totals: EngineTotals
    ) -> dict[str, Any]:
        """Return the last event, with the prompt's earlier pieces counted in."""
        if not self.early:
            return event
        counts = {
            "cache_n": totals.cached_tokens,
            "prompt_n": totals.prefilled_tokens,
            "prompt_ms": 1e3 * (totals.prefill_seconds or 0.0),
        }
        return {**event, "timings": {**event["timings"], **counts}}

    @asynccontextmanager
    async def forward(self) -> AsyncIterator["RelayedAnswer"]:
        """Send the body as it is, with the slot named; relay the answer unchanged.

        Raises RunnerGone.
        """
        async with self._answered(self._ask_answer, _first_chunk) as (answer, first):
            yield RelayedAnswer(self, answer, *first)

    @asynccontextmanager
    async def _answered(
        self,
        ask: Callable[[LlamaServerClient], AbstractAsyncContextManager[_Answer]],
        hear: Callable[[_Answer], Awaitable[_Word]],
    ) -> AsyncIterator[tuple[_Answer, _Word]]:
        """Ask the slot's runner, or the next one (rule 4), and hear its first word."""
        while True:
            gone: RunnerGone
            with self.trace.stage("forward"):
                async with AsyncExitStack() as stack:
                    try:
                        runner = self.slot.runner
                        runner.check_process()
                        answer = await stack.enter_async_context(ask(runner.client))
                        word = await hear(answer)
                    except RunnerGone as exc:
                        gone = exc
                    else:
                        yield answer, word
                        return
            await self.move(self, gone)

    def _ask_events(
        self, client: LlamaServerClient
    ) -> AbstractAsyncContextManager[AsyncIterator[dict[str, Any]]]:
        body = {
            **self.request.body,
            "id_slot": self.slot.slot_id,
            "cache_prompt": self.keeps_slot,
            "stream": True,
            # The engine looks whether its client is still there when it has something
            # to say. Without progress that is not before the first token, as long as
            # another slot keeps it talking.
            "return_progress": True,
        }
        if self.is_prompt_exact:
            body["prompt"] = np.ascontiguousarray(self.request.token_ids)
            body["return_tokens"] = True
        return client.stream_completion(self.request.path, body)

    def _ask_answer(
        self, client: LlamaServerClient
    ) -> AbstractAsyncContextManager[EngineAnswer]:
        body = {**self.request.body, "id_slot": self.slot.slot_id}
        if not self.keeps_slot:
            body["cache_prompt"] = False
        return client.open_answer(self.request.path, body)

    @property
    def is_prompt_exact(self) -> bool:
        """Whether the engine is given token ids, and not something to render."""
        return self.request.path == COMPLETION_PATH

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in events while it is generated."""
        return self.is_prompt_exact or bool(self.request.body.get("stream", True))

    def reply_ids(self) -> TokenIds:
        """Return the ids of the reply that are in the slot; none where one is unknown.

        The engine sends no event for a token whose text it holds back: the middle of
        a character, or the possible beginning of a stop string.
        """
        assert self.totals is not None
        num_decoded = self.totals.decoded_tokens
        if len(self.generated) != num_decoded - self.totals.ended_by_eos:
            return NO_TOKENS
        return np.array(self.generated[: max(0, num_decoded - 1)], dtype=np.int32)


async def _next_event(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the next event that is part of the answer."""
    while "prompt_progress" in (event := await anext(events)):
        pass
    return event


_Chunks = AsyncIterator[bytes]


async def _first_chunk(answer: EngineAnswer) -> tuple[bytes, _Chunks]:
    """Return the first piece of an answer, empty if there is none, and the rest."""
    if not answer.is_event_stream:
        return await answer.read(), _nothing()
    events = answer.events()
    return await anext(events, b""), events


async def _nothing() -> AsyncGenerator[bytes]:
    return
    yield b""


class RelayedAnswer:
    """An answer of the runner on its way to the client, which it reaches unchanged."""

    def __init__(
        self, turn: ActiveTurn, answer: EngineAnswer, first: bytes, rest: _Chunks
    ) -> None:
        self._turn = turn
        self._answer = answer
        self._first = first
        self._rest = rest

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._answer.status

    @property
    def content_type(self) -> str:
        """The `Content-Type` as sent."""
        return self._answer.content_type

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self._answer.is_event_stream

    @property
    def totals(self) -> EngineTotals | None:
        """The engine's counts; None before the end of the body."""
        return self._turn.totals

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield whole server-sent events, or pieces of a body. Raises RunnerGone.

        The turn knows its totals before the last piece is handed over.
        """
        scanner = TotalsScanner()
        is_read = self._answer.is_event_stream or self.status == OK_STATUS
        self._turn.is_refused = self.status != OK_STATUS
        turn, chunk = self._turn, self._first
        while chunk:
            turn.num_events += chunk.count(END_OF_EVENT)
            if is_read:
                scanner.feed(chunk)
                totals = scanner.totals
                turn.totals = totals and of_pieces(totals, turn.early)
            handed = time.monotonic()
            try:
                yield chunk
            finally:
                turn.held_seconds += time.monotonic() - handed
            chunk = await anext(self._rest, b"")
