"""How long a sequence-state file is, where its rows lie, and all of it but the rows.

All of it for tokens and a layout that are given. Rules:
1. What is laid out here is what the engine itself would save of these tokens, with the
   cells in stream 0: the same bytes but for the sequence id, which it ignores.
2. Where the memory has a tail the file ends with it. Its places are left free, as those
   of the rows are.
3. Nothing loops over cells in Python.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from proxy.blocks import BlockLayout, RowRun
from proxy.llamacpp.state_format import (
    DATA_HEADER_WORDS,
    LAYER_HEADER_BYTES,
    MAGIC,
    MAX_STREAMS,
    PACKED_MARK,
    PACKED_VERSION,
    PACKED_WORDS,
    WORD,
    Buffer,
    StateLayout,
    as_bytes,
    encode_words,
    text_cells,
)
from proxy.llamacpp.state_tails import TailFrame, frame_tail


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
    return tail_frame(layout, num_tokens, n_stream=n_stream).end


def tail_frame(
    layout: StateLayout, num_tokens: int, *, n_stream: int | None = None
) -> TailFrame:
    """Lay out the tail, if any, of a file of exactly `num_tokens` tokens."""
    streams = _streams(layout, n_stream)
    start = _attention_end(layout, num_tokens, streams)
    return frame_tail(layout, num_tokens, start=start, n_stream=streams)


def frame_parts(
    layout: StateLayout,
    token_ids: Sequence[int] | NDArray[np.int32],
    *,
    n_stream: int | None = None,
) -> list[tuple[int, bytes]]:
    """Return all of a file of exactly `token_ids` but the rows: (offset, bytes).

    The cells go to stream 0 of `n_stream` (the layout's own unless given): the
    engine puts them into the stream of the slot that it restores. Raises ValueError
    where there is nothing to write.
    """
    tokens = np.asarray(token_ids, dtype=WORD)
    streams = _streams(layout, n_stream)
    num_tokens, num_layers = len(tokens), len(layout.k_layers)
    if not num_tokens or not (num_layers or layout.tail):
        raise ValueError("a frame needs tokens, and a layout that knows the rows")
    token_list = _token_list(layout, tokens)
    data_header = [layout.v_trans, num_layers, layout.n_rot_k, layout.n_rot_v]
    head = b"".join(
        (
            MAGIC,
            encode_words([layout.version, len(token_list)]),
            encode_words(token_list),
        )
    )
    if layout.has_attention:
        head += encode_words([streams, num_tokens])
        head += encode_words(text_cells(tokens, layout.cell_words))
        head += encode_words(data_header[: DATA_HEADER_WORDS[layout.version]])
    parts = [(0, head)]
    position = len(head)
    for rows in (*layout.k_layers, *layout.v_layers):
        if rows.element_bytes:
            second, third = rows.element_bytes, rows.row_bytes // rows.element_bytes
        else:
            second, third = rows.row_bytes, 0  # a u64
        parts.append((position, encode_words([rows.ggml_type, second, third])))
        position += LAYER_HEADER_BYTES + num_tokens * rows.row_bytes
    end = _attention_end(layout, num_tokens, streams)
    parts.append((position, bytes(end - position)))  # the streams without cells
    return [*parts, *tail_frame(layout, num_tokens, n_stream=streams).parts]


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
    size = file_bytes(layout, len(token_ids), n_stream=n_stream)
    raw = as_bytes(buffer)
    if raw.size < size:
        raise ValueError(f"a frame of {size} bytes does not fit in {raw.size}")
    for offset, part in parts:
        raw[offset : offset + len(part)] = np.frombuffer(part, dtype=np.uint8)
    return size


# -- geometry ---------------------------------------------------------------------


def _streams(layout: StateLayout, n_stream: int | None) -> int:
    streams = layout.n_stream if n_stream is None else n_stream
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"{streams} streams")
    return streams


def _rows_start(layout: StateLayout, num_tokens: int) -> int:
    """Offset of the first layer's header in a file with its cells in stream 0."""
    list_words = num_tokens + (PACKED_WORDS if layout.has_packed_tokens else 0)
    words = 3 + list_words  # magic, version and length
    if layout.has_attention:  # n_stream and num_cells, cells, the header of the rows
        words += 2 + num_tokens * layout.cell_words + DATA_HEADER_WORDS[layout.version]
    return words * 4


def _attention_end(layout: StateLayout, num_tokens: int, streams: int) -> int:
    """Offset of what follows the attention section."""
    num_layers = len(layout.k_layers) + len(layout.v_layers)
    return (
        _rows_start(layout, num_tokens)
        + num_layers * LAYER_HEADER_BYTES
        + num_tokens * layout.kv_bytes_per_token
        + (streams - 1) * 4 * layout.has_attention
    )


def lay_blocks(
    layout: StateLayout, num_tokens: int, block_size: int, rows_start: int
) -> BlockLayout:
    """Find the rows; layers at equal distances make one run."""
    runs: list[RowRun] = []
    position = rows_start
    for rows in (*layout.k_layers, *layout.v_layers):
        if not rows.row_bytes:  # a layer without attention
            position += LAYER_HEADER_BYTES
            continue
        offset = position + LAYER_HEADER_BYTES
        layer_bytes = LAYER_HEADER_BYTES + num_tokens * rows.row_bytes
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
