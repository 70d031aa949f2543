"""A folder below the RAM: blocks are written behind, and brought back when asked for.

Rules:
1. Nobody waits for the disk but who finds a block there alone. Whole objects move
   between the tiers in one thread of its own, by key, read again when their turn
   comes: so a queue of keys needs no memory, and what is gone by then is skipped.
2. A full queue drops: the tier below is a cache as well.
3. Trouble in RAM (its master restarts) leaves the disk readable. But a read out of RAM
   that was given up on the way may still write to the slot file: that call fails, so
   that nobody uses the file again.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from proxy.blocks import BlockKey
from proxy.errors import StoreError
from proxy.store.backend import Backend, Transfer
from proxy.store.base import PutOutcome
from proxy.store.envelope import Bytes
from proxy.store.gate import CallNotStartedError

logger = logging.getLogger(__name__)

MAX_WAITING = 8192
"""Blocks; at 2 MB each far more than is written before RAM evicts them."""
CLOSE_SECONDS = 1.0


class Tier(Backend, Protocol):
    """A backend that gives and takes whole objects."""

    def read_object(self, key: BlockKey) -> Bytes | None:
        """Return header and payload, not verified."""
        ...

    def write_object(self, key: BlockKey, data: Bytes) -> bool:
        """Store header and payload."""
        ...


class _Direction(Enum):
    DOWN = "to disk"
    UP = "to RAM"


class TieredBackend:
    """RAM above a disk; see `Backend`."""

    def __init__(self, ram: Tier, disk: Tier) -> None:
        self._ram = ram
        self._disk = disk
        self._condition = threading.Condition()
        # mutable state
        self._waiting: OrderedDict[tuple[BlockKey, _Direction], None] = OrderedDict()
        self._is_closing = False
        self.dropped_moves = 0
        self.moved_blocks = 0
        self._mover = threading.Thread(target=self._move, name="tiers", daemon=True)
        self._mover.start()

    def __repr__(self) -> str:
        return f"<TieredBackend {self._ram!r} {self._disk!r}>"

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.contains`."""
        below = self._disk.contains(keys)
        try:
            above = self._ram.contains(keys)
        except StoreError:
            return below
        return [a or b for a, b in zip(above, below, strict=True)]

    def get(self, transfer: Transfer) -> list[bool]:
        """See `Backend.get`."""
        try:
            filled = self._ram.get(transfer)
        except CallNotStartedError:
            filled = [False] * len(transfer.blocks)
        missing = [i for i, is_filled in enumerate(filled) if not is_filled]
        if not missing:
            return filled
        below = self._disk.get(
            transfer.only(tuple(transfer.blocks[i] for i in missing))
        )
        found = [i for i, is_filled in zip(missing, below, strict=True) if is_filled]
        for i in found:
            filled[i] = True
        self._enqueue([transfer.blocks[i].key for i in found], _Direction.UP)
        return filled

    def put(self, transfer: Transfer) -> PutOutcome:
        """See `Backend.put`."""
        outcome = self._ram.put(transfer)
        if outcome.stored_blocks:
            keys = [block.key for block in transfer.blocks]
            below = self._disk.contains(keys)
            self._enqueue(
                [
                    key
                    for key, is_there in zip(keys, below, strict=True)
                    if not is_there
                ],
                _Direction.DOWN,
            )
        return outcome

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """See `Backend.remove`."""
        below = self._disk.remove(keys)
        return max(below, self._ram.remove(keys))

    def status(self) -> dict[str, Any]:
        """See `Backend.status`."""
        with self._condition:
            moves = {
                "waiting_moves": len(self._waiting),
                "dropped_moves": self.dropped_moves,
                "moved_blocks": self.moved_blocks,
            }
        return {**self._ram.status(), **moves, "disk": self._disk.status()}

    def close(self) -> None:
        """See `Backend.close`. Moves that wait are dropped."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._mover.join(CLOSE_SECONDS)
        self._ram.close()
        self._disk.close()

    def _enqueue(self, keys: Sequence[BlockKey], direction: _Direction) -> None:
        with self._condition:
            for key in keys:
                if len(self._waiting) >= MAX_WAITING:
                    self.dropped_moves += 1
                else:
                    self._waiting[key, direction] = None
            self._condition.notify_all()

    def _move(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._is_closing)
                if self._is_closing:
                    return
                (key, direction), _ = self._waiting.popitem(last=False)
            try:
                self._move_one(key, direction)
            except StoreError as exc:
                logger.debug("block stays where it is: %s", exc)
            except Exception:  # the root of this thread
                logger.exception("moving a block failed")

    def _move_one(self, key: BlockKey, direction: _Direction) -> None:
        source, target = self._ram, self._disk
        if direction is _Direction.UP:
            source, target = target, source
        if target.contains([key])[0]:
            return
        data = source.read_object(key)
        if data is not None and target.write_object(key, data):
            with self._condition:
                self.moved_blocks += 1
