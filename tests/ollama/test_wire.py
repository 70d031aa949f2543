"""What goes over the socket: framings, odd requests, large bodies, slow readers."""

import asyncio
import json

import pytest

from tests.fakes.scripted_turns import simple_script, text_event
from tests.ollama.conftest import Front

BODY = b'{"model":"smol","prompt":"Say hi."}'
ENCODED_BODY = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (10, BODY[:10], 25, BODY[10:])


def request_of(
    *headers: bytes,
    method: bytes = b"POST",
    path: bytes = b"/api/generate",
    version: bytes = b"1.1",
    body: bytes = BODY,
) -> bytes:
    """Write a request by hand."""
    lines = [b"%b %b HTTP/%b" % (method, path, version), b"Host: localhost", *headers]
    return b"\r\n".join([*lines, b"", body])


def with_length(body: bytes = BODY) -> bytes:
    """Write the header of a body's length."""
    return b"Content-Length: %d" % len(body)


async def talk(front: Front, data: bytes) -> bytes:
    """Send bytes and read until the front closes the connection."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        try:
            writer.write(data)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


def split(reply: bytes) -> tuple[bytes, bytes, bytes]:
    """Cut a reply into status line, headers (lower case) and body."""
    head, _, body = reply.partition(b"\r\n\r\n")
    status, _, headers = head.partition(b"\r\n")
    return status, headers.lower(), body


async def test_a_stream_has_exactly_one_framing(front: Front) -> None:
    """Chunks and no length, each line in a chunk of its own, ended properly."""
    reply = await talk(front, request_of(b"Connection: close", with_length()))
    status, headers, body = split(reply)
    assert status == b"HTTP/1.1 200 OK"
    assert headers.count(b"transfer-encoding: chunked") == 1
    assert b"content-length" not in headers
    assert b"server:" not in headers
    assert body.endswith(b"\r\n0\r\n\r\n")
    assert body.count(b'"done":') == 3


async def test_http_1_0_clients_get_plain_lines(front: Front) -> None:
    """A client of HTTP/1.0 knows no chunks: the end of the connection is the end."""
    reply = await talk(front, request_of(with_length(), version=b"1.0"))
    _, headers, body = split(reply)
    assert b"transfer-encoding" not in headers
    assert b"content-length" not in headers
    lines = [json.loads(line) for line in body.splitlines()]
    assert [line["done"] for line in lines] == [False, False, True]


async def test_chunked_request_bodies_are_read(front: Front) -> None:
    """A body without a known length is a body."""
    data = request_of(
        b"Connection: close", b"Transfer-Encoding: chunked", body=ENCODED_BODY
    )
    status, _, body = split(await talk(front, data))
    assert status == b"HTTP/1.1 200 OK"
    assert b'"done":true' in body


@pytest.mark.parametrize(
    "data",
    [
        request_of(with_length(), b"Transfer-Encoding: chunked", body=ENCODED_BODY),
        request_of(with_length(), b"Content-Length: 5"),
        request_of(b"Content-Length: -1"),
        request_of(b"Content-Length: 1_0"),
        request_of(b"Transfer-Encoding: chunked, identity", body=ENCODED_BODY),
        request_of(b"Transfer-Encoding: chunked", body=b"0x5\r\nhello\r\n0\r\n\r\n"),
        request_of(b"Bad Header: x", with_length()),
        request_of(b"Host: evil.test", with_length()),
        request_of(with_length(), method=b"post"),
        request_of(with_length(), path=b"/api/gen erate"),
    ],
    ids=[
        "length-and-chunks",
        "two-lengths",
        "negative-length",
        "underscore-length",
        "chunks-not-last",
        "hex-prefix-chunk",
        "space-in-name",
        "two-hosts",
        "lower-case-method",
        "space-in-path",
    ],
)
async def test_ambiguous_requests_are_refused(front: Front, data: bytes) -> None:
    """What two servers could read in two ways is a 400, and the connection ends."""
    status, _, _ = split(await talk(front, data))
    assert status.split()[1] == b"400"
    assert front.turns.requests == []


async def test_pipelined_requests_are_answered_in_order(front: Front) -> None:
    """Two requests sent at once get two whole replies, one after the other."""
    reply = await talk(
        front,
        request_of(with_length())
        + request_of(b"Connection: close", method=b"GET", path=b"/", body=b""),
    )
    assert reply.count(b"HTTP/1.1 200 OK") == 2
    assert reply.index(b'"done":true') < reply.index(b"Ollama is running")


@pytest.mark.parametrize(
    "path", [b"/", b"/api/tags", b"/api/version", b"/api/chat", b"/nowhere", b"/v1/x"]
)
async def test_heads_have_no_body(front: Front, path: bytes) -> None:
    """After a HEAD the connection is usable: no byte of a body was sent."""
    reply = await talk(
        front,
        request_of(method=b"HEAD", path=path, body=b"")
        + request_of(b"Connection: close", method=b"GET", path=b"/", body=b""),
    )
    first, _, rest = reply.partition(b"\r\n\r\n")
    assert first.split()[1] in (b"200", b"404", b"405")
    assert rest.startswith(b"HTTP/1.1 200 OK")
    assert rest.endswith(b"Ollama is running")


async def test_a_full_url_names_the_host(front: Front) -> None:
    """The host of an absolute request line outranks the header, as in Go."""
    data = request_of(
        b"Connection: close", method=b"GET", path=b"http://evil.test/", body=b""
    )
    status, _, body = split(await talk(front, data))
    assert status.split()[1] == b"403"
    assert body == b""


async def test_bodies_that_are_no_utf8_are_read(front: Front) -> None:
    """Bytes that are no UTF-8 become replacement characters, as in Go."""
    body = b'{"model":"smol","prompt":"\xff\xc3","raw":true,"stream":false}'
    data = request_of(b"Connection: close", with_length(body), body=body)
    status, _, _ = split(await talk(front, data))
    assert status == b"HTTP/1.1 200 OK"
    assert list(front.turns.requests[0].token_ids) == [0xFFFD, 0xFFFD]


async def test_bodies_after_the_first_value_are_ignored(front: Front) -> None:
    """What follows the first JSON value, in any content type, does not matter."""
    async with front.session.post(
        front.url + "/api/generate",
        data=BODY + b"\r\n{garbage",
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    ) as response:
        assert response.status == 200
        assert b'"done":true' in await response.read()


async def test_a_large_body_is_served(front: Front) -> None:
    """Fifty megabytes arrive and are parsed; they fit because the model is large."""
    front.model.context_tokens = 1 << 27
    body = {
        "model": "smol",
        "prompt": "x",
        "raw": True,
        "stream": False,
        "unknown": "x" * (50 << 20),
    }
    async with front.session.post(front.url + "/api/generate", json=body) as response:
        assert response.status == 200
        assert (await response.json())["done"] is True


async def test_a_body_beyond_the_limit_is_refused(front: Front) -> None:
    """A body larger than the application allows gets a 413 of Ollama's shape."""
    async with front.session.post(
        front.url + "/api/chat", data=b"x" * (65 << 20)
    ) as response:
        assert response.status == 413
        assert await response.json() == {"error": "request body too large"}
    assert front.observer.outcomes[0].status == 413


async def test_a_line_of_megabytes_arrives_whole(front: Front) -> None:
    """A piece of three megabytes is one line, byte for byte."""
    text = "<é\u2028>" * 400_000
    front.turns.script = simple_script(text)
    async with front.session.post(front.url + "/api/generate", data=BODY) as response:
        raw = await response.read()
    first, last, rest = raw.split(b"\n")
    assert json.loads(first)["response"] == text
    assert json.loads(last)["done"] is True
    assert rest == b""


async def test_lines_are_sent_as_they_come(front: Front) -> None:
    """A line reaches the client before the engine makes the next one."""
    gate = asyncio.Event()
    front.turns.script = [text_event("Hi"), gate, *simple_script(" there.")]
    async with (
        asyncio.timeout(5),
        front.session.post(front.url + "/api/generate", data=BODY) as response,
    ):
        first = await response.content.readline()
        assert json.loads(first)["response"] == "Hi"
        assert not gate.is_set()
        gate.set()
        assert b'"done":true' in await response.read()


async def test_a_slow_reader_slows_the_engine(front: Front) -> None:
    """While a client does not read, only a few lines are taken from the engine."""
    num_lines, line_text = 4000, "x" * 10_000
    taken = 0

    class CountingList(list[object]):
        def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
            nonlocal taken
            for step in super().__iter__():
                taken += 1
                yield step

    front.turns.script = CountingList(simple_script(*[line_text] * num_lines))  # type: ignore[assignment]
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", front.port, limit=1 << 14
    )
    writer.write(request_of(b"Connection: close", with_length()))
    async with asyncio.timeout(20):
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while taken != before:  # until the front has come to rest
            before = taken
            await asyncio.sleep(0.2)
        # what lies in the buffers of the two sockets is far less than the reply
        assert taken < num_lines / 2
        rest = await reader.read(-1)
    writer.close()
    assert rest.count(b'"done":false') == num_lines
    assert rest.count(b'"done":true') == 1


async def test_polls_do_not_delay_each_other(front: Front) -> None:
    """Fifty polls at once beside an open stream are all answered."""
    gate = asyncio.Event()
    front.turns.script = [text_event("Hi"), gate, *simple_script()]

    async def poll() -> int:
        async with front.session.get(front.url + "/api/ps") as response:
            return response.status

    async with front.session.post(front.url + "/api/generate", data=BODY) as response:
        await response.content.readline()
        async with asyncio.timeout(5):
            assert set(await asyncio.gather(*(poll() for _ in range(50)))) == {200}
        gate.set()
        assert b'"done":true' in await response.read()
