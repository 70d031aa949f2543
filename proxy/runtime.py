"""Where a running kvbus keeps its sockets and slot files, and how they go away.

Rules:
1. All of it lies in directories of mode 0700 that we own; one that is not ours is
   refused, not used.
2. A process holds a lock on its own directory. A directory whose lock is free belongs
   to a process that died: `remove_stale` deletes it.
3. A lock counts only while its file is where it was opened: between making and
   locking it another process may find the lock free, and delete the directory.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from proxy.errors import ConfigError

LOCK_NAME = "lock"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory, in directories of our own


def default_runtime_dir() -> Path:
    """Return the user's directory for sockets and locks."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir():
        return Path(given) / "kvbus"
    return Path(tempfile.gettempdir()) / f"kvbus-{os.getuid()}"


def default_slot_root() -> Path:
    """Return the user's directory for slot files: memory where there is any."""
    if os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY / f"kvbus-{os.getuid()}"
    return default_runtime_dir() / "slots"


def ensure_private(path: Path) -> Path:
    """Make `path` a directory that only we can use. Raises ConfigError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as exc:
        raise ConfigError(f"cannot use the directory {path}: {exc.strerror}") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path} is not a directory of this user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


class OwnedDirectory:
    """A fresh directory that lives as long as its process, or until `close`."""

    def __init__(self, parent: Path, prefix: str) -> None:
        """Create it below `parent`, whose stale ones are removed first.

        Raises ConfigError when `parent` cannot be used.
        """
        while True:
            ensure_private(parent)
            remove_stale(parent, prefix)
            with suppress(FileNotFoundError):  # others remove an empty parent
                self.path, self._lock = _make_locked(parent, prefix)
                if _is_at(self.path / LOCK_NAME, self._lock):
                    return
                os.close(self._lock)

    def close(self) -> None:
        """Remove it and all that is in it; its parent too if it is empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        with suppress(OSError):
            self.path.parent.rmdir()


def _make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a directory and take its lock, which may be void by then (rule 3)."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return path, lock


def _is_at(path: Path, fd: int) -> bool:
    """Tell whether the open file is the one under this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def remove_stale(parent: Path, prefix: str) -> None:
    """Remove the directories of processes that are no more."""
    for path in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # just being made, or not one of ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path / LOCK_NAME, lock):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its process lives
        finally:
            os.close(lock)
