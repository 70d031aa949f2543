"""Every exception of kvbus, by whose fault it is.

    KvbusError
    ├── ConfigError              the operator's: one clear line, exit code 2
    ├── RequestError             the client's: an HTTP status and Ollama's error text
    ├── UpstreamError            a runner's: keeps its status and body
    │   └── RunnerGone           the runner died or cannot be reached
    └── ReuseError               ours: the request is then served without reuse
        ├── StoreError           the block store gave up, refused or is away
        │   └── StoreTimeout     ... did not answer within its deadline
        ├── SlotError            saving or restoring a slot failed
        └── StateFormatError     a sequence-state file that we do not understand

`ReuseError` never reaches a client: the orchestrator catches it in one place and
forwards the request as it came.
"""


class KvbusError(Exception):
    """Root of all exceptions that kvbus raises on purpose."""


class ConfigError(KvbusError):
    """A setting or a part of the environment is wrong; the text says which."""


class RequestError(KvbusError):
    """The client's request cannot be served; carries the status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class UpstreamError(KvbusError):
    """A runner answered with an error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"runner answered {status}: {body[:200]}")
        self.status = status
        self.body = body


class RunnerGone(UpstreamError):
    """The runner died, or its connection broke, before its answer was complete."""

    def __init__(self, reason: str) -> None:
        super().__init__(500, f"model runner has unexpectedly stopped: {reason}")
        self.reason = reason


class ReuseError(KvbusError):
    """Sharing KV failed; the request goes on without it."""


class StoreError(ReuseError):
    """The block store is away, refused, or failed."""


class StoreTimeout(StoreError):
    """The block store did not answer within its deadline."""


class SlotError(ReuseError):
    """A slot could not be saved or restored."""


class StateFormatError(ReuseError):
    """A sequence-state file is damaged, or of a kind that is not understood."""
