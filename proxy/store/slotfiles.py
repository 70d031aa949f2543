"""Maps the slot files that clients name by a descriptor.

Rules:
1. Only regular files that are long enough for the layout of the call are mapped; the
   length is asked of the system at every call.
2. A file for restores is mapped once and kept, since mapping and faulting cost more
   than the copy: by (device, inode), the least recently used goes first. It is
   dropped when its last name is gone, and with its client. (A memfd never had a
   name; it stays until it is pushed out or the client goes.)
3. A file to store from is mapped for its call alone, read only.
"""

import mmap
import os
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from proxy.blocks import BlockLayout
from proxy.errors import StoreError
from proxy.store.paging import map_pages, unmap_pages
from proxy.store.slotview import SlotView

MAX_MAPPED_FILES = 16
"""Per client; a proxy has a few slot files for each of its runners."""


@dataclass(slots=True)
class _MappedFile:
    fd: int
    mapping: mmap.mmap
    had_name: bool


class SlotFiles:
    """The mapped slot files of one client. Safe for several threads."""

    def __init__(self, *, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        # mutable state
        self._files: OrderedDict[tuple[int, int], _MappedFile] = OrderedDict()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<SlotFiles mapped={len(self._files)}>"

    def view_for_get(self, fd: int, layout: BlockLayout) -> SlotView:
        """Return the places in the file `fd`, writable; the mapping is kept.

        Raises StoreError when the file cannot be used. `fd` stays the caller's.
        """
        found = _check(fd, layout)
        identity = (found.st_dev, found.st_ino)
        with self._lock:
            file = self._files.get(identity)
            if file is not None and len(file.mapping) < layout.end:
                self._forget(identity)  # it grew
                file = None
            if file is None:
                if self._is_closed:
                    raise StoreError("the client is gone")
                mapping = _map(fd, found.st_size, mmap.PROT_READ | mmap.PROT_WRITE)
                address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
                map_pages(address, min(layout.end, found.st_size))
                file = _MappedFile(os.dup(fd), mapping, found.st_nlink > 0)
                self._files[identity] = file
            self._files.move_to_end(identity)
            while len(self._files) > MAX_MAPPED_FILES:
                self._forget(next(iter(self._files)))
            return SlotView(file.mapping, layout, part_bytes=self._part_bytes)

    def view_for_put(self, fd: int, layout: BlockLayout) -> SlotView:
        """Return the places in the file `fd`, read only; unmapped with the view.

        Raises StoreError when the file cannot be used. `fd` stays the caller's.
        """
        found = _check(fd, layout)
        mapping = _map(fd, found.st_size, mmap.PROT_READ)
        return SlotView(mapping, layout, part_bytes=self._part_bytes)

    def sweep(self) -> None:
        """Drop the files whose last name is gone: their memory is wanted back."""
        with self._lock:
            for identity, file in list(self._files.items()):
                if file.had_name and os.fstat(file.fd).st_nlink == 0:
                    self._forget(identity)

    def close(self) -> None:
        """Drop all files, now and from now on."""
        with self._lock:
            self._is_closed = True
            for identity in list(self._files):
                self._forget(identity)

    def _forget(self, identity: tuple[int, int]) -> None:
        # The mapping goes with its last view: a copy may be under way.
        file = self._files.pop(identity)
        os.close(file.fd)
        unmap_pages(np.frombuffer(file.mapping, dtype=np.uint8))


def _check(fd: int, layout: BlockLayout) -> os.stat_result:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise StoreError("a slot file is a regular file")
    if found.st_size < layout.end or not found.st_size:
        raise StoreError(
            f"the slot file has {found.st_size} bytes, the layout needs {layout.end}"
        )
    return found


def _map(fd: int, size: int, protection: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection)
    except (OSError, ValueError) as exc:
        raise StoreError(f"the slot file cannot be mapped: {exc}") from exc
