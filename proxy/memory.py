"""How much memory the block store may take by default.

A quarter of what is free now, at most 4 GiB, in whole segments. What a control group
leaves counts as well as what the machine has. Rules:

1. Every group above us counts, of cgroup v2 and of v1.
2. Files that a group has read and does not use (`inactive_file`) are free memory: the
   kernel drops them first. A model that was just read would else fill its container.
3. What cannot be read sets no limit.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_DEFAULT_BYTES = 4 << 30
SEGMENT_BYTES = 256 << 20
SMALL_SEGMENT_BYTES = 64 << 20

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def default_store_bytes(*, proc: Path = PROC, cgroups: Path = CGROUP_ROOT) -> int:
    """Return the default size of the store's memory, in bytes."""
    quarter = min(_free_bytes(proc, cgroups) // 4, MAX_DEFAULT_BYTES)
    step = SEGMENT_BYTES if quarter >= SEGMENT_BYTES else SMALL_SEGMENT_BYTES
    return max(SMALL_SEGMENT_BYTES, quarter // step * step)


def _free_bytes(proc: Path, cgroups: Path) -> int:
    left = [_left_in(group, files) for group, files in _groups(proc, cgroups)]
    known = [amount for amount in left if amount is not None]
    return min([_machine_bytes(proc), *known])


def _machine_bytes(proc: Path) -> int:
    try:
        fields = _fields((proc / "meminfo").read_text())
        return fields["MemAvailable:"] << 10
    except (OSError, KeyError):  # half of what there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@dataclass(frozen=True, slots=True)
class _Files:
    """How one version of cgroups names what we read."""

    limit: str
    used: str
    inactive: str
    """A line of memory.stat that has the group and all below it."""


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)  # which says "no limit" by a number larger than any memory


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the groups that count our memory, and all above them.

    In a container the names may be those of the host, and its own group is the root:
    a group that is not there sets no limit.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            root, files = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", _V1
        else:
            continue
        group = root / name.lstrip("/")
        for path in (group, *group.parents):
            if path.is_relative_to(root):
                yield path, files


def _left_in(group: Path, files: _Files) -> int | None:
    """Return the bytes that a group leaves; None where it sets no limit."""
    try:
        limit = int((group / files.limit).read_text())  # "max": a ValueError
        used = int((group / files.used).read_text())
    except (OSError, ValueError):
        return None
    try:
        inactive = _fields((group / "memory.stat").read_text()).get(files.inactive, 0)
    except OSError:
        inactive = 0
    return max(0, limit - used + inactive)


def _fields(text: str) -> dict[str, int]:
    """Read lines of a name and a number."""
    return {
        words[0]: int(words[1])
        for words in map(str.split, text.splitlines())
        if len(words) > 1 and words[1].isdigit()
    }
