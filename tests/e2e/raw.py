"""Requests written by hand, for what a client library would not send."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

HOST = b"Host: localhost"
CLOSE = b"Connection: close"
CHUNKED = b"Transfer-Encoding: chunked"


def connect(url: str, *, receive_buffer_bytes: int | None = None) -> socket.socket:
    """Open a connection of its own."""
    address = urlsplit(url)
    raw = socket.socket()
    raw.settimeout(60)
    if receive_buffer_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    raw.connect((address.hostname, address.port))
    return raw


def write(
    body: bytes = b"",
    *fields: bytes,
    start: bytes = b"POST /api/generate HTTP/1.1",
    host: tuple[bytes, ...] = (HOST, CLOSE),
) -> bytes:
    """Write a request line, header fields and a body."""
    return b"\r\n".join([start, *host, *fields, b"", body])


def sized(body: bytes) -> bytes:
    """Write the field that tells a body's length."""
    return b"Content-Length: %d" % len(body)


def chunked(body: bytes, *, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    """Write a body in two chunks."""
    parts = (body[:7], body[7:])
    return (
        b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
        + b"0\r\n"
        + trailers
        + b"\r\n"
    )


def post(path: str, body: Any) -> bytes:  # noqa: ANN401 - any JSON
    """Write a usual request with a JSON body."""
    content = json.dumps(body).encode()
    return write(
        content, sized(content), start=b"POST %b HTTP/1.1" % path.encode(), host=(HOST,)
    )


def talk(url: str, data: bytes) -> bytes:
    """Send bytes, and return all that comes until the connection ends."""
    with connect(url) as raw:
        raw.sendall(data)
        return read_all(raw)


def read_all(raw: socket.socket) -> bytes:
    """Return what comes until the connection ends."""
    pieces = []
    try:
        while piece := raw.recv(1 << 16):
            pieces.append(piece)
    except ConnectionResetError:
        pass  # ours was not read to its end
    return b"".join(pieces)


def read_one(raw: socket.socket) -> bytes:
    """Return one whole reply, as long as its head says; in chunks or of a length."""
    reply = b""
    while True:
        head, end, body = reply.partition(b"\r\n\r\n")
        if end:
            fields = dict(
                line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:]
            )
            length = fields.get(b"content-length")
            is_whole = (
                body.endswith(b"0\r\n\r\n")
                if length is None
                else len(body) >= int(length)
            )
            if is_whole:
                return reply
        piece = raw.recv(1 << 16)
        assert piece, reply
        reply += piece


def head_of(reply: bytes) -> tuple[int, list[bytes]]:
    """Return the status of a reply and its header lines, in lower case."""
    lines = reply.partition(b"\r\n\r\n")[0].split(b"\r\n")
    return int(lines[0].split()[1]), [line.lower() for line in lines[1:]]
