"""One HTTP/1.1 answer, read as its bytes come. No I/O here.

Rules:
1. It is strict: what is not surely the answer of an HTTP server is an error, for
   behind it is something else than a llama-server.
2. Body bytes are handed on as they come, decoded from their chunks; nothing but an
   unfinished line is kept.
3. What follows the end of the answer is not read; where something does, or the
   connection's end is part of the answer, no other answer can follow.
4. Its errors quote nothing of what came: it may be a prompt.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

MAX_HEAD_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 12
"""Of the line before a chunk, or a trailer."""

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: .*)?")
_FIELD_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")
_END_OF_HEAD = b"\r\n\r\n"
_END_OF_LINE = b"\r\n"


class AnswerError(Exception):
    """What came is no HTTP answer, or only the beginning of one."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Status and fields of an answer; the names of the fields in lower case."""

    status: int
    fields: Mapping[str, str]


class _State(Enum):
    HEAD = auto()
    SIZED = auto()
    UNTIL_END = auto()
    CHUNK_LINE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILERS = auto()
    COMPLETE = auto()


class AnswerReader:
    """Takes the bytes of a connection, gives the head and the body of the answer."""

    def __init__(self) -> None:
        # the mutable state
        self.head: AnswerHead | None = None
        self.ends_connection = False
        """Whether no other answer can follow on the same connection."""
        self._state = _State.HEAD
        self._kept = b""
        self._left = 0
        """Bytes still to come of a sized body, or of a chunk."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer has come to its end."""
        return self._state is _State.COMPLETE

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; returns those of the body. Raises AnswerError.

        No piece is empty.
        """
        if self._kept:
            data, self._kept = self._kept + data, b""
        start = 0
        while self._state is _State.HEAD:
            stop = data.find(_END_OF_HEAD, start)
            if (len(data) if stop < 0 else stop) - start > MAX_HEAD_BYTES:
                raise AnswerError("its head does not end")
            if stop < 0:
                self._kept = data[start:]
                return []
            self._read_head(data[start:stop])
            start = stop + len(_END_OF_HEAD)
        pieces: list[bytes] = []
        if self._state is _State.UNTIL_END:
            if start < len(data):
                pieces.append(data[start:])
            start = len(data)
        elif self._state is _State.SIZED:
            start = self._take(data, start, pieces, then=_State.COMPLETE)
        else:
            start = self._take_chunks(data, start, pieces)
        if start < len(data):
            if self.is_complete:
                self.ends_connection = True
            else:
                self._kept = data[start:]
        return pieces

    def feed_end(self) -> None:
        """Take the end of the connection. Raises AnswerError if more had to come."""
        if self._state is _State.UNTIL_END:
            self._state = _State.COMPLETE
        if self._state is not _State.COMPLETE:
            raise AnswerError("the connection ended before the answer did")

    def _read_head(self, head: bytes) -> None:
        status_line, *lines = head.split(_END_OF_LINE)
        found = _STATUS_LINE.fullmatch(status_line)
        if found is None:
            raise AnswerError("it does not begin like an answer")
        fields: dict[str, str] = {}
        for line in lines:
            stop = line.find(b":")
            if stop < 0 or not _FIELD_NAME.fullmatch(line, 0, stop):
                raise AnswerError("a line of its head is no field")
            name = line[:stop].decode("ascii").lower()
            value = line[stop + 1 :].strip(b" \t").decode("latin-1")
            fields[name] = f"{fields[name]}, {value}" if name in fields else value
        status = int(found[1])
        if status < 200:
            return  # not the answer yet
        keeps = head.startswith(b"HTTP/1.1") and "connection" not in fields
        self.ends_connection = not (
            keeps or fields.get("connection", "").lower() == "keep-alive"
        )
        self.head = AnswerHead(status, fields)
        self._expect_body(self.head)

    def _expect_body(self, head: AnswerHead) -> None:
        coding = head.fields.get("transfer-encoding")
        length = head.fields.get("content-length")
        if head.status in (204, 304):
            self._state = _State.COMPLETE
        elif coding is not None:
            if coding.lower() != "chunked":
                raise AnswerError("its transfer coding is unknown")
            self._state = _State.CHUNK_LINE
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise AnswerError("its length is no number")
            self._left = int(length)
            self._state = _State.SIZED if self._left else _State.COMPLETE
        else:
            self._state = _State.UNTIL_END
            self.ends_connection = True

    def _take(
        self, data: bytes, start: int, pieces: list[bytes], *, then: _State
    ) -> int:
        """Take what is there of a sized body or a chunk; returns where it stops."""
        piece = data[start : start + self._left]
        if piece:
            pieces.append(piece)
        self._left -= len(piece)
        if not self._left:
            self._state = then
        return start + len(piece)

    def _take_chunks(self, data: bytes, start: int, pieces: list[bytes]) -> int:
        """Take the pieces of a chunked body; returns where they stop."""
        while self._state is not _State.COMPLETE:
            if self._state is _State.CHUNK:
                if start == len(data):
                    break
                start = self._take(data, start, pieces, then=_State.CHUNK_END)
                continue
            stop = data.find(_END_OF_LINE, start)
            if stop < 0:
                if len(data) - start > MAX_LINE_BYTES:
                    raise AnswerError("a line between its chunks does not end")
                break
            if self._state is _State.CHUNK_LINE:
                found = _CHUNK_LINE.fullmatch(data, start, stop)
                if found is None:
                    raise AnswerError("a chunk has no size")
                size = int(found[1], 16)
                start = stop + len(_END_OF_LINE)
                stop = start + size
                if size and data.startswith(_END_OF_LINE, stop):  # the usual case
                    pieces.append(data[start:stop])
                    start = stop + len(_END_OF_LINE)
                else:
                    self._left = size
                    self._state = _State.CHUNK if size else _State.TRAILERS
                continue
            is_empty = stop == start
            start = stop + len(_END_OF_LINE)
            if self._state is _State.CHUNK_END:
                if not is_empty:
                    raise AnswerError("a chunk is longer than its size")
                self._state = _State.CHUNK_LINE
            elif is_empty:  # a trailer is of no interest
                self._state = _State.COMPLETE
        return start
