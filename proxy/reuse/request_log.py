"""The recent requests, so that each can be explained by its id.

Rules:
1. A request that generates is in here from its start; of those that have ended the
   last `MAX_ENDED` stay.
2. Nothing in here is text of a prompt or of a reply, a token id or a namespace.
3. Whoever works for a request finds its record by its task (`current`): the front
   begins it, a turn adds its trace, and neither knows the other.
"""

import secrets
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from proxy.reuse.trace import TurnTrace

MAX_ENDED = 1000


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. It is filled in as the request goes on, and by its commit after."""

    route: str
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))
    started_at: float = field(default_factory=time.time)
    model: str = ""
    trace: TurnTrace | None = None
    is_running: bool = True
    status: int | None = None
    error: str = ""
    done_reason: str = ""
    first_token_seconds: float | None = None
    total_seconds: float | None = None

    def brief(self) -> dict[str, Any]:
        """Return what a list shows of it, as JSON-ready values."""
        trace = self.trace
        return {
            "id": self.request_id,
            "route": self.route,
            "model": self.model or (trace.model if trace else None),
            "started_at": _timestamp(self.started_at),
            "running": self.is_running,
            "status": self.status,
            "total_ms": _milliseconds(self.total_seconds),
            "decision": str(trace.plan.decision) if trace else None,
            "result": trace.result if trace else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all that is known of it, as JSON-ready values."""
        elapsed = self.total_seconds
        if self.is_running:
            elapsed = max(0.0, time.time() - self.started_at)
        return {
            "id": self.request_id,
            "route": self.route,
            "model": self.model or (self.trace.model if self.trace else None),
            "started_at": _timestamp(self.started_at),
            "running": self.is_running,
            "status": self.status,
            "error": self.error or None,
            "done_reason": self.done_reason or None,
            "first_token_ms": _milliseconds(self.first_token_seconds),
            "total_ms": _milliseconds(elapsed),
            "turn": self.trace.to_dict() if self.trace else None,
        }


class RequestLog:
    """The requests that run, and the last ones that have ended."""

    def __init__(self, *, max_ended: int = MAX_ENDED) -> None:
        self._max_ended = max_ended
        self._current: ContextVar[RequestRecord | None] = ContextVar(
            "request that this task serves", default=None
        )
        # the mutable state: by id, in the order of their start, and of their end
        self._running: dict[str, RequestRecord] = {}
        self._ended: dict[str, RequestRecord] = {}

    def __repr__(self) -> str:
        return f"<RequestLog {len(self._running)} running, {len(self._ended)} ended>"

    def begin(self, route: str) -> RequestRecord:
        """Note a request that this task serves from now on."""
        record = RequestRecord(route)
        self._running[record.request_id] = record
        self._current.set(record)
        return record

    def leave(self) -> None:
        """Note that this task serves none of the requests begun so far."""
        self._current.set(None)

    @property
    def current(self) -> RequestRecord | None:
        """The request that this task serves."""
        return self._current.get()

    def end(self, record: RequestRecord) -> None:
        """Note that a request has ended; forgets the oldest one beyond the bound."""
        if self._running.pop(record.request_id, None) is None:
            return
        record.is_running = False
        self._ended[record.request_id] = record
        if len(self._ended) > self._max_ended:
            del self._ended[next(iter(self._ended))]

    def find(self, request_id: str) -> RequestRecord | None:
        """Find a request by its id."""
        return self._running.get(request_id) or self._ended.get(request_id)

    def recent(self) -> Iterator[RequestRecord]:
        """Yield those that run, then those that have ended, the latest first."""
        yield from reversed(self._running.values())
        yield from reversed(self._ended.values())


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)
