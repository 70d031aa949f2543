"""Puts blocks into Mooncake, and memory below them as they need it.

Rules:
1. The library copies the pieces straight out of the mapped slot file; where these are
   too many or too small for it, numpy makes each object contiguous first.
2. What was just stored is leased, so that a put larger than the store fails in its
   tail instead of evicting its head. "No space" that lasts ends the put, and further
   puts are refused for `PAUSE_SECONDS`.
3. All of this runs behind the gate.
"""

import threading
import time
from collections.abc import Callable

import numpy as np

from proxy.blocks import BlockKey
from proxy.store.backend import CopyThreads, Transfer
from proxy.store.base import BlockRef, PutOutcome
from proxy.store.envelope import HEADER_BYTES, Bytes
from proxy.store.mooncake import (
    MAX_BLOCKS,
    MAX_PIECES,
    NO_SPACE,
    TRANSFER_FAILED,
    MooncakeHandle,
    name_of,
)
from proxy.store.segments import Segments

EVICTION_SECONDS = (0.02, 0.05, 0.1)
"""Waits after "no space": the failure itself sets eviction going."""
PAUSE_SECONDS = 0.5
GROW_RATIO = 0.8
"""Another segment is mounted before the store is fuller; eviction starts at 0.9."""
_MIN_DIRECT_PIECE_BYTES = 2048
"""Smaller pieces are gathered by numpy first: the library's cost per piece is high."""


class MooncakeWriter:
    """The writing side of `MooncakeBackend`."""

    def __init__(
        self,
        *,
        get_handle: Callable[[], MooncakeHandle],
        segments: Segments,
        copy: CopyThreads,
        on_suspicion: Callable[[], None],
    ) -> None:
        self._get_handle = get_handle
        self._segments = segments
        self._copy = copy
        self._on_suspicion = on_suspicion
        self._grow_lock = threading.Lock()
        # mutable state
        self.used_bytes = 0
        """As told by the master, and what was put since."""
        self.failed_puts = 0
        self._puts_paused_until = 0.0
        self._failed_calls = 0

    def __repr__(self) -> str:
        return f"<MooncakeWriter used={self.used_bytes} {self._segments!r}>"

    def put_object(self, key: BlockKey, data: Bytes) -> bool:
        """Store header and payload of a block; False when that did not work."""
        self.ensure_segments(len(data), touch=False)
        where = [[data.ctypes.data]]
        return self._get_handle().put([name_of(key)], where, [[len(data)]]) == [0]

    def put(self, transfer: Transfer) -> PutOutcome:
        """Store the blocks that are not stored yet. Raises StoreError."""
        blocks = list({block.key: block for block in transfer.blocks}.values())
        handle = self._get_handle()
        exist = handle.exist_all([name_of(block.key) for block in blocks])
        missing = [b for b, is_there in zip(blocks, exist, strict=True) if not is_there]
        layout = transfer.slot.layout
        pieces = layout.pieces_per_block + 1
        is_direct = (
            pieces <= MAX_PIECES
            and layout.block_bytes // layout.pieces_per_block >= _MIN_DIRECT_PIECE_BYTES
        )
        batch = min(MAX_BLOCKS, MAX_PIECES // pieces) if is_direct else MAX_BLOCKS

        put_once = self._put_direct if is_direct else self._put_gathered
        stored = 0
        for start in range(0, len(missing), batch):
            part = missing[start : start + batch]
            if transfer.is_given_up or time.monotonic() < self._puts_paused_until:
                break
            self.ensure_segments(len(part) * transfer.object_bytes, touch=False)
            count = self._put_retrying(transfer, part, put_once)
            self.used_bytes += count * transfer.object_bytes
            stored += count
        self.failed_puts += len(missing) - stored
        return PutOutcome(
            stored_blocks=stored,
            present_blocks=len(transfer.blocks) - len(missing),
            failed_blocks=len(missing) - stored,
            stored_bytes=stored * layout.block_bytes,
        )

    def _put_direct(self, transfer: Transfer, blocks: list[BlockRef]) -> list[int]:
        """Have the library copy the pieces out of the mapped slot file."""
        slot = transfer.slot
        headers = np.empty((len(blocks), HEADER_BYTES), dtype=np.uint8)

        def fill(i: int) -> None:
            header = transfer.identity(blocks[i].key).pack(
                slot.checksum(blocks[i].index)
            )
            headers[i] = np.frombuffer(header, dtype=np.uint8)

        self._copy.for_each(range(len(blocks)), fill)
        pointers = [
            [headers[i].ctypes.data, *slot.addresses(block.index)]
            for i, block in enumerate(blocks)
        ]
        sizes = [[HEADER_BYTES, *slot.piece_sizes]] * len(blocks)
        return self._get_handle().put(
            [name_of(block.key) for block in blocks], pointers, sizes
        )

    def _put_gathered(self, transfer: Transfer, blocks: list[BlockRef]) -> list[int]:
        """Make each object contiguous first; for many or small pieces."""
        size = transfer.object_bytes
        staging = np.empty((len(blocks), size), dtype=np.uint8)

        def fill(i: int) -> None:
            payload_checksum = transfer.slot.gather(
                blocks[i].index, staging[i, HEADER_BYTES:]
            )
            header = transfer.identity(blocks[i].key).pack(payload_checksum)
            staging[i, :HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)

        self._copy.for_each(range(len(blocks)), fill)
        pointers = [[staging.ctypes.data + i * size] for i in range(len(blocks))]
        return self._get_handle().put(
            [name_of(block.key) for block in blocks], pointers, [[size]] * len(blocks)
        )

    def _put_retrying(
        self,
        transfer: Transfer,
        blocks: list[BlockRef],
        put_once: Callable[[Transfer, list[BlockRef]], list[int]],
    ) -> int:
        """Put a batch; where there is no space, grow, or give eviction a few moments.

        How much is used is known by and large only, so "no space" may come while there
        still is memory to mount. Returns how many are there, and leased: without that,
        a later batch would evict this one, or eviction take it right away.
        """
        stored = 0
        pauses = [0.0, *EVICTION_SECONDS]
        while pauses:
            time.sleep(pauses.pop(0))
            codes = put_once(transfer, blocks)
            self._note(codes)
            put_now = [b for b, c in zip(blocks, codes, strict=True) if c == 0]
            again = [b for b, c in zip(blocks, codes, strict=True) if c == NO_SPACE]
            if put_now:
                names = [name_of(block.key) for block in put_now]
                exist = self._get_handle().exist(names)
                stored += sum(exist)
                again += [b for b, e in zip(put_now, exist, strict=True) if not e]
            if not again:
                return stored
            blocks = again
            if self._grow_by_one():
                pauses.insert(0, 0.0)
        self._puts_paused_until = time.monotonic() + PAUSE_SECONDS
        return stored

    def _grow_by_one(self) -> bool:
        """Mount another segment, if the limit allows it; return whether it was."""
        with self._grow_lock:
            if not self._segments.can_grow:
                return False
            self._segments.grow(self._get_handle().mount, touch=False)
            return True

    def ensure_segments(self, ahead_bytes: int, *, touch: bool) -> None:
        """Mount segments until `ahead_bytes` more fit below the eviction mark."""
        with self._grow_lock:
            while self._segments.can_grow and (
                self.used_bytes + ahead_bytes
                > GROW_RATIO * self._segments.mounted_bytes
            ):
                self._segments.grow(self._get_handle().mount, touch=touch)

    def _note(self, codes: list[int]) -> None:
        """Count calls of which every part failed; two in a row are suspicious."""
        has_failed = all(code == TRANSFER_FAILED for code in codes)
        self._failed_calls = self._failed_calls + 1 if has_failed else 0
        if self._failed_calls >= 2:
            self._failed_calls = 0
            self._on_suspicion()
