"""Accepts clients of the store process, and decides when the process ends.

Rules:
1. Only this user's processes are served: the socket is 0600 in a folder of ours, and
   the peer's uid is asked of the kernel besides.
2. A service ends by a signal alone. A store that a proxy started ends when its last
   client has said bye, and `linger_seconds` after the last one was lost without a
   word (a killed proxy may come back), or after the start if none came.
3. Only a connection that said hello counts as a client.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import stat
import struct
import threading
import time
from pathlib import Path
from typing import Any

from proxy.store.backend import Backend
from proxy.store.session import ClientSession, Workers

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
_TICK_SECONDS = 0.5
_MAX_LOG_BYTES = 4 << 20
_UCRED = struct.Struct("iII")


class StoreServer:
    """The accepting end of the socket; runs in the main thread."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        backend: Backend,
        part_bytes: int,
        facts: dict[str, Any],
        linger_seconds: float | None,
    ) -> None:
        self._listener = listener
        self._backend = backend
        self._part_bytes = part_bytes
        self._facts = facts
        self._linger_seconds = linger_seconds
        self._workers = Workers()
        self._lock = threading.Lock()
        # mutable state
        self._sessions: set[ClientSession] = set()
        self._alone_since: float | None = time.monotonic()
        self._ends_now = False
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __repr__(self) -> str:
        return f"<StoreServer clients={self._count_clients()}>"

    def serve(self) -> None:
        """Serve until a signal, or until nobody needs this store any more."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        while not self._is_over():
            listener_fd = self._listener.fileno()
            ready, _, _ = select.select(
                [listener_fd, self._wake_reader], [], [], _TICK_SECONDS
            )
            if self._wake_reader in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
            if listener_fd in ready:
                self._accept()
            self._tidy()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.shutdown()

    def describe(self) -> dict[str, Any]:
        """Return what a client is told first."""
        return {
            **self._facts,
            "pid": os.getpid(),
            "linger_seconds": self._linger_seconds,
            "clients": self._count_clients(),
        }

    def _is_over(self) -> bool:
        with self._lock:
            if self._ends_now:
                return True
            if self._linger_seconds is None or self._alone_since is None:
                return False
            return time.monotonic() - self._alone_since >= self._linger_seconds

    def _on_signal(self, number: int, _frame: object) -> None:
        self._ends_now = True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            logger.warning("cannot accept: %s", exc)
            time.sleep(0.05)  # out of descriptors: do not spin
            return
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(peer)
        with self._lock:
            is_welcome = uid == os.geteuid() and len(self._sessions) < MAX_CONNECTIONS
        if not is_welcome:
            logger.warning("refused a client of uid %d", uid)
            sock.close()
            return
        session = ClientSession(
            sock,
            backend=self._backend,
            part_bytes=self._part_bytes,
            workers=self._workers,
            describe=self.describe,
            count_others=self._count_clients,
            on_end=self._on_end,
        )
        with self._lock:
            self._sessions.add(session)
        session.start()

    def _count_clients(self, but: ClientSession | None = None) -> int:
        with self._lock:
            return sum(s.is_introduced and s is not but for s in self._sessions)

    def _on_end(self, session: ClientSession) -> None:
        with self._lock:
            self._sessions.discard(session)
            is_last = session.is_introduced and not any(
                other.is_introduced for other in self._sessions
            )
            if is_last:
                self._alone_since = time.monotonic()
                self._ends_now |= session.said_bye and self._linger_seconds is not None
        self._wake()

    def _tidy(self) -> None:
        with self._lock:
            sessions = list(self._sessions)
            if any(session.is_introduced for session in sessions):
                self._alone_since = None
            elif self._alone_since is None:
                self._alone_since = time.monotonic()
        for session in sessions:
            session.slot_files.sweep()
        found = os.fstat(2)
        if stat.S_ISREG(found.st_mode) and found.st_size > _MAX_LOG_BYTES:
            os.ftruncate(2, 0)  # opened for appending: all writers go on at the start

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"\0")


def listen_privately(path: Path) -> socket.socket:
    """Listen at `path`, for this user alone; the caller holds its lock."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(before)
    listener.listen(64)
    return listener
