"""Where the KV of a sequence lies in a llama.cpp sequence-state file.

Such a *slot file* is what ``POST /slots/N?action=save`` writes, all little endian::

    "qsgg"  u32 version  u32 n  n x i32 token list
    u32 n_stream, then for each stream:
        u32 num_cells, and where that is not 0:
        num_cells x (i32 pos, u32 n_seq_id = 1, [3 x i32 extra], i32 seq id)
        u32 v_trans  u32 n_layer  u32 n_rot_k  u32 n_rot_v
        for each layer: i32 type  u64 row_bytes  num_cells x row_bytes        (K)
        for each layer: the same (V, v_trans = 0), or
                        i32 type  u32 element_bytes  u32 num_elements
                        num_elements x num_cells x element_bytes (V, v_trans = 1)

The token list is plain, or packed as ``-1, 1, count, tokens..., media_count, ...``.
Empty streams stand before and after the one that holds the cells. The extra words of
a cell are there with M-RoPE: two more positions and the token id.

Rules:
1. A file is consumed exactly to its end, or refused: what is not understood is never
   guessed. A sound file of another memory kind (sliding window, recurrent) raises
   `UnsupportedStateError`, everything else `StateFormatError`.
2. No count in a file is believed before it is compared with the bytes that are left.
3. Rows of files with equal `StateLayout.digest_fields` are interchangeable; n_stream
   and the form of the token list may differ.
4. Nothing here copies rows, does I/O or keeps a buffer.
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
KNOWN_VERSIONS = frozenset({4})

MAX_STREAMS = 256  # the engine's own limit on sequences
MAX_LAYERS = 1024
MAX_GGML_TYPE = 255
MAX_ROW_BYTES = 1 << 24

_PACKED_MARK = -1
_PACKED_VERSION = 1
_PACKED_WORDS = 4  # mark, version, token count, media count
_LAYER_HEADER_BYTES = 12
_DATA_HEADER_BYTES = 16
_CELL_WORDS = 3
_EXTENDED_CELL_WORDS = 6

_WORD = np.dtype("<i4")


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


def parse(buffer: Buffer, size: int) -> ParsedState:
    """Read the first `size` bytes of `buffer` as one whole slot file.

    Raises UnsupportedStateError for a sound file of another memory kind, and
    StateFormatError for everything else that is not understood to the last byte.
    """
    reader = _Reader(buffer, size)
    if reader.take(4, "magic").tobytes() != MAGIC:
        raise StateFormatError("not a sequence-state file")
    version = reader.u32("version")
    if version not in KNOWN_VERSIONS:
        raise StateFormatError(f"sequence-state version {version} is not known")
    words = reader.words(reader.u32("length of the token list"), "token list")
    token_ids, num_media, is_packed = _unpack_tokens(words)

    section = _read_memory(reader)
    layout = StateLayout(
        version=version,
        has_packed_tokens=is_packed,
        has_extended_cells=section.has_extended_cells,
        n_stream=section.n_stream,
        v_trans=section.v_trans,
        n_rot_k=section.n_rot_k,
        n_rot_v=section.n_rot_v,
        k_layers=section.k_layers,
        v_layers=section.v_layers,
    )
    return ParsedState(
        layout=layout,
        token_ids=token_ids,
        num_cells=section.num_cells,
        is_contiguous=_is_contiguous(section, token_ids),
        num_media=num_media,
        stream=section.stream,
        rows_start=section.rows_start,
    )


def block_layout(parsed: ParsedState, block_size: int) -> BlockLayout:
    """Tell where the full blocks lie in the very file that was parsed.

    Raises StateFormatError where its cells are not in order.
    """
    if not parsed.is_contiguous:
        raise StateFormatError("the cells are not the positions from 0 in order")
    return _blocks(parsed.layout, parsed.num_cells, block_size, parsed.rows_start)


def block_layout_for(
    layout: StateLayout,
    num_tokens: int,
    *,
    block_size: int,
    n_stream: int | None = None,
) -> BlockLayout:
    """Tell where the blocks lie in a file of exactly `num_tokens` tokens.

    `n_stream` is the layout's own unless given.
    """
    return _blocks(layout, num_tokens, block_size, _rows_start(layout, num_tokens))


def file_bytes(
    layout: StateLayout, num_tokens: int, *, n_stream: int | None = None
) -> int:
    """Tell how long a file of exactly `num_tokens` tokens is."""
    num_layers = len(layout.k_layers) + len(layout.v_layers)
    return (
        _rows_start(layout, num_tokens)
        + num_layers * _LAYER_HEADER_BYTES
        + num_tokens * layout.kv_bytes_per_token
        + (_streams(layout, n_stream) - 1) * 4
    )


def write_frame(
    buffer: Buffer,
    layout: StateLayout,
    *,
    token_ids: Sequence[int] | NDArray[np.int32],
    n_stream: int | None = None,
) -> int:
    """Write all of a file of exactly `token_ids` but the rows; give its length.

    The cells go to stream 0 of `n_stream` (the layout's own unless given): the
    engine puts them into the stream of the slot that it restores. Rows already in
    `buffer` stay. Raises ValueError where the buffer is too short or read-only, and
    where there is nothing to write.
    """
    tokens = np.asarray(token_ids, dtype=_WORD)
    streams = _streams(layout, n_stream)
    num_tokens = len(tokens)
    size = file_bytes(layout, num_tokens, n_stream=streams)
    if not num_tokens or not layout.k_layers:
        raise ValueError("a frame needs tokens, and a layout that knows the rows")
    raw = _as_bytes(buffer)
    if raw.size < size:
        raise ValueError(f"a frame of {size} bytes does not fit in {raw.size}")

    token_list = _token_list(layout, tokens)
    raw[:4] = np.frombuffer(MAGIC, dtype=np.uint8)
    position = _put_words(raw, 4, [layout.version, len(token_list)])
    position = _put_words(raw, position, token_list)
    position = _put_words(raw, position, [streams, num_tokens])
    cells = _cells(tokens, is_extended=layout.has_extended_cells)
    position = _put_words(raw, position, cells)
    num_layers = len(layout.k_layers)
    position = _put_words(
        raw, position, [layout.v_trans, num_layers, layout.n_rot_k, layout.n_rot_v]
    )
    for rows in (*layout.k_layers, *layout.v_layers):
        if rows.element_bytes:
            second, third = rows.element_bytes, rows.row_bytes // rows.element_bytes
        else:
            second, third = rows.row_bytes, 0  # a u64
        _put_words(raw, position, [rows.ggml_type, second, third])
        position += _LAYER_HEADER_BYTES + num_tokens * rows.row_bytes
    raw[position:size] = 0  # the streams without cells
    return size


# -- reading ----------------------------------------------------------------------


class _Reader:
    """A bounded walk over a buffer: no read goes past the end."""

    def __init__(self, buffer: Buffer, size: int) -> None:
        raw = _as_bytes(buffer)
        if not 0 <= size <= raw.size:
            raise StateFormatError(f"{size} bytes announced, {raw.size} there")
        self._raw = raw[:size]
        self.position = 0

    @property
    def left(self) -> int:
        return self._raw.size - self.position

    def take(self, num_bytes: int, what: str) -> NDArray[np.uint8]:
        if num_bytes > self.left:
            raise StateFormatError(
                f"ends early: {what} needs {num_bytes} bytes, {self.left} are left"
            )
        start = self.position
        self.position = start + num_bytes
        return self._raw[start : self.position]

    def words(self, count: int, what: str) -> NDArray[np.int32]:
        return self.take(count * 4, what).view(_WORD)

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what).tobytes(), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what).tobytes(), "little")

    def peek_words(self, count: int) -> list[int]:
        count = min(count, self.left // 4)
        stop = self.position + count * 4
        words: list[int] = self._raw[self.position : stop].view(_WORD).tolist()
        return words


@dataclass(slots=True, kw_only=True)
class _Section:
    """One attention section; a section without cells keeps the defaults."""

    n_stream: int
    num_cells: int = 0
    cells: NDArray[np.int32] | None = None  # [num_cells, words]
    has_extended_cells: bool = False
    stream: int = 0
    rows_start: int = 0
    v_trans: int = 0
    n_rot_k: int = 0
    n_rot_v: int = 0
    k_layers: tuple[RowFormat, ...] = ()
    v_layers: tuple[RowFormat, ...] = ()


def _unpack_tokens(words: NDArray[np.int32]) -> tuple[NDArray[np.int32], int, bool]:
    """Give the tokens (copied), the number of media, and whether they were packed."""
    num_media = 0
    is_packed = bool(len(words) and words[0] == _PACKED_MARK)
    if is_packed:
        if len(words) < _PACKED_WORDS or words[1] != _PACKED_VERSION:
            raise StateFormatError("the packed token list is not of version 1")
        count = int(words[2])
        if not 0 <= count <= len(words) - _PACKED_WORDS:
            raise StateFormatError(f"the packed token list cannot hold {count} tokens")
        num_media = int(words[3 + count])
        rest = len(words) - count - _PACKED_WORDS
        if not 0 <= num_media <= rest or (rest and not num_media):
            raise StateFormatError("the packed token list has a damaged media part")
        words = words[3 : 3 + count]
    token_ids = words.astype(np.int32)
    if not num_media and len(token_ids) and token_ids.min() < 0:
        raise StateFormatError("the token list holds a negative id")
    return token_ids, num_media, is_packed


def _read_memory(reader: _Reader) -> _Section:
    """Read one attention section and find the end, whatever the width of its cells.

    Only the bytes tell the widths apart: that they come out even to the end, each
    cell of exactly one sequence, leaves no doubt.
    """
    start = reader.position
    errors = []
    for cell_words in (_CELL_WORDS, _EXTENDED_CELL_WORDS):
        reader.position = start
        try:
            section = _read_attention(reader, cell_words)
            _expect_end(reader, cell_words)
            return section
        except UnsupportedStateError:
            raise
        except StateFormatError as error:
            errors.append(error)
    reader.position = start
    if _is_recurrent(reader):
        raise UnsupportedStateError("recurrent")
    raise errors[0]


def _expect_end(reader: _Reader, cell_words: int) -> None:
    if not reader.left:
        return
    if _is_recurrent(reader):
        raise UnsupportedStateError("attention and recurrent")
    surplus = reader.left
    try:
        while reader.left:
            _read_attention(reader, cell_words)
    except StateFormatError:
        raise StateFormatError(f"{surplus} bytes follow the state") from None
    raise UnsupportedStateError("several attention caches (sliding window or sparse)")


def _is_recurrent(reader: _Reader) -> bool:
    """Tell whether a section for one sequence's recurrent state begins here.

    It has at most one cell, which names no sequence: ``u32 num_cells, [i32 pos,
    u32 n_seq_id = 0], u32 s_trans = 0, u32 n_layer``. Leaves the position alone.
    """
    words = reader.peek_words(5)
    if words[:1] == [1]:
        words = words[2:]
    return words[:2] == [0, 0] and 1 <= sum(words[2:3]) <= MAX_LAYERS


def _read_attention(reader: _Reader, cell_words: int) -> _Section:
    n_stream = reader.u32("number of streams")
    if not 1 <= n_stream <= MAX_STREAMS:
        raise StateFormatError(f"{n_stream} streams")
    section = _Section(n_stream=n_stream)
    for stream in range(n_stream):
        num_cells = reader.u32("number of cells")
        if not num_cells:
            continue
        if section.num_cells:
            raise StateFormatError("more than one stream holds cells")
        section.num_cells = num_cells
        section.stream = stream
        section.has_extended_cells = cell_words == _EXTENDED_CELL_WORDS
        words = reader.words(num_cells * cell_words, "cells")
        section.cells = words.reshape(num_cells, cell_words)
        if not bool((section.cells[:, 1] == 1).all()):
            raise StateFormatError("a cell does not belong to exactly one sequence")
        _read_rows(reader, section)
    return section


def _read_rows(reader: _Reader, section: _Section) -> None:
    section.v_trans = reader.u32("v_trans")
    num_layers = reader.u32("number of layers")
    section.n_rot_k = reader.u32("n_rot_k")
    section.n_rot_v = reader.u32("n_rot_v")
    if section.v_trans > 1:
        raise StateFormatError(f"v_trans is {section.v_trans}")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise StateFormatError(f"{num_layers} layers")
    section.rows_start = reader.position
    cells = section.num_cells
    section.k_layers = tuple(_read_layer(reader, cells, 0) for _ in range(num_layers))
    if reader.left == (section.n_stream - section.stream - 1) * 4:
        return  # nothing but empty streams: multi-head latent attention has no V
    section.v_layers = tuple(
        _read_layer(reader, cells, section.v_trans) for _ in range(num_layers)
    )


def _read_layer(reader: _Reader, num_cells: int, is_transposed: int) -> RowFormat:
    ggml_type = reader.u32("type of a layer")
    if ggml_type > MAX_GGML_TYPE:
        raise StateFormatError(f"type {ggml_type} of a layer")
    element_bytes = 0
    if is_transposed:
        element_bytes = reader.u32("bytes of an element")
        row_bytes = element_bytes * reader.u32("elements of a layer")
    else:
        row_bytes = reader.u64("bytes of a row")
    if not 1 <= row_bytes <= MAX_ROW_BYTES:
        raise StateFormatError(f"rows of {row_bytes} bytes")
    reader.take(num_cells * row_bytes, "rows of a layer")
    return RowFormat(ggml_type, row_bytes, element_bytes)


def _is_contiguous(section: _Section, token_ids: NDArray[np.int32]) -> bool:
    if section.cells is None:
        return True
    if len(token_ids) != section.num_cells:
        return False
    expected = _cells(token_ids, is_extended=section.has_extended_cells)
    return np.array_equal(section.cells[:, :-1], expected[:, :-1])


# -- places and writing -----------------------------------------------------------


def _as_bytes(buffer: Buffer) -> NDArray[np.uint8]:
    return np.frombuffer(buffer, dtype=np.uint8)


def _streams(layout: StateLayout, n_stream: int | None) -> int:
    streams = layout.n_stream if n_stream is None else n_stream
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"{streams} streams")
    return streams


def _rows_start(layout: StateLayout, num_tokens: int) -> int:
    """Offset of the first layer's header in a file with its cells in stream 0."""
    list_words = num_tokens + (_PACKED_WORDS if layout.has_packed_tokens else 0)
    cell_words = _EXTENDED_CELL_WORDS if layout.has_extended_cells else _CELL_WORDS
    # magic, version and length; n_stream and num_cells
    return 12 + (list_words + 2 + num_tokens * cell_words) * 4 + _DATA_HEADER_BYTES


def _blocks(
    layout: StateLayout, num_tokens: int, block_size: int, rows_start: int
) -> BlockLayout:
    """Find the rows; layers at equal distances make one run."""
    runs: list[RowRun] = []
    position = rows_start
    for rows in (*layout.k_layers, *layout.v_layers):
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
    head = np.array([_PACKED_MARK, _PACKED_VERSION, len(tokens)], dtype=_WORD)
    return np.concatenate((head, tokens, np.zeros(1, dtype=_WORD)))


def _cells(tokens: NDArray[np.int32], *, is_extended: bool) -> NDArray[np.int32]:
    """Metadata of the cells of a text, as it is saved: [num_tokens, words]."""
    positions = np.arange(len(tokens), dtype=_WORD)
    ones, zeros = np.ones_like(positions), np.zeros_like(positions)
    if is_extended:
        return np.stack((positions, ones, positions, positions, tokens, zeros), axis=1)
    return np.stack((positions, ones, zeros), axis=1)


def _put_words(
    raw: NDArray[np.uint8], position: int, words: Sequence[int] | NDArray[np.int32]
) -> int:
    """Write little-endian 32-bit words; give the position behind them."""
    encoded = np.ascontiguousarray(words, dtype=_WORD).reshape(-1).view(np.uint8)
    stop = position + encoded.size
    raw[position:stop] = encoded
    return stop
