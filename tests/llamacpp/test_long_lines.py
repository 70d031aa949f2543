"""Lines of megabytes on their way from a runner, in pieces of any size."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson

from proxy.llamacpp.client import LlamaServerClient
from proxy.v1.gathering import Gathering

TEXT = "<é\u2028>" * 400_000  # 3.2 MB
PIECE_BYTES = 50_000


@asynccontextmanager
async def runner_that_streams(
    events: bytes, folder: Path
) -> AsyncIterator[LlamaServerClient]:
    """Make a client of a server that sends a stream in chunks and small pieces."""
    pieces = [
        events[start : start + PIECE_BYTES]
        for start in range(0, len(events), PIECE_BYTES)
    ]

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    path = folder / "r.sock"
    server = await asyncio.start_unix_server(answer, path)
    client = LlamaServerClient(url="http://runner", socket_path=path)
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


async def test_an_event_of_megabytes_is_relayed_unchanged(tmp_path: Path) -> None:
    """It comes out as one event, byte for byte, with those before and after it."""
    choice = {"index": 0, "delta": {"content": TEXT}, "finish_reason": "stop"}
    long = b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"
    last = b'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n'
    events = b'data: {"choices":[]}\n\n' + long + last
    async with (
        runner_that_streams(events, tmp_path) as client,
        client.open_answer("/v1/chat/completions", {"stream": True}) as answer,
    ):
        assert answer.is_event_stream
        relayed = [piece async for piece in answer.events()]
    assert b"".join(relayed) == events
    assert all(piece.endswith(b"\n\n") for piece in relayed)
    gathering = Gathering("/v1/chat/completions")
    for piece in relayed:
        gathering.feed(piece)
    message = orjson.loads(gathering.whole())["choices"][0]["message"]
    assert message["content"] == TEXT


async def test_an_event_of_megabytes_is_parsed(tmp_path: Path) -> None:
    """The native routes read it whole."""
    event = {"content": TEXT, "stop": False}
    events = b"data: " + orjson.dumps(event) + b"\n\n"
    async with (
        runner_that_streams(events, tmp_path) as client,
        client.stream_completion("/completion", {}) as stream,
    ):
        assert await anext(stream) == event
