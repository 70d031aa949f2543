"""Whole slot files of memories that are not understood, for prompts that extend them.

Where the layout of a runner's slot files cannot be read, only their token list is, and
only if the operator wants it (`--opaque`) they are stored as they are. Such a snapshot
serves a prompt that begins with all of its tokens, to the last. It is found by a
*pointer*: a small object at the end of the last full block of its tokens, which tells
how many there are, their digest, and the length of the file.

Rules:
1. A pointer is written after its snapshot, and never changed: the first snapshot that
   ends within a block stays the one that is found there.
2. Nothing in a pointer is believed but by the digest of the prompt's own tokens and by
   the length, checksum and fingerprint that the store verifies with the snapshot.
"""

import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from proxy.blocks import BLOCK_KEY_BYTES, BlockKey, Fingerprint
from proxy.llamacpp.state import payload_layout
from proxy.prefix.hashing import TokenIds, tail_key
from proxy.store.base import BlockRef, BlockStore, PutOptions, PutOutcome

_POINTER = struct.Struct("<8sQQ32s")
_MAGIC = b"KVBUSPTR"
MAX_POINTERS_READ = 4
"""A lookup tries the longest ones only."""
MAX_SNAPSHOT_BYTES = 64 << 30


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One whole slot file in the store."""

    num_tokens: int
    num_bytes: int
    key: BlockKey


async def find_snapshot(
    store: BlockStore,
    token_ids: TokenIds,
    keys: Sequence[BlockKey],
    *,
    fingerprint: Fingerprint,
    deadline_seconds: float,
) -> Snapshot | None:
    """Return the longest snapshot that a prompt extends by a token at least.

    `keys` are those of the prompt's full blocks. Raises StoreError.
    """
    pointers = [tail_key(key) for key in keys]
    found = await store.contains(pointers, deadline_seconds=deadline_seconds)
    there = [key for key, is_there in zip(pointers, found, strict=True) if is_there]
    for key in list(reversed(there))[:MAX_POINTERS_READ]:
        with tempfile.NamedTemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, _POINTER.size)
            (is_read,) = await store.get_into(
                file.fileno(),
                payload_layout(0, _POINTER.size),
                [BlockRef(key, 0)],
                fingerprint=fingerprint,
                deadline_seconds=deadline_seconds,
            )
            data = os.pread(file.fileno(), _POINTER.size, 0)
        snapshot = _read_pointer(data, token_ids, fingerprint) if is_read else None
        if snapshot is not None:
            return snapshot
    return None


async def put_snapshot(
    store: BlockStore,
    fd: int,
    num_bytes: int,
    token_ids: TokenIds,
    block_key: BlockKey,
    *,
    fingerprint: Fingerprint,
    deadline_seconds: float,
    options: PutOptions,
) -> PutOutcome:
    """Store the file `fd` of `token_ids`, whose last full block is `block_key`.

    Raises StoreError.
    """
    key = _snapshot_key(token_ids, fingerprint)
    outcome = await store.put_from(
        fd,
        payload_layout(0, num_bytes),
        [BlockRef(key, 0)],
        fingerprint=fingerprint,
        deadline_seconds=deadline_seconds,
        options=options,
    )
    if outcome.failed_blocks:
        return outcome
    data = _POINTER.pack(_MAGIC, len(token_ids), num_bytes, key)
    with tempfile.NamedTemporaryFile() as file:
        os.pwrite(file.fileno(), data, 0)
        pointed = await store.put_from(
            file.fileno(),
            payload_layout(0, len(data)),
            [BlockRef(tail_key(block_key), 0)],
            fingerprint=fingerprint,
            deadline_seconds=deadline_seconds,
            options=options,
        )
    return outcome + PutOutcome(0, 0, pointed.failed_blocks, 0)


def _read_pointer(
    data: bytes, token_ids: TokenIds, fingerprint: Fingerprint
) -> Snapshot | None:
    if len(data) != _POINTER.size:
        return None
    magic, num_tokens, num_bytes, key = _POINTER.unpack(data)
    if magic != _MAGIC or not 0 < num_tokens < len(token_ids):
        return None
    if key != _snapshot_key(token_ids[:num_tokens], fingerprint):
        return None
    if not 0 < num_bytes <= MAX_SNAPSHOT_BYTES:
        return None
    return Snapshot(num_tokens, num_bytes, BlockKey(key))


def _snapshot_key(token_ids: TokenIds, fingerprint: Fingerprint) -> BlockKey:
    digest = blake2b(fingerprint, digest_size=BLOCK_KEY_BYTES, person=b"snapshot")
    digest.update(token_ids.astype("<i4").tobytes())
    return BlockKey(digest.digest())
