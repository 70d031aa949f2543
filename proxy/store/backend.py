"""What the store process asks of a place where blocks live (its inner seam).

Backends are synchronous and are called by several worker threads at once.

Rules:
1. A stored object is `HEADER_BYTES` of header and the payload, contiguous; see
   `envelope`. Backends verify what they give out, and drop what fails.
2. Trouble with single blocks is told by their results; a backend that cannot work at
   all raises `StoreError`, soon.
3. A transfer past its deadline, or whose client is gone, is given up between blocks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.blocks import BlockKey, Fingerprint
from proxy.store.base import BlockRef, PutOutcome
from proxy.store.envelope import HEADER_BYTES, BlockIdentity
from proxy.store.slotview import SlotView


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One get or put: which blocks, and where in which mapped slot file."""

    slot: SlotView
    blocks: tuple[BlockRef, ...]
    fingerprint: Fingerprint
    give_up_at: float
    """On the monotonic clock."""
    is_wanted: Callable[[], bool] = field(default=lambda: True)
    """False once the client is gone."""

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for the result any more."""
        return time.monotonic() > self.give_up_at or not self.is_wanted()

    def identity(self, key: BlockKey) -> BlockIdentity:
        """Return what the header of block `key` has to say."""
        return BlockIdentity.of(key, self.fingerprint, self.slot.layout)

    @property
    def object_bytes(self) -> int:
        """Bytes of one stored object."""
        return HEADER_BYTES + self.slot.layout.block_bytes


class Backend(Protocol):
    """A place where blocks live."""

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Tell which keys are stored; what is found stays for 5 seconds or more."""
        ...

    def get(self, transfer: Transfer) -> list[bool]:
        """Fill the places of the blocks; True where it arrived verified."""
        ...

    def put(self, transfer: Transfer) -> PutOutcome:
        """Store the blocks that are not stored yet."""
        ...

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Remove blocks; return how many were there."""
        ...

    def status(self) -> dict[str, Any]:
        """Tell capacity_bytes, used_bytes, blocks and more, as JSON-ready values."""
        ...

    def close(self) -> None:
        """Let go of everything, within 2.5 seconds. Nothing is called after it."""
        ...


class CopyThreads:
    """Spreads work on single blocks over a few threads.

    The calling thread takes part, so `num_threads` copies run at once for each call,
    and 1 needs no further thread.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = (
            ThreadPoolExecutor(num_threads - 1, thread_name_prefix="copy")
            if num_threads > 1
            else None
        )

    def for_each(self, count: int, work: Callable[[int], None]) -> None:
        """Call ``work(i)`` for i in range(count); raises what a call raised."""
        positions = iter(range(count))
        if self._pool is None or count == 1:
            _drain(positions, work)
            return
        helpers: list[Future[None]] = [
            self._pool.submit(_drain, positions, work)
            for _ in range(min(self._num_threads, count) - 1)
        ]
        try:
            _drain(positions, work)
        finally:
            for helper in helpers:
                helper.result()


def _drain(positions: Iterator[int], work: Callable[[int], None]) -> None:
    # `next` on one range iterator is atomic, so every position is taken once.
    for position in positions:
        work(position)
