"""Moves blocks between a mapped slot file and contiguous memory.

A whole run of a block is one strided copy of numpy, which releases the interpreter
lock; no Python code runs per piece.

Rules:
1. A view is made only when the file has all bytes that the layout names, so no later
   access needs a check.
2. A view holds its mapping: a copy that was given up by its caller still writes to
   mapped memory.
"""

import mmap

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided

from proxy.blocks import BlockLayout
from proxy.errors import StoreError
from proxy.store.envelope import Bytes, layout_digest
from proxy.store.paging import unmap_pages


class SlotView:
    """The places of blocks in one mapped slot file."""

    def __init__(self, mapping: mmap.mmap | Bytes, layout: BlockLayout) -> None:
        """Take `mapping` (bytes of the file from offset 0) apart by `layout`.

        Raises StoreError when the file is shorter than the layout.
        """
        memory = np.frombuffer(mapping, dtype=np.uint8)
        if layout.end > memory.size:
            raise StoreError(
                f"the slot file has {memory.size} bytes, the layout needs {layout.end}"
            )
        self.layout = layout
        self.layout_digest = layout_digest(layout)
        self._memory = memory
        self.piece_sizes = [
            run.piece_bytes for run in layout.runs for _ in range(run.count)
        ]
        # per run: [num_blocks, count, piece_bytes]
        self._runs = [
            as_strided(
                memory[run.offset :],
                shape=(layout.num_blocks, run.count, run.piece_bytes),
                strides=(run.piece_bytes, run.stride, 1),
                writeable=memory.flags.writeable,
            )
            for run in layout.runs
        ]

    def scatter(self, index: int, payload: Bytes) -> bytes:
        """Copy a payload [block_bytes] to the place of block `index`.

        Returns the checksum of what was copied, read at its source *after* it was
        copied: if it is right then the source was so throughout. Going run by run
        finds the bytes in the CPU's cache again.
        """
        digest = xxhash.xxh3_128()
        start = 0
        for run in self._runs:
            place = run[index]
            part = payload[start : start + place.size]
            np.copyto(place, part.reshape(place.shape))
            digest.update(part.data)
            start += place.size
        return digest.digest()

    def gather(self, index: int, payload: Bytes) -> None:
        """Copy block `index` into `payload` [block_bytes]."""
        start = 0
        for run in self._runs:
            place = run[index]
            stop = start + place.size
            np.copyto(payload[start:stop].reshape(place.shape), place)
            start = stop

    def forget_pages(self) -> None:
        """Unmap the pages of the file; they come back when used."""
        unmap_pages(self._memory)

    def checksum(self, index: int) -> bytes:
        """Return the checksum of block `index`, read piece by piece."""
        digest = xxhash.xxh3_128()
        for run in self._runs:
            for piece in run[index]:
                digest.update(piece.data)
        return digest.digest()

    def addresses(self, index: int) -> list[int]:
        """Return where the pieces of block `index` are mapped, in payload order."""
        base = self._memory.ctypes.data
        return [base + offset for offset, _ in self.layout.pieces(index)]
