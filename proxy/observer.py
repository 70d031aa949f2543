"""Counts requests, keeps those that generate, and logs those that had no turn.

Rules:
1. Every request that has a status is counted once, when it has ended, by its route as
   it is registered: what a client sends makes no label.
2. What the front tells of a generating request is believed before the status sent:
   it knows of clients that left before the end.
3. A request with a turn has its line from the orchestrator, which knows more.
4. Every request that generates has an id, and is told it in `X-KVBus-Request-Id`,
   whatever becomes of it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web
from aiohttp.typedefs import Middleware

from proxy.metrics import Metrics
from proxy.ollama.backend import RequestOutcome
from proxy.reuse.request_log import RequestLog

logger = logging.getLogger("proxy.request")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

UNKNOWN_ROUTE = "other"
CLIENT_GONE_STATUS = 499
ID_HEADER = "X-KVBus-Request-Id"


class MetricsObserver:
    """A `RequestObserver` over the metrics and the requests of one application."""

    def __init__(self, metrics: Metrics, log: RequestLog) -> None:
        self._metrics = metrics
        self._log = log
        self._told: ContextVar[list[int]] = ContextVar("status told by the front")

    def middleware(self) -> Middleware:
        """Return the middleware that counts; it wants to be the outermost one."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            told: list[int] = []
            self._told.set(told)
            self._log.leave()
            status = 500
            try:
                response = await handler(request)
                status = response.status
            except web.HTTPException as exc:
                status = exc.status
                raise
            except asyncio.CancelledError:
                status = CLIENT_GONE_STATUS
                raise
            finally:
                status = told[0] if told else status
                self._metrics.requests.labels(_route(request), str(status)).inc()
            return response

        return count

    async def add_id(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell the client the id of its request; a signal of `on_response_prepare`."""
        record = self._log.current
        if record is not None:
            response.headers[ID_HEADER] = record.request_id

    def started(self, route: str) -> None:
        """Note a generating request that has arrived."""
        self._log.begin(route)
        self._metrics.requests_in_flight.labels(route).inc()

    def first_token(self, route: str, *, model: str, seconds: float) -> None:
        """Note the first text of a reply."""
        self._metrics.time_to_first_token.labels(model).observe(seconds)

    def finished(self, outcome: RequestOutcome) -> None:
        """Note the end of a request."""
        route = outcome.route
        self._metrics.requests_in_flight.labels(route).dec()
        self._told.get([]).append(outcome.status)
        record = self._log.current
        if record is not None:
            record.model, record.status = outcome.model, outcome.status
            record.error, record.done_reason = outcome.error, outcome.done_reason
            record.first_token_seconds = outcome.first_token_seconds
            record.total_seconds = outcome.total_seconds
            self._log.end(record)
        if outcome.request_id and not outcome.error:
            return
        logger.info(
            "event=request id=%s route=%s model=%s status=%d error=%s"
            " prompt_tokens=%d total_ms=%.1f",
            outcome.request_id or (record.request_id if record else "-"),
            route,
            outcome.model or "-",
            outcome.status,
            outcome.error or "-",
            outcome.num_prompt_tokens,
            1e3 * outcome.total_seconds,
        )


def _route(request: web.Request) -> str:
    """Name the route that was registered, not the path that was asked for."""
    resource = request.match_info.route.resource
    return UNKNOWN_ROUTE if resource is None else resource.canonical
