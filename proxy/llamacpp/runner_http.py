"""Requests to one llama-server.

Rules:
1. A connection that breaks, is refused, or brings no HTTP becomes `RunnerGone` here
   and nowhere else.
2. What has an effect is sent on a connection of its own, once (`request`).
3. A question is answered the same however often it is asked (`ask`). One connection
   is kept for the next question; where the runner has ended it just then, which it
   does after some idle seconds, the question is asked again on a new one.
4. Closing is synchronous, and drops what is not sent yet: no cancellation comes
   between an answer that is given up and the end of its connection, which is what
   stops the engine.
5. A reader that is slow stops the engine's writing; no answer is collected unasked.

A general HTTP client takes twice the time for each of these requests, of which a
prompt needs two or three before its first token.
"""

import asyncio
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast
from urllib.parse import quote, unquote, urlsplit

from proxy.errors import RunnerGone
from proxy.llamacpp.http_answer import AnswerError, AnswerHead, AnswerReader

MAX_UNREAD_BYTES = 1 << 16
"""Of an answer; beyond that the connection is not read until they are."""

_CLOSED = "its process has ended"
_BROKEN = "it closed the connection before its answer was complete"


class RunnerHttp:
    """Sends requests to one llama-server, over a unix socket or TCP."""

    def __init__(self, *, url: str, socket_path: Path | None) -> None:
        parts = urlsplit(url)
        self._socket_path = socket_path
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = quote(parts.path.rstrip("/"), safe="/%")
        self._fields = _fields(parts.netloc)
        # the mutable state
        self._in_use: set[_Connection] = set()
        self._kept: _Connection | None = None
        self._is_closed = False

    async def close(self) -> None:
        """Close all connections; whoever waits for an answer gets RunnerGone."""
        self._is_closed = True
        if self._kept is not None:
            self._kept.close()
        for connection in tuple(self._in_use):
            connection.fail(_CLOSED)
        await asyncio.sleep(0)  # in which the sockets are closed

    @asynccontextmanager
    async def request(
        self, path: str, content: bytes, *, connect_seconds: float | None = None
    ) -> AsyncIterator["Answer"]:
        """Post a request, yield its answer once the head is there; close at the end.

        Raises RunnerGone. What the block raises passes through unchanged.
        """
        connection = await self._connect(connect_seconds)
        self._in_use.add(connection)
        try:
            connection.send(self._head("POST", path, content, "close"), content)
            yield Answer(await connection.wait_head(), connection)
        finally:
            self._in_use.discard(connection)
            connection.close()

    async def ask(
        self, method: str, path: str, content: bytes = b""
    ) -> tuple[int, bytes]:
        """Ask for something that has no effect; returns status and body.

        Raises RunnerGone.
        """
        kept, self._kept = self._kept, None
        if kept is not None:
            try:
                return await self._ask_on(kept, method, path, content)
            except RunnerGone:
                if kept.has_answered:
                    raise
        connection = await self._connect(None)
        return await self._ask_on(connection, method, path, content)

    async def _ask_on(
        self, connection: "_Connection", method: str, path: str, content: bytes
    ) -> tuple[int, bytes]:
        self._in_use.add(connection)
        try:
            connection.send(self._head(method, path, content, "keep-alive"), content)
            answer = Answer(await connection.wait_head(), connection)
            body = await answer.read()
        except BaseException:
            connection.close()
            raise
        finally:
            self._in_use.discard(connection)
        if connection.is_reusable and self._kept is None and not self._is_closed:
            self._kept = connection
        else:
            connection.close()
        return answer.status, body

    def _head(self, method: str, path: str, content: bytes, reuse: str) -> bytes:
        """Return the head of a request; `reuse` is what `Connection` says."""
        return (
            f"{method} {self._path}{path} HTTP/1.1\r\n{self._fields}"
            f"Connection: {reuse}\r\nContent-Length: {len(content)}\r\n\r\n"
        ).encode()

    async def _connect(self, seconds: float | None) -> "_Connection":
        """Open a connection. Raises RunnerGone."""
        if self._is_closed:
            raise RunnerGone(_CLOSED)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                if self._socket_path is not None:
                    _, connection = await loop.create_unix_connection(
                        _Connection, str(self._socket_path)
                    )
                else:
                    _, connection = await loop.create_connection(
                        _Connection, self._host, self._port, ssl=self._tls
                    )
        except OSError as exc:  # a TimeoutError, too
            raise RunnerGone(_why(exc)) from exc
        if self._is_closed:
            connection.fail(_CLOSED)  # its first wait raises it
        return connection


class Answer:
    """An answer: its head, and its body as it comes, once."""

    def __init__(self, head: AnswerHead, connection: "_Connection") -> None:
        self.status = head.status
        self.content_type = head.fields.get("content-type", "")
        self._connection = connection

    def __aiter__(self) -> "Answer":
        """Iterate over the pieces of the body. Raises RunnerGone."""
        return self

    async def __anext__(self) -> bytes:
        """Return what of the body has come since, waiting for it."""
        piece = await self._connection.read()
        if not piece:
            raise StopAsyncIteration
        return piece

    async def read(self) -> bytes:
        """Return the whole body. Raises RunnerGone."""
        return b"".join([piece async for piece in self])

    async def read_text(self) -> str:
        """Return the whole body as text. Raises RunnerGone."""
        return (await self.read()).decode(errors="replace")


class _Connection(asyncio.Protocol):
    """A connection: one request after the other, each with its answer."""

    def __init__(self) -> None:
        # the mutable state
        self._transport: asyncio.Transport | None = None
        self._failure = ""
        self._waiting: asyncio.Future[None] | None = None
        # ... of one exchange
        self._reader = AnswerReader()
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._is_paused = False
        self.has_answered = False
        """Whether any byte of the answer has come."""

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent on it."""
        return (
            self._reader.is_complete
            and not self._reader.ends_connection
            and not self._failure
        )

    def send(self, head: bytes, content: bytes) -> None:
        """Send a request, after which its answer is waited for and read."""
        self._reader = AnswerReader()
        self.has_answered = False
        if self._transport is not None:
            self._transport.writelines((head, content))

    async def wait_head(self) -> AnswerHead:
        """Wait for the head of the answer. Raises RunnerGone."""
        while (head := self._reader.head) is None:
            await self._wait()
        return head

    async def read(self) -> bytes:
        """Return what has come of the body, b"" at its end. Raises RunnerGone."""
        while not self._pieces:
            if self._reader.is_complete:
                return b""
            await self._wait()
        pieces, self._pieces = self._pieces, []
        self._num_unread = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def fail(self, reason: str) -> None:
        """End the connection and tell whoever waits."""
        self._failure = self._failure or reason
        self.close()
        self._wake()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the answer."""
        if self._reader.is_complete:  # nobody asked for more
            self.fail(_BROKEN)
            return
        self.has_answered = True
        try:
            pieces = self._reader.feed(data)
        except AnswerError as exc:
            self.fail(f"what it answers is not HTTP: {exc}")
            return
        self._pieces += pieces
        self._num_unread += sum(map(len, pieces))
        if self._num_unread > MAX_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            assert self._transport is not None, "data comes before the end only"
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection."""
        with suppress(AnswerError):
            self._reader.feed_end()
        self.fail(_BROKEN)

    async def _wait(self) -> None:
        """Wait until something has happened. Raises RunnerGone."""
        if self._failure:
            raise RunnerGone(self._failure)
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _why(exc: OSError) -> str:
    """Say why there is no connection, without its address."""
    match exc:
        case ssl.SSLError():
            return f"TLS: {exc.reason}"
        case socket.gaierror():
            return "its name is not known"
        case OSError(errno=int(number)):
            return os.strerror(number)
        case _:
            return "it cannot be reached"


def _fields(netloc: str) -> str:
    """Return the fields that all requests have, as lines."""
    user, _, host = netloc.rpartition("@")
    fields = {
        "Host": host,
        "User-Agent": "kvbus",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
    }
    if user:
        secret = b64encode(unquote(user).encode()).decode()
        fields["Authorization"] = f"Basic {secret}"
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items())
