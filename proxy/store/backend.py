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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from proxy.blocks import BlockKey, Fingerprint
from proxy.store.base import PLAIN, BlockRef, PutOptions, PutOutcome
from proxy.store.envelope import HEADER_BYTES, BlockIdentity, Bytes, read_checksum
from proxy.store.placement import current_cpu, keep_off
from proxy.store.slotview import SlotView

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One get or put: which blocks, and where in which mapped slot file."""

    slot: SlotView
    blocks: tuple[BlockRef, ...]
    fingerprint: Fingerprint
    give_up_at: float
    """On the monotonic clock."""
    options: PutOptions = PLAIN
    """Of a put."""
    is_wanted: Callable[[], bool] = field(default=lambda: True)
    """False once the client is gone."""

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for the result any more."""
        return time.monotonic() > self.give_up_at or not self.is_wanted()

    def identity(self, key: BlockKey) -> BlockIdentity:
        """Return what the header of block `key` has to say."""
        slot = self.slot
        return BlockIdentity(
            key, self.fingerprint, slot.layout_digest, slot.layout.block_bytes
        )

    def deliver(self, key: BlockKey, indexes: Sequence[int], stored: Bytes) -> bool:
        """Copy a stored object to its places; tell whether it was what it should be.

        The places may hold anything when it was not.
        """
        header, payload = stored[:HEADER_BYTES].copy(), stored[HEADER_BYTES:]
        if len(stored) != self.object_bytes or not self.identity(key).is_header(header):
            return False
        found = {self.slot.scatter(index, payload) for index in indexes}
        return found == {read_checksum(header)}

    def only(self, blocks: tuple[BlockRef, ...]) -> "Transfer":
        """Return the same transfer, of some of its blocks."""
        return replace(self, blocks=blocks)

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
    and 1 needs no further thread. The others keep off its CPU: a scheduler that
    leaves them where they were woken, for some milliseconds, takes all the gain.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = (
            ThreadPoolExecutor(num_threads - 1, thread_name_prefix="copy")
            if num_threads > 1
            else None
        )

    def for_each(self, items: Iterable[_T], work: Callable[[_T], None]) -> None:
        """Call ``work(item)`` for all items; raises what a call raised.

        `items` is iterated by the calling thread alone, which copies besides; so
        finding the next items and copying those found overlap.
        """
        if self._pool is None:
            for item in items:
                work(item)
            return
        queue: SimpleQueue[_T | _End] = SimpleQueue()
        helpers: list[Future[None]] = []

        def help_out(callers_cpu: int | None) -> None:
            if callers_cpu is not None:
                keep_off(callers_cpu)
            _drain(queue, work)

        try:
            for count, item in enumerate(items):
                queue.put(item)
                if 0 < count < self._num_threads:
                    helpers.append(self._pool.submit(help_out, current_cpu()))
        finally:
            queue.put(_End.END)
            _drain(queue, work)
            for helper in helpers:
                if not helper.cancel():
                    helper.result()


class _End(Enum):
    END = 0


def _drain(queue: "SimpleQueue[_T | _End]", work: Callable[[_T], None]) -> None:
    while True:
        item = queue.get()
        if isinstance(item, _End):
            queue.put(item)  # for the next thread
            return
        work(item)
