"""Sequence-state files written the long way round, and taken apart and put together.

The writers here know nothing of the code that is tested: field by field, cell by cell.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from proxy.blocks import BlockLayout
from proxy.llamacpp import state
from proxy.llamacpp.state import RowFormat, StateLayout


@dataclass(frozen=True)
class Sample:
    """One slot file to be: its layout, tokens, stream, and rows by layer."""

    layout: StateLayout
    token_ids: tuple[int, ...]
    stream: int
    seed: int

    def rows(self) -> list[np.ndarray]:
        """Random rows, one array [tokens, row_bytes] for each layer's K and V."""
        random = np.random.default_rng(self.seed)
        formats = (*self.layout.k_layers, *self.layout.v_layers)
        count = len(self.token_ids)
        return [
            random.integers(0, 256, (count, rows.row_bytes), np.uint8)
            for rows in formats
        ]


@dataclass(frozen=True)
class RecurrentSample:
    """The recurrent state of one sequence to be."""

    num_cells: int
    position: int
    num_layers: int
    history_rows: tuple[RowFormat, ...]
    state_rows: tuple[RowFormat, ...]


def write_plainly(sample: Sample) -> bytes:
    """Write a file of one attention section."""
    layout = sample.layout
    head = write_head(
        layout.version, sample.token_ids, is_packed=layout.has_packed_tokens
    )
    return head + write_attention(sample)


def write_head(version: int, token_ids: Sequence[int], *, is_packed: bool) -> bytes:
    """Write what stands before the sections."""
    words = list(token_ids)
    if is_packed:
        words = [-1, 1, len(token_ids), *token_ids, 0]
    head = b"qsgg" + struct.pack("<II", version, len(words))
    return head + b"".join(struct.pack("<i", word) for word in words)


def write_attention(sample: Sample) -> bytes:
    """Write one attention section."""
    layout, tokens = sample.layout, sample.token_ids
    out = [struct.pack("<I", layout.n_stream)]
    for stream in range(layout.n_stream):
        if stream != sample.stream:
            out.append(struct.pack("<I", 0))
            continue
        out.append(struct.pack("<I", len(tokens)))
        for position, token in enumerate(tokens):
            out.append(struct.pack("<iI", position, 1))
            if layout.has_extended_cells:
                out.append(struct.pack("<ii", position, position))
                if layout.version > 2:
                    out.append(struct.pack("<i", token))
            out.append(struct.pack("<i", stream))
        out.append(struct.pack("<II", layout.v_trans, len(layout.k_layers)))
        if layout.version > 3:
            out.append(struct.pack("<II", layout.n_rot_k, layout.n_rot_v))
        formats = (*layout.k_layers, *layout.v_layers)
        for rows, data in zip(formats, sample.rows(), strict=True):
            if rows.element_bytes:
                count = rows.row_bytes // rows.element_bytes
                head = (rows.ggml_type, rows.element_bytes, count)
                out.append(struct.pack("<iII", *head))
                elements = data.reshape(len(tokens), count, rows.element_bytes)
                out.append(elements.transpose(1, 0, 2).tobytes())
            else:
                out.append(struct.pack("<iQ", rows.ggml_type, rows.row_bytes))
                out.append(data.tobytes())
    return b"".join(out)


def write_recurrent(sample: RecurrentSample) -> bytes:
    """Write one recurrent section."""
    out = [struct.pack("<I", sample.num_cells)]
    if sample.num_cells:
        out.append(struct.pack("<iI", sample.position, 0))
    out.append(struct.pack("<II", 0, sample.num_layers))
    for rows in (*sample.history_rows, *sample.state_rows):
        out.append(struct.pack("<iQ", rows.ggml_type, rows.row_bytes))
        out.append(bytes(range(1, 252)) * (rows.row_bytes // 251 + 1))
        out[-1] = out[-1][: rows.row_bytes * sample.num_cells]
    return b"".join(out)


def write_checkpoints(sections: Sequence[tuple[int, bytes]]) -> bytes:
    """Write checkpoints: of so many tokens, with such sections."""
    out = [b"SCKP", struct.pack("<II", 1, len(sections))]
    for num_tokens, data in sections:
        out.append(struct.pack("<Qii", num_tokens, 0, num_tokens - 1))
        blob = struct.pack("<Ii", 0xAF143CD8, 0) + data
        out += [struct.pack("<Q", len(blob)), blob]
        out += [struct.pack("<Q", 3), b"abc", struct.pack("<Q", 0)]
    return b"".join(out)


row_formats = st.builds(RowFormat, st.integers(0, 40), st.integers(1, 40))


row_formats = st.builds(RowFormat, st.integers(0, 40), st.integers(1, 40))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Draw files of all kinds: plain and packed, mixed layers, transposed V, no V."""
    k_layers = draw(st.lists(row_formats, min_size=1, max_size=4))
    k_layers[1:] = [replace(k, row_bytes=k.row_bytes - 1) for k in k_layers[1:]]
    if draw(st.booleans()):
        k_layers = [k_layers[0]] * len(k_layers)
    v_layers = [draw(row_formats) for _ in k_layers]
    v_layers[1:] = [replace(v, row_bytes=v.row_bytes - 1) for v in v_layers[1:]]
    v_trans = draw(st.integers(0, 1))
    if v_trans:
        size = draw(st.sampled_from((1, 2, 4)))
        v_layers = [
            replace(v, row_bytes=3 * size, element_bytes=size) for v in k_layers
        ]
    elif draw(st.booleans()):
        v_layers = []
    n_stream = draw(st.integers(1, 5))
    version = draw(st.integers(2, 4))
    rotations = st.sampled_from((0, 32) if version > 3 else (0,))
    layout = StateLayout(
        version=version,
        has_packed_tokens=draw(st.booleans()),
        has_extended_cells=draw(st.booleans()),
        n_stream=n_stream,
        v_trans=v_trans,
        n_rot_k=draw(rotations),
        n_rot_v=draw(rotations),
        k_layers=tuple(k_layers),
        v_layers=tuple(v_layers),
    )
    tokens = draw(st.lists(st.integers(2, 2**31 - 1), min_size=2, max_size=40))
    stream = draw(st.integers(0, n_stream - 1))
    return Sample(layout, tuple(tokens), stream, draw(st.integers(0, 99)))


@st.composite
def recurrent_samples(draw: st.DrawFn) -> RecurrentSample:
    """Recurrent states of one or no sequence, in some or all layers of a model."""
    count = draw(st.integers(1, 4))
    return RecurrentSample(
        num_cells=draw(st.integers(0, 1)),
        position=draw(st.integers(0, 9)),
        num_layers=draw(st.integers(count, 8)),
        history_rows=(draw(row_formats),) * count,
        state_rows=(RowFormat(draw(st.integers(0, 1)), draw(st.integers(0, 300))),)
        * count,
    )


def payloads(
    saved: bytes | bytearray, *, block_size: int, window_tokens: int = 0
) -> list[bytes]:
    """Take a file apart as a store does: the payloads of its full blocks."""
    parsed = state.parse(saved, len(saved), window_tokens=window_tokens)
    places = state.block_layout(parsed, block_size)
    return [
        b"".join(saved[o : o + n] for o, n in places.pieces(index))
        for index in range(places.num_blocks)
    ]


def compose(
    layout: StateLayout,
    token_ids: Sequence[int],
    blocks: Sequence[bytes],
    *,
    block_size: int,
    n_stream: int | None = None,
) -> bytes:
    """Put a file of whole blocks together: a frame, and the rows block by block."""
    size = state.file_bytes(layout, len(token_ids), n_stream=n_stream)
    composed = bytearray(size)
    written = state.write_frame(
        composed, layout, token_ids=token_ids, n_stream=n_stream
    )
    assert written == size
    places = state.block_layout_for(layout, len(token_ids), block_size=block_size)
    scatter(composed, places, blocks)
    return bytes(composed)


def scatter(target: bytearray, places: BlockLayout, blocks: Sequence[bytes]) -> None:
    """Write as many payloads as the target has room for."""
    for index in range(places.num_blocks):
        assert len(blocks[index]) == places.block_bytes
        position = 0
        for offset, length in places.pieces(index):
            stop = position + length
            target[offset : offset + length] = blocks[index][position:stop]
            position = stop
