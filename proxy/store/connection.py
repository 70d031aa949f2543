"""One connection to a store process, on the event loop, never blocking it.

Rules:
1. `send` returns at once: what the socket does not take waits in memory and goes out
   when it can. Descriptors are duplicated, so the caller may close its own.
2. The end of the connection is told exactly once, by `on_end`, whatever its cause.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proxy.store.wire import FrameReader, WireError, pack_frame

_READ_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 32 << 20
"""A store that reads nothing is not fed for ever."""


class StoreConnection:
    """Frames over a connected unix socket; owned by one event loop."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[dict[str, Any]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_end = on_end
        self._reader = FrameReader()
        # mutable state
        self.num_reads = 0
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._unsent_bytes = 0
        self._is_open = True
        self._loop.add_reader(sock, self._read)

    def __repr__(self) -> str:
        return f"<StoreConnection open={self._is_open} unsent={self._unsent_bytes}>"

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        on_message: Callable[[dict[str, Any]], None],
        on_end: Callable[[str], None],
    ) -> "StoreConnection":
        """Connect to the socket at `path`. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, os.fspath(path))
        except BaseException:
            sock.close()
            raise
        return cls(sock, on_message=on_message, on_end=on_end)

    @property
    def is_open(self) -> bool:
        """Whether messages can still be sent."""
        return self._is_open

    def send(self, message: Mapping[str, Any], fd: int | None = None) -> None:
        """Send one message, with the descriptor `fd`.

        Raises WireError when the message is too long, or too much is unsent.
        """
        frame = memoryview(pack_frame(message))
        if self._unsent_bytes + len(frame) > _MAX_UNSENT_BYTES:
            raise WireError("the store does not read what it is sent")
        if not self._is_open:
            return  # on_end has told, or is about to
        own_fd = None if fd is None else os.dup(fd)
        was_idle = not self._unsent
        self._unsent.append((frame, own_fd))
        self._unsent_bytes += len(frame)
        if was_idle:
            self._write()

    def close(self) -> None:
        """Close at once; `on_end` is not called."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
        while self._unsent:
            _, fd = self._unsent.popleft()
            if fd is not None:
                os.close(fd)

    def _write(self) -> None:
        try:
            while self._unsent:
                data, fd = self._unsent[0]
                if fd is None:
                    sent = self._sock.send(data)
                else:
                    sent = socket.send_fds(self._sock, [data], [fd])
                    os.close(fd)
                self._unsent_bytes -= sent
                if sent == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = (data[sent:], None)
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._write)
        except OSError as exc:
            self._end(str(exc))
        else:
            self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as exc:
            self._end(str(exc))
            return
        if not data:
            self._end("the store closed the connection")
            return
        self.num_reads += 1
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except WireError as exc:
            self._end(str(exc))

    def _end(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._loop.call_soon(self._on_end, reason)
