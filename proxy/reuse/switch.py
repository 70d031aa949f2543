"""The switch by which an operator turns sharing off and on while kvbus runs.

Rules:
1. While it is off no turn restores, and none begins a commit: every request is
   forwarded plainly. What is under way then is finished.
2. It forgets nothing: stored blocks and what slots hold are as before.
"""

import time

from proxy.metrics import Metrics


class SharingSwitch:
    """Whether KV is shared at the moment; a new process shares."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # the mutable state
        self.is_paused = False
        self.changed_at: float | None = None
        """Seconds since the epoch; None: never."""

    def __repr__(self) -> str:
        return f"<SharingSwitch {'off' if self.is_paused else 'on'}>"

    def set_paused(self, is_paused: bool) -> bool:
        """Turn sharing off or on; return whether that changed anything."""
        if self.is_paused == is_paused:
            return False
        self.is_paused = is_paused
        self.changed_at = time.time()
        self._metrics.paused.set(is_paused)
        return True
