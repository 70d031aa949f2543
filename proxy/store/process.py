"""What a store process needs of the operating system: one instance, no leftovers.

Rules:
1. The folder of the socket belongs to us alone (owner, mode 0700); anything else is
   a `ConfigError`, never silently accepted.
2. Whoever holds the lock file beside the socket is the store of that socket. Its
   content tells who that is, and whether a proxy may kill it.
3. A process started through `die_with_parent` is killed by the kernel when the
   *thread* that started it ends, so it must be started from one that lives as long.
"""

import contextlib
import fcntl
import json
import os
import resource
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from proxy.errors import ConfigError

EXIT_CONFIG = 2
"""The settings, or the system, do not allow this store; the last line says why."""
EXIT_TAKEN = 75
"""Another store serves this socket already."""

_LOCK_TRIES = 5
_PR_SET_PDEATHSIG = 1
_DIE_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class SocketTakenError(ConfigError):
    """Another store holds the lock of this socket."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The store that holds a lock file."""

    pid: int
    is_service: bool
    """Nobody may kill it."""


def ensure_private_folder(path: Path) -> None:
    """Create `path` for us alone, or check that it is. Raises ConfigError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as exc:
        raise ConfigError(f"cannot use the folder {path}: {exc.strerror}") from exc
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is not a folder")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"the folder {path} belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"the folder {path} is open to others: chmod 700 it")


class InstanceLock:
    """The lock file of one socket, held until `release` or the process's end."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def acquire(cls, path: Path, *, is_service: bool) -> Self:
        """Take the lock. Raises SocketTakenError when another store has it."""
        tries = _LOCK_TRIES
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                tries -= 1
                if not tries:
                    raise SocketTakenError(f"another store holds {path}") from None
                time.sleep(0.02)  # perhaps `find_holder` looks at it just now
                continue
            # The one that we waited for may have unlinked the file as it ended.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(fd).st_ino:
                    break
            os.close(fd)
        os.ftruncate(fd, 0)
        holder = {"pid": os.getpid(), "is_service": is_service}
        os.pwrite(fd, json.dumps(holder).encode(), 0)
        return cls(path, fd)

    def release(self) -> None:
        """Remove the file and give the lock back."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def find_holder(path: Path) -> LockHolder | None:
    """Tell which live store holds the lock file `path`."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = json.loads(file.read())
                return LockHolder(int(holder["pid"]), bool(holder["is_service"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None  # a leftover: nobody holds it


def forbid_core_dumps() -> None:
    """Keep prompts out of core files, of this process and its children."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with_parent(command: Sequence[str]) -> list[str]:
    """Return `command` (an absolute path first) such that it dies with its parent."""
    return [
        sys.executable,
        *("-I", "-S", "-c", _DIE_WITH_PARENT),
        str(os.getpid()),
        *command,
    ]
