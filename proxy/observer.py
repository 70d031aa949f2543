"""Counts what the front tells about requests, and logs those that had no turn.

A request with a turn has its line from the orchestrator, which knows more.
"""

import logging

from proxy.metrics import Metrics
from proxy.ollama.backend import RequestOutcome

logger = logging.getLogger("proxy.request")


class MetricsObserver:
    """A `RequestObserver` over the metrics of one application."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

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
        self._metrics.requests.labels(route, str(outcome.status)).inc()
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
