"""The words and the geometry of llama.cpp's sequence-state files.

What `proxy.llamacpp.state` reads is described there. Here: the values that a file is
told in, and how long a file is, where its rows lie, and all of it but the rows, for
tokens and a layout that are given.

Rules:
1. Rows of files with equal `StateLayout.digest_fields` are interchangeable; n_stream
   and the form of the token list may differ.
2. What is laid out here is what the engine itself would save of these tokens, with the
   cells in stream 0: the same bytes but for the sequence id, which it ignores.
3. Nothing loops over cells in Python.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.blocks import BlockLayout, RowRun
from proxy.errors import StateFormatError

Buffer = bytes | bytearray | memoryview | mmap | NDArray[Any]
"""Contiguous bytes, by the buffer protocol."""

MAGIC = b"qsgg"

MAX_STREAMS = 256  # the engine's own limit on sequences

PACKED_MARK = -1
PACKED_VERSION = 1
PACKED_WORDS = 4  # mark, version, token count, media count
_LAYER_HEADER_BYTES = 12
CELL_WORDS = 3
EXTENDED_CELL_WORDS = {2: 5, 3: 6, 4: 6}
"""By version. The extra words are two more positions and, since version 3, the token
id."""
DATA_HEADER_WORDS = {2: 2, 3: 2, 4: 4}
"""By version: v_trans, n_layer and, since version 4, n_rot_k and n_rot_v."""

WORD = np.dtype("<i4")


class UnsupportedStateError(StateFormatError):
    """A sound file of a memory kind that is not understood; `reason` says which."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"memory kind not supported yet: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RowFormat:
    """K or V of one layer.

    `element_bytes` is 0 where the file holds one row after the other, else the file
    holds one element of all rows after the other, each of that many bytes.
    """

    ggml_type: int
    row_bytes: int
    """Bytes of one token, in either order."""
    element_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """What is the same in all slot files of one runner.

    The layout of a file without cells has no layers: it says nothing about rows.
    """

    version: int
    has_packed_tokens: bool
    has_extended_cells: bool
    n_stream: int
    v_trans: int
    n_rot_k: int
    n_rot_v: int
    k_layers: tuple[RowFormat, ...]
    v_layers: tuple[RowFormat, ...]

    @property
    def cell_words(self) -> int:
        """Words of metadata of one cell."""
        if self.has_extended_cells:
            return EXTENDED_CELL_WORDS[self.version]
        return CELL_WORDS

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return sum(rows.row_bytes for rows in (*self.k_layers, *self.v_layers))

    def digest_fields(self) -> bytes:
        """Encode canonically what must be equal for rows to fit."""
        words = [self.version, int(self.has_extended_cells), self.v_trans]
        words += [self.n_rot_k, self.n_rot_v, len(self.k_layers), len(self.v_layers)]
        for rows in (*self.k_layers, *self.v_layers):
            words += [rows.ggml_type, rows.row_bytes, rows.element_bytes]
        return struct.pack(f"<{len(words)}q", *words)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedState:
    """One slot file as read."""

    layout: StateLayout
    token_ids: NDArray[np.int32]
    """What the slot holds, by the file's own list. -1 where media stands."""
    num_cells: int
    is_contiguous: bool
    """Whether the cells are those of a text of exactly `token_ids`, in order."""
    num_media: int
    stream: int
    """Which stream holds the cells; 0 where there are none."""
    rows_start: int
    """Offset of the first layer's header."""


def block_layout_for(
    layout: StateLayout,
    num_tokens: int,
    *,
    block_size: int,
) -> BlockLayout:
    """Tell where the blocks lie in a file of exactly `num_tokens` tokens.

    The number of streams has no part in it: the cells stand in the first one.
    """
    return lay_blocks(layout, num_tokens, block_size, _rows_start(layout, num_tokens))


def file_bytes(
    layout: StateLayout, num_tokens: int, *, n_stream: int | None = None
) -> int:
    """Tell how long a file of exactly `num_tokens` tokens is.

    `n_stream` is the layout's own unless given.
    """
    num_layers = len(layout.k_layers) + len(layout.v_layers)
    return (
        _rows_start(layout, num_tokens)
        + num_layers * _LAYER_HEADER_BYTES
        + num_tokens * layout.kv_bytes_per_token
        + (_streams(layout, n_stream) - 1) * 4
    )


def frame_parts(
    layout: StateLayout,
    token_ids: Sequence[int] | NDArray[np.int32],
    *,
    n_stream: int | None = None,
) -> list[tuple[int, bytes]]:
    """Return all of a file of exactly `token_ids` but the rows: (offset, bytes).

    The cells go to stream 0 of `n_stream` (the layout's own unless given): the
    engine puts them into the stream of the slot that it restores. The last part ends
    where the file does. Raises ValueError where there is nothing to write.
    """
    tokens = np.asarray(token_ids, dtype=WORD)
    streams = _streams(layout, n_stream)
    num_tokens, num_layers = len(tokens), len(layout.k_layers)
    if not num_tokens or not num_layers:
        raise ValueError("a frame needs tokens, and a layout that knows the rows")
    token_list = _token_list(layout, tokens)
    data_header = [layout.v_trans, num_layers, layout.n_rot_k, layout.n_rot_v]
    head = b"".join(
        (
            MAGIC,
            _words([layout.version, len(token_list)]),
            _words(token_list),
            _words([streams, num_tokens]),
            _words(text_cells(tokens, layout.cell_words)),
            _words(data_header[: DATA_HEADER_WORDS[layout.version]]),
        )
    )
    parts = [(0, head)]
    position = len(head)
    for rows in (*layout.k_layers, *layout.v_layers):
        if rows.element_bytes:
            second, third = rows.element_bytes, rows.row_bytes // rows.element_bytes
        else:
            second, third = rows.row_bytes, 0  # a u64
        parts.append((position, _words([rows.ggml_type, second, third])))
        position += _LAYER_HEADER_BYTES + num_tokens * rows.row_bytes
    size = file_bytes(layout, num_tokens, n_stream=streams)
    return [*parts, (position, bytes(size - position))]  # the streams without cells


def write_frame(
    buffer: Buffer,
    layout: StateLayout,
    *,
    token_ids: Sequence[int] | NDArray[np.int32],
    n_stream: int | None = None,
) -> int:
    """Write `frame_parts` into a buffer; give the length of the file.

    Rows already in `buffer` stay. Raises ValueError where the buffer is too short or
    read-only, and where there is nothing to write.
    """
    parts = frame_parts(layout, token_ids, n_stream=n_stream)
    size = parts[-1][0] + len(parts[-1][1])
    raw = as_bytes(buffer)
    if raw.size < size:
        raise ValueError(f"a frame of {size} bytes does not fit in {raw.size}")
    for offset, part in parts:
        raw[offset : offset + len(part)] = np.frombuffer(part, dtype=np.uint8)
    return size


# -- geometry ---------------------------------------------------------------------


def as_bytes(buffer: Buffer) -> NDArray[np.uint8]:
    """Look at a buffer as bytes, without a copy."""
    return np.frombuffer(buffer, dtype=np.uint8)


def _streams(layout: StateLayout, n_stream: int | None) -> int:
    streams = layout.n_stream if n_stream is None else n_stream
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"{streams} streams")
    return streams


def _rows_start(layout: StateLayout, num_tokens: int) -> int:
    """Offset of the first layer's header in a file with its cells in stream 0."""
    list_words = num_tokens + (PACKED_WORDS if layout.has_packed_tokens else 0)
    cells_words = num_tokens * layout.cell_words
    # magic, version and length; n_stream and num_cells
    words = 3 + list_words + 2 + cells_words + DATA_HEADER_WORDS[layout.version]
    return words * 4


def lay_blocks(
    layout: StateLayout, num_tokens: int, block_size: int, rows_start: int
) -> BlockLayout:
    """Find the rows; layers at equal distances make one run."""
    runs: list[RowRun] = []
    position = rows_start
    for rows in (*layout.k_layers, *layout.v_layers):
        if not rows.row_bytes:  # a layer without attention
            position += _LAYER_HEADER_BYTES
            continue
        offset = position + _LAYER_HEADER_BYTES
        layer_bytes = _LAYER_HEADER_BYTES + num_tokens * rows.row_bytes
        if rows.element_bytes:
            run = RowRun(
                offset=offset,
                stride=num_tokens * rows.element_bytes,
                count=rows.row_bytes // rows.element_bytes,
                piece_bytes=block_size * rows.element_bytes,
            )
        else:
            run = RowRun(offset, layer_bytes, 1, block_size * rows.row_bytes)
            last = runs[-1] if runs else None
            if (
                last
                and last.stride == run.stride
                and last.piece_bytes == run.piece_bytes
                and last.offset + last.count * last.stride == offset
            ):
                run = replace(last, count=last.count + 1)
                runs.pop()
        runs.append(run)
        position += layer_bytes
    return BlockLayout(runs=tuple(runs), num_blocks=num_tokens // block_size)


def _token_list(layout: StateLayout, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    if not layout.has_packed_tokens:
        return tokens
    head = np.array([PACKED_MARK, PACKED_VERSION, len(tokens)], dtype=WORD)
    return np.concatenate((head, tokens, np.zeros(1, dtype=WORD)))


def text_cells(tokens: NDArray[np.int32], cell_words: int) -> NDArray[np.int32]:
    """Metadata of the cells of a text, as it is saved: [num_tokens, cell_words]."""
    positions = np.arange(len(tokens), dtype=WORD)
    ones, zeros = np.ones_like(positions), np.zeros_like(positions)
    extra = [positions, positions, tokens][: cell_words - CELL_WORDS]
    return np.stack((positions, ones, *extra, zeros), axis=1)


def _words(words: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Encode little-endian 32-bit words."""
    return np.ascontiguousarray(words, dtype=WORD).tobytes()
