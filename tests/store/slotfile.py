"""Slot files for the store's tests: memfds with known blocks in them."""

import hashlib
import os

import numpy as np
from numpy.typing import NDArray

from proxy.blocks import BlockKey, BlockLayout, Fingerprint, RowRun
from proxy.store.base import BlockRef

FINGERPRINT = Fingerprint(hashlib.sha256(b"model").digest())


def small_layout(num_blocks: int, *, piece_bytes: int = 4096) -> BlockLayout:
    """Return K and V of 6 layers with a gap between them, as slot files have."""
    layer = num_blocks * piece_bytes + 12
    return BlockLayout(
        runs=(
            RowRun(100, layer, 6, piece_bytes),
            RowRun(100 + 6 * layer + 40, layer, 6, piece_bytes),
        ),
        num_blocks=num_blocks,
    )


def make_key(name: str) -> BlockKey:
    """Return the key that belongs to a name."""
    return BlockKey(hashlib.sha256(name.encode()).digest())


def make_refs(prefix: str, count: int) -> list[BlockRef]:
    """Return `count` blocks named after `prefix`, at the places 0, 1, ..."""
    return [BlockRef(make_key(f"{prefix}{i}"), i) for i in range(count)]


class TestFile:
    """A memfd as long as a layout, seen as numpy bytes."""

    __test__ = False

    def __init__(self, layout: BlockLayout, *, seed: int | None = None) -> None:
        self.layout = layout
        self.fd = os.memfd_create("slot")
        size = layout.end + 777
        os.ftruncate(self.fd, size)
        if seed is not None:
            noise = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
            os.pwrite(self.fd, noise.data, 0)

    def __enter__(self) -> "TestFile":
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self.fd)

    def payload(self, index: int) -> bytes:
        """Return the payload of block `index`."""
        return b"".join(
            os.pread(self.fd, length, offset)
            for offset, length in self.layout.pieces(index)
        )

    def everything(self) -> NDArray[np.uint8]:
        """Return a copy of the whole file."""
        size = os.fstat(self.fd).st_size
        return np.frombuffer(os.pread(self.fd, size, 0), dtype=np.uint8)
