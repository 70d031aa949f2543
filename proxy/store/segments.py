"""The RAM that a store gives to Mooncake: files in memory that we map ourselves too.

Mooncake maps each file (a memfd, named by its path below /proc) as a segment of its
own; we keep a second mapping. So an object's address can be turned into memory that
stays valid whatever becomes of the client.

Rules:
1. `locate` gives out memory only for a range that lies in one segment, whole.
2. Segments are added as they are needed: first touch of fresh pages runs at a tenth
   of the speed of memcpy, so a segment's pages are touched before anybody waits for
   them, where there is time.
3. A segment is never unmapped or shrunk while the process lives.
"""

import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proxy.errors import StoreError
from proxy.store.envelope import Bytes
from proxy.store.paging import allocate_pages, map_pages

logger = logging.getLogger(__name__)

MountSegment = Callable[[str, int], bool]
"""Mounts the file at a path with its size; False when that failed."""


@dataclass(slots=True)
class _Segment:
    fd: int
    size: int
    memory: Bytes
    """Our mapping."""
    base: int = 0
    """Where Mooncake mapped it; 0 while it is not mounted."""
    is_touched: bool = False

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"


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
        return sum(segment.size for segment in self._segments if segment.base)

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
            mapping = mmap.mmap(fd, self._segment_bytes)
        except OSError as exc:
            raise StoreError(f"no memory for the store: {exc}") from exc
        memory = np.frombuffer(mapping, dtype=np.uint8)
        segment = _Segment(fd, self._segment_bytes, memory)
        if touch:
            allocate_pages(fd, segment.size)
        _mount(segment, mount)
        self._segments.append(segment)

    def touch(self) -> None:
        """Fault in, in both mappings, the pages of what is mounted."""
        for segment in self._segments:
            if segment.base and not segment.is_touched:
                segment.is_touched = True
                allocate_pages(segment.fd, segment.size)
                map_pages(segment.base, segment.size)
                map_pages(segment.memory.ctypes.data, segment.size)

    def locate(self, address: int, size: int) -> Bytes | None:
        """Return the memory of an object, or None if it is not wholly ours."""
        for segment in self._segments:
            start = address - segment.base
            if segment.base and start >= 0 and start + size <= segment.size:
                return segment.memory[start : start + size]
        return None


def _mount(segment: _Segment, mount: MountSegment) -> None:
    before = _find_mappings(segment.fd)
    if not mount(segment.path, segment.size):
        raise StoreError("Mooncake refuses a segment")
    added = [
        (start, stop)
        for start, stop in _find_mappings(segment.fd)
        if (start, stop) not in before
    ]
    if len(added) != 1 or added[0][1] - added[0][0] != segment.size:
        raise StoreError("Mooncake's mapping of a segment was not found")
    segment.base = added[0][0]


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
