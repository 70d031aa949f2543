"""Every Prometheus metric of kvbus, in one place (docs/metrics.md explains them).

A registry of its own per application: two applications in one process do not mix.
Labels are bounded: models that are served, routes that exist, decisions, stages.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvbus_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(
                f"kvbus_{name}",
                text,
                labels,
                registry=registry,
                buckets=SECONDS_BUCKETS,
            )

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvbus_{name}", text, labels, registry=registry)

        self.requests = counter(
            "requests_total", "Requests answered.", "route", "status"
        )
        self.requests_in_flight = gauge(
            "requests_in_flight", "Generating requests being served.", "route"
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "From the receipt of a request to its first text.",
            "model",
        )
        self.avoided_tokens = counter(
            "avoided_prefill_tokens_total",
            "Prompt tokens not evaluated thanks to a restore, confirmed by the engine.",
            "model",
        )
        self.prefilled_tokens = counter(
            "prefilled_tokens_total",
            "Prompt tokens evaluated.",
            "model",
        )
        self.queried_tokens = counter(
            "prefix_cache_queried_tokens_total",
            "Prompt tokens of all turns.",
            "model",
        )
        self.hit_tokens = counter(
            "prefix_cache_hit_tokens_total",
            "Prompt tokens that the engine did not evaluate, for whatever reason.",
            "model",
        )
        self.decisions = counter(
            "decisions_total", "What was decided for a turn.", "decision", "reason"
        )
        self.lookups = counter(
            "store_lookups_total", "Store lookups: hit, miss or declined.", "result"
        )
        self.failed_open = counter(
            "failed_open_total",
            "Failures of sharing after which a request went on without it.",
            "stage",
        )
        self.restore_ineffective = counter(
            "restore_ineffective_total",
            "Restores after which the engine reused less than was restored.",
            "model",
        )
        self.restored_bytes = counter("restored_bytes_total", "KV put into slots.")
        self.committed_bytes = counter("committed_bytes_total", "KV put into it.")
        self.commits = counter("commits_total", "Commits, by result.", "result")
        self.phase = histogram(
            "phase_seconds", "Duration of the phases of a turn.", "phase"
        )
        self.paused = gauge("paused", "Whether sharing is switched off.")
        self.slots = gauge("slots", "Slots of runners that are ready.", "model")
        self.slots_leased = gauge("slots_leased", "Slots in use.", "model")
        self.waiting = gauge("waiting_requests", "Requests in the queue.", "model")
        self.runner_restarts = counter(
            "runner_failures_total",
            "Ends and failed starts.",
            "model",
        )
        self.store_errors = counter(
            "store_errors_total", "Calls to the store that failed.", "call"
        )
        self.store_timeouts = counter(
            "store_timeouts_total", "Calls to the store without an answer.", "call"
        )
        self.store_up = gauge("store_up", "Whether the block store can be used now.")
        self.store_used_bytes = gauge("store_used_bytes", "Bytes that the store holds.")
        self.store_capacity_bytes = gauge(
            "store_capacity_bytes", "Bytes that the store may hold."
        )
        self.store_blocks = gauge("store_blocks", "Blocks that the store holds.")
