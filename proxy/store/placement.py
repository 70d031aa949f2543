"""On which CPU a thread runs, and where it may.

Rules:
1. All of this is advice: where the system has no such thing, nothing happens.
2. A thread is never left without a CPU, nor given one that the process may not use.
"""

import contextlib
import ctypes
import os
import sys

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_ALLOWED = frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else None
"""The CPUs of this process, as it began."""


def num_cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(_ALLOWED) if _ALLOWED else os.cpu_count() or 1


def current_cpu() -> int | None:
    """Return the CPU that the calling thread runs on; None where nobody knows."""
    if _libc is None:
        return None
    cpu = int(_libc.sched_getcpu())
    return cpu if cpu >= 0 else None


def keep_off(cpu: int) -> None:
    """Have the calling thread run on any CPU of this process but `cpu`."""
    if sys.platform == "linux" and _ALLOWED:
        with contextlib.suppress(OSError):  # the CPUs of the process have changed
            os.sched_setaffinity(0, _ALLOWED - {cpu} or _ALLOWED)
