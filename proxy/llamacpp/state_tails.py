"""The part of a memory that cannot be cut: where it lies in a file, how it is written.

A prefix of n tokens of an attention cache is the first n rows of it. The state of a
recurrent layer, or the cache of a layer that looks back a window only, is there for the
end of a sequence alone. The engine keeps such *tails* as checkpoints of a slot, and
saves them with it. One tail and the rows before it make a file that the engine goes on
from. The *payload* of a tail is

- recurrent: its whole section;
- window: its section from the cells to the last row, without the counts of the streams,
  which differ from runner to runner.

Rules:
1. A tail counts only where it is what is expected to the byte: of exactly the tokens
   that it is filed under, as many cells as the window has, nothing of a draft model.
2. The engine takes a window up only with a checkpoint that reaches further back than
   the window does (`pos_min < n_past - n_swa`, server-context.cpp of llama.cpp), so the
   window is written twice: as the cache, and as a checkpoint. Its own checkpoints claim
   the cells that its cache had then; that of a file made here claims one cell more than
   it has, and that it reaches to the token that comes next. So all tokens are reused.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from proxy.blocks import BlockLayout, RowRun
from proxy.llamacpp.state_format import (
    DATA_HEADER_WORDS,
    LAYER_HEADER_BYTES,
    RecurrentTail,
    RowFormat,
    StateLayout,
    Tail,
    WindowTail,
    encode_words,
)
from proxy.llamacpp.state_sections import (
    CHECKPOINTS_MARK,
    CHECKPOINTS_VERSION,
    MEMORY_MAGIC,
    AttentionSection,
    Memory,
    RecurrentSection,
    Section,
)

PIECE_BYTES = 1 << 16
"""A tail is copied and hashed in such pieces; only its total is part of the format."""
_RECURRENT_HEADER_WORDS = 5  # num_cells, pos, n_seq_id, s_trans, n_layer


@dataclass(frozen=True, slots=True)
class TailFrame:
    """All of a tail but its payload."""

    parts: tuple[tuple[int, bytes], ...]
    """Offset in the file, bytes."""
    places: tuple[int, ...]
    """Offsets of the payload: it stands at each of them."""
    end: int
    """One past the last byte."""


def tail_of(section: Section, window_tokens: int) -> Tail:
    """Return the form of a tail that a section of a real save has.

    The section must hold cells; `window_tokens` is how far the model's layers look
    back, from its metadata.
    """
    if isinstance(section, RecurrentSection):
        return RecurrentTail(
            num_layers=section.num_layers,
            history_rows=section.history_rows,
            state_rows=section.state_rows,
        )
    return WindowTail(
        num_tokens=window_tokens,
        cell_words=section.cell_words,
        v_trans=section.v_trans,
        n_rot_k=section.n_rot_k,
        n_rot_v=section.n_rot_v,
        k_layers=section.k_layers,
        v_layers=section.v_layers,
    )


def payload_bytes(layout: StateLayout, num_tokens: int) -> int:
    """Tell how long the payload of a tail is, after `num_tokens` tokens; 0: no tail."""
    tail = layout.tail
    if tail is None:
        return 0
    if isinstance(tail, RecurrentTail):
        rows = (*tail.history_rows, *tail.state_rows)
        return 4 * _RECURRENT_HEADER_WORDS + _rows_bytes(rows, 1)
    num_cells = min(num_tokens, tail.num_tokens)
    words = num_cells * tail.cell_words + DATA_HEADER_WORDS[layout.version]
    return 4 * words + _rows_bytes((*tail.k_layers, *tail.v_layers), num_cells)


def payload_layout(offset: int, num_bytes: int) -> BlockLayout:
    """Tell where a payload lies, as one block, in a file that has it at `offset`."""
    num_pieces, rest = divmod(num_bytes, PIECE_BYTES)
    runs = []
    if num_pieces:
        runs.append(RowRun(offset, PIECE_BYTES, num_pieces, PIECE_BYTES))
    if rest:
        runs.append(RowRun(offset + num_pieces * PIECE_BYTES, rest, 1, rest))
    return BlockLayout(runs=tuple(runs), num_blocks=1)


def frame_tail(
    layout: StateLayout, num_tokens: int, *, start: int, n_stream: int
) -> TailFrame:
    """Lay a tail out that begins at `start`, after the attention section, if any."""
    num_bytes = payload_bytes(layout, num_tokens)
    if layout.tail is None:
        return TailFrame((), (), start)
    if isinstance(layout.tail, RecurrentTail):
        return TailFrame((), (start,), start + num_bytes)
    num_cells = min(num_tokens, layout.tail.num_tokens)
    before, after = encode_words([n_stream, num_cells]), bytes((n_stream - 1) * 4)
    section_bytes = len(before) + num_bytes + len(after)
    head = b"".join(
        (
            CHECKPOINTS_MARK,
            encode_words([CHECKPOINTS_VERSION, 1]),
            num_tokens.to_bytes(8, "little"),
            # see rule 2
            encode_words([max(0, num_tokens - layout.tail.num_tokens - 1), num_tokens]),
            (8 + section_bytes).to_bytes(8, "little"),
            MEMORY_MAGIC.to_bytes(4, "little"),
            encode_words([0]),  # the sequence id, which is ignored
        )
    )
    first = start + len(before)
    second_start = first + num_bytes + len(after) + len(head)
    second = second_start + len(before)
    end = second + num_bytes + len(after) + 16  # no draft, no speculation
    return TailFrame(
        (
            (start, before),
            (first + num_bytes, after + head + before),
            (second + num_bytes, bytes(end - second - num_bytes)),
        ),
        (first, second),
        end,
    )


def find_tails(
    memory: Memory, layout: StateLayout, num_tokens: int
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the tails of a save of `num_tokens` tokens: (tokens, (offset, length))."""
    if layout.tail is None:
        return
    for point in memory.checkpoints:
        is_plain = point.draft[0] == point.draft[1]
        is_plain = is_plain and point.speculation[0] == point.speculation[1]
        is_here = 0 < point.num_tokens <= num_tokens
        if not is_plain or not is_here or len(point.sections) != 1:
            continue
        if point.last_position != point.num_tokens - 1:
            continue
        place = _place(point.sections[0], layout, point.num_tokens)
        if place is not None:
            yield point.num_tokens, place


def _place(
    section: Section, layout: StateLayout, num_tokens: int
) -> tuple[int, int] | None:
    """Return offset and length of the payload, if it is one of so many tokens."""
    tail, num_bytes = layout.tail, payload_bytes(layout, num_tokens)
    if isinstance(section, RecurrentSection) and isinstance(tail, RecurrentTail):
        is_whole = section.num_cells == 1 and section.position == num_tokens - 1
        place = section.start, section.stop - section.start
    elif isinstance(section, AttentionSection) and isinstance(tail, WindowTail):
        is_whole = section.num_cells == min(num_tokens, tail.num_tokens)
        after = (section.n_stream - section.stream - 1) * 4
        place = section.cells_start, section.stop - after - section.cells_start
    else:
        return None
    if not is_whole or place[1] != num_bytes:
        return None
    window = tail.num_tokens if isinstance(tail, WindowTail) else 0
    return place if tail_of(section, window) == tail else None


def _rows_bytes(layers: tuple[RowFormat, ...], count: int) -> int:
    return sum(LAYER_HEADER_BYTES + count * rows.row_bytes for rows in layers)
