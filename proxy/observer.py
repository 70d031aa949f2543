"""Counts requests, and logs those that generate and had no turn.

Rules:
1. Every request that has a status is counted once, when it has ended, by its route as
   it is registered: what a client sends makes no label.
2. What the front tells of a generating request is believed before the status sent:
   it knows of clients that left before the end.
3. A request with a turn has its line from the orchestrator, which knows more.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from aiohttp import web
from aiohttp.typedefs import Middleware

from proxy.metrics import Metrics
from proxy.ollama.backend import RequestOutcome

logger = logging.getLogger("proxy.request")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

UNKNOWN_ROUTE = "other"
CLIENT_GONE_STATUS = 499


class MetricsObserver:
    """A `RequestObserver` over the metrics of one application."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: ContextVar[list[int]] = ContextVar("status told by the front")

    def middleware(self) -> Middleware:
        """Return the middleware that counts; it wants to be the outermost one."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            told: list[int] = []
            self._told.set(told)
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

    def started(self, route: str) -> None:
        """Note a generating request that has arrived."""
        self._metrics.requests_in_flight.labels(route).inc()

    def first_token(self, route: str, *, model: str, seconds: float) -> None:
        """Note the first text of a reply."""
        self._metrics.time_to_first_token.labels(model).observe(seconds)

    def finished(self, outcome: RequestOutcome) -> None:
        """Note the end of a request."""
        route = outcome.route
        self._metrics.requests_in_flight.labels(route).dec()
        self._told.get([]).append(outcome.status)
        if outcome.request_id and not outcome.error:
            return
        logger.info(
            "event=request id=%s route=%s model=%s status=%d error=%s"
            " prompt_tokens=%d total_ms=%.1f",
            outcome.request_id or "-",
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
