"""A llama-server's answer that is passed on as it is, cut into server-sent events.

Rules:
1. What the engine sent reaches the reader byte for byte, with one exception: events
   that tell the progress of the prefill, which kvbus itself has asked for.
2. Only whole events are handed over; what follows the last blank line comes at the
   end of the stream.
3. A long prefill is not silent: where nothing but progress has come for some time, a
   comment takes its place, which clients pass over. Some give up without a sign.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

EVENT_STREAM = "text/event-stream"

MAX_QUIET_SECONDS = 20.0
"""Cline waits 30 s for the headers of an answer, others a few minutes."""

SIGN_OF_LIFE = b": prefill\n\n"

_PROGRESS = b'"prompt_progress"'
END_OF_EVENT = b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """Status and type of an answer, and its body while it comes."""

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]
    """Pieces of the body as they come. Raises RunnerGone where it breaks off."""
    keeps_progress: bool
    """Whether the client itself has asked for the progress of the prefill."""
    max_quiet_seconds: float = MAX_QUIET_SECONDS

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self.content_type.partition(";")[0].strip() == EVENT_STREAM

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield whole events with their closing blank lines, all that came at once.

        Raises RunnerGone.
        """
        buffer = bytearray()
        heard = time.monotonic()
        async for chunk in self.chunks:
            searched = max(0, len(buffer) - 1)
            buffer += chunk
            end = buffer.rfind(END_OF_EVENT, searched)
            if end < 0:
                continue
            stop = end + len(END_OF_EVENT)
            events = bytes(buffer[:stop])
            del buffer[:stop]
            if not self.keeps_progress and _PROGRESS in events:
                events = _without_progress(events)
            now = time.monotonic()
            if not events and now - heard >= self.max_quiet_seconds:
                events = SIGN_OF_LIFE
            if events:
                heard = now
                yield events
        if buffer:
            yield bytes(buffer)

    async def read(self) -> bytes:
        """Return the whole body. Raises RunnerGone."""
        return b"".join([chunk async for chunk in self.chunks])


def _without_progress(events: bytes) -> bytes:
    kept = [
        event + END_OF_EVENT
        for event in events.split(END_OF_EVENT)
        if event and _PROGRESS not in event
    ]
    return b"".join(kept)
