"""The words that all parts share about KV blocks.

A *block* is the K and V rows of `block_size` consecutive tokens, of all layers.
A *slot file* is a llama.cpp sequence-state file; where in it the bytes of a block
lie is told by a `BlockLayout`. Nothing here does I/O.

Rules:
1. A `BlockKey` covers the tokens of its block, all tokens before it, and the
   fingerprint of everything that changes KV. Equal keys mean equal bytes.
2. The payload of a block is the concatenation of its pieces in the order of
   `BlockLayout.pieces`. That order depends on the model alone, never on the length
   or the slot of the file that the block was taken from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: the chained hash of a block. A type of its own, so that a digest of
something else is not passed by mistake."""

Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes: digest of everything that changes KV (see docs/architecture.md)."""

BLOCK_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class RowRun:
    """`count` equally spaced stretches of rows in a slot file.

    Piece k (of `count`) of block i is the `piece_bytes` bytes at
    ``offset + k * stride + i * piece_bytes``. For row-major K and V one run holds
    all layers (stride = distance between layers); for element-major V one run holds
    the elements of one layer (stride = bytes of one element's row).
    """

    offset: int
    stride: int
    count: int
    piece_bytes: int

    def __post_init__(self) -> None:
        if min(self.offset, self.stride, self.count, self.piece_bytes) < 0:
            raise ValueError("a run has no negative members")
        if not self.count or not self.piece_bytes:
            raise ValueError("a run holds at least one byte")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the blocks of one sequence lie in one slot file."""

    runs: tuple[RowRun, ...]
    num_blocks: int
    """How many full blocks the file has room for."""

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return sum(run.count * run.piece_bytes for run in self.runs)

    @property
    def pieces_per_block(self) -> int:
        """How many separate stretches of the file one block fills."""
        return sum(run.count for run in self.runs)

    @property
    def end(self) -> int:
        """One past the last byte of the file that any block fills."""
        if not self.num_blocks:
            return 0
        return max(
            run.offset
            + (run.count - 1) * run.stride
            + self.num_blocks * run.piece_bytes
            for run in self.runs
        )

    def pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each piece of block `index`, in payload order."""
        for run in self.runs:
            start = run.offset + index * run.piece_bytes
            for k in range(run.count):
                yield start + k * run.stride, run.piece_bytes
