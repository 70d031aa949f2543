"""The writer over a Mooncake that has no space: it mounts more before it gives up."""

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from proxy.blocks import BlockKey
from proxy.store.backend import CopyThreads
from proxy.store.envelope import Bytes
from proxy.store.mooncake import NO_SPACE, MooncakeHandle
from proxy.store.mooncake_writer import MooncakeWriter
from proxy.store.segments import Segments

SEGMENT_BYTES = 1 << 20


class FullHandle:
    """A client whose segments are full until `needed` of them are mounted."""

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.mounted: list[mmap.mmap] = []

    def mount(self, path: str, size: int) -> bool:
        """Map the file, as Mooncake does."""
        fd = os.open(Path(path), os.O_RDWR)
        self.mounted.append(mmap.mmap(fd, size))
        os.close(fd)
        return True

    def exist(self, names: list[str]) -> list[bool]:
        """Tell that all is there."""
        return [True] * len(names)


def put_one(handle: FullHandle, *, max_segments: int) -> int:
    """Put a block; returns how many were stored."""
    segments = Segments(segment_bytes=SEGMENT_BYTES, max_segments=max_segments)
    writer = MooncakeWriter(
        get_handle=lambda: cast(MooncakeHandle, cast(Any, handle)),
        segments=segments,
        copy=CopyThreads(1),
        on_suspicion=lambda: None,
    )

    def put_once(objects: Mapping[BlockKey, Bytes]) -> list[int]:
        return [0 if len(handle.mounted) >= handle.needed else NO_SPACE] * len(objects)

    return writer._put_retrying(
        {BlockKey(bytes(32)): np.zeros(8, dtype=np.uint8)}, put_once
    )


def test_no_space_mounts_more() -> None:
    """As many segments as it takes, though usage was believed to be low."""
    handle = FullHandle(needed=6)
    assert put_one(handle, max_segments=8) == 1
    assert len(handle.mounted) == 6


def test_no_space_at_the_limit_gives_up() -> None:
    """With all segments mounted and nothing evicted the put fails, in bounded time."""
    handle = FullHandle(needed=6)
    assert put_one(handle, max_segments=4) == 0
    assert len(handle.mounted) == 4
