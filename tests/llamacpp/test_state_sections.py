"""All kinds of memory in sequence-state files: read, declined, damaged."""

import itertools
import struct
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.llamacpp import state
from proxy.llamacpp.state import (
    RowFormat,
    StateFormatError,
    StateLayout,
    UnsupportedStateError,
)
from proxy.llamacpp.state_format import RecurrentTail, WindowTail
from proxy.llamacpp.state_sections import AttentionSection, RecurrentSection
from tests.llamacpp.state_samples import (
    RecurrentSample,
    Sample,
    compose,
    payloads,
    recurrent_samples,
    samples,
    write_attention,
    write_checkpoints,
    write_head,
    write_recurrent,
)

SAVES = Path(__file__).parent / "saves"
"""What real engines saved, by build and kind: RECORDED_TOKENS in slot 1 of 3."""
BUILDS = {"10068": (2, False), "10566": (2, True), "11063": (3, True)}
"""Version of the file, and whether its token list is packed."""
RECORDED_TOKENS = [7, 9, 4, 300, 12, 5, 8, 77, 31]
WITH_TAILS = ("window", "hybrid", "recurrent")
SHARED = ("llama", "transposed", "mrope", "latent")
MAX_SECONDS = 2.0  # of the CPU, for a file that is made to take long

Samples = tuple[Sample | RecurrentSample, ...]


@st.composite
def memories(draw: st.DrawFn) -> Samples:
    """Draw what engines have: caches over all or some cells, then recurrent states."""
    first = draw(samples())
    kind = draw(st.sampled_from(("window", "hybrid", "hybrid-window", "recurrent")))
    if kind == "recurrent":
        return (draw(recurrent_samples()),)
    second = draw(samples())
    layout = replace(
        second.layout,
        version=first.layout.version,
        n_stream=first.layout.n_stream,
        n_rot_k=first.layout.n_rot_k,
        n_rot_v=first.layout.n_rot_v,
        has_extended_cells=first.layout.has_extended_cells,
    )
    window = replace(second, layout=layout, stream=first.stream)
    attention = (first, window) if kind.endswith("window") else (first,)
    if kind.startswith("hybrid"):
        return (*attention, draw(recurrent_samples()))
    return attention


def write_section(sample: Sample | RecurrentSample) -> bytes:
    """Write one section of either kind."""
    if isinstance(sample, Sample):
        return write_attention(sample)
    return write_recurrent(sample)


@settings(deadline=None)
@given(memories(), st.integers(0, 3))
def test_every_memory_is_read_as_it_was_written(
    memory: Samples, num_checkpoints: int
) -> None:
    """Sections, their cells and rows, and checkpoints are found where they are."""
    first = memory[0]
    tokens = first.token_ids if isinstance(first, Sample) else (3, 4)
    version = first.layout.version if isinstance(first, Sample) else 4
    head = write_head(version, tokens, is_packed=True)
    sections = [write_section(sample) for sample in memory]
    tail = [(9 + n, sections[-1]) for n in range(num_checkpoints)]
    data = head + b"".join(sections) + (write_checkpoints(tail) if tail else b"")

    file = state.read(data, len(data))
    assert file.token_ids.tolist() == list(tokens)
    starts = list(itertools.accumulate(map(len, sections), initial=len(head)))
    assert [section.start for section in file.memory.sections] == starts[:-1]
    assert [section.stop for section in file.memory.sections] == starts[1:]
    for section, sample in zip(file.memory.sections, memory, strict=True):
        check_section(section, sample)
    assert [point.num_tokens for point in file.memory.checkpoints] == [
        num_tokens for num_tokens, _ in tail
    ]
    for point in file.memory.checkpoints:
        (section,) = point.sections
        check_section(section, memory[-1])
        assert data[slice(*point.draft)] == b"abc"
        assert data[slice(*point.speculation)] == b""
    kinds = [isinstance(sample, Sample) for sample in memory]
    is_shared = kinds in ([False], [True, False])
    if is_shared or (kinds == [True] and not tail):
        parsed = state.parse(data, len(data))
        assert (parsed.layout.tail is not None) == is_shared
        assert not parsed.tails  # those of a draft model besides are left alone
    else:
        with pytest.raises(UnsupportedStateError):
            state.parse(data, len(data))


def check_section(
    section: AttentionSection | RecurrentSection, sample: Sample | RecurrentSample
) -> None:
    """Compare what was read with what was written."""
    if isinstance(sample, Sample):
        assert isinstance(section, AttentionSection)
        assert section.num_cells == len(sample.token_ids)
        assert section.stream == sample.stream
        assert section.n_stream == sample.layout.n_stream
        assert section.k_layers == sample.layout.k_layers
        assert section.v_layers == sample.layout.v_layers
    else:
        assert isinstance(section, RecurrentSection)
        assert section.num_cells == sample.num_cells
        assert section.position == (sample.position if sample.num_cells else -1)
        assert section.num_layers == sample.num_layers
        assert section.history_rows == sample.history_rows
        assert section.state_rows == sample.state_rows


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("kind", SHARED)
def test_files_of_older_builds_are_understood(build: str, kind: str) -> None:
    """What engines with versions 2 and 3 saved is taken apart and put together."""
    saved = (SAVES / f"{build}-{kind}.bin").read_bytes()
    parsed = state.parse(saved, len(saved))
    layout = parsed.layout
    assert (layout.version, layout.has_packed_tokens) == BUILDS[build]
    assert parsed.token_ids.tolist() == RECORDED_TOKENS
    assert (parsed.stream, layout.n_stream, parsed.is_contiguous) == (1, 3, True)
    assert layout.v_trans == (kind == "transposed")
    assert layout.has_extended_cells == (kind == "mrope")
    assert bool(layout.v_layers) == (kind != "latent")
    composed = compose(
        layout, RECORDED_TOKENS, payloads(saved, block_size=3), block_size=3
    )
    assert len(composed) == len(saved)
    again = state.parse(composed, len(composed))
    assert (again.layout, again.stream) == (layout, 0)
    assert payloads(composed, block_size=3) == payloads(saved, block_size=3)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("kind", WITH_TAILS)
def test_memories_of_older_builds_have_tails_but_none_saved(
    build: str, kind: str
) -> None:
    """Windows, hybrids and recurrent states are read to the end."""
    saved = (SAVES / f"{build}-{kind}.bin").read_bytes()
    file = state.read(saved, len(saved))
    assert file.version == BUILDS[build][0]
    assert file.memory.sections[-1].stop == len(saved)
    parsed = state.parse(saved, len(saved), window_tokens=64)
    assert isinstance(
        parsed.layout.tail, WindowTail if kind == "window" else RecurrentTail
    )
    assert parsed.layout.has_attention == (kind != "recurrent")
    assert not parsed.tails
    if kind == "window":
        with pytest.raises(UnsupportedStateError, match="known as a window"):
            state.parse(saved, len(saved))


def recorded() -> list[bytes]:
    """Give all recorded files, and one with checkpoints."""
    files = [path.read_bytes() for path in sorted(SAVES.glob("*.bin"))]
    window = (SAVES / "11063-hybrid.bin").read_bytes()
    section = state.read(window, len(window)).memory.sections[-1]
    data = window[section.start : section.stop]
    return [*files, window + write_checkpoints([(5, data), (9, data)])]


RECORDED = recorded()


def read_safely(data: bytes | bytearray) -> bool:
    """Tell whether a file is read; anything but StateFormatError is a fault.

    It takes little time and room in either case.
    """
    started = time.process_time()
    tracemalloc.start()
    try:
        file = state.read(data, len(data))
    except StateFormatError as error:
        assert str(error)  # noqa: PT017 - the words are what is tested
        return False
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < (1 << 20) + 4 * len(data)
        assert time.process_time() - started < MAX_SECONDS
    stops = [section.stop for section in file.memory.sections]
    assert stops == sorted(stops)
    assert stops[-1] <= len(data)
    return True


@pytest.mark.parametrize("saved", RECORDED, ids=range(len(RECORDED)))
def test_a_recorded_file_cut_anywhere_is_refused(saved: bytes) -> None:
    """No beginning of a file passes as a file.

    But at a seam: behind the first section, or behind K.
    """
    seams = {section.stop for section in state.read(saved, len(saved)).memory.sections}
    step = max(1, len(saved) // 400)
    for size in {*range(0, len(saved), step), *range(len(saved) - 40, len(saved))}:
        try:
            file = state.read(saved[:size], size)
        except StateFormatError:
            continue
        last = file.memory.sections[-1]
        assert size in seams or not getattr(last, "v_layers", True)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(RECORDED), st.data())
def test_a_damaged_recorded_file_raises_nothing_else(
    saved: bytes, data: st.DataObject
) -> None:
    """Bits flipped, huge counts, parts cut out and doubled: read or refused."""
    damaged = bytearray(saved)
    for _ in range(data.draw(st.integers(1, 4))):
        # most of what is counted stands at the beginning
        highest = data.draw(st.sampled_from((64, 400, len(damaged) - 8)))
        offset = data.draw(st.integers(0, min(highest, len(damaged) - 8)))
        match data.draw(st.sampled_from(("bit", "word", "count", "cut", "double"))):
            case "bit":
                damaged[offset] ^= 1 << data.draw(st.integers(0, 7))
            case "word":
                word = data.draw(st.integers(0, 2**32 - 1))
                struct.pack_into("<I", damaged, offset, word)
            case "count":
                count = data.draw(st.sampled_from((0, 1, 255, 2**31 - 1, 2**32 - 1)))
                struct.pack_into("<I", damaged, offset // 4 * 4, count)
            case "cut":
                del damaged[offset : offset + data.draw(st.integers(1, 64))]
            case _:
                size = data.draw(st.integers(1, 64))
                damaged[offset:offset] = damaged[offset : offset + size]
        if len(damaged) < 16:
            break
    read_safely(damaged)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 4), st.binary(max_size=300), st.integers(0, 9))
def test_noise_behind_a_sound_head_is_refused_or_read(
    version: int, noise: bytes, num_tokens: int
) -> None:
    """Any bytes in place of the sections give no other error."""
    read_safely(write_head(version, range(num_tokens), is_packed=False) + noise)


def sections_in_sections(count: int) -> bytes:
    """Write a recurrent section whose every entry could begin another one."""
    rows = (RowFormat(0, 1),) * count
    inner = RecurrentSample(0, -1, 1024, rows, rows)
    return write_recurrent(inner)


HOSTILE = {
    "empty streams": struct.pack("<2I", 1, 0) * 20_000,
    "no recurrent cell": struct.pack("<3I", 0, 0, 1024) + bytes(12 * 2048 * 3),
    "recurrent in recurrent": sections_in_sections(1024) * 8,
    "all zeros": bytes(1 << 20),
    "all ones": struct.pack("<I", 1) * (1 << 18),
    "one layer, many cells": struct.pack("<2I", 1, 1 << 18)
    + struct.pack("<3i", 0, 1, 1) * (1 << 18),
    "many layers of nothing": struct.pack("<2I3i4I", 1, 1, 0, 1, 0, 0, 1024, 0, 0)
    + (struct.pack("<IQ", 1, 1) + b"x") * 4096,
    "many checkpoints": struct.pack("<2I", 1, 0)
    + b"SCKP"
    + struct.pack("<II", 1, 1024)
    + struct.pack("<QiiQIi2IQQ", 1, 0, 0, 16, 0xAF143CD8, 0, 1, 0, 0, 0) * 1024,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_made_to_take_long_do_not(name: str) -> None:
    """What could be read in very many ways is given up in bounded time and room."""
    for version in (2, 3, 4):
        head = write_head(version, [5, 6], is_packed=False)
        read_safely(head + HOSTILE[name])


def test_a_file_that_can_be_read_in_two_ways_is_refused() -> None:
    """What is V of 40 cells, and as well a second cache of one cell, is not guessed."""
    tokens = tuple(range(40))
    sample = Sample(
        StateLayout(
            version=4,
            has_packed_tokens=False,
            has_extended_cells=False,
            n_stream=1,
            v_trans=0,
            n_rot_k=0,
            n_rot_v=0,
            k_layers=(RowFormat(1, 8),),
            v_layers=(),
        ),
        tokens,
        stream=0,
        seed=1,
    )
    # type 1 and rows of 1 byte, or 1 stream and 1 cell; then 40 bytes
    section = struct.pack("<IQ", 1, 1) + struct.pack("<2i", 1, 0)
    section += struct.pack("<4I", 0, 1, 0, 0) + struct.pack("<IQ", 1, 4) + b"rows"
    data = write_head(4, tokens, is_packed=False) + write_attention(sample) + section
    with pytest.raises(StateFormatError, match="two ways"):
        state.read(data, len(data))
