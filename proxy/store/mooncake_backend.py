"""Blocks in a Mooncake Store: in RAM of this process, and of a pool's other members.

Reading: what lies in our own segments is copied out of them by our own threads,
straight into the slot file (the library would use one thread, and could not verify on
the way); what lies elsewhere comes through the library into staging memory first.
Writing: see `mooncake_writer`.

Rules:
1. Own replicas are leased, then copied, then verified *at their source*: memory that
   was given to another object meanwhile fails the checksum. The place in the slot
   file may hold anything then; the block counts as missing.
2. An address is ours only with our own endpoint, and inside of one of our segments:
   other members use the same addresses.
3. A member that does not deliver is left alone for `SHUN_SECONDS`; its blocks are
   misses meanwhile.
4. Everything that may hang runs behind the gate; see `gate` and `mooncake_watch`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from proxy.blocks import BlockKey
from proxy.store.backend import CopyThreads, Transfer
from proxy.store.base import PutOutcome
from proxy.store.envelope import Bytes
from proxy.store.gate import CallGate
from proxy.store.mooncake import (
    MAX_BLOCKS,
    MISS_CODES,
    TRANSFER_FAILED,
    MooncakeHandle,
    Replica,
    name_of,
)
from proxy.store.mooncake_writer import MooncakeWriter
from proxy.store.segments import Segments

logger = logging.getLogger(__name__)

SHUN_SECONDS = 11.0
"""The master keeps naming a dead member's objects for so long (its client_ttl)."""
FIRST_KEYS, MORE_KEYS = 16, 64
"""So many are looked up before the copies begin, and at a time while they run: a
question costs as much as copying a block, hardly more for many keys."""
MAX_FETCHES = 2
"""From other members at once: more are not faster, and a frozen one holds them."""
FETCH_WAIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _Found:
    """A block that was found, and all the places that want it."""

    key: BlockKey
    positions: list[int]
    memory: Bytes | None
    """The object, where it lies in a segment of ours."""
    endpoint: str
    """Whose segment it lies in."""


class MooncakeBackend:
    """Blocks in Mooncake; see `Backend`. `mooncake_watch` keeps it alive."""

    def __init__(
        self,
        *,
        gate: CallGate,
        segments: Segments,
        copy: CopyThreads,
        writer: MooncakeWriter,
        get_handle: Callable[[], MooncakeHandle],
        refresh: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._copy = copy
        self._segments = segments
        self._writer = writer
        self._get_handle = get_handle
        self._refresh = refresh
        self._close = close
        self._fetches = threading.BoundedSemaphore(MAX_FETCHES)
        # mutable state
        self.own_endpoint = ""
        self.pool_bytes = 0
        self.num_blocks = 0
        self.damaged_blocks = 0
        self._shunned: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<MooncakeBackend {self._writer!r} {self._gate!r}>"

    @property
    def limit_bytes(self) -> int:
        """RAM that this store may give."""
        return self._segments.limit_bytes

    # ---- Backend

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.contains`."""
        names = [name_of(key) for key in keys]
        return self._gate.run(
            lambda: self._get_handle().exist_all(names), timeout_seconds=5.0
        )

    def get(self, transfer: Transfer) -> list[bool]:
        """See `Backend.get`."""
        left = transfer.give_up_at - time.monotonic()
        return self._gate.run(lambda: self._get(transfer), timeout_seconds=left)

    def put(self, transfer: Transfer) -> PutOutcome:
        """See `Backend.put`."""
        left = transfer.give_up_at - time.monotonic()
        return self._gate.run(lambda: self._writer.put(transfer), timeout_seconds=left)

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """See `Backend.remove`."""
        names = [name_of(key) for key in keys]
        return self._gate.run(
            lambda: self._get_handle().remove(names), timeout_seconds=5.0
        )

    def status(self) -> dict[str, Any]:
        """See `Backend.status`."""
        if self._gate.shut_reason is None:
            self._refresh()
        return {
            "capacity_bytes": max(self._segments.limit_bytes, self.pool_bytes),
            "mounted_bytes": self._segments.mounted_bytes,
            "used_bytes": self._writer.used_bytes,
            "blocks": self.num_blocks,
            "trouble": self._gate.shut_reason,
            "damaged_blocks": self.damaged_blocks,
            "failed_puts": self._writer.failed_puts,
        }

    def close(self) -> None:
        """See `Backend.close`."""
        self._close()

    # ---- whole objects, for the tier below

    def read_object(self, key: BlockKey) -> Bytes | None:
        """Return a copy of header and payload, not verified; None if absent."""

        def read() -> Bytes | None:
            handle, name = self._get_handle(), name_of(key)
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
        return self._gate.run(
            lambda: self._writer.put_object(key, data), timeout_seconds=10.0
        )

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
        for found in self._fetch_all(transfer, remote):
            copy_out(found)
        if damaged:
            self._remove_damaged(damaged)
        return filled

    def _find(self, transfer: Transfer, damaged: list[BlockKey]) -> Iterator[_Found]:
        """Yield the blocks that are stored, leased; note those of a wrong size."""
        positions: dict[BlockKey, list[int]] = {}
        for position, block in enumerate(transfer.blocks):
            positions.setdefault(block.key, []).append(position)
        keys, handle = list(positions), self._get_handle()
        start, stop = 0, FIRST_KEYS
        while start < len(keys):
            if transfer.is_given_up:
                return
            chunk = {name_of(key): key for key in keys[start:stop]}
            start, stop = stop, stop + MORE_KEYS
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
                    own = [r for r in usable if r.endpoint == self.own_endpoint]
                    chosen = (own or usable)[0]
                    memory = self.locate(chosen)
                    yield _Found(key, positions[key], memory, chosen.endpoint)

    def locate(self, replica: Replica) -> Bytes | None:
        """Return an object's memory where it lies in a segment of ours."""
        if replica.endpoint != self.own_endpoint:
            return None
        return self._segments.locate(replica.address, replica.size)

    def _fetch_all(self, transfer: Transfer, blocks: list[_Found]) -> Iterator[_Found]:
        """Yield other members' blocks as they arrive; few at a time."""
        if not blocks or not self._fetches.acquire(timeout=FETCH_WAIT_SECONDS):
            return  # other fetches hang, or are slow: these are misses
        try:
            while blocks and not transfer.is_given_up:
                yield from self._fetch(transfer, blocks[:MAX_BLOCKS])
                blocks = [b for b in blocks[MAX_BLOCKS:] if not self._is_shunned(b)]
        finally:
            self._fetches.release()

    def _is_shunned(self, found: _Found) -> bool:
        return self._shunned.get(found.endpoint, 0.0) > time.monotonic()

    def _fetch(self, transfer: Transfer, blocks: list[_Found]) -> Iterator[_Found]:
        """Read objects of other members into staging memory; yield what arrived."""
        size = transfer.object_bytes
        staging = np.empty((len(blocks), size), dtype=np.uint8)
        names = [name_of(found.key) for found in blocks]
        pointers = [[staging.ctypes.data + i * size] for i in range(len(blocks))]
        codes = self._get_handle().get(names, pointers, [[size]] * len(blocks))
        for i, (found, code) in enumerate(zip(blocks, codes, strict=True)):
            if code == size:
                yield replace(found, memory=staging[i])
            elif code not in MISS_CODES and found.endpoint != self.own_endpoint:
                self._shunned[found.endpoint] = time.monotonic() + SHUN_SECONDS

    def _remove_damaged(self, keys: list[BlockKey]) -> None:
        logger.warning("%d damaged blocks in Mooncake are removed", len(keys))
        self.damaged_blocks += len(keys)
        self._get_handle().remove([name_of(key) for key in keys])


def probe_endpoint(handle: MooncakeHandle, segments: Segments) -> str:
    """Return under which endpoint our own segments appear in descriptors.

    An object with a random name and content is put into our own segment, found by its
    content, and removed. Empty when that did not work out: then every object is read
    through the library, which is slower and as right.
    """
    name = name_of(os.urandom(16))
    content = np.frombuffer(os.urandom(64), dtype=np.uint8)
    if _put_probe(handle, name, content) != 0:
        return ""
    try:
        for replica in handle.describe([name]).get(name, []):
            memory = segments.locate(replica.address, replica.size)
            if memory is not None and np.array_equal(memory, content):
                return replica.endpoint
    finally:
        handle.remove([name])
    return ""


def is_wedged(handle: MooncakeHandle) -> bool:
    """Whether the client cannot move even a few bytes."""
    name = name_of(os.urandom(16))
    code = _put_probe(handle, name, np.zeros(64, dtype=np.uint8))
    if code == 0:
        handle.remove([name])
    return code == TRANSFER_FAILED


def _put_probe(handle: MooncakeHandle, name: str, content: Bytes) -> int:
    """Put a small object; return the library's code."""
    return handle.put([name], [[content.ctypes.data]], [[len(content)]])[0]
