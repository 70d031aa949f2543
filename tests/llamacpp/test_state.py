"""Sequence-state files: reading, places and frames, without a runner."""

import contextlib
import mmap
import struct
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.llamacpp import state
from proxy.llamacpp.state import RowFormat, StateFormatError, StateLayout
from tests.llamacpp.state_samples import (
    Sample,
    compose,
    payloads,
    samples,
    write_plainly,
)


@settings(deadline=None)
@given(samples())
def test_a_file_is_read_as_it_was_written(sample: Sample) -> None:
    """Parsing a file of any kind gives its layout, tokens and stream."""
    data = write_plainly(sample)
    parsed = state.parse(data, len(data))
    assert parsed.layout == sample.layout
    assert tuple(parsed.token_ids.tolist()) == sample.token_ids
    assert parsed.num_cells == len(sample.token_ids)
    assert parsed.stream == sample.stream
    assert parsed.is_contiguous


@settings(deadline=None)
@given(samples(), st.integers(1, 8), st.integers(1, 5), st.data())
def test_frame_and_blocks_make_the_file_of_the_cut(
    sample: Sample, block_size: int, n_stream: int, data: st.DataObject
) -> None:
    """A frame and copied blocks equal the file of the first tokens, byte for byte."""
    saved = write_plainly(sample)
    blocks = payloads(saved, block_size=block_size)
    num_tokens = data.draw(st.integers(0, len(blocks))) * block_size
    if not num_tokens:
        return
    composed = compose(
        state.parse(saved, len(saved)).layout,
        sample.token_ids[:num_tokens],
        blocks,
        block_size=block_size,
        n_stream=n_stream,
    )
    assert composed == write_cut(sample, num_tokens, n_stream)


@settings(deadline=None)
@given(samples(), st.data())
def test_a_file_is_what_its_parts_make(sample: Sample, data: st.DataObject) -> None:
    """A file of whole blocks with its cells in stream 0 is composed of its own parts.

    Byte for byte, with blocks of any size that leave no token over.
    """
    count = len(sample.token_ids)
    sizes = [size for size in range(1, count + 1) if not count % size]
    block_size = data.draw(st.sampled_from(sizes))
    saved = write_plainly(replace(sample, stream=0))
    parsed = state.parse(saved, len(saved))
    composed = compose(
        parsed.layout,
        parsed.token_ids.tolist(),
        payloads(saved, block_size=block_size),
        block_size=block_size,
    )
    assert composed == saved


@settings(deadline=None)
@given(samples())
def test_a_frame_leaves_the_rest_of_the_buffer_alone(sample: Sample) -> None:
    """Neither rows nor what follows the file are touched by its frame."""
    layout, token_ids = sample.layout, sample.token_ids
    size = state.file_bytes(layout, len(token_ids))
    buffer = bytearray(b"\xa5" * (size + 7))
    assert state.write_frame(buffer, layout, token_ids=token_ids) == size
    assert buffer[size:] == b"\xa5" * 7
    places = state.block_layout_for(layout, len(token_ids), block_size=1)
    assert places.end <= size
    for index in range(places.num_blocks):
        for offset, length in places.pieces(index):
            assert buffer[offset : offset + length] == b"\xa5" * length


def write_cut(sample: Sample, num_tokens: int, n_stream: int) -> bytes:
    """Write the file of the first tokens, in stream 0 of another number of streams."""

    class Cut(Sample):
        def rows(self) -> list[np.ndarray]:
            return [rows[:num_tokens] for rows in sample.rows()]

    layout = replace(sample.layout, n_stream=n_stream)
    return write_plainly(Cut(layout, sample.token_ids[:num_tokens], 0, sample.seed))


@settings(deadline=None)
@given(samples(), st.data())
def test_a_file_that_ends_early_or_late_is_refused(
    sample: Sample, data: st.DataObject
) -> None:
    """Bytes too few or too many are a StateFormatError, or another layout.

    A file that ends exactly behind K is one of a model without V.
    """
    saved = write_plainly(sample)
    try:
        parsed = state.parse(saved, data.draw(st.integers(0, len(saved) - 1)))
    except StateFormatError:
        pass
    else:
        assert sample.layout.v_layers
        assert not parsed.layout.v_layers
    with pytest.raises(StateFormatError):
        state.parse(saved + b"\0", len(saved) + 1)
    with pytest.raises(StateFormatError, match="announced"):
        state.parse(saved, len(saved) + 1)


@settings(max_examples=300, deadline=None)
@given(samples(), st.data())
def test_a_damaged_file_raises_nothing_else(
    sample: Sample, data: st.DataObject
) -> None:
    """Overwritten bytes give a parse or a StateFormatError, fast and in little room."""
    damaged = bytearray(write_plainly(sample))
    for _ in range(data.draw(st.integers(1, 3))):
        offset = data.draw(st.integers(0, len(damaged) - 4))
        word = data.draw(st.sampled_from((0, 1, 2, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 24)))
        struct.pack_into("<I", damaged, offset, word)
    try:
        parsed = state.parse(damaged, len(damaged))
        places = state.block_layout(parsed, 4)
    except StateFormatError:
        return
    assert places.end <= len(damaged)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    """Random bytes behind a good start raise StateFormatError, or hold no cells."""
    data = b"qsgg" + struct.pack("<II", 4, 0) + noise
    with contextlib.suppress(StateFormatError):
        assert state.parse(data, len(data)).num_cells == 0


def a_sample(**changes: object) -> Sample:
    """Give a file of 20 tokens, two layers, plain."""
    rows = RowFormat(1, 8)
    layout = StateLayout(
        version=4,
        has_packed_tokens=True,
        has_extended_cells=False,
        n_stream=1,
        v_trans=0,
        n_rot_k=0,
        n_rot_v=0,
        k_layers=(rows, rows),
        v_layers=(rows, rows),
    )
    layout = replace(layout, **changes)  # type: ignore[arg-type]
    return Sample(layout, tuple(range(2, 22)), 0, 1)


def test_equal_layers_make_one_run() -> None:
    """Layers at equal distances make one run, K and V of other sizes two."""
    wide = RowFormat(1, 16)
    for v_layers, num_runs in (((RowFormat(1, 8),) * 2, 1), ((wide,) * 2, 2)):
        layout = a_sample(v_layers=v_layers).layout
        places = state.block_layout_for(layout, 20, block_size=4)
        assert len(places.runs) == num_runs
        assert places.pieces_per_block == 4


@pytest.mark.parametrize("version", [0, 1, 5, 2**32 - 1])
def test_an_unknown_version_is_refused(version: int) -> None:
    """Any version but the known ones is named in the error."""
    data = write_plainly(a_sample(version=version))
    with pytest.raises(StateFormatError, match=f"version {version} is not known"):
        state.parse(data, len(data))


def test_huge_counts_take_no_room() -> None:
    """A damaged count is refused before anything of its size is allocated."""
    data = bytearray(write_plainly(a_sample()))
    list_words = 20 + 4
    places = [8, 20, 12 + list_words * 4, 12 + list_words * 4 + 4]
    tracemalloc.start()
    for offset in places:
        damaged = bytearray(data)
        struct.pack_into("<I", damaged, offset, 0x7FFFFFF0)
        with pytest.raises(StateFormatError):
            state.parse(damaged, len(damaged))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_cells_out_of_order_have_no_blocks() -> None:
    """Cells that are not the positions 0, 1, 2... parse, but have no blocks."""
    data = bytearray(write_plainly(a_sample()))
    cells = 12 + (20 + 4) * 4 + 8
    struct.pack_into("<i", data, cells + 5 * 12, 6)
    parsed = state.parse(data, len(data))
    assert not parsed.is_contiguous
    with pytest.raises(StateFormatError, match="in order"):
        state.block_layout(parsed, 4)


def test_more_cells_than_tokens_are_not_contiguous() -> None:
    """A token list that is shorter than the cells does not pass as their text."""
    sample = a_sample(has_packed_tokens=False)
    data = write_plainly(sample)
    short = data[:8] + struct.pack("<I", 19) + data[16:]
    parsed = state.parse(short, len(short))
    assert (parsed.num_cells, len(parsed.token_ids)) == (20, 19)
    assert not parsed.is_contiguous


def test_media_are_counted() -> None:
    """A packed list with media gives their number, and tokens of -1 in their place."""
    data = write_plainly(a_sample())
    words = [-1, 1, 20, *range(2, 12), *([-1] * 10), 1, 10, 7, 7, 7]
    packed = struct.pack(f"<{len(words) + 1}i", len(words), *words)
    with_media = data[:8] + packed + data[12 + 24 * 4 :]
    parsed = state.parse(with_media, len(with_media))
    assert parsed.num_media == 1
    assert parsed.token_ids.tolist() == [*range(2, 12), *([-1] * 10)]


def test_digest_fields_tell_rows_apart() -> None:
    """What changes rows changes the digest fields; streams and list form do not."""
    base = a_sample().layout
    same = replace(base, n_stream=4, has_packed_tokens=False)
    assert same.digest_fields() == base.digest_fields()
    rows = RowFormat(1, 8)
    others = [
        replace(base, v_trans=1),
        replace(base, n_rot_k=32),
        replace(base, n_rot_v=32),
        replace(base, has_extended_cells=True),
        replace(base, k_layers=(rows, RowFormat(8, 8))),
        replace(base, v_layers=(rows, RowFormat(1, 16))),
        replace(base, k_layers=(rows,), v_layers=(rows, rows, rows)),
        replace(base, v_layers=()),
    ]
    digests = {layout.digest_fields() for layout in (base, *others)}
    assert len(digests) == 1 + len(others)


def test_a_frame_that_cannot_be_written_is_refused() -> None:
    """A short or read-only buffer, no tokens or an unknown layout raise ValueError."""
    layout = a_sample().layout
    size = state.file_bytes(layout, 4)
    tokens = [5, 6, 7, 8]
    with pytest.raises(ValueError, match="does not fit"):
        state.write_frame(bytearray(size - 1), layout, token_ids=tokens)
    with pytest.raises(ValueError, match="read-only"):
        state.write_frame(bytes(size), layout, token_ids=tokens)
    with pytest.raises(ValueError, match="needs tokens"):
        state.write_frame(bytearray(size), layout, token_ids=[])
    empty = replace(layout, k_layers=(), v_layers=())
    with pytest.raises(ValueError, match="needs tokens"):
        state.write_frame(bytearray(size), empty, token_ids=tokens)


def test_a_mapped_file_can_be_closed_after_the_parse(tmp_path: Path) -> None:
    """Neither a result nor an error keeps the buffer exported."""
    sound = write_plainly(a_sample(has_extended_cells=True))
    for data, is_sound in ((sound, True), (sound + b"1234", False), (b"qsgg", False)):
        path = tmp_path / "slot"
        path.write_bytes(data)
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if is_sound:
            parsed = state.parse(view, len(view))
            view.close()
            assert len(parsed.token_ids) == 20
        else:
            with pytest.raises(StateFormatError) as caught:
                state.parse(view, len(view))
            view.close()
            assert caught.value.__context__ is None


def test_long_sequences_are_fast() -> None:
    """A frame and a parse of 128 thousand tokens take little of the CPU."""
    layout = a_sample().layout
    token_ids = np.arange(2, 131074, dtype=np.int32)
    data = bytearray(state.file_bytes(layout, len(token_ids)))
    started = time.process_time()
    state.write_frame(data, layout, token_ids=token_ids)
    parsed = state.parse(data, len(data))
    assert time.process_time() - started < 0.5
    assert np.array_equal(parsed.token_ids, token_ids)
    assert parsed.is_contiguous
