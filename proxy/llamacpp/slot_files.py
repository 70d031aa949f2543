"""The files that slots are restored from and saved to.

llama-server reads and writes them in the directory that it was started with. Rules:
1. A restore file is ours alone: allocated in full before the store maps it (a full
   file system is then an error here, not a SIGBUS there), never shrunk, larger than
   any state that is put into it, and reused, since fresh pages cost more than the
   copy into them. A file that ends early would abort the engine. This process writes
   to it and never maps it: whoever cuts it cannot end the proxy.
2. A save file gets a name that is used once, and is opened after the engine's answer.
3. Names are unguessable and of a fixed form (`FILE_PREFIX`, then who owns them); the
   directory is 0700. Files hold prompts: they are unlinked as soon as they are read,
   and those of an owner that died by whoever uses the directory next.
4. Everything here that touches pages runs in a thread, not on the event loop. What
   such a thread makes for a task that was cancelled meanwhile is closed.
"""

import asyncio
import os
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from proxy.errors import SlotError

FILE_PREFIX = "kvbus-"
_OWNED = re.compile(r"kvbus-(\d+)-(\d+)-(\d+)-\w+-[0-9a-f]{24}")
"""Namespace of the pid, pid and start time of the owner, kind, random part."""

_T = TypeVar("_T")

MIN_RESTORE_BYTES = 16 << 20
MAX_IDLE_RESTORE_FILES = 2


@dataclass(frozen=True, slots=True, eq=False)
class RestoreFile:
    """A file that states are composed in."""

    path: Path
    fd: int
    size: int

    @property
    def name(self) -> str:
        """The name that the engine knows it by."""
        return self.path.name

    def write(self, parts: Iterable[tuple[int, bytes]]) -> None:
        """Write (offset, bytes) parts. Raises SlotError if the file was cut."""
        for offset, part in parts:
            os.pwrite(self.fd, part, offset)
        if os.fstat(self.fd).st_size < self.size:
            raise SlotError("somebody has cut a slot file short")

    def close(self) -> None:
        """Unlink it; somebody else's mapping of it stays valid."""
        _unlink(self.path)
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
        self._prefix = f"{FILE_PREFIX}{_owner(os.getpid())}"
        # the mutable state: restore files that nobody uses now
        self._idle: list[RestoreFile] = []
        self._is_closed = False

    def new_name(self, kind: str) -> str:
        """Return a file name that was never used."""
        return f"{self._prefix}-{kind}-{secrets.token_hex(12)}"

    async def acquire(self, num_bytes: int) -> RestoreFile:
        """Return a mapped file of at least `num_bytes` for one restore.

        Raises SlotError when there is no room for it.
        """
        fitting = [file for file in self._idle if file.size >= num_bytes]
        if fitting:
            file = min(fitting, key=lambda candidate: candidate.size)
            self._idle.remove(file)
            if await _in_thread(lambda: _is_linked(file), lambda _: file.close()):
                return file
            await self.discard(file)
        size = MIN_RESTORE_BYTES
        while size < num_bytes:
            size += max(MIN_RESTORE_BYTES, size // 4)
        path = self.path / self.new_name("restore")
        return await _in_thread(lambda: _create(path, size), RestoreFile.close)

    async def release(self, file: RestoreFile) -> None:
        """Put a file back for the next restore."""
        if self._is_closed:
            await self.discard(file)
            return
        self._idle.append(file)
        if len(self._idle) > MAX_IDLE_RESTORE_FILES:
            smallest = min(self._idle, key=lambda candidate: candidate.size)
            self._idle.remove(smallest)
            await self.discard(smallest)

    async def discard(self, file: RestoreFile) -> None:
        """Give up a file that somebody may still be writing to."""
        await _in_thread(file.close, lambda _: None)

    async def open_saved(self, name: str, *, expected_bytes: int) -> SaveFile:
        """Open and unlink what the engine has saved under `name`.

        Raises SlotError if it is not there or not as long as the engine says.
        """
        path = self.path / name
        return await _in_thread(
            lambda: _open_saved(path, expected_bytes), SaveFile.close
        )

    async def remove(self, name: str) -> None:
        """Remove a save file that is not wanted; it need not exist."""
        path = self.path / name
        await _in_thread(lambda: _unlink(path), lambda _: None)

    def close(self) -> None:
        """Unlink all files that are kept for reuse, and those put back later."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()


async def _in_thread(work: Callable[[], _T], undo: Callable[[_T], None]) -> _T:
    """Run `work` in a thread, to its end; undo it where the caller was cancelled."""
    loop = asyncio.get_running_loop()
    working = loop.run_in_executor(None, work)

    def undo_result(done: asyncio.Future[_T]) -> None:
        if not done.cancelled() and done.exception() is None:
            _ = loop.run_in_executor(None, undo, done.result())

    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        working.add_done_callback(undo_result)
        raise


def remove_stale_files(path: Path) -> None:
    """Remove the slot files of owners that are no more (blocking)."""
    for file in path.glob(f"{FILE_PREFIX}*"):
        match = _OWNED.fullmatch(file.name)
        if match is None or int(match[1]) != _pid_namespace():
            continue
        if _owner(int(match[2])) != f"{match[1]}-{match[2]}-{match[3]}":
            _unlink(file)


def _owner(pid: int) -> str:
    """Name a process for good: pids are used again. Linux; proc(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        started = stat.rpartition(")")[2].split()[19]
    except OSError:
        started = "0"
    return f"{_pid_namespace()}-{pid}-{started}"


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _unlink(path: Path) -> None:
    """Remove a file, if it is there and can be: what is left goes with the runner."""
    with suppress(OSError):
        path.unlink()


def _is_linked(file: RestoreFile) -> bool:
    """Tell whether the file still is, in full, what the engine would open."""
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
    except OSError as exc:
        os.close(fd)
        _unlink(path)
        raise SlotError(f"no room for a slot file of {size} bytes: {exc}") from exc
    return RestoreFile(path, fd, size)


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
