"""Maps and unmaps the pages of large files in good time.

Page faults cost more than the copies that run into them: on one machine a gigabyte
of existing pages took 0.3 to 0.6 s to fault in by writing, 0.2 s by
MADV_POPULATE_WRITE, and 0.07 s by MADV_POPULATE_READ, which maps many pages at once;
pages of a file in memory are writable then too.

Rules:
1. Little at a time: who changes this process's memory keeps everybody else from it,
   and Python maps memory while it holds its own lock.
2. All of this is advice: an older kernel that refuses leaves it to the page faults.
"""

import ctypes
import mmap
import os

from proxy.errors import StoreError
from proxy.store.envelope import Bytes

_MADV_POPULATE_READ = 22
_MAP_BYTES = 8 << 20
_UNMAP_BYTES = 64 << 20
_ALLOCATE_BYTES = 8 << 20


def map_pages(address: int, size: int) -> None:
    """Map the existing pages of a mapped file in memory."""
    _advise(address, size, _MADV_POPULATE_READ, _MAP_BYTES)


def unmap_pages(memory: Bytes) -> None:
    """Unmap the pages of a mapped file; they come back when they are used."""
    _advise(memory.ctypes.data, memory.size, mmap.MADV_DONTNEED, _UNMAP_BYTES)


def allocate_pages(fd: int, size: int) -> None:
    """Have the system find and clear the pages of a file. Raises StoreError.

    That is most of what a first touch costs, and it holds up no other thread.
    """
    try:
        for start in range(0, size, _ALLOCATE_BYTES):
            os.posix_fallocate(fd, start, min(_ALLOCATE_BYTES, size - start))
    except OSError as exc:
        raise StoreError(f"no memory for the store: {exc}") from exc


def _advise(address: int, size: int, advice: int, step: int) -> None:
    libc = ctypes.CDLL(None)
    for start in range(0, size, step):
        libc.madvise(
            ctypes.c_void_p(address + start),
            ctypes.c_size_t(min(step, size - start)),
            advice,
        )
