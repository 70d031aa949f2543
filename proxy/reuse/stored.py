"""What the store has of a prompt, block by block.

An attention cache is restored up to any block whose predecessors are stored. A memory
with a tail (`proxy.llamacpp.state_tails`) needs, besides them, the tail of the very
place; a memory that is a tail alone has no blocks, but is told of in their measure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.blocks import BlockKey
from proxy.llamacpp.state import StateLayout
from proxy.prefix.hashing import leading_true, tail_key


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """How much of a prompt is stored."""

    num_blocks: int = 0
    """Leading blocks; all of them where the memory has none."""
    tails: tuple[bool, ...] | None = None
    """Of each full block, whether the tail for its end is there; None: none needed."""

    @property
    def restorable_blocks(self) -> int:
        """Up to how many leading blocks a restore reaches."""
        if self.tails is None:
            return self.num_blocks
        ends = (i + 1 for i in range(self.num_blocks) if self.tails[i])
        return max(ends, default=0)


def keys_to_ask(layout: StateLayout, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Return the keys of all objects that may be of use for the blocks `keys`."""
    blocks = list(keys) if layout.has_attention else []
    return blocks + ([tail_key(key) for key in keys] if layout.tail else [])


def read_answer(
    layout: StateLayout, num_blocks: int, found: Sequence[bool]
) -> StoredPrefix:
    """Read the store's answer to `keys_to_ask`."""
    count = num_blocks if layout.has_attention else 0
    return StoredPrefix(
        leading_true(list(found[:count])) if layout.has_attention else num_blocks,
        tuple(found[count:]) if layout.tail else None,
    )
