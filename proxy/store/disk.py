"""Blocks in a folder: one file for each, found again after any kind of end.

A file is written under a temporary name and renamed when it is whole; the checksum of
the block, not fsync, guards against a torn one after a power cut. Which blocks there
are is kept in memory, in the order of their last use, and read from the folder when
the store starts (the order from the files' times).

Rules:
1. A put that fails (no room, read-only folder) leaves nothing visible behind; after
   one, puts are refused for a second instead of trying the disk for every block.
2. The sum of the files stays within the limit: the least recently used go first, and
   of one batch the last before the first, since a block is of no use without those
   before it. What was asked for in the last `LEASE_SECONDS` stays.
3. One store at a time: the folder itself is locked.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proxy.blocks import BLOCK_KEY_BYTES, BlockKey
from proxy.errors import ConfigError
from proxy.store.backend import CopyThreads, Transfer
from proxy.store.base import PutOutcome
from proxy.store.envelope import HEADER_BYTES, Bytes

logger = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
BATCH_SECONDS = 30.0
"""What a put has stored is not evicted by the rest of the same put."""
TOUCH_SECONDS = 60.0
"""File times are renewed at most this often."""
PAUSE_SECONDS = 1.0
_PAGE_BYTES = 4096
_TEMPORARY = ".tmp-"


@dataclass(slots=True)
class _Entry:
    size_bytes: int
    leased_until: float = 0.0
    touched: float = 0.0


class DiskBackend:
    """A folder of blocks; see `Backend`."""

    def __init__(self, folder: Path, size_bytes: int, copy: CopyThreads) -> None:
        """Open the folder and learn what it holds.

        Raises ConfigError when it cannot be used, or another store uses it.
        """
        self._folder = folder
        self._limit_bytes = size_bytes
        self._copy = copy
        self._lock = threading.Lock()
        self._staging = threading.local()
        # mutable state
        self._index: OrderedDict[BlockKey, _Entry] = OrderedDict()
        self._used_bytes = 0
        self._puts_paused_until = 0.0
        self._temporary_names = 0
        self.evicted_blocks = 0
        self.damaged_blocks = 0
        self.failed_puts = 0
        self._folder_fd = self._open_folder()
        self._scan()

    def __repr__(self) -> str:
        return f"<DiskBackend {self._folder} blocks={len(self._index)}>"

    # ---- Backend

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.contains`."""
        with self._lock:
            found = [key in self._index for key in keys]
            self._touch(
                [key for key, is_found in zip(keys, found, strict=True) if is_found]
            )
        return found

    def get(self, transfer: Transfer) -> list[bool]:
        """See `Backend.get`."""
        filled = [False] * len(transfer.blocks)

        def fetch(position: int) -> None:
            if transfer.is_given_up:
                return
            block = transfer.blocks[position]
            staging = self._staging_for(transfer.object_bytes)
            if not self._read(block.key, staging):
                return
            if transfer.deliver(block.key, [block.index], staging):
                filled[position] = True
            else:
                self._drop_damaged(block.key)

        self._copy.for_each(range(len(transfer.blocks)), fetch)
        with self._lock:
            keys = [block.key for block in transfer.blocks]
            self._touch(
                [key for key, is_filled in zip(keys, filled, strict=True) if is_filled]
            )
        return filled

    def put(self, transfer: Transfer) -> PutOutcome:
        """See `Backend.put`."""
        results = ["failed"] * len(transfer.blocks)

        def store(position: int) -> None:
            block = transfer.blocks[position]
            with self._lock:
                is_present = block.key in self._index
            if is_present:
                results[position] = "present"
                return
            if transfer.is_given_up or time.monotonic() < self._puts_paused_until:
                return
            staging = self._staging_for(transfer.object_bytes)
            payload = staging[HEADER_BYTES:]
            payload_checksum = transfer.slot.gather(block.index, payload)
            header = transfer.identity(block.key).pack(payload_checksum)
            staging[:HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
            if self.write_object(block.key, staging, lease_seconds=BATCH_SECONDS):
                results[position] = "stored"

        self._copy.for_each(range(len(transfer.blocks)), store)
        stored = [
            block.key
            for block, result in zip(transfer.blocks, results, strict=True)
            if result == "stored"
        ]
        with self._lock:
            self._touch(stored, lease=False)
            self.failed_puts += results.count("failed")
        return PutOutcome(
            stored_blocks=len(stored),
            present_blocks=results.count("present"),
            failed_blocks=results.count("failed"),
            stored_bytes=len(stored) * transfer.slot.layout.block_bytes,
        )

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """See `Backend.remove`."""
        return sum(self._unlink(key) for key in keys)

    def status(self) -> dict[str, Any]:
        """See `Backend.status`."""
        with self._lock:
            return {
                "capacity_bytes": self._limit_bytes,
                "used_bytes": self._used_bytes,
                "blocks": len(self._index),
                "folder": str(self._folder),
                "evicted_blocks": self.evicted_blocks,
                "damaged_blocks": self.damaged_blocks,
                "failed_puts": self.failed_puts,
            }

    def close(self) -> None:
        """See `Backend.close`. The blocks stay."""
        os.close(self._folder_fd)

    # ---- whole objects, for the tier above

    def read_object(self, key: BlockKey) -> Bytes | None:
        """Return header and payload of a block, not verified; None if absent."""
        with self._lock:
            entry = self._index.get(key)
        if entry is None:
            return None
        try:
            return np.fromfile(self._path(key), dtype=np.uint8)
        except OSError:
            self._drop_damaged(key)
            return None

    def write_object(
        self, key: BlockKey, data: Bytes, *, lease_seconds: float = 0.0
    ) -> bool:
        """Store header and payload of a block; False when that did not work."""
        size_bytes = _on_disk(len(data))
        if not self._make_room(size_bytes):
            return False
        with self._lock:
            self._temporary_names += 1
            number = self._temporary_names
        path = self._path(key)
        temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{number}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write_file(temporary, data)
            temporary.rename(path)
        except OSError as exc:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._puts_paused_until = time.monotonic() + PAUSE_SECONDS
            logger.warning("cannot store on disk: %s", exc)
            with self._lock:
                self._used_bytes -= size_bytes
            if isinstance(exc, FileNotFoundError):
                self._revive_folder()
            return False
        with self._lock:
            before = self._index.pop(key, None)
            if before is not None:
                self._used_bytes -= before.size_bytes
            self._index[key] = _Entry(size_bytes, time.monotonic() + lease_seconds)
        return True

    # ---- files

    def _path(self, key: BlockKey) -> Path:
        text = key.hex()
        return self._folder / text[:2] / text[2:]

    def _staging_for(self, size: int) -> Bytes:
        """Return memory for one object, this thread's own."""
        memory: Bytes | None = getattr(self._staging, "memory", None)
        if memory is None or len(memory) < size:
            memory = self._staging.memory = np.empty(size, dtype=np.uint8)
        return memory[:size]

    def _read(self, key: BlockKey, memory: Bytes) -> bool:
        """Read the object of a block; a file of another size is damaged."""
        with self._lock:
            if key not in self._index:
                return False
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._drop_damaged(key)
            return False
        try:
            if os.fstat(fd).st_size == len(memory) and _read_all(fd, memory):
                return True
        except OSError as exc:
            logger.warning("cannot read block %s: %s", key.hex()[:12], exc)
        finally:
            os.close(fd)
        self._drop_damaged(key)
        return False

    def _drop_damaged(self, key: BlockKey) -> None:
        logger.warning("block %s on disk is damaged: removed", key.hex()[:12])
        self.damaged_blocks += 1
        self._unlink(key)

    def _unlink(self, key: BlockKey) -> bool:
        with self._lock:
            entry = self._index.pop(key, None)
            if entry is None:
                return False
            self._used_bytes -= entry.size_bytes
        with contextlib.suppress(OSError):
            self._path(key).unlink()
        return True

    def _make_room(self, size_bytes: int) -> bool:
        """Reserve `size_bytes`, evicting the oldest blocks until they fit."""
        while True:
            with self._lock:
                if self._used_bytes + size_bytes <= self._limit_bytes:
                    self._used_bytes += size_bytes
                    return True
                now = time.monotonic()
                oldest = next(
                    (k for k, e in self._index.items() if e.leased_until < now), None
                )
                if oldest is None or size_bytes > self._limit_bytes:
                    return False
                self.evicted_blocks += 1
            self._unlink(oldest)

    def _touch(self, keys: Sequence[BlockKey], *, lease: bool = True) -> None:
        """Note the use of a batch, so that its first block is the newest (locked)."""
        now, wall_ns = time.monotonic(), time.time_ns()
        for position in range(len(keys) - 1, -1, -1):
            key = keys[position]
            entry = self._index.get(key)
            if entry is None:
                continue
            self._index.move_to_end(key)
            entry.leased_until = now + LEASE_SECONDS if lease else 0.0
            if not entry.touched or now - entry.touched > TOUCH_SECONDS:
                entry.touched = now
                stamp = wall_ns - position * 1000
                with contextlib.suppress(OSError):
                    os.utime(self._path(key), ns=(stamp, stamp))

    # ---- start

    def _open_folder(self) -> int:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise ConfigError(
                f"cannot use the block folder {self._folder}: {exc.strerror}"
            ) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(fd)
            raise ConfigError(
                f"another store uses the block folder {self._folder}"
                if exc.errno == errno.EWOULDBLOCK
                else f"cannot lock the block folder {self._folder}: {exc.strerror}"
            ) from exc
        return fd

    def _revive_folder(self) -> None:
        """Make the folder anew where somebody has removed it: the store is empty."""
        with self._lock:
            if os.fstat(self._folder_fd).st_nlink:
                return
            try:
                fd = self._open_folder()
            except ConfigError as exc:
                logger.warning("%s", exc)
                return
            os.close(self._folder_fd)
            self._folder_fd = fd
            self._index.clear()
            self._used_bytes = 0
            logger.warning("the block folder was removed; it is made anew, empty")

    def _scan(self) -> None:
        found: list[tuple[int, BlockKey, int]] = []
        with os.scandir(self._folder) as folders:
            names = [e.name for e in folders if len(e.name) == 2 and e.is_dir()]
        for name in names:
            with os.scandir(self._folder / name) as files:
                for file in files:
                    if file.name.startswith(_TEMPORARY):
                        with contextlib.suppress(OSError):
                            Path(file.path).unlink()
                        continue
                    key = _parse_key(name + file.name)
                    if key is not None:
                        stat = file.stat(follow_symlinks=False)
                        found.append((stat.st_mtime_ns, key, stat.st_size))
        found.sort()
        for _, key, size in found:
            self._index[key] = _Entry(_on_disk(size))
        self._used_bytes = sum(entry.size_bytes for entry in self._index.values())


def _on_disk(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _parse_key(text: str) -> BlockKey | None:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        return None
    return BlockKey(key) if len(key) == BLOCK_KEY_BYTES else None


def _read_all(fd: int, memory: Bytes) -> bool:
    view, offset = memory.data, 0
    while offset < len(view):
        count = os.preadv(fd, [view[offset:]], offset)
        if not count:
            return False
        offset += count
    return True


def _write_file(path: Path, data: Bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view, offset = data.data, 0
        while offset < len(view):
            offset += os.pwrite(fd, view[offset:], offset)
    finally:
        os.close(fd)
