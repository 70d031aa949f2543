"""How much memory the block store may take by default.

A quarter of what is free now, at most 4 GiB, in whole segments. What a control group
leaves counts as well as what the machine has (cgroup v2: memory.max less
memory.current, of every group above us).
"""

import os
from pathlib import Path

MAX_DEFAULT_BYTES = 4 << 30
SEGMENT_BYTES = 256 << 20
SMALL_SEGMENT_BYTES = 64 << 20

CGROUP_ROOT = Path("/sys/fs/cgroup")


def default_store_bytes() -> int:
    """Return the default size of the store's memory, in bytes."""
    quarter = min(_free_bytes() // 4, MAX_DEFAULT_BYTES)
    step = SEGMENT_BYTES if quarter >= SEGMENT_BYTES else SMALL_SEGMENT_BYTES
    return max(SMALL_SEGMENT_BYTES, quarter // step * step)


def _free_bytes() -> int:
    left = [_machine_bytes(), *(_left_in(group) for group in _cgroups())]
    return min(amount for amount in left if amount is not None)


def _machine_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux: half of what there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10


def _cgroups() -> list[Path]:
    """Return our cgroup and all above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("0::"):
            group = CGROUP_ROOT / line[3:].lstrip("/")
            return [group, *(p for p in group.parents if p.is_relative_to(CGROUP_ROOT))]
    return []


def _left_in(group: Path) -> int | None:
    """Return the bytes that a cgroup leaves; None where it sets no limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
