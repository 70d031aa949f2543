"""The words that llama.cpp's sequence-state files are told in.

What `proxy.llamacpp.state` reads is described there. Rows, and tails, of files with
equal `StateLayout.digest_fields` are interchangeable; n_stream and the form of the
token list may differ.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.errors import StateFormatError

Buffer = bytes | bytearray | memoryview | mmap | NDArray[Any]
"""Contiguous bytes, by the buffer protocol."""

MAGIC = b"qsgg"

MAX_STREAMS = 256  # the engine's own limit on sequences

PACKED_MARK = -1
PACKED_VERSION = 1
PACKED_WORDS = 4  # mark, version, token count, media count
LAYER_HEADER_BYTES = 12
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
class WindowTail:
    """The cache of the layers that look back a window only (sliding attention)."""

    num_tokens: int
    """How far they look back."""
    cell_words: int
    v_trans: int
    n_rot_k: int
    n_rot_v: int
    k_layers: tuple[RowFormat, ...]
    v_layers: tuple[RowFormat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentTail:
    """The state of the layers that keep one state for the whole sequence."""

    num_layers: int
    history_rows: tuple[RowFormat, ...]
    state_rows: tuple[RowFormat, ...]


Tail = WindowTail | RecurrentTail
"""The part of a memory that cannot be cut: it is what it is after one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """What is the same in all slot files of one runner.

    The layout of a file without cells has no layers: it says nothing about rows. A
    memory that is a recurrent state alone has no attention, and no layers either.
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
    has_attention: bool = True
    tail: Tail | None = None
    is_opaque: bool = False
    """Whether nothing but the token list is understood."""

    @property
    def can_be_cut(self) -> bool:
        """Whether any leading tokens of it can be kept without the rest."""
        return self.tail is None and not self.is_opaque

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
        digest = struct.pack(f"<{len(words)}q", *words) + _tail_digest_fields(self.tail)
        return digest + b"opaque" * self.is_opaque


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
    tails: Mapping[int, tuple[int, int]]
    """Where the tails of the file lie, by how many tokens each has seen: offset and
    length of what `proxy.llamacpp.state_tails` calls the payload."""


def as_bytes(buffer: Buffer) -> NDArray[np.uint8]:
    """Look at a buffer as bytes, without a copy."""
    return np.frombuffer(buffer, dtype=np.uint8)


def text_cells(tokens: NDArray[np.int32], cell_words: int) -> NDArray[np.int32]:
    """Metadata of the cells of a text, as it is saved: [num_tokens, cell_words]."""
    positions = np.arange(len(tokens), dtype=WORD)
    ones, zeros = np.ones_like(positions), np.zeros_like(positions)
    extra = [positions, positions, tokens][: cell_words - CELL_WORDS]
    return np.stack((positions, ones, *extra, zeros), axis=1)


def encode_words(words: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Encode little-endian 32-bit words."""
    return np.ascontiguousarray(words, dtype=WORD).tobytes()


def _tail_digest_fields(tail: Tail | None) -> bytes:
    if tail is None:
        return b""
    if isinstance(tail, WindowTail):
        words = [1, tail.num_tokens, tail.cell_words, tail.v_trans]
        words += [tail.n_rot_k, tail.n_rot_v]
        groups = (tail.k_layers, tail.v_layers)
    else:
        words = [2, tail.num_layers]
        groups = (tail.history_rows, tail.state_rows)
    for group in groups:
        words.append(len(group))
        for rows in group:
            words += [rows.ggml_type, rows.row_bytes, rows.element_bytes]
    return struct.pack(f"<{len(words)}q", *words)
