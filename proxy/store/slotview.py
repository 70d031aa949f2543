"""Moves blocks between a mapped slot file and contiguous memory.

A block moves in parts, each whole pieces of one run: a part is one strided copy of
numpy and one call of the hash, which finds the bytes in the CPU's cache again. Both
release the interpreter lock; no Python code runs per piece.

Rules:
1. A view is made only when the file has all bytes that the layout names, so no later
   access needs a check.
2. A view holds its mapping: a copy that was given up by its caller still writes to
   mapped memory.
"""

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided

from proxy.blocks import BlockLayout, RowRun
from proxy.errors import StoreError
from proxy.store.envelope import Bytes, layout_digest
from proxy.store.paging import unmap_pages

FEW_THREADS = 4


def part_bytes_for(num_threads: int) -> int:
    """Return how large the parts should be that so many threads copy.

    Larger parts leave the second-level cache before they are hashed; with smaller
    ones many threads wait for each other's interpreter lock. Measured with blocks of
    2 MiB on 16 cores, GB/s with the hash: one thread 3.6 in one part and 4.2 in four,
    four threads 14.6 and 13.1, eight threads 28 and 15.
    """
    return 512 << 10 if num_threads < FEW_THREADS else 2 << 20


_Part = tuple[Bytes, int, int]
"""Places [num_blocks, pieces, piece_bytes], and start and stop in the payload."""


class SlotView:
    """The places of blocks in one mapped slot file."""

    def __init__(
        self, mapping: mmap.mmap | Bytes, layout: BlockLayout, *, part_bytes: int
    ) -> None:
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
        self._parts = [part for run in self._runs() for part in _cut(*run, part_bytes)]

    def _runs(self) -> Iterator[tuple[Bytes, int]]:
        """Yield the places of each run, and where it starts in the payload."""
        num_blocks, start = self.layout.num_blocks, 0
        for run in _joined(self.layout.runs):
            places = as_strided(
                self._memory[run.offset :],
                shape=(num_blocks, run.count, run.piece_bytes),
                strides=(run.piece_bytes, run.stride, 1),
                writeable=self._memory.flags.writeable,
            )
            yield places, start
            start += run.count * run.piece_bytes

    def scatter(self, index: int, payload: Bytes) -> bytes:
        """Copy a payload [block_bytes] to the place of block `index`.

        Returns the checksum of what was copied, read at its source *after* it was
        copied: if it is right then the source was so throughout.
        """
        digest = xxhash.xxh3_128()
        for places, start, stop in self._parts:
            place, part = places[index], payload[start:stop]
            np.copyto(place, part.reshape(place.shape))
            digest.update(part.data)
        return digest.digest()

    def gather(self, index: int, payload: Bytes) -> bytes:
        """Copy block `index` into `payload` [block_bytes]; return its checksum.

        The checksum is of what `payload` holds now.
        """
        digest = xxhash.xxh3_128()
        for places, start, stop in self._parts:
            place, part = places[index], payload[start:stop]
            np.copyto(part.reshape(place.shape), place)
            digest.update(part.data)
        return digest.digest()

    def forget_pages(self) -> None:
        """Unmap the pages of the file; they come back when used."""
        unmap_pages(self._memory)


def _joined(runs: Iterable[RowRun]) -> Iterator[RowRun]:
    """Yield the runs, those in one that go on where another ends.

    As the rows of V do after those of K, where both are of one size.
    """
    last: RowRun | None = None
    for run in runs:
        if last is None:
            last = run
        elif (run.offset, run.stride, run.piece_bytes) == (
            last.offset + last.count * last.stride,
            last.stride,
            last.piece_bytes,
        ):
            last = replace(last, count=last.count + run.count)
        else:
            yield last
            last = run
    if last is not None:
        yield last


def _cut(places: Bytes, start: int, part_bytes: int) -> Iterator[_Part]:
    """Yield the parts of one run, of about equal sizes."""
    _, count, piece_bytes = places.shape
    num_parts = min(count, -(-count * piece_bytes // part_bytes))
    for number in range(num_parts):
        first, last = (count * n // num_parts for n in (number, number + 1))
        yield (
            places[:, first:last],
            start + first * piece_bytes,
            start + last * piece_bytes,
        )
