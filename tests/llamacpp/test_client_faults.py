"""A runner that answers something else than it should: every kind of it ends soon.

A real one cannot be made to; the server here sends what it is told and closes.
"""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from proxy.errors import KvbusError, RunnerGone, SlotError, UpstreamError
from proxy.llamacpp.client import LlamaServerClient

SOON_SECONDS = 5.0
SECRET = "a prompt"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
EVENT = b'data: {"content": "a"}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)

BROKEN = {
    "nothing": [b""],
    "no HTTP": [b"SSH-2.0-a prompt\r\n\r\n"],
    "half a head": [b"HTTP/1.1 200 OK\r\nContent-Type: a prompt"],
    "an endless head": [b"HTTP/1.1 200 OK\r\n", b"X: a prompt\r\n" * 1000],
    "an early end": [CHUNKED, CHUNK],
    "half a chunk": [CHUNKED, CHUNK, b"ff\r\na prompt"],
    "no chunk": [CHUNKED, CHUNK, b"a prompt\r\n"],
    "no chunk, at once": [CHUNKED + CHUNK + b"a prompt\r\n"],
    "an early last chunk": [CHUNKED, CHUNK, b"0\r\n\r\n"],
    "a short body": [SIZED, EVENT],
    "no length": [b"HTTP/1.1 200 OK\r\n\r\n", EVENT],
    "no JSON": [CHUNKED, b"10\r\ndata: a prompt\n\n\r\n"],
}


@asynccontextmanager
async def runner_that_sends(
    pieces: list[bytes], folder: Path, *, hangs: bool = False
) -> AsyncIterator[LlamaServerClient]:
    """Make a client of a server that sends `pieces` one by one and closes, or hangs."""

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)  # so that it comes by itself
        if hangs:
            await reader.read()
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


async def read_stream(client: LlamaServerClient) -> None:
    """Read the events of a reply until it fails."""
    async with client.stream_completion("/completion", {}) as events:
        async for _ in events:
            pass


async def read_answer(client: LlamaServerClient) -> None:
    """Read an answer that is passed on."""
    async with client.open_answer("/completion", {}) as answer:
        await answer.read()


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN)
async def test_a_broken_stream_ends_soon(pieces: list[bytes], tmp_path: Path) -> None:
    """Nobody waits for the rest, and nothing that was sent is told."""
    async with runner_that_sends(pieces, tmp_path) as client:
        with pytest.raises(RunnerGone) as caught:
            await asyncio.wait_for(read_stream(client), SOON_SECONDS)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN)
async def test_a_broken_answer_ends_soon(pieces: list[bytes], tmp_path: Path) -> None:
    """So do short answers, and those that are passed on, unless they are whole."""
    is_whole = pieces in (BROKEN["an early last chunk"], BROKEN["no length"])
    is_broken = not is_whole and pieces is not BROKEN["no JSON"]
    async with runner_that_sends(pieces, tmp_path) as client:
        with pytest.raises(KvbusError) as caught:
            await asyncio.wait_for(client.props(), SOON_SECONDS)
        assert isinstance(caught.value, RunnerGone) == (not is_whole)
        assert SECRET not in str(caught.value)
        if is_broken:
            with pytest.raises(RunnerGone):
                await asyncio.wait_for(read_answer(client), SOON_SECONDS)


async def test_an_error_in_a_stream_keeps_its_status(tmp_path: Path) -> None:
    """An error event after the first one is an UpstreamError."""
    error = b'error: {"code": 507, "message": "no room"}\n\n'
    chunk = b"%x\r\n%s\r\n" % (len(error), error)
    async with runner_that_sends([CHUNKED, CHUNK, chunk], tmp_path) as client:
        with pytest.raises(UpstreamError) as caught:
            await read_stream(client)
        assert caught.value.status == 507


async def test_a_silent_runner_is_given_up(tmp_path: Path) -> None:
    """A control request has a time-out, also where an answer has begun."""
    for pieces in ([], [SIZED]):
        folder = tmp_path / str(len(pieces))
        folder.mkdir()
        async with runner_that_sends(pieces, folder, hangs=True) as client:
            assert not await client.is_healthy(timeout_seconds=0.1)
            with pytest.raises(SlotError, match="does not answer"):
                await client.restore_slot(0, "none", timeout_seconds=0.1)


@asynccontextmanager
async def runner_of_questions(
    folder: Path, *, questions: int, excess: bytes = b"", resets: bool = False
) -> AsyncIterator[tuple[LlamaServerClient, list[int]]]:
    """Make a client of a server that ends each connection when it is asked again.

    It answers so many questions on each; yields how many it was asked on each.
    """
    asked: list[int] = []
    body = b'{"prompt": "x"}'
    message = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        asked.append(0)
        number = len(asked) - 1
        with suppress(asyncio.IncompleteReadError):
            while True:
                if resets and asked[number] == questions:
                    asked[number] += len(await reader.readexactly(1))
                    break  # what is not read resets the connection
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split()[0])
                await reader.readexactly(length)
                asked[number] += 1
                if asked[number] > questions:
                    break
                writer.write(message + excess)
        writer.close()

    path = folder / "r.sock"
    server = await asyncio.start_unix_server(answer, path)
    client = LlamaServerClient(url="http://runner", socket_path=path)
    try:
        yield client, asked
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("resets", [False, True])
async def test_a_question_is_asked_again_on_a_new_connection(
    tmp_path: Path, resets: bool
) -> None:
    """A kept connection that the runner ends when it is used costs no question."""
    many = {"messages": ["x" * 1000] * 1000}
    async with runner_of_questions(tmp_path, questions=2, resets=resets) as (
        client,
        asked,
    ):
        for _ in range(5):
            assert await client.apply_template(many) == "x"
        assert asked == [3, 3, 1]


async def test_a_question_is_asked_at_most_twice(tmp_path: Path) -> None:
    """A runner that takes questions and ends is gone."""
    async with runner_of_questions(tmp_path, questions=0) as (client, asked):
        with pytest.raises(RunnerGone, match="closed the connection"):
            await client.apply_template({})
        assert asked == [1, 1]


async def test_what_has_an_effect_is_sent_once(tmp_path: Path) -> None:
    """Slots are saved on a connection of their own, which is used for nothing else."""
    async with runner_of_questions(tmp_path, questions=1) as (client, asked):
        await client.apply_template({})
        await client.erase_slot(0)
        await client.apply_template({})
        assert asked == [2, 1, 1]
    async with runner_of_questions(tmp_path, questions=0) as (client, asked):
        with pytest.raises(SlotError):
            await client.erase_slot(0)
        assert asked == [1]


async def test_a_connection_with_something_unasked_is_not_kept(tmp_path: Path) -> None:
    """What follows an answer would be taken for the next one."""
    message = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    async with runner_of_questions(tmp_path, questions=9, excess=message) as (
        client,
        asked,
    ):
        for _ in range(3):
            assert await client.apply_template({}) == "x"
        assert asked == [1, 1, 1]


async def test_questions_at_once_have_connections_of_their_own(
    tmp_path: Path,
) -> None:
    """Each has its own meanwhile, and its own answer."""
    async with runner_of_questions(tmp_path, questions=9) as (client, asked):
        for _ in range(2):
            answers = [client.apply_template({}) for _ in range(4)]
            assert await asyncio.gather(*answers) == ["x"] * 4
        assert asked == [2] * 4


async def test_a_cancelled_question_ends_its_connection(tmp_path: Path) -> None:
    """Its answer is nobody else's."""
    async with runner_of_questions(tmp_path, questions=9) as (client, asked):
        await client.apply_template({})
        task = asyncio.create_task(client.apply_template({}))
        for _ in range(2):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.apply_template({})
        assert len(asked) == 2


@asynccontextmanager
async def tcp_server(heads: list[bytes]) -> AsyncIterator[str]:
    """Listen at a port; keeps what comes and answers nonsense."""

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        heads.append(await reader.read(1 << 16))
        writer.write(b"no answer\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    server.close()
    await server.wait_closed()


async def test_a_url_may_hold_a_path_and_a_password() -> None:
    """As for a llama-server behind another server."""
    heads: list[bytes] = []
    async with tcp_server(heads) as address:
        client = LlamaServerClient(url=f"http://m%40e:a b@{address}/some where/")
        with pytest.raises(RunnerGone):
            await client.props()
        await client.close()
    lines = heads[0].decode().split("\r\n")
    assert lines[0] == "GET /some%20where/props HTTP/1.1"
    assert f"Host: {address}" in lines
    assert f"Authorization: Basic {b64encode(b'm@e:a b').decode()}" in lines


async def test_a_server_without_tls_is_no_https() -> None:
    """Neither is the request sent to it in plain text."""
    heads: list[bytes] = []
    async with tcp_server(heads) as address:
        client = LlamaServerClient(url=f"https://{address}")
        with pytest.raises(RunnerGone):
            await asyncio.wait_for(client.props(), SOON_SECONDS)
        await client.close()
    assert not any(b"HTTP" in head for head in heads)
