"""Lets calls into foreign code be given up: the caller goes on, the thread may hang.

Rules:
1. A call runs on a thread of the gate; its caller waits for the result, for the end
   of its time, or for `fail_all`, whichever comes first.
2. While the gate is shut, calls fail at once with the reason that it was shut for.
3. Threads that hang are left behind with their pool: a gate that opens again has a
   full set of fresh ones. `num_inside` counts those that are in foreign code still.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import TypeVar

from proxy.errors import StoreError, StoreTimeout

_T = TypeVar("_T")

MAX_CALLS = 6
"""At once; as many were tried on one Mooncake client."""
QUEUE_SECONDS = 0.25
"""A call that finds no free thread for so long is refused."""


class CallNotStartedError(StoreError):
    """The call was refused before it began: nothing of it will happen later."""


class CallGate:
    """Runs calls that may hang. Safe for several threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        # mutable state
        self._shut_reason: str | None = "it has not started yet"
        self._pool = self._new_pool()
        self._outstanding: set[Future[object]] = set()
        self.num_inside = 0

    def __repr__(self) -> str:
        return f"<CallGate shut={self._shut_reason!r} inside={self.num_inside}>"

    @property
    def shut_reason(self) -> str | None:
        """Why calls fail; None while the gate is open."""
        return self._shut_reason

    def run(self, call: Callable[[], _T], *, timeout_seconds: float) -> _T:
        """Return what `call` returns.

        Raises CallNotStartedError; StoreError or StoreTimeout where the call was given
        up and may still be going on; or the call's own error.
        """
        end = time.monotonic() + timeout_seconds
        result: Future[_T] = Future()
        with self._condition:
            self._condition.wait_for(
                lambda: self._shut_reason or len(self._outstanding) < MAX_CALLS,
                timeout=min(QUEUE_SECONDS, timeout_seconds),
            )
            if self._shut_reason:
                raise CallNotStartedError(self._shut_reason)
            if len(self._outstanding) >= MAX_CALLS:
                raise CallNotStartedError("too many calls are in flight")
            self._outstanding.add(result)  # type: ignore[arg-type]  # only ever failed
            self._condition.notify_all()
            self._pool.submit(self._enter, result, call)
        try:
            return result.result(timeout=end - time.monotonic())
        except TimeoutError as exc:
            if result.done():
                raise
            raise StoreTimeout("the block store took too long") from exc

    def wait_for_call(self, timeout_seconds: float) -> bool:
        """Wait until a call is outstanding; return whether one is."""
        with self._condition:
            return self._condition.wait_for(
                lambda: bool(self._outstanding), timeout=timeout_seconds
            )

    def fail_all(self, reason: str) -> None:
        """Shut the gate; every outstanding call fails with `reason`."""
        with self._condition:
            self._shut_reason = reason
            outstanding, self._outstanding = self._outstanding, set()
            if outstanding:
                self._pool.shutdown(wait=False)
                self._pool = self._new_pool()
            self._condition.notify_all()
        for result in outstanding:
            _finish(result, error=StoreError(reason))

    def open(self) -> None:
        """Let calls in again."""
        with self._condition:
            self._shut_reason = None

    def _enter(self, result: Future[_T], call: Callable[[], _T]) -> None:
        if result.done():
            return  # given up while it waited for this thread
        with self._condition:
            self.num_inside += 1
        try:
            value = call()
        except BaseException as exc:
            _finish(result, error=exc)
        else:
            _finish(result, value)
        finally:
            with self._condition:
                self.num_inside -= 1
                self._outstanding.discard(result)
                self._condition.notify_all()

    @staticmethod
    def _new_pool() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="mooncake")


def _finish(
    result: Future[_T], value: _T | None = None, *, error: BaseException | None = None
) -> None:
    try:
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]  # None is a value of T
    except InvalidStateError:
        return  # given up before, or answered just now
