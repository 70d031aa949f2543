"""Requests to one llama-server, each on a connection of its own.

Rules:
1. A connection that breaks, is refused, or brings no HTTP becomes `RunnerGone` here
   and nowhere else. Nothing of what the runner sent is quoted: it may be a prompt.
2. A connection per request: llama-server closes streams' connections, and a reused
   one may be half closed when the next request is written to it.
3. An answer whose connection has ended is over, whatever the HTTP parser made of it:
   nobody waits for the rest.
4. Closing is synchronous: no cancellation comes between an answer that is given up
   and the end of its connection, which is what stops the engine.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from proxy.errors import RunnerGone

CLOSE_SECONDS = 1.0

PIECE_BYTES = 1 << 18
"""Larger bodies are written in pieces, waiting for the runner between them."""

_HEADERS = {
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": "kvbus",
}


class RunnerHttp:
    """Sends requests to one llama-server, over a unix socket or TCP."""

    def __init__(self, *, url: str, socket_path: Path | None) -> None:
        self._url = url
        connector: aiohttp.BaseConnector
        if socket_path:
            connector = aiohttp.UnixConnector(
                str(socket_path), force_close=True, limit=0
            )
        else:
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close all connections; whoever waits for an answer gets RunnerGone.

        What a frozen runner does not read is not waited for: such a connection ends
        with the runner's process.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._session.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        bounds: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, yield the beginning of its answer, close the connection.

        Raises RunnerGone. What the block raises passes through unchanged.
        """
        if self._session.closed:
            raise RunnerGone("its process has ended")
        data: bytes | AsyncIterator[bytes] | None = content
        headers: dict[str, str] = {}
        if content is not None and len(content) > PIECE_BYTES:
            data = _pieces(content)
            headers["Content-Length"] = str(len(content))
        try:
            response = await self._session.request(
                method,
                self._url + path,
                data=data,
                headers=headers,
                timeout=bounds,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as exc:
            raise _gone(exc) from exc
        try:
            _end_with_connection(response)
            yield response
        finally:
            response.close()


async def read(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body. Raises RunnerGone."""
    return b"".join([chunk async for chunk in read_chunks(response)])


async def read_text(response: aiohttp.ClientResponse) -> str:
    """Return the whole body as text. Raises RunnerGone."""
    return (await read(response)).decode(errors="replace")


async def read_chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the pieces of a body as they come. Raises RunnerGone."""
    content = response.content
    while True:
        try:
            chunk = await content.readany()
        except (aiohttp.ClientError, OSError) as exc:
            raise _gone(exc) from exc
        if not chunk:
            return
        yield chunk


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
