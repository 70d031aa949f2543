"""Where the KV of a sequence lies in a llama.cpp sequence-state file.

Such a *slot file* is what ``POST /slots/N?action=save`` writes, all little endian::

    "qsgg"  u32 version  u32 n  n x i32 token list, then the memory

The token list is plain, or packed as ``-1, 1, count, tokens..., media_count, ...``.
The memory is told in `proxy.llamacpp.state_sections`. It is shared where it is one
attention section, one and a tail (`proxy.llamacpp.state_tails`), or a tail alone. Empty
streams stand before and after the one that holds the
cells. The extra words of a cell are there with M-RoPE: two more positions and, from
version 3 on, the token id.

Rules:
1. A file is consumed exactly to its end, or refused: what is not understood is never
   guessed. A sound file of another memory kind raises `UnsupportedStateError`,
   everything else `StateFormatError`.
2. No count in a file is believed before it is compared with the bytes that are left.
3. Rows of files with equal `StateLayout.digest_fields` are interchangeable; n_stream
   and the form of the token list may differ.
4. Nothing here copies rows, does I/O or keeps a buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from proxy.blocks import BlockLayout
from proxy.errors import StateFormatError
from proxy.llamacpp.state_format import (
    CELL_WORDS,
    DATA_HEADER_WORDS,
    MAGIC,
    PACKED_MARK,
    PACKED_VERSION,
    PACKED_WORDS,
    Buffer,
    ParsedState,
    RowFormat,
    StateLayout,
    Tail,
    UnsupportedStateError,
    as_bytes,
    text_cells,
)
from proxy.llamacpp.state_frame import (
    block_layout_for,
    file_bytes,
    frame_parts,
    lay_blocks,
    tail_frame,
    write_frame,
)
from proxy.llamacpp.state_reader import Reader
from proxy.llamacpp.state_sections import (
    AttentionSection,
    Memory,
    Section,
    read_memory,
)
from proxy.llamacpp.state_tails import (
    find_tails,
    payload_bytes,
    payload_layout,
    tail_of,
)

__all__ = [
    "Buffer",
    "ParsedState",
    "RowFormat",
    "StateFile",
    "StateFormatError",
    "StateLayout",
    "UnsupportedStateError",
    "block_layout",
    "block_layout_for",
    "file_bytes",
    "frame_parts",
    "parse",
    "payload_bytes",
    "payload_layout",
    "read",
    "read_tokens",
    "tail_frame",
    "write_frame",
]

NO_ATTENTION = AttentionSection(start=0, stop=0, n_stream=1)
"""Of a memory that is a recurrent state alone."""

KNOWN_VERSIONS = frozenset(DATA_HEADER_WORDS)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """One slot file of any kind of memory, as read."""

    version: int
    has_packed_tokens: bool
    token_ids: NDArray[np.int32]
    """What the slot holds, by the file's own list. -1 where media stands."""
    num_media: int
    memory: Memory


def read(buffer: Buffer, size: int) -> StateFile:
    """Read the first `size` bytes of `buffer` as one whole file, whatever its memory.

    Raises StateFormatError where it is not understood to the last byte.
    """
    return _without_frames(lambda: _read(buffer, size))


def read_tokens(buffer: Buffer, size: int) -> tuple[StateLayout, NDArray[np.int32]]:
    """Read the token list alone of a file whose memory is not understood.

    Returns a layout that says nothing of the memory, and the tokens. Raises
    StateFormatError, also for a file that holds media.
    """
    return _without_frames(lambda: _read_tokens(buffer, size))


def parse(buffer: Buffer, size: int, *, window_tokens: int = 0) -> ParsedState:
    """Read the first `size` bytes of `buffer` as one whole file that can be shared.

    `window_tokens` is how far layers of the model look back that do not look back to
    the beginning, 0 if there are none. Raises UnsupportedStateError for a sound file of
    another memory kind, and StateFormatError for everything else that is not understood
    to the last byte.
    """
    return _without_frames(lambda: _parse(buffer, size, window_tokens))


def block_layout(parsed: ParsedState, block_size: int) -> BlockLayout:
    """Tell where the full blocks lie in the very file that was parsed.

    Raises StateFormatError where its cells are not in order.
    """
    if not parsed.is_contiguous:
        raise StateFormatError("the cells are not the positions from 0 in order")
    return lay_blocks(parsed.layout, parsed.num_cells, block_size, parsed.rows_start)


def unsupported_reason(memory: Memory, window_tokens: int) -> str:
    """Tell why such a memory is not shared, or ""."""
    kinds = [isinstance(section, AttentionSection) for section in memory.sections]
    match kinds:
        case [True] if memory.checkpoints:
            return "attention with checkpoints"
        case [True, True] if not window_tokens:
            return "two attention caches, none of them known as a window"
        case [True] | [False] | [True, False] | [True, True]:
            return ""
        case _:
            return f"{len(kinds)} caches"


# -- reading ----------------------------------------------------------------------


def _without_frames(work: Callable[[], _T]) -> _T:
    """Do `work`; the frames of its errors look into a buffer that must be closable."""
    failure: StateFormatError
    try:
        return work()
    except UnsupportedStateError as error:
        failure = UnsupportedStateError(error.reason)
    except StateFormatError as error:
        failure = StateFormatError(*error.args)
    try:
        raise failure
    finally:
        del failure


def _read_tokens(buffer: Buffer, size: int) -> tuple[StateLayout, NDArray[np.int32]]:
    _, version, token_ids, num_media, is_packed = _read_head(as_bytes(buffer), size)
    if num_media or not len(token_ids):
        raise StateFormatError("a file of media, or of no tokens")
    layout = StateLayout(
        version=version,
        has_packed_tokens=is_packed,
        has_extended_cells=False,
        n_stream=1,
        v_trans=0,
        n_rot_k=0,
        n_rot_v=0,
        k_layers=(),
        v_layers=(),
        has_attention=False,
        is_opaque=True,
    )
    return layout, token_ids


def _read_head(
    raw: NDArray[np.uint8], size: int
) -> tuple[int, int, NDArray[np.int32], int, bool]:
    """Return where the memory begins, version, tokens, media, the list's form."""
    if not 0 <= size <= raw.size:
        raise StateFormatError(f"{size} bytes announced, {raw.size} there")
    reader = Reader(raw, 0, size)
    if reader.take(4, "magic").tobytes() != MAGIC:
        raise StateFormatError("not a sequence-state file")
    version = reader.u32("version")
    if version not in KNOWN_VERSIONS:
        raise StateFormatError(f"sequence-state version {version} is not known")
    words = reader.words(reader.u32("length of the token list"), "token list")
    return (reader.position, version, *_unpack_tokens(words))


def _read(buffer: Buffer, size: int) -> StateFile:
    raw = as_bytes(buffer)
    start, version, token_ids, num_media, is_packed = _read_head(raw, size)
    return StateFile(
        version=version,
        has_packed_tokens=is_packed,
        token_ids=token_ids,
        num_media=num_media,
        memory=read_memory(raw[:size], start, version=version),
    )


def _parse(buffer: Buffer, size: int, window_tokens: int) -> ParsedState:
    file = _read(buffer, size)
    reason = unsupported_reason(file.memory, window_tokens)
    if reason:
        raise UnsupportedStateError(reason)
    layout = _layout_of(file, window_tokens)
    first, is_contiguous = file.memory.sections[0], True
    if isinstance(first, AttentionSection):
        cells = first.cells(as_bytes(buffer))
        is_contiguous = _is_contiguous(cells, file.token_ids, first.cell_words)
        num_cells, stream, rows_start = first.num_cells, first.stream, first.rows_start
    else:
        is_contiguous = first.position + 1 == len(file.token_ids)
        num_cells, stream, rows_start = first.num_cells, 0, first.start
    return ParsedState(
        layout=layout,
        token_ids=file.token_ids,
        num_cells=num_cells,
        is_contiguous=is_contiguous,
        num_media=file.num_media,
        stream=stream,
        rows_start=rows_start,
        tails=dict(find_tails(file.memory, layout, len(file.token_ids))),
    )


def _layout_of(file: StateFile, window_tokens: int) -> StateLayout:
    sections = list(file.memory.sections)
    is_attention = isinstance(sections[0], AttentionSection)
    section = sections.pop(0) if is_attention else NO_ATTENTION
    assert isinstance(section, AttentionSection)
    return StateLayout(
        version=file.version,
        has_packed_tokens=file.has_packed_tokens,
        has_extended_cells=section.cell_words > CELL_WORDS,
        n_stream=section.n_stream,
        v_trans=section.v_trans,
        n_rot_k=section.n_rot_k,
        n_rot_v=section.n_rot_v,
        k_layers=section.k_layers,
        v_layers=section.v_layers,
        has_attention=is_attention,
        tail=_tail(sections, window_tokens),
    )


def _tail(rest: list[Section], window_tokens: int) -> Tail | None:
    return tail_of(rest[0], window_tokens) if rest else None


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


def _is_contiguous(
    cells: NDArray[np.int32], token_ids: NDArray[np.int32], cell_words: int
) -> bool:
    if not len(cells):
        return True
    if len(token_ids) != len(cells):
        return False
    expected = text_cells(token_ids, cell_words)
    return np.array_equal(cells[:, :-1], expected[:, :-1])
