"""The files that slots are restored from and saved to.

llama-server reads and writes them in the directory that it was started with. Rules:
1. A restore file is ours alone: allocated in full before anybody maps it (a full
   file system is then an error here, not a SIGBUS later), never shrunk, larger than
   any state that is put into it, and reused, since fresh pages cost more than the
   copy into them. A file that ends early would abort the engine.
2. A save file gets a name that is used once, and is opened after the engine's answer.
3. Names are unguessable and of a fixed form (`FILE_PREFIX`); the directory is 0700.
   Files hold prompts: they are unlinked as soon as they are read.
4. Everything here that touches pages runs in a thread, not on the event loop.
"""

import asyncio
import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from proxy.errors import SlotError

FILE_PREFIX = "kvbus-"
MIN_RESTORE_BYTES = 16 << 20
MAX_IDLE_RESTORE_FILES = 2


@dataclass(frozen=True, slots=True, eq=False)
class RestoreFile:
    """A mapped file that states are composed in."""

    path: Path
    fd: int
    size: int
    view: mmap.mmap

    @property
    def name(self) -> str:
        """The name that the engine knows it by."""
        return self.path.name

    def close(self) -> None:
        """Unlink and unmap it; somebody else's mapping of it stays valid."""
        _unlink(self.path)
        with suppress(BufferError):  # an exported view ends with its holder
            self.view.close()
        os.close(self.fd)


@dataclass(frozen=True, slots=True, eq=False)
class SaveFile:
    """A file that the engine has written, opened and already unlinked."""

    fd: int
    size: int

    def close(self) -> None:
        """Give its memory back."""
        os.close(self.fd)


class SlotDirectory:
    """The slot files of one runner."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # the mutable state: restore files that nobody uses now
        self._idle: list[RestoreFile] = []
        self._is_closed = False

    def new_name(self, kind: str) -> str:
        """Return a file name that was never used."""
        return f"{FILE_PREFIX}{kind}-{secrets.token_hex(12)}"

    async def acquire(self, num_bytes: int) -> RestoreFile:
        """Return a mapped file of at least `num_bytes` for one restore.

        Raises SlotError when there is no room for it.
        """
        fitting = [file for file in self._idle if file.size >= num_bytes]
        if fitting:
            file = min(fitting, key=lambda candidate: candidate.size)
            self._idle.remove(file)
            if await asyncio.to_thread(_is_linked, file):
                return file
            await asyncio.to_thread(file.close)
        size = MIN_RESTORE_BYTES
        while size < num_bytes:
            size += max(MIN_RESTORE_BYTES, size // 4)
        return await asyncio.to_thread(
            _create, self.path / self.new_name("restore"), size
        )

    async def release(self, file: RestoreFile) -> None:
        """Put a file back for the next restore."""
        if self._is_closed:
            await self.discard(file)
            return
        self._idle.append(file)
        if len(self._idle) > MAX_IDLE_RESTORE_FILES:
            smallest = min(self._idle, key=lambda candidate: candidate.size)
            self._idle.remove(smallest)
            await asyncio.to_thread(smallest.close)

    async def discard(self, file: RestoreFile) -> None:
        """Give up a file that somebody may still be writing to."""
        await asyncio.to_thread(file.close)

    async def open_saved(self, name: str, *, expected_bytes: int) -> SaveFile:
        """Open and unlink what the engine has saved under `name`.

        Raises SlotError if it is not there or not as long as the engine says.
        """
        return await asyncio.to_thread(_open_saved, self.path / name, expected_bytes)

    async def remove(self, name: str) -> None:
        """Remove a save file that is not wanted; it need not exist."""
        await asyncio.to_thread(_unlink, self.path / name)

    def close(self) -> None:
        """Unlink all files that are kept for reuse, and those put back later."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()


def _unlink(path: Path) -> None:
    """Remove a file, if it is there and can be: what is left goes with the runner."""
    with suppress(OSError):
        path.unlink()


def _is_linked(file: RestoreFile) -> bool:
    """Tell whether the file still is, in full, what the engine would open.

    Writing behind the end of one that somebody has cut would end this process.
    """
    try:
        found = file.path.stat()
    except OSError:
        return False
    ours = os.fstat(file.fd)
    is_same = (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)
    return is_same and found.st_size >= file.size


def _create(path: Path, size: int) -> RestoreFile:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as exc:
        raise SlotError(f"cannot create a slot file: {exc}") from exc
    try:
        _allocate(fd, size)
        view = mmap.mmap(fd, size)
    except OSError as exc:
        os.close(fd)
        _unlink(path)
        raise SlotError(f"no room for a slot file of {size} bytes: {exc}") from exc
    return RestoreFile(path, fd, size, view)


def _allocate(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
        return
    block = bytes(1 << 20)
    for start in range(0, size, len(block)):
        os.pwrite(fd, block[: size - start], start)


def _open_saved(path: Path, expected_bytes: int) -> SaveFile:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as exc:
        raise SlotError(f"the saved slot file is not there: {exc}") from exc
    size = os.fstat(fd).st_size
    _unlink(path)
    if size != expected_bytes:
        os.close(fd)
        raise SlotError(f"the saved slot file has {size} of {expected_bytes} bytes")
    return SaveFile(fd, size)
