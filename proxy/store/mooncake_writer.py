"""Puts blocks into Mooncake, and memory below them as they need it.

Rules:
1. Objects are made contiguous in staging memory by our own threads, with their
   checksums, a few ahead of those that the library stores meanwhile with its one
   thread: out of pieces it is slower than that, and each needs a hash before.
2. What was just stored is leased, so that a put larger than the store fails in its
   tail instead of evicting its head. "No space" that lasts ends the put, and further
   puts are refused for `PAUSE_SECONDS`.
3. All of this runs behind the gate.
"""

import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial

import numpy as np

from proxy.blocks import BlockKey
from proxy.store.backend import CopyThreads, Transfer
from proxy.store.base import PLAIN, BlockRef, PutOptions, PutOutcome
from proxy.store.envelope import HEADER_BYTES, Bytes
from proxy.store.mooncake import (
    MAX_BLOCKS,
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
STAGING_BYTES = 16 << 20
"""Each put has two of these, or two blocks if one is larger: one is filled while the
other is stored. It is worth its calls, and a good part stays in the CPU's cache."""
_NUM_GATHERERS = 2


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
        self._gatherers = ThreadPoolExecutor(_NUM_GATHERERS, thread_name_prefix="put")
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
        return self._put_once({key: data}) == [0]

    def put(self, transfer: Transfer) -> PutOutcome:
        """Store the blocks that are not stored yet. Raises StoreError."""
        blocks = list({block.key: block for block in transfer.blocks}.values())
        exist = self._get_handle().exist_all([name_of(block.key) for block in blocks])
        missing = [b for b, is_there in zip(blocks, exist, strict=True) if not is_there]
        stored = 0
        with closing(self._gather(transfer, missing)) as batches:
            for objects in batches:
                if transfer.is_given_up or time.monotonic() < self._puts_paused_until:
                    break
                self.ensure_segments(len(objects) * transfer.object_bytes, touch=False)
                count = self._put_retrying(
                    objects, partial(self._put_once, options=transfer.options)
                )
                self.used_bytes += count * transfer.object_bytes
                stored += count
        self.failed_puts += len(missing) - stored
        return PutOutcome(
            stored_blocks=stored,
            present_blocks=len(transfer.blocks) - len(missing),
            failed_blocks=len(missing) - stored,
            stored_bytes=stored * transfer.slot.layout.block_bytes,
        )

    def _gather(
        self, transfer: Transfer, blocks: list[BlockRef]
    ) -> Generator[dict[BlockKey, Bytes], None, None]:
        """Yield the objects of some blocks at a time, until the next are asked for.

        The next are gathered by another thread while the caller works on these.
        """
        size = transfer.object_bytes
        batch = max(1, min(MAX_BLOCKS, STAGING_BYTES // size))
        parts = [blocks[i : i + batch] for i in range(0, len(blocks), batch)]
        stagings = [np.empty((len(part), size), dtype=np.uint8) for part in parts[:2]]

        def gather(number: int) -> dict[BlockKey, Bytes]:
            part, staging = parts[number], stagings[number % 2]

            def fill(i: int) -> None:
                payload_checksum = transfer.slot.gather(
                    part[i].index, staging[i, HEADER_BYTES:]
                )
                header = transfer.identity(part[i].key).pack(payload_checksum)
                staging[i, :HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)

            self._copy.for_each(range(len(part)), fill)
            return {block.key: staging[i] for i, block in enumerate(part)}

        ahead = [self._gatherers.submit(gather, 0)] if parts else []
        try:
            for number in range(len(parts)):
                objects = ahead.pop().result()
                if number + 1 < len(parts):
                    ahead.append(self._gatherers.submit(gather, number + 1))
                yield objects
        finally:
            wait(ahead)  # given up in between: the slot file may be unmapped next

    def _put_once(
        self, objects: Mapping[BlockKey, Bytes], options: PutOptions = PLAIN
    ) -> list[int]:
        """Have the library store some objects; returns its codes."""
        return self._get_handle().put(
            [name_of(key) for key in objects],
            [[memory.ctypes.data] for memory in objects.values()],
            [[len(memory)] for memory in objects.values()],
            options,
        )

    def _put_retrying(
        self,
        objects: Mapping[BlockKey, Bytes],
        put_once: Callable[[Mapping[BlockKey, Bytes]], list[int]],
    ) -> int:
        """Put some objects; where there is no space, grow, or let eviction work.

        How much is used is known by and large only, so "no space" may come while there
        still is memory to mount. Returns how many are there, and leased: without that,
        a later batch would evict this one, or eviction take it right away.
        """
        stored = 0
        pauses = [0.0, *EVICTION_SECONDS]
        while pauses:
            time.sleep(pauses.pop(0))
            codes = put_once(objects)
            self._note(codes)
            put_now = [k for k, c in zip(objects, codes, strict=True) if c == 0]
            again = [k for k, c in zip(objects, codes, strict=True) if c == NO_SPACE]
            if put_now:
                exist = self._get_handle().exist([name_of(key) for key in put_now])
                stored += sum(exist)
                again += [k for k, e in zip(put_now, exist, strict=True) if not e]
            if not again:
                return stored
            objects = {key: objects[key] for key in again}
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
