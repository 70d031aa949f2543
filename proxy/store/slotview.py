"""Moves blocks between a mapped slot file and contiguous memory.

A block moves in parts, each whole pieces of one run, or of several that are alike: a
part is one strided copy of numpy and one call of the hash, which finds the bytes in the
CPU's cache again. Both release the interpreter lock; no Python code runs per piece.
Small pieces (elements of V, with flash attention off) are one item each to numpy,
which copies items half as fast again as it does short rows.

Rules:
1. A view is made only when the file has all bytes that the layout names, so no later
   access needs a check.
2. A view holds its mapping: a copy that was given up by its caller still writes to
   mapped memory.
"""

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from proxy.blocks import BlockLayout, RowRun
from proxy.errors import StoreError
from proxy.store.envelope import Bytes, layout_digest
from proxy.store.paging import unmap_pages

FEW_THREADS = 4
MAX_ITEM_BYTES = 256
"""Larger pieces are copied faster as rows of bytes (measured)."""


def part_bytes_for(num_threads: int) -> int:
    """Return how large the parts should be that so many threads copy.

    Larger parts leave the second-level cache before they are hashed; with smaller
    ones many threads wait for each other's interpreter lock. Measured with blocks of
    2 MiB on 16 cores, GB/s with the hash: one thread 3.6 in one part and 4.2 in four,
    four threads 14.6 and 13.1, eight threads 28 and 15.
    """
    return 512 << 10 if num_threads < FEW_THREADS else 2 << 20


_Places = NDArray[Any]
"""[num_blocks, runs, pieces] of items, or [num_blocks, runs, pieces, bytes]."""
_Part = tuple[_Places, int, int]
"""Places, and start and stop in the payload."""


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

    def _runs(self) -> Iterator[tuple[_Places, int]]:
        """Yield the places of runs that are alike, and where a payload has them."""
        start = 0
        for run, num_runs, distance in _alike(_joined(self.layout.runs)):
            shape = (self.layout.num_blocks, num_runs, run.count)
            strides = (run.piece_bytes, distance, run.stride)
            is_item = run.piece_bytes <= MAX_ITEM_BYTES
            places: _Places = np.ndarray(
                shape if is_item else (*shape, run.piece_bytes),
                dtype=np.dtype((np.void, run.piece_bytes)) if is_item else np.uint8,
                buffer=self._memory.data,
                offset=run.offset,
                strides=strides if is_item else (*strides, 1),
            )
            yield places, start
            start += num_runs * run.count * run.piece_bytes

    def scatter(self, index: int, payload: Bytes) -> bytes:
        """Copy a payload [block_bytes] to the place of block `index`.

        Returns the checksum of what was copied, read at its source *after* it was
        copied: if it is right then the source was so throughout.
        """
        digest = xxhash.xxh3_128()
        for places, start, stop in self._parts:
            place, part = places[index], payload[start:stop]
            np.copyto(place, part.view(place.dtype).reshape(place.shape))
            digest.update(part.data)
        return digest.digest()

    def gather(self, index: int, payload: Bytes) -> bytes:
        """Copy block `index` into `payload` [block_bytes]; return its checksum.

        The checksum is of what `payload` holds now.
        """
        digest = xxhash.xxh3_128()
        for places, start, stop in self._parts:
            place, part = places[index], payload[start:stop]
            np.copyto(part.view(place.dtype).reshape(place.shape), place)
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


def _alike(runs: Iterable[RowRun]) -> Iterator[tuple[RowRun, int, int]]:
    """Yield the first of runs of one shape at equal distances, how many, how far.

    As are the elements of V in one layer and in the next.
    """
    group: list[RowRun] = []
    for run in runs:
        if group and not _goes_on(group, run):
            yield _described(group)
            group = []
        group.append(run)
    if group:
        yield _described(group)


def _goes_on(group: list[RowRun], run: RowRun) -> bool:
    first, last = group[0], group[-1]
    distance = run.offset - last.offset
    return distance >= 0 and run == replace(
        first, offset=first.offset + len(group) * distance
    )


def _described(group: list[RowRun]) -> tuple[RowRun, int, int]:
    distance = group[1].offset - group[0].offset if len(group) > 1 else 0
    return group[0], len(group), distance


def _cut(places: _Places, start: int, part_bytes: int) -> Iterator[_Part]:
    """Yield the parts of some runs, of about equal sizes: whole runs, if several."""
    total = places[0].nbytes if len(places) else 0
    axis = 1 if places.shape[1] > 1 else 2
    count = places.shape[axis]
    num_parts = min(count, -(-total // part_bytes))
    for number in range(num_parts):
        first, last = (count * n // num_parts for n in (number, number + 1))
        part = places[:, first:last] if axis == 1 else places[:, :, first:last]
        stop = start + part[0].nbytes
        yield part, start, stop
        start = stop
