"""A turn that holds its slot: it forwards the prompt and hears the reply.

Rules:
1. The slot is pinned and named in each forwarded body.
2. The stream stops after the engine's final event, or when its reader leaves.
3. `totals` are set exactly when the answer came to its end.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proxy.llamacpp.answers import EngineAnswer
from proxy.llamacpp.totals import EngineTotals, TotalsScanner, is_final, read_event
from proxy.prefix.hashing import TokenIds
from proxy.reuse.plan import RequestedTurn
from proxy.reuse.slots import NO_TOKENS, Slot
from proxy.reuse.trace import TurnTrace

COMPLETION_PATH = "/completion"
OK_STATUS = 200


@dataclass(slots=True, eq=False)
class ActiveTurn:
    """A turn that holds its slot."""

    request: RequestedTurn
    slot: Slot
    trace: TurnTrace
    load_seconds: float
    generated: list[int] = field(default_factory=list)
    totals: EngineTotals | None = None

    @property
    def request_id(self) -> str:
        """Short, unique, safe in a header and in a log."""
        return self.trace.request_id

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

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Forward the prompt to the slot; yield the engine's events up to the last.

        Raises UpstreamError before the first event and RunnerGone at any time.
        """
        body = {
            **self.request.body,
            "id_slot": self.slot.slot_id,
            "cache_prompt": True,
            "stream": True,
            # The engine looks whether its client is still there when it has something
            # to say. Without progress that is not before the first token, as long as
            # another slot keeps it talking.
            "return_progress": True,
        }
        if self.is_prompt_exact:
            body["prompt"] = np.ascontiguousarray(self.request.token_ids)
            body["return_tokens"] = True
        self.slot.runner.check_process()
        client = self.slot.runner.client
        with self.trace.stage("forward"):
            async with client.stream_completion(self.request.path, body) as events:
                async for event in events:
                    if "prompt_progress" in event:
                        continue
                    if is_final(event):
                        self.totals = read_event(event)
                    else:
                        self.generated += event.get("tokens", ())
                    yield event
                    if self.totals is not None:
                        return

    @asynccontextmanager
    async def forward(self) -> AsyncIterator["RelayedAnswer"]:
        """Send the body as it is, with the slot named; relay the answer unchanged.

        Raises RunnerGone.
        """
        body = {**self.request.body, "id_slot": self.slot.slot_id}
        self.slot.runner.check_process()
        client = self.slot.runner.client
        with self.trace.stage("forward"):
            async with client.open_answer(self.request.path, body) as answer:
                yield RelayedAnswer(self, answer)

    @property
    def is_prompt_exact(self) -> bool:
        """Whether the engine is given token ids, and not something to render."""
        return self.request.path == COMPLETION_PATH

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


class RelayedAnswer:
    """An answer of the runner on its way to the client, which it reaches unchanged."""

    def __init__(self, turn: ActiveTurn, answer: EngineAnswer) -> None:
        self._turn = turn
        self._answer = answer

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._answer.status

    @property
    def content_type(self) -> str:
        """The `Content-Type` as sent."""
        return self._answer.content_type

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield whole server-sent events, or pieces of a body. Raises RunnerGone.

        The turn knows its totals before the last piece is handed over.
        """
        scanner = TotalsScanner()
        if self._answer.is_event_stream:
            async for event in self._answer.events():
                scanner.feed(event)
                self._turn.totals = scanner.totals
                yield event
        else:
            body = await self._answer.read()
            if self.status == OK_STATUS:
                scanner.feed(body)
                self._turn.totals = scanner.totals
            yield body
