"""What a stored block looks like: a 128-byte header, then the payload.

The header says whose block it is and what it must hash to, so that a reader needs to
trust nothing else: not the key-value store below, not a lease, not a disk.

Rules:
1. A block is what it should be only when every field of its header equals what the
   reader expects *and* the payload has the header's checksum.
2. The layout digest covers the shape of a block alone (how many pieces of how many
   bytes, in payload order), never where a file has them: the same block fits files
   of any length.

>>> import numpy as np
>>> from proxy.blocks import BlockKey, BlockLayout, Fingerprint, RowRun
>>> shape = BlockLayout((RowRun(0, 64, 2, 8),), num_blocks=1)
>>> expected = BlockIdentity(
...     BlockKey(b"k" * 32), Fingerprint(b"f" * 32), layout_digest(shape), 16
... )
>>> payload = np.arange(16, dtype=np.uint8)
>>> header = expected.pack(checksum(payload))
>>> len(header), expected.is_header(header)
(128, True)
>>> read_checksum(header) == checksum(payload)
True
>>> payload[3] = 0
>>> read_checksum(header) == checksum(payload)
False
"""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from proxy.blocks import BlockKey, BlockLayout, Fingerprint

HEADER_BYTES = 128
MAGIC = b"KVBUSBLK"
VERSION = 1
CHECKSUM_BYTES = 16

Bytes = NDArray[np.uint8]

_FIELDS = struct.Struct("<8sII32s32s16sQ16s8x")
_CHECKSUM_START = 104


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """All that a header says but the checksum."""

    key: BlockKey
    fingerprint: Fingerprint
    layout_digest: bytes
    payload_bytes: int

    def pack(self, payload_checksum: bytes) -> bytes:
        """Return the header of this block for a payload with that checksum."""
        return _FIELDS.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            self.fingerprint,
            self.key,
            self.layout_digest,
            self.payload_bytes,
            payload_checksum,
        )

    def is_header(self, header: bytes | Bytes) -> bool:
        """Whether `header` is of this block."""
        found = bytes(header)
        return (
            len(found) == HEADER_BYTES
            and found[:_CHECKSUM_START] == self.pack(bytes(16))[:_CHECKSUM_START]
        )


def read_checksum(header: bytes | Bytes) -> bytes:
    """Return what the payload of a block must hash to."""
    return bytes(header)[_CHECKSUM_START : _CHECKSUM_START + CHECKSUM_BYTES]


def checksum(payload: Bytes) -> bytes:
    """Return the checksum of a payload's bytes, pieces in payload order."""
    return xxhash.xxh3_128_digest(payload.data)


def layout_digest(layout: BlockLayout) -> bytes:
    """Return 16 bytes that tell apart the shapes of blocks."""
    shape = ";".join(f"{run.count}x{run.piece_bytes}" for run in layout.runs)
    return hashlib.blake2b(shape.encode(), digest_size=16).digest()
