"""A `BlockStore` in memory, for tests of what sits above the store.

It behaves as the real one does: a short slot file is refused, a block of another
fingerprint or shape is a miss and dropped, a put of an existing key changes nothing.
Faults are programmed: `is_available`, `fail_with` (raised by the next calls), `gate`
(an event that calls wait for), `capacity_blocks`.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.blocks import BlockKey, BlockLayout, Fingerprint
from proxy.errors import StoreError, StoreTimeout
from proxy.store.base import PLAIN, BlockRef, PutOptions, PutOutcome


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """What the store keeps of one block."""

    fingerprint: Fingerprint
    shape: tuple[tuple[int, int], ...]
    payload: bytes


class MemoryStore:
    """Blocks in a dict."""

    def __init__(self, *, capacity_blocks: int | None = None) -> None:
        self.blocks: dict[BlockKey, StoredBlock] = {}
        self.capacity_blocks = capacity_blocks
        self.is_available = True
        self.fail_with: StoreError | None = None
        self.gate: asyncio.Event | None = None
        self.calls: list[tuple[str, tuple[BlockKey, ...]]] = []
        self.put_options: list[PutOptions] = []

    def __repr__(self) -> str:
        return f"<MemoryStore blocks={len(self.blocks)}>"

    async def contains(
        self, keys: Sequence[BlockKey], *, deadline_seconds: float
    ) -> list[bool]:
        """See `BlockStore.contains`."""
        await self._enter("contains", keys, deadline_seconds)
        return [key in self.blocks for key in keys]

    async def get_into(
        self,
        fd: int,
        layout: BlockLayout,
        blocks: Sequence[BlockRef],
        *,
        fingerprint: Fingerprint,
        deadline_seconds: float,
    ) -> list[bool]:
        """See `BlockStore.get_into`."""
        await self._enter("get", [block.key for block in blocks], deadline_seconds)
        _check_size(fd, layout)
        filled = []
        for block in blocks:
            stored = self.blocks.get(block.key)
            if stored is None:
                filled.append(False)
                continue
            if (stored.fingerprint, stored.shape) != (fingerprint, _shape(layout)):
                del self.blocks[block.key]
                filled.append(False)
                continue
            start = 0
            for offset, length in layout.pieces(block.index):
                os.pwrite(fd, stored.payload[start : start + length], offset)
                start += length
            filled.append(True)
        return filled

    async def put_from(
        self,
        fd: int,
        layout: BlockLayout,
        blocks: Sequence[BlockRef],
        *,
        fingerprint: Fingerprint,
        deadline_seconds: float,
        options: PutOptions = PLAIN,
    ) -> PutOutcome:
        """See `BlockStore.put_from`."""
        await self._enter("put", [block.key for block in blocks], deadline_seconds)
        self.put_options.append(options)
        _check_size(fd, layout)
        stored = present = failed = 0
        for block in blocks:
            if block.key in self.blocks:
                present += 1
            elif self.capacity_blocks is not None and (
                len(self.blocks) >= self.capacity_blocks
            ):
                failed += 1
            else:
                payload = b"".join(
                    os.pread(fd, length, offset)
                    for offset, length in layout.pieces(block.index)
                )
                self.blocks[block.key] = StoredBlock(
                    fingerprint, _shape(layout), payload
                )
                stored += 1
        return PutOutcome(stored, present, failed, stored * layout.block_bytes)

    async def status(self) -> dict[str, Any]:
        """See `BlockStore.status`."""
        await self._enter("status", (), 1.0)
        used = sum(len(block.payload) for block in self.blocks.values())
        return {
            "kind": "memory",
            "capacity_bytes": 1 << 40,
            "used_bytes": used,
            "blocks": len(self.blocks),
            "isolated": True,
        }

    async def _enter(
        self, name: str, keys: Sequence[BlockKey], deadline_seconds: float
    ) -> None:
        self.calls.append((name, tuple(keys)))
        if not self.is_available:
            raise StoreError("the block store is away")
        if self.gate is not None:
            try:
                async with asyncio.timeout(deadline_seconds):
                    await self.gate.wait()
            except TimeoutError as exc:
                raise StoreTimeout(f"no answer to {name}") from exc
        if self.fail_with is not None:
            raise self.fail_with


def _shape(layout: BlockLayout) -> tuple[tuple[int, int], ...]:
    return tuple((run.count, run.piece_bytes) for run in layout.runs)


def _check_size(fd: int, layout: BlockLayout) -> None:
    if os.fstat(fd).st_size < layout.end:
        raise StoreError("the slot file is shorter than the layout")
