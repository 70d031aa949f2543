"""What a store client is told, what it learns, and what it counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.store.wire import WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTiming:
    """The client's clocks, in seconds and beats."""

    beat_seconds: float = 0.02
    """Between two looks at calls in flight."""
    missed_beats: int = 4
    """So many without any answer open the circuit."""
    probe_seconds: float = 0.1
    """Between two probes while the circuit is open."""
    prompt_seconds: float = 0.04
    """A probe answered later than this does not close the circuit."""
    idle_seconds: float = 0.5
    """Between two probes while nothing goes on."""
    hello_seconds: float = 1.0
    """For connecting and the first answer."""
    first_backoff_seconds: float = 0.02
    last_backoff_seconds: float = 1.0


@dataclass(slots=True)
class ClientCounters:
    """What went wrong, and how often it connected: for who looks into a client."""

    errors: int = 0
    timeouts: int = 0
    circuit_openings: int = 0
    connections: int = 0


@dataclass(frozen=True, slots=True)
class StoreHello:
    """What a store said of itself when it was met."""

    pid: int
    kind: str
    capacity_bytes: int
    isolated: bool
    reason: str
    """Why it is not isolated, or not of the kind that was asked for; may be empty."""
    linger_seconds: float | None
    """None: a service, which nobody may kill."""

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> "StoreHello":
        """Read the answer to a hello. Raises WireError."""
        try:
            linger = answer["linger_seconds"]
            return cls(
                pid=int(answer["pid"]),
                kind=str(answer["kind"]),
                capacity_bytes=int(answer["capacity_bytes"]),
                isolated=bool(answer["isolated"]),
                reason=str(answer["reason"]),
                linger_seconds=None if linger is None else float(linger),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise WireError(f"the store's hello was not understood: {exc!r}") from exc
