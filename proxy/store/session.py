"""One connected client of the store process: a thread that reads its requests.

Rules:
1. The reading thread never works on blocks: it answers `ping` itself, at once, and
   hands everything else to the workers.
2. At most `MAX_CALLS` requests are worked on at once, over all clients; one more is
   refused at once. Each is answered exactly once.
3. Garbage ends this connection and nothing else; so does a client that does not read
   its answers for a second.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from proxy.errors import StoreError
from proxy.store.backend import Backend, Transfer
from proxy.store.base import PLAIN
from proxy.store.slotfiles import SlotFiles
from proxy.store.wire import (
    WIRE_VERSION,
    FrameReader,
    WireError,
    pack_frame,
    parse_keys,
    parse_put_options,
    parse_transfer,
)

logger = logging.getLogger(__name__)

MAX_CALLS = 32
NUM_WORKERS = 8
_READ_BYTES = 256 << 10
_MAX_WAITING_FDS = 16
_SEND_TIMEOUT = struct.pack("ll", 1, 0)  # a timeval of one second


class Workers:
    """The threads that work on requests, with a cap on what is in flight."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="store")
        self._free = threading.BoundedSemaphore(MAX_CALLS)

    def try_submit(self, work: Callable[[], None]) -> bool:
        """Have `work` done; False, at once, when too much is in flight."""
        if not self._free.acquire(blocking=False):
            return False
        self._pool.submit(self._run, work)
        return True

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._free.release()


class _OwnedFd:
    """A descriptor that is closed once, used or not."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_exc: object) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.__exit__()


class ClientSession:
    """A connection, from accept to its end."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        backend: Backend,
        part_bytes: int,
        workers: Workers,
        describe: Callable[[], dict[str, Any]],
        count_others: Callable[["ClientSession"], int],
        on_end: Callable[["ClientSession"], None],
    ) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self._sock = sock
        self._backend = backend
        self._workers = workers
        self._describe = describe
        self._count_others = count_others
        self._on_end = on_end
        self._send_lock = threading.Lock()
        self.slot_files = SlotFiles(part_bytes=part_bytes)
        # mutable state
        self.is_introduced = False
        self.said_bye = False
        self._is_open = True
        self._fds: deque[int] = deque()

    def __repr__(self) -> str:
        return f"<ClientSession introduced={self.is_introduced} open={self._is_open}>"

    def start(self) -> None:
        """Read requests in a thread of its own, until the connection ends."""
        threading.Thread(target=self._read, name="client", daemon=True).start()

    def shutdown(self) -> None:
        """End the connection from another thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        reader = FrameReader()
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(
                    self._sock,
                    _READ_BYTES,
                    _MAX_WAITING_FDS,
                    flags=socket.MSG_CMSG_CLOEXEC,
                )
                self._fds.extend(fds)
                if not data or len(self._fds) > _MAX_WAITING_FDS:
                    break
                for message in reader.feed(data):
                    self._dispatch(message)
        except (OSError, WireError) as exc:
            logger.debug("client dropped: %s", exc)
        finally:
            self._is_open = False
            self.slot_files.close()
            while self._fds:
                os.close(self._fds.popleft())
            self._on_end(self)
            with self._send_lock:
                self._sock.close()

    def _dispatch(self, message: dict[str, Any]) -> None:
        """Answer a request here, or have it answered. Raises WireError."""
        call_id, op = message.get("id"), message.get("op")
        if type(call_id) is not int or not isinstance(op, str):
            raise WireError("a request has an id and an operation")
        match op:
            case "ping":
                self._answer(call_id, {})
                return
            case "hello":
                if message.get("version") != WIRE_VERSION:
                    self._answer(call_id, {"error": "another version of kvbus"})
                    return
                self.is_introduced = True
                self._answer(call_id, self._describe())
                return
            case "bye":
                self.said_bye = True
                self._answer(call_id, {"clients": self._count_others(self)})
                return
            case "get" | "put":
                work = self._transfer(op, message)
            case "contains":
                keys = parse_keys(message.get("keys"))
                work = lambda: {"found": self._backend.contains(keys)}  # noqa: E731
            case "remove":
                keys = parse_keys(message.get("keys"))
                work = lambda: {"removed": self._backend.remove(keys)}  # noqa: E731
            case "status":
                work = lambda: {  # noqa: E731
                    "status": {**self._describe(), **self._backend.status()}
                }
            case _:
                raise WireError(f"unknown operation {op[:20]!r}")
        if not self._workers.try_submit(lambda: self._work(call_id, work)):
            self._answer(call_id, {"error": "the store has too much to do"})

    def _transfer(
        self, op: str, message: dict[str, Any]
    ) -> Callable[[], dict[str, Any]]:
        """Return the work of a get or put. Raises WireError."""
        arrived = time.monotonic()
        if not self._fds:
            raise WireError(f"{op} without a slot file")
        fd = self._fds.popleft()
        try:
            request = parse_transfer(message)
            options = parse_put_options(message) if op == "put" else PLAIN
        except WireError:
            os.close(fd)
            raise
        slot_file = _OwnedFd(fd)

        def work() -> dict[str, Any]:
            # Mapped here: it can wait for others who change this process's memory.
            with slot_file as fd:
                view = (
                    self.slot_files.view_for_get(fd, request.layout)
                    if op == "get"
                    else self.slot_files.view_for_put(fd, request.layout)
                )
            transfer = Transfer(
                slot=view,
                blocks=request.blocks,
                fingerprint=request.fingerprint,
                give_up_at=arrived + request.deadline_seconds,
                options=options,
                is_wanted=lambda: self._is_open,
            )
            if op == "get":
                return {"filled": self._backend.get(transfer)}
            try:
                outcome = self._backend.put(transfer)
            finally:
                view.forget_pages()
            return {
                "stored_blocks": outcome.stored_blocks,
                "present_blocks": outcome.present_blocks,
                "failed_blocks": outcome.failed_blocks,
                "stored_bytes": outcome.stored_bytes,
            }

        return work

    def _work(self, call_id: int, work: Callable[[], dict[str, Any]]) -> None:
        try:
            values = work()
        except StoreError as exc:
            values = {"error": str(exc)}
        except Exception as exc:  # the root of a worker: every request is answered
            logger.exception("request failed")
            values = {"error": f"internal error: {exc!r}"}
        self._answer(call_id, values)

    def _answer(self, call_id: int, values: dict[str, Any]) -> None:
        frame = pack_frame({"id": call_id, **values})
        with self._send_lock:
            if self._is_open:
                try:
                    self._sock.sendall(frame)
                except OSError:  # a part may be out: the stream is of no use now
                    self.shutdown()
