"""Requests to one llama-server, by aiohttp's client.

Rules:
1. A connection that breaks, is refused, or brings no HTTP becomes `RunnerGone` here
   and nowhere else. Nothing of what the runner sent is quoted: it may be a prompt.
2. What has an effect is sent on a connection of its own, once (`request`).
3. A question is answered the same however often it is asked (`ask`). Connections are
   kept for questions; where the runner has ended one just then, which it does after
   some idle seconds, the question is asked again on a new one.
4. An answer whose connection has ended is over, whatever the HTTP parser made of it:
   nobody waits for the rest.
5. Closing is synchronous: no cancellation comes between an answer that is given up
   and the end of its connection, which is what stops the engine.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from proxy.errors import RunnerGone

CLOSE_SECONDS = 1.0

KEEP_SECONDS = 3.0
"""llama-server ends a connection that was idle for 5 seconds."""

PIECE_BYTES = 1 << 18
"""Larger bodies are written in pieces, waiting for the runner between them."""

_ENDED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
"""What comes of a connection that the runner has ended, read or unread."""

_HEADERS = {
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": "kvbus",
}


class RunnerHttp:
    """Sends requests to one llama-server, over a unix socket or TCP."""

    def __init__(self, *, url: str, socket_path: Path | None) -> None:
        self._url = url.rstrip("/")
        self._requests = _session(socket_path, keeps_connections=False)
        self._questions = _session(socket_path, keeps_connections=True)

    async def close(self) -> None:
        """Close all connections; whoever waits for an answer gets RunnerGone.

        What a frozen runner does not read is not waited for: such a connection ends
        with the runner's process.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(self._questions.close(), self._requests.close())

    @asynccontextmanager
    async def request(
        self, path: str, content: bytes, *, connect_seconds: float | None = None
    ) -> AsyncIterator["Answer"]:
        """Post a request, yield its answer once the head is there; close at the end.

        Raises RunnerGone. What the block raises passes through unchanged.
        """
        bounds = aiohttp.ClientTimeout(connect=connect_seconds)
        response = await self._send(self._requests, "POST", path, content, bounds)
        try:
            _end_with_connection(response)
            yield Answer(response)
        finally:
            response.close()

    async def ask(
        self, method: str, path: str, content: bytes = b""
    ) -> tuple[int, bytes]:
        """Ask for something that has no effect; returns status and body.

        Raises RunnerGone.
        """
        try:
            return await self._ask(method, path, content)
        except RunnerGone as exc:
            if not isinstance(exc.__cause__, _ENDED):
                raise
        return await self._ask(method, path, content)

    async def _ask(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        response = await self._send(self._questions, method, path, content, _UNBOUNDED)
        try:
            _end_with_connection(response)
            body = await Answer(response).read()
        except BaseException:
            response.close()
            raise
        return response.status, body

    async def _send(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        content: bytes,
        bounds: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send a request; returns its answer once the head is there."""
        if session.closed:
            raise RunnerGone("its process has ended")
        is_large = len(content) > PIECE_BYTES
        try:
            return await session.request(
                method,
                self._url + path,
                data=_pieces(content) if is_large else content or None,
                headers={"Content-Length": str(len(content))} if is_large else None,
                timeout=bounds,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as exc:
            raise _gone(exc) from exc


class Answer:
    """An answer: its head, and its body as it comes, once."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "")
        self._content = response.content

    def __aiter__(self) -> "Answer":
        """Iterate over the pieces of the body. Raises RunnerGone."""
        return self

    async def __anext__(self) -> bytes:
        """Return what of the body has come since, waiting for it."""
        try:
            piece = await self._content.readany()
        except (aiohttp.ClientError, OSError) as exc:
            raise _gone(exc) from exc
        except RuntimeError as exc:  # the connection was closed before
            raise _gone(exc) from exc
        if not piece:
            raise StopAsyncIteration
        return piece

    async def read(self) -> bytes:
        """Return the whole body. Raises RunnerGone."""
        return b"".join([piece async for piece in self])

    async def read_text(self) -> str:
        """Return the whole body as text. Raises RunnerGone."""
        return (await self.read()).decode(errors="replace")


_UNBOUNDED = aiohttp.ClientTimeout()


def _session(
    socket_path: Path | None, *, keeps_connections: bool
) -> aiohttp.ClientSession:
    options: dict[str, Any] = {"limit": 0, "force_close": not keeps_connections}
    if keeps_connections:
        options["keepalive_timeout"] = KEEP_SECONDS
    connector = (
        aiohttp.UnixConnector(str(socket_path), **options)
        if socket_path
        else aiohttp.TCPConnector(**options)
    )
    return aiohttp.ClientSession(
        connector=connector,
        headers=_HEADERS,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=_UNBOUNDED,
    )


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


def _end_with_connection(response: aiohttp.ClientResponse) -> None:
    """Tell whoever reads an answer when its connection ends.

    The parser forgets to, after bytes that are no HTTP and when the session closes.
    """
    connection, content = response.connection, response.content
    protocol = connection.protocol if connection is not None else None
    ended = protocol.closed if protocol is not None else None
    if ended is None:
        return  # the whole answer has come already

    def note_end(ended: asyncio.Future[None]) -> None:
        if not ended.cancelled():
            ended.exception()  # seen
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError())

    ended.add_done_callback(note_end)


def _gone(exc: Exception) -> RunnerGone:
    """Say why a runner is gone."""
    match exc:
        case aiohttp.ClientConnectorError():
            number = exc.os_error.errno
            return RunnerGone(os.strerror(number) if number else "it is not found")
        case TimeoutError():
            return RunnerGone("it does not answer")
        case aiohttp.ClientResponseError():
            return RunnerGone("what it answers is not HTTP")
        case _:
            return RunnerGone("it closed the connection before its answer was complete")
