"""The RAM that a store gives to Mooncake, and how to look into it.

Mooncake maps each of our files in memory (a memfd, named by its path below /proc) as
a segment; where, this process's list of mappings tells. So an object's address can be
turned into memory, and the memory can be got ready before it is used.

Rules:
1. `locate` gives out memory only for a range that lies in one segment, whole.
2. Segments are added as they are needed: first touch of fresh pages runs at a tenth
   of the speed of memcpy, so a segment's pages are touched before anybody waits for
   them, where there is time.
3. A segment stays mapped while the client is open, and that is closed only after
   every call has ended, by a process that ends itself.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proxy.errors import StoreError
from proxy.store.envelope import Bytes
from proxy.store.paging import allocate_pages, map_pages

MountSegment = Callable[[str, int], bool]
"""Mounts the file at a path with its size; False when that failed."""


@dataclass(slots=True)
class _Segment:
    fd: int
    size: int
    base: int
    """Where Mooncake mapped it."""
    memory: Bytes
    """The same, to look into."""
    is_touched: bool = False


class Segments:
    """The segments of one store process; grown by one thread at a time."""

    def __init__(self, *, segment_bytes: int, max_segments: int) -> None:
        self._segment_bytes = segment_bytes
        self._max_segments = max_segments
        # mutable state
        self._segments: list[_Segment] = []

    def __repr__(self) -> str:
        return f"<Segments {len(self._segments)} of {self._max_segments}>"

    @property
    def mounted_bytes(self) -> int:
        """Size of what is mounted now."""
        return sum(segment.size for segment in self._segments)

    @property
    def limit_bytes(self) -> int:
        """Size of all segments that there may be."""
        return self._segment_bytes * self._max_segments

    @property
    def can_grow(self) -> bool:
        """Whether the limit allows another segment."""
        return len(self._segments) < self._max_segments

    def grow(self, mount: MountSegment, *, touch: bool) -> None:
        """Add a segment; with `touch` its pages are faulted in first.

        Raises StoreError when Mooncake or the system refuses.
        """
        try:
            fd = os.memfd_create("kvbus-segment", os.MFD_CLOEXEC)
            os.ftruncate(fd, self._segment_bytes)
        except OSError as exc:
            raise StoreError(f"no memory for the store: {exc}") from exc
        size = self._segment_bytes
        if touch:
            allocate_pages(fd, size)
        base = _mount(fd, size, mount)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
        self._segments.append(_Segment(fd, size, base, memory))

    def touch(self) -> None:
        """Fault in the pages of what is mounted. Raises StoreError."""
        for segment in list(self._segments):
            if not segment.is_touched:
                segment.is_touched = True
                allocate_pages(segment.fd, segment.size)
                map_pages(segment.base, segment.size)

    def locate(self, address: int, size: int) -> Bytes | None:
        """Return the memory of an object, or None if it is not wholly ours."""
        for segment in self._segments:
            start = address - segment.base
            if start >= 0 and start + size <= segment.size:
                return segment.memory[start : start + size]
        return None


def _mount(fd: int, size: int, mount: MountSegment) -> int:
    """Have a file mounted; return where it was mapped. Raises StoreError."""
    if not mount(f"/proc/{os.getpid()}/fd/{fd}", size):
        raise StoreError("Mooncake refuses a segment")
    mappings = _find_mappings(fd)
    if len(mappings) != 1:
        raise StoreError("Mooncake's mapping of a segment was not found")
    start, stop = mappings.pop()
    if stop - start != size:
        raise StoreError("Mooncake's mapping of a segment is not whole")
    return start


def _find_mappings(fd: int) -> set[tuple[int, int]]:
    """Return where this process has mapped the file `fd`."""
    inode = str(os.fstat(fd).st_ino)
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[4] == inode and "memfd:" in fields[5]:
            start, _, stop = fields[0].partition("-")
            found.add((int(start, 16), int(stop, 16)))
    return found
