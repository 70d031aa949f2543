"""Blocks in a Mooncake Store: in RAM of this process, and of a pool's other members.

Reading: what lies in our own segments is copied out of them by our own threads,
straight into the slot file (the library would use one thread, and could not verify on
the way); what lies elsewhere comes through the library into staging memory first.
Writing: the library copies the pieces of the mapped slot file into a segment.

Rules:
1. Own replicas are leased, then copied, then verified *at their source*: memory that
   was given to another object meanwhile fails the checksum. The place in the slot
   file may hold anything then; the block counts as missing.
2. An address is ours only with our own endpoint, and inside of one of our segments:
   other members use the same addresses.
3. What was just stored is leased, so that a put larger than the store fails in its
   tail instead of evicting its head. "No space" that lasts ends the put, and further
   puts are refused for `PAUSE_SECONDS`.
4. Everything that may hang runs behind the gate; see `gate` and `mooncake_watch`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from proxy.blocks import BlockKey
from proxy.store.backend import CopyThreads, Transfer
from proxy.store.base import BlockRef, PutOutcome
from proxy.store.envelope import HEADER_BYTES, Bytes, checksum
from proxy.store.gate import CallGate
from proxy.store.mooncake import (
    MAX_BLOCKS,
    MAX_PIECES,
    MISS_CODES,
    NO_SPACE,
    TRANSFER_FAILED,
    MasterAway,
    MooncakeHandle,
    Replica,
    name_of,
)
from proxy.store.segments import Segments

logger = logging.getLogger(__name__)

EVICTION_SECONDS = (0.02, 0.05, 0.1)
"""Waits after "no space": the failure itself sets eviction going."""
PAUSE_SECONDS = 0.5
SHUN_SECONDS = 11.0
"""The master keeps naming a dead member's objects for so long (its client_ttl)."""
GROW_RATIO = 0.8
"""Another segment is mounted before the pool is fuller; eviction starts at 0.9."""
EXIST_KEYS = 1024
DESCRIBE_KEYS = 32
_MIN_DIRECT_PIECE_BYTES = 2048
"""Smaller pieces are gathered by numpy first: the library's cost per piece is high."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A block that was found, and all the places that want it."""

    key: BlockKey
    positions: list[int]
    memory: Bytes | None
    """The object, where it lies in a segment of ours."""


class MooncakeBackend:
    """Blocks in Mooncake; see `Backend`. `mooncake_watch` keeps it alive."""

    def __init__(
        self,
        *,
        gate: CallGate,
        segments: Segments,
        copy: CopyThreads,
        on_wedged: Callable[[], None],
        refresh: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._copy = copy
        self._segments = segments
        self._on_wedged = on_wedged
        self._refresh = refresh
        self._close = close
        self._grow_lock = threading.Lock()
        # mutable state
        self.handle: MooncakeHandle | None = None
        self.own_endpoint = ""
        self.used_bytes = 0
        self.pool_bytes = 0
        self.num_blocks = 0
        self.damaged_blocks = 0
        self.failed_puts = 0
        self._puts_paused_until = 0.0
        self._failed_calls = 0
        self._shunned: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<MooncakeBackend used={self.used_bytes} {self._segments!r}>"

    @property
    def limit_bytes(self) -> int:
        """RAM that this store may give."""
        return self._segments.limit_bytes

    # ---- Backend

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.contains`."""

        def ask() -> list[bool]:
            found: list[bool] = []
            for start in range(0, len(keys), EXIST_KEYS):
                names = [name_of(key) for key in keys[start : start + EXIST_KEYS]]
                found += self._the_handle().exist(names)
            return found

        return self._gate.run(ask, timeout_seconds=5.0)

    def get(self, transfer: Transfer) -> list[bool]:
        """See `Backend.get`."""
        left = transfer.give_up_at - time.monotonic()
        return self._gate.run(lambda: self._get(transfer), timeout_seconds=left)

    def put(self, transfer: Transfer) -> PutOutcome:
        """See `Backend.put`."""
        left = transfer.give_up_at - time.monotonic()
        return self._gate.run(lambda: self._put(transfer), timeout_seconds=left)

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """See `Backend.remove`."""
        names = [name_of(key) for key in keys]
        return self._gate.run(
            lambda: self._the_handle().remove(names), timeout_seconds=5.0
        )

    def status(self) -> dict[str, Any]:
        """See `Backend.status`."""
        if self._gate.shut_reason is None:
            self._refresh()
        return {
            "capacity_bytes": max(self._segments.limit_bytes, self.pool_bytes),
            "mounted_bytes": self._segments.mounted_bytes,
            "used_bytes": self.used_bytes,
            "blocks": self.num_blocks,
            "trouble": self._gate.shut_reason,
            "damaged_blocks": self.damaged_blocks,
            "failed_puts": self.failed_puts,
        }

    def close(self) -> None:
        """See `Backend.close`."""
        self._close()

    # ---- whole objects, for the tier below

    def read_object(self, key: BlockKey) -> Bytes | None:
        """Return a copy of header and payload, not verified; None if absent."""

        def read() -> Bytes | None:
            handle, name = self._the_handle(), name_of(key)
            if not handle.exist([name])[0]:
                return None
            for replica in handle.describe([name]).get(name, []):
                memory = self.locate(replica)
                if memory is not None:
                    return memory.copy()
                staging = np.empty(replica.size, dtype=np.uint8)
                where = [[staging.ctypes.data]]
                if handle.get([name], where, [[replica.size]])[0] == replica.size:
                    return staging
            return None

        return self._gate.run(read, timeout_seconds=10.0)

    def write_object(self, key: BlockKey, data: Bytes) -> bool:
        """Store header and payload of a block; False when that did not work."""

        def write() -> bool:
            self.ensure_segments(len(data), touch=False)
            where = [[data.ctypes.data]]
            return self._the_handle().put([name_of(key)], where, [[len(data)]]) == [0]

        return self._gate.run(write, timeout_seconds=10.0)

    # ---- get

    def _get(self, transfer: Transfer) -> list[bool]:
        filled = [False] * len(transfer.blocks)
        remote: list[_Found] = []
        damaged: list[BlockKey] = []

        def copy_out(found: _Found) -> None:
            if found.memory is None or transfer.is_given_up:
                return
            indexes = [transfer.blocks[position].index for position in found.positions]
            if transfer.deliver(found.key, indexes, found.memory):
                for position in found.positions:
                    filled[position] = True
            else:
                damaged.append(found.key)  # removed by this call's own thread

        def own_blocks() -> Iterator[_Found]:
            for found in self._find(transfer, damaged):
                if found.memory is None:
                    remote.append(found)
                else:
                    yield found

        self._copy.for_each(own_blocks(), copy_out)
        for start in range(0, len(remote), MAX_BLOCKS):
            if transfer.is_given_up:
                break
            for found in self._fetch(transfer, remote[start : start + MAX_BLOCKS]):
                copy_out(found)
        if damaged:
            self._remove_damaged(damaged)
        return filled

    def _find(self, transfer: Transfer, damaged: list[BlockKey]) -> Iterator[_Found]:
        """Yield the blocks that are stored, leased; note those of a wrong size."""
        positions: dict[BlockKey, list[int]] = {}
        for position, block in enumerate(transfer.blocks):
            positions.setdefault(block.key, []).append(position)
        keys, handle = list(positions), self._the_handle()
        for start in range(0, len(keys), DESCRIBE_KEYS):
            if transfer.is_given_up:
                return
            chunk = {name_of(key): key for key in keys[start : start + DESCRIBE_KEYS]}
            exist = handle.exist(list(chunk))
            names = [
                name for name, is_there in zip(chunk, exist, strict=True) if is_there
            ]
            for name, replicas in (handle.describe(names) if names else {}).items():
                key = chunk[name]
                if any(r.size != transfer.object_bytes for r in replicas):
                    damaged.append(key)
                    continue
                now = time.monotonic()
                usable = [
                    r for r in replicas if self._shunned.get(r.endpoint, 0.0) < now
                ]
                if usable:
                    own = (self.locate(replica) for replica in usable)
                    memory = next((m for m in own if m is not None), None)
                    yield _Found(key, positions[key], memory)

    def locate(self, replica: Replica) -> Bytes | None:
        """Return an object's memory where it lies in a segment of ours."""
        if replica.endpoint != self.own_endpoint:
            return None
        return self._segments.locate(replica.address, replica.size)

    def _fetch(self, transfer: Transfer, blocks: list[_Found]) -> Iterator[_Found]:
        """Read objects of other members into staging memory; yield what arrived."""
        size = transfer.object_bytes
        staging = np.empty((len(blocks), size), dtype=np.uint8)
        names = [name_of(found.key) for found in blocks]
        pointers = [[staging.ctypes.data + i * size] for i in range(len(blocks))]
        codes = self._the_handle().get(names, pointers, [[size]] * len(blocks))
        self._note_transfers(codes)
        for i, (found, code) in enumerate(zip(blocks, codes, strict=True)):
            if code == size:
                yield _Found(found.key, found.positions, staging[i])
            elif code not in MISS_CODES:
                self._shun(names[i])

    def _shun(self, name: str) -> None:
        """Remember that the owner of an object does not answer."""
        for replica in self._the_handle().describe([name]).get(name, []):
            if replica.endpoint != self.own_endpoint:
                self._shunned[replica.endpoint] = time.monotonic() + SHUN_SECONDS

    def _remove_damaged(self, keys: list[BlockKey]) -> None:
        logger.warning("%d damaged blocks in Mooncake are removed", len(keys))
        self.damaged_blocks += len(keys)
        self._the_handle().remove([name_of(key) for key in keys])

    # ---- put

    def _put(self, transfer: Transfer) -> PutOutcome:
        blocks = list({block.key: block for block in transfer.blocks}.values())
        handle = self._the_handle()
        exist: list[bool] = []
        for start in range(0, len(blocks), EXIST_KEYS):
            part = blocks[start : start + EXIST_KEYS]
            exist += handle.exist([name_of(block.key) for block in part])
        missing = [b for b, is_there in zip(blocks, exist, strict=True) if not is_there]
        layout = transfer.slot.layout
        pieces = layout.pieces_per_block + 1
        is_direct = (
            pieces <= MAX_PIECES
            and layout.block_bytes // layout.pieces_per_block >= _MIN_DIRECT_PIECE_BYTES
        )
        batch = min(MAX_BLOCKS, MAX_PIECES // pieces) if is_direct else MAX_BLOCKS

        def put(part: list[BlockRef]) -> list[int]:
            if is_direct:
                return self._put_direct(transfer, part)
            return self._put_gathered(transfer, part)

        stored = 0
        for start in range(0, len(missing), batch):
            part = missing[start : start + batch]
            if transfer.is_given_up or time.monotonic() < self._puts_paused_until:
                break
            self.ensure_segments(len(part) * transfer.object_bytes, touch=False)
            count = self._put_retrying(part, put)
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
        return self._the_handle().put(
            [name_of(block.key) for block in blocks], pointers, sizes
        )

    def _put_gathered(self, transfer: Transfer, blocks: list[BlockRef]) -> list[int]:
        """Make each object contiguous first; for many or small pieces."""
        size = transfer.object_bytes
        staging = np.empty((len(blocks), size), dtype=np.uint8)

        def fill(i: int) -> None:
            payload = staging[i, HEADER_BYTES:]
            transfer.slot.gather(blocks[i].index, payload)
            header = transfer.identity(blocks[i].key).pack(checksum(payload))
            staging[i, :HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)

        self._copy.for_each(range(len(blocks)), fill)
        pointers = [[staging.ctypes.data + i * size] for i in range(len(blocks))]
        return self._the_handle().put(
            [name_of(block.key) for block in blocks], pointers, [[size]] * len(blocks)
        )

    def _put_retrying(
        self, blocks: list[BlockRef], put: Callable[[list[BlockRef]], list[int]]
    ) -> int:
        """Put a batch; where there is no space, give eviction a few moments.

        Returns how many are there, and leased: without that, a later batch would
        evict this one, or eviction take it right away.
        """
        stored = 0
        for pause_seconds in (0.0, *EVICTION_SECONDS):
            time.sleep(pause_seconds)
            codes = put(blocks)
            self._note_transfers(codes)
            put_now = [b for b, c in zip(blocks, codes, strict=True) if c == 0]
            again = [b for b, c in zip(blocks, codes, strict=True) if c == NO_SPACE]
            if put_now:
                names = [name_of(block.key) for block in put_now]
                exist = self._the_handle().exist(names)
                stored += sum(exist)
                again += [b for b, e in zip(put_now, exist, strict=True) if not e]
            if not again:
                return stored
            blocks = again
        self._puts_paused_until = time.monotonic() + PAUSE_SECONDS
        return stored

    def ensure_segments(self, ahead_bytes: int, *, touch: bool) -> None:
        """Mount segments until `ahead_bytes` more fit below the eviction mark."""
        with self._grow_lock:
            while self._segments.can_grow and (
                self.used_bytes + ahead_bytes
                > GROW_RATIO * self._segments.mounted_bytes
            ):
                self._segments.grow(self._the_handle().mount, touch=touch)

    def _note_transfers(self, codes: list[int]) -> None:
        """Two calls in a row of which every part failed: the client is wedged."""
        has_failed = bool(codes) and all(code == TRANSFER_FAILED for code in codes)
        self._failed_calls = self._failed_calls + 1 if has_failed else 0
        if self._failed_calls >= 2:
            self._failed_calls = 0
            self._on_wedged()

    def _the_handle(self) -> MooncakeHandle:
        if self.handle is None:
            raise MasterAway("there is no Mooncake client")
        return self.handle


def probe_endpoint(handle: MooncakeHandle, segments: Segments) -> str:
    """Return under which endpoint our own segments appear in descriptors.

    An object with a random name and content is put into our own segment, found by its
    content, and removed. Empty when that did not work out: then every object is read
    through the library, which is slower and as right.
    """
    name = name_of(os.urandom(16))
    content = np.frombuffer(os.urandom(64), dtype=np.uint8)
    if handle.put([name], [[content.ctypes.data]], [[len(content)]]) != [0]:
        return ""
    try:
        for replica in handle.describe([name]).get(name, []):
            memory = segments.locate(replica.address, replica.size)
            if memory is not None and np.array_equal(memory, content):
                return replica.endpoint
    finally:
        handle.remove([name])
    return ""
