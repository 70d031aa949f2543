"""Which blocks a token sequence is made of.

A block key is a chained hash: h_i = H(h_{i-1} || token ids of block i), where h_{-1}
is the fingerprint. Rules:
1. Equal keys mean equal fingerprints, equal block sizes and equal token ids up to the
   end of the block. The hash is cryptographic (BLAKE2b-256): prefix caches with weak
   hashes have had collisions, and a collision here would be a wrong answer.
2. Only full blocks have keys.
3. Keys depend on nothing else: not on the process, the host or the seed of `hash()`.

>>> import numpy as np
>>> fingerprint = Fingerprint(bytes(32))
>>> ids = np.arange(10, dtype=np.int32)
>>> keys = hash_blocks(ids, block_size=4, fingerprint=fingerprint)
>>> len(keys)
2
>>> keys == hash_blocks(ids[:8], block_size=4, fingerprint=fingerprint)
True
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from proxy.blocks import BLOCK_KEY_BYTES, BlockKey, Fingerprint

TokenIds = npt.NDArray[np.int32]
"""Token ids, shape [tokens]."""


def hash_blocks(
    token_ids: TokenIds, *, block_size: int, fingerprint: Fingerprint
) -> list[BlockKey]:
    """Return the key of each full block of `token_ids`, first block first."""
    if block_size < 1:
        raise ValueError("a block holds at least one token")
    data = memoryview(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    step = 4 * block_size
    keys: list[BlockKey] = []
    parent: bytes = fingerprint
    for start in range(0, len(data) - step + 1, step):
        digest = blake2b(parent, digest_size=BLOCK_KEY_BYTES)
        digest.update(data[start : start + step])
        parent = digest.digest()
        keys.append(BlockKey(parent))
    return keys


def tail_key(key: BlockKey) -> BlockKey:
    """Return the key of what a memory has, besides blocks, at the end of a block."""
    return BlockKey(blake2b(key, digest_size=BLOCK_KEY_BYTES, person=b"tail").digest())


def common_prefix_tokens(one: TokenIds, other: TokenIds) -> int:
    """Return how many leading token ids two sequences share."""
    num_tokens = min(len(one), len(other))
    different = one[:num_tokens] != other[:num_tokens]
    first = int(different.argmax()) if num_tokens else 0
    return first if num_tokens and different[first] else num_tokens


def leading_true(flags: list[bool]) -> int:
    """Return how many leading flags are set."""
    return flags.index(False) if False in flags else len(flags)
