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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxy.blocks import BlockLayout
from proxy.errors import StateFormatError
from proxy.llamacpp.state_format import (
    CELL_WORDS,
    EXTENDED_CELL_WORDS,
    MAGIC,
    MAX_STREAMS,
    PACKED_MARK,
    PACKED_VERSION,
    PACKED_WORDS,
    WORD,
    Buffer,
    ParsedState,
    RowFormat,
    StateLayout,
    UnsupportedStateError,
    as_bytes,
    block_layout_for,
    file_bytes,
    frame_parts,
    lay_blocks,
    text_cells,
    write_frame,
)

__all__ = [
    "Buffer",
    "ParsedState",
    "RowFormat",
    "StateFormatError",
    "StateLayout",
    "UnsupportedStateError",
    "block_layout",
    "block_layout_for",
    "file_bytes",
    "frame_parts",
    "parse",
    "write_frame",
]

KNOWN_VERSIONS = frozenset({4})
MAX_LAYERS = 1024
MAX_GGML_TYPE = 255
MAX_ROW_BYTES = 1 << 24

_CHECKPOINT_MARK = [int.from_bytes(b"SCKP", "little")]
"""Where the engine keeps earlier states of a window or a recurrent state, they follow
the last section."""


def parse(buffer: Buffer, size: int) -> ParsedState:
    """Read the first `size` bytes of `buffer` as one whole slot file.

    Raises UnsupportedStateError for a sound file of another memory kind, and
    StateFormatError for everything else that is not understood to the last byte.
    """
    failure: StateFormatError
    try:
        return _parse(_Reader(buffer, size))
    except UnsupportedStateError as error:
        failure = UnsupportedStateError(error.reason)
    except StateFormatError as error:
        failure = StateFormatError(*error.args)
    # the first one's frames look into `buffer`, which its owner must be able to close
    try:
        raise failure
    finally:
        del failure


def block_layout(parsed: ParsedState, block_size: int) -> BlockLayout:
    """Tell where the full blocks lie in the very file that was parsed.

    Raises StateFormatError where its cells are not in order.
    """
    if not parsed.is_contiguous:
        raise StateFormatError("the cells are not the positions from 0 in order")
    return lay_blocks(parsed.layout, parsed.num_cells, block_size, parsed.rows_start)


# -- reading ----------------------------------------------------------------------


class _Reader:
    """A bounded walk over a buffer: no read goes past the end."""

    def __init__(self, buffer: Buffer, size: int) -> None:
        raw = as_bytes(buffer)
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
        return self.take(count * 4, what).view(WORD)

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what).tobytes(), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what).tobytes(), "little")

    def peek_words(self, count: int) -> list[int]:
        count = min(count, self.left // 4)
        stop = self.position + count * 4
        words: list[int] = self._raw[self.position : stop].view(WORD).tolist()
        return words


def _parse(reader: "_Reader") -> ParsedState:
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
    is_packed = bool(len(words) and words[0] == PACKED_MARK)
    if is_packed:
        if len(words) < PACKED_WORDS or words[1] != PACKED_VERSION:
            raise StateFormatError("the packed token list is not of version 1")
        count = int(words[2])
        if not 0 <= count <= len(words) - PACKED_WORDS:
            raise StateFormatError(f"the packed token list cannot hold {count} tokens")
        num_media = int(words[3 + count])
        rest = len(words) - count - PACKED_WORDS
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
    if _is_recurrent(reader):
        raise UnsupportedStateError("recurrent")
    start = reader.position
    reasons = []
    for cell_words in (CELL_WORDS, EXTENDED_CELL_WORDS):
        reader.position = start
        try:
            section = _read_attention(reader, cell_words)
            _expect_end(reader, cell_words)
            return section
        except UnsupportedStateError:
            raise
        except StateFormatError as error:
            reasons.append(str(error))
    raise StateFormatError(reasons[0])


def _expect_end(reader: _Reader, cell_words: int) -> None:
    if not reader.left:
        return
    if _is_recurrent(reader):
        raise UnsupportedStateError("attention and recurrent")
    surplus = reader.left
    try:
        while reader.left and reader.peek_words(1) != _CHECKPOINT_MARK:
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
        section.has_extended_cells = cell_words == EXTENDED_CELL_WORDS
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
    expected = text_cells(token_ids, is_extended=section.has_extended_cells)
    return np.array_equal(section.cells[:, :-1], expected[:, :-1])
