"""What the rest of kvbus asks of a block store.

The store moves bytes between its blocks and *slot files* by itself; no KV passes
through the caller. Every call is a batch, in the order of its arguments.

Rules:
1. A block is written once and never changed. Putting a key that exists is success.
2. Whatever is wrong with a stored block (gone, short, damaged, of another model or
   layout) makes it a miss; a damaged one is removed.
3. A call that fails as a whole raises `StoreError`, within its deadline. It never
   hangs, and after it the slot file named in it must not be used again: the store
   may still be writing to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.blocks import BlockKey, BlockLayout, Fingerprint


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One block: its key, and its place in the slot file of the call."""

    key: BlockKey
    index: int


MAX_REPLICAS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    """How new blocks are kept, where the store is able to; the rest is passed over.

    What is stored already stays as it is.
    """

    replica_num: int = 1
    """Copies, each in the memory of another member of a pool; from 1 to 8."""
    soft_pin: bool = False
    """Whether they are evicted only when all others are."""

    def __post_init__(self) -> None:
        if not 1 <= self.replica_num <= MAX_REPLICAS:
            raise ValueError(f"a block has 1 to {MAX_REPLICAS} copies")


PLAIN = PutOptions()


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """What became of the blocks of one put."""

    stored_blocks: int
    """Written by this call."""
    present_blocks: int
    """Were there already (two writers of one block both succeed)."""
    failed_blocks: int
    """Refused: no room, or the store is in trouble. Nothing of them is visible."""
    stored_bytes: int

    def __add__(self, other: "PutOutcome") -> "PutOutcome":
        """Return what became of the blocks of both."""
        return PutOutcome(
            self.stored_blocks + other.stored_blocks,
            self.present_blocks + other.present_blocks,
            self.failed_blocks + other.failed_blocks,
            self.stored_bytes + other.stored_bytes,
        )


NOTHING_PUT = PutOutcome(0, 0, 0, 0)


class BlockStore(Protocol):
    """A place where KV blocks live."""

    @property
    def is_available(self) -> bool:
        """Whether a call is worth trying now (False while the circuit is open)."""
        ...

    async def contains(
        self, keys: Sequence[BlockKey], *, deadline_seconds: float
    ) -> list[bool]:
        """Tell which keys are stored; what is found stays for at least 5 seconds.

        Raises StoreError (StoreTimeout past the deadline).
        """
        ...

    async def get_into(
        self,
        fd: int,
        layout: BlockLayout,
        blocks: Sequence[BlockRef],
        *,
        fingerprint: Fingerprint,
        deadline_seconds: float,
    ) -> list[bool]:
        """Fill the places of `blocks` in the slot file `fd` with their payloads.

        True where the block arrived whole and verified. The file must be at least
        `layout.end` bytes long, fully allocated, and never shrink. The store may
        keep it mapped for later calls (it is told apart by device and inode).
        Raises StoreError (StoreTimeout past the deadline).
        """
        ...

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
        """Store `blocks`, read from their places in the slot file `fd`.

        Raises StoreError (StoreTimeout past the deadline).
        """
        ...

    async def status(self) -> dict[str, Any]:
        """Tell what the store is and holds, as JSON-ready values.

        At least: `kind`, `capacity_bytes`, `used_bytes`, `blocks`, `isolated`.
        Raises StoreError.
        """
        ...
