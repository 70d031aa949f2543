"""Answers that are passed on, cut into whole events."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import RunnerGone
from proxy.llamacpp.answers import SIGN_OF_LIFE, EngineAnswer

PROGRESS = b'data: {"choices":[],"prompt_progress":{"total":9}}\n\n'
TEXT = b'data: {"choices":[{"text":"a \\"prompt_progress\\" b"}]}\n\n'


async def pieces(parts: Sequence[bytes | Exception]) -> AsyncIterator[bytes]:
    """Yield parts, or raise them."""
    for part in parts:
        if isinstance(part, Exception):
            raise part
        yield part


def answer(
    *parts: bytes | Exception,
    content_type: str = "text/event-stream",
    keeps_progress: bool = False,
) -> EngineAnswer:
    """Make an answer that comes in these parts."""
    return EngineAnswer(
        status=200,
        content_type=content_type,
        chunks=pieces(parts),
        keeps_progress=keeps_progress,
    )


async def events(
    *parts: bytes | Exception, keeps_progress: bool = False
) -> list[bytes]:
    """Return what a reader of the events gets."""
    came = answer(*parts, keeps_progress=keeps_progress).events()
    return [piece async for piece in came]


async def test_events_that_come_at_once_go_on_at_once() -> None:
    """One piece for each piece that came, cut at the end of its last event."""
    got = await events(b"data: 1\n\ndata: 2\n\nda", b"ta: 3\n", b"\n: ping\n\n")
    assert got == [b"data: 1\n\ndata: 2\n\n", b"data: 3\n\n: ping\n\n"]


async def test_progress_is_dropped_unless_it_was_asked_for() -> None:
    """Only events of progress go; text that quotes the word stays."""
    assert await events(PROGRESS, PROGRESS + TEXT + PROGRESS) == [TEXT]
    kept = await events(PROGRESS + TEXT, keeps_progress=True)
    assert kept == [PROGRESS + TEXT]


async def test_a_long_prefill_is_not_silent() -> None:
    """Progress that is dropped leaves a comment, once in a while."""
    parts = PROGRESS, PROGRESS + PROGRESS, TEXT + PROGRESS
    quiet = replace(answer(*parts), max_quiet_seconds=0.0)
    assert [piece async for piece in quiet.events()] == [SIGN_OF_LIFE] * 2 + [TEXT]


async def test_what_follows_the_last_event_comes_at_the_end() -> None:
    """Nothing of a stream that ended well is lost."""
    assert await events(b"data: 1\n\ndata: 2") == [b"data: 1\n\n", b"data: 2"]


async def test_half_an_event_of_a_broken_stream_is_not_handed_over() -> None:
    """The error comes instead of it."""
    came = answer(b"data: 1\n\ndata: 2", RunnerGone("dead")).events()
    assert await anext(came) == b"data: 1\n\n"
    with pytest.raises(RunnerGone):
        await anext(came)


async def test_a_body_in_one_piece() -> None:
    """What is no stream is read as it is."""
    whole = answer(b'{"a":', b"1}\n\n", content_type="application/json; charset=utf-8")
    assert not whole.is_event_stream
    assert await whole.read() == b'{"a":1}\n\n'


def test_the_type_of_a_stream() -> None:
    """Parameters of the type do not matter."""
    assert answer(content_type="text/event-stream; charset=utf-8").is_event_stream
    assert not answer(content_type="text/event-streamer").is_event_stream


@given(st.data())
async def test_any_cut_gives_the_same_bytes(data: st.DataObject) -> None:
    """However a stream is cut on its way, all of it but the progress arrives."""
    parts = data.draw(
        st.lists(st.sampled_from([PROGRESS, TEXT, b": ping\n\n", b"data: x\ny\n\n"]))
    )
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=20)))
    bounds = [0, *cuts, len(stream)]
    cut = [stream[a:b] for a, b in pairwise(bounds)]
    got = await events(*cut)
    assert b"".join(got) == b"".join(part for part in parts if part != PROGRESS)
    assert all(piece.endswith(b"\n\n") for piece in got)
