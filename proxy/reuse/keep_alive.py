"""When a model has been idle for long enough.

Rules:
1. The time runs while nobody uses the model: from the end of the last use, or from
   when it was loaded. A use stops the clock.
2. The value of the last use that states one holds, until the model is freed; a model
   that is loaded anew begins with the default.
3. What is due is asked again by whoever frees the model, after each wait: a use may
   have come between.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class KeepAlive:
    """Counts the uses of one model; calls `on_idle` when it was idle long enough."""

    def __init__(self, *, default_seconds: float, on_idle: Callable[[], None]) -> None:
        """Infinity seconds are for ever."""
        self._default_seconds = default_seconds
        self._on_idle = on_idle
        # the mutable state
        self._seconds = default_seconds
        self._num_uses = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at: float | None = None
        """By the loop's clock; None while it is used, and once it is freed."""
        self._is_over = False

    @contextmanager
    def use(self, seconds: float | None = None) -> Iterator[None]:
        """Keep the model while the block runs, and so many seconds after it."""
        self._stop_clock()
        self._num_uses += 1
        if seconds is not None:
            self._seconds = seconds
        try:
            yield
        finally:
            self._num_uses -= 1
            if not self._num_uses:
                self._start_clock()

    @property
    def remaining_seconds(self) -> float:
        """How long the model is kept from now on, if nobody uses it; or infinity."""
        if self._ends_at is None:
            return self._seconds
        return max(0.0, self._ends_at - asyncio.get_running_loop().time())

    @property
    def is_due(self) -> bool:
        """Whether the model is to be freed now."""
        return self._is_over

    def note_loaded(self) -> None:
        """Start the clock of a model that came up, unless it runs already."""
        if not self._num_uses and self._ends_at is None:
            self._start_clock()

    def note_freed(self) -> None:
        """Forget what was said about the model until it is loaded again."""
        self._stop_clock()
        self._seconds = self._default_seconds

    def end(self) -> None:
        """Let the time be over: now, or when the last use ends."""
        self._seconds = 0.0
        if not self._num_uses:
            self._start_clock()

    def close(self) -> None:
        """Call nobody any more."""
        self._stop_clock()

    def _start_clock(self) -> None:
        self._stop_clock()
        loop = asyncio.get_running_loop()
        self._ends_at = loop.time() + self._seconds
        if self._seconds <= 0.0:
            self._end_clock()
        elif math.isfinite(self._seconds):
            self._timer = loop.call_at(self._ends_at, self._end_clock)

    def _end_clock(self) -> None:
        self._timer = None
        self._is_over = True
        self._on_idle()

    def _stop_clock(self) -> None:
        self._ends_at = None
        self._is_over = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
