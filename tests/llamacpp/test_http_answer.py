"""Reading one HTTP answer: whole, in pieces, broken, and what may follow it."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.llamacpp.http_answer import (
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    AnswerError,
    AnswerReader,
)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def read(pieces: Sequence[bytes]) -> tuple[AnswerReader, bytes]:
    """Feed a reader; returns it and the body."""
    reader = AnswerReader()
    parts = [part for piece in pieces for part in reader.feed(piece)]
    assert all(parts), "an empty piece would be taken for the end"
    return reader, b"".join(parts)


def chunked(parts: Sequence[bytes]) -> bytes:
    """Write a body in chunks, with everything that may stand between them."""
    chunks = [b"%X ;a=b\r\n%s\r\n" % (len(part), part) for part in parts if part]
    return b"".join(chunks) + b"0\r\nTrailer: x\r\n\r\n"


@given(
    parts=st.lists(st.binary(max_size=40), max_size=5),
    form=st.sampled_from(["sized", "chunked", "until the end"]),
    data=st.data(),
)
def test_a_body_is_the_same_however_it_is_cut(
    parts: list[bytes], form: str, data: st.DataObject
) -> None:
    """Neither the cuts between reads nor the form of the body change it."""
    body = b"".join(parts)
    message = {
        "sized": OK + b"content-length:%d \r\n\r\n%s" % (len(body), body),
        "chunked": b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + chunked(parts),
        "until the end": OK + b"\r\n" + body,
    }[form]
    places = st.lists(st.integers(0, len(message)), max_size=8)
    cuts = [0, *sorted(data.draw(places)), len(message)]
    pieces = [message[i:j] for i, j in pairwise(cuts)]
    reader, found = read(pieces)
    assert found == body
    assert reader.head is not None
    assert reader.head.status == 200
    assert reader.is_complete == (form != "until the end")
    assert reader.ends_connection == (form == "until the end")
    reader.feed_end()
    assert reader.is_complete


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """What is no HTTP is an AnswerError, and no other exception."""
    for head in (b"", OK, CHUNKED):
        reader = AnswerReader()
        try:
            for piece in (head, data):
                reader.feed(piece)
            reader.feed_end()
        except AnswerError:
            continue
        assert reader.is_complete


def test_fields_are_found_by_their_lower_case_names() -> None:
    """Repeated fields are one, and white space around a value is none of it."""
    reader, _ = read([OK + b"X-Y:  a b \r\nx-y: c\r\nContent-Length: 0\r\n\r\n"])
    assert reader.head is not None
    assert reader.head.fields == {"x-y": "a b, c", "content-length": "0"}
    assert reader.is_complete


@pytest.mark.parametrize("status", [204, 304])
def test_some_answers_have_no_body(status: int) -> None:
    """Whatever their fields say."""
    reader, body = read([b"HTTP/1.1 %d\r\nContent-Length: 5\r\n\r\n" % status])
    assert (reader.is_complete, body) == (True, b"")


@pytest.mark.parametrize(
    "message",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        OK + b"no field\r\n\r\n",
        OK + b" folded: x\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1, 1\r\n\r\n",
        OK + b"Content-Length: %s\r\n\r\n" % (b"1" * 5000),
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        CHUNKED + b"+5\r\n",
        CHUNKED + b"0x5\r\n",
        CHUNKED + b"\r\n",
        CHUNKED + b"5\r\nabcdefg\r\n",
        CHUNKED + b"%016x\r\n" % 1,
        CHUNKED + b"1" * (MAX_LINE_BYTES + 1),
        OK + b"X" * (MAX_HEAD_BYTES + 1),
    ],
)
def test_what_is_no_answer_is_refused(message: bytes) -> None:
    """Strictly: behind it is no llama-server."""
    with pytest.raises(AnswerError):
        read([message])


@pytest.mark.parametrize(
    "message",
    [b"", OK, CHUNKED, CHUNKED + b"1\r\n", CHUNKED + b"1\r\na\r\n0\r\n"],
)
def test_an_early_end_is_an_error(message: bytes) -> None:
    """The end of a connection ends an answer only where it has no other end."""
    reader, _ = read([message])
    with pytest.raises(AnswerError):
        reader.feed_end()


def test_what_may_follow_an_answer() -> None:
    """Another answer follows unless this one says no, or something came already."""
    empty = b"Content-Length: 1\r\n\r\n-"
    for message, ends in {
        OK + empty: False,
        OK + b"Connection: Keep-Alive\r\n" + empty: False,
        OK + b"Connection: close\r\n" + empty: True,
        b"HTTP/1.0 200 OK\r\n" + empty: True,
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" + empty: False,
        OK + empty + b"H": True,
        CHUNKED + b"0\r\n\r\nH": True,
    }.items():
        reader, _ = read([message])
        assert reader.is_complete
        assert reader.ends_connection == ends
        reader.feed(b"H")
        assert reader.ends_connection
