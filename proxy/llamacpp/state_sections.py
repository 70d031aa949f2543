"""What kinds of memory a llama.cpp sequence-state file holds, section by section.

Behind its token list a file has one section for each cache of the model's memory, and
after them, in some builds, earlier states of a window or a recurrent state
(*checkpoints*). Nothing in the file says which sections there are. An attention
section is::

    u32 n_stream, then for each stream:
        u32 num_cells, and where that is not 0:
        num_cells x (i32 pos, u32 n_seq_id = 1, [extra words], i32 seq id)
        u32 v_trans  u32 n_layer  [u32 n_rot_k  u32 n_rot_v]
        for each layer: i32 type  u64 row_bytes  num_cells x row_bytes        (K)
        for each layer: the same (V, v_trans = 0), or
                        i32 type  u32 element_bytes  u32 num_elements
                        num_elements x num_cells x element_bytes (V, v_trans = 1)

A recurrent section has at most one cell, which names no sequence::

    u32 num_cells, [i32 pos, u32 n_seq_id = 0], u32 s_trans = 0, u32 n_layer,
    then for each recurrent layer i32 type, u64 row_bytes and a row (its short
    history), and for each of them the same again (its state)

The checkpoints are ``"SCKP" u32 1 u32 count``, then for each ``u64 num_tokens, i32
pos_min, i32 pos_max`` and three times ``u64 size`` with as many bytes (model, draft
model, speculation). The first are ``u32 magic, i32 seq id`` and sections.

Rules:
1. All ways to read the sections are tried: with and without extra words of cells, with
   and without V. Exactly one of them must come out even at the end of the file, else
   the file is refused.
2. No count is believed before it is compared with the bytes that are left, and the
   number of steps is bounded: reading a damaged file takes little time and no room.
3. What is returned holds places, never the buffer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxy.errors import StateFormatError
from proxy.llamacpp.state_format import (
    CELL_WORDS,
    DATA_HEADER_WORDS,
    EXTENDED_CELL_WORDS,
    MAX_STREAMS,
    WORD,
    RowFormat,
)
from proxy.llamacpp.state_reader import Reader

MAX_SECTIONS = 4  # the engine's memories have three at most
MAX_LAYERS = 1024
MAX_GGML_TYPE = 255
MAX_ROW_BYTES = 1 << 24
MAX_STATE_ROW_BYTES = 1 << 30
MAX_CHECKPOINTS = 1024  # the engine's own limit
MAX_STEPS = 50_000
_CELLS_PER_STEP = 4096

CHECKPOINTS_MARK = b"SCKP"
CHECKPOINTS_VERSION = 1
MEMORY_MAGIC = 0xAF143CD8


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSection:
    """One cache of K and V; without cells it says nothing about rows."""

    start: int
    stop: int
    n_stream: int
    stream: int = 0
    """Which stream holds the cells."""
    num_cells: int = 0
    cell_words: int = CELL_WORDS
    cells_start: int = 0
    v_trans: int = 0
    n_rot_k: int = 0
    n_rot_v: int = 0
    rows_start: int = 0
    """Offset of the first layer's header."""
    k_layers: tuple[RowFormat, ...] = ()
    v_layers: tuple[RowFormat, ...] = ()

    def cells(self, raw: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Look at the cells in the file's bytes: [num_cells, cell_words]."""
        stop = self.cells_start + self.num_cells * self.cell_words * 4
        words = raw[self.cells_start : stop].view(WORD)
        return words.reshape(self.num_cells, self.cell_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSection:
    """The recurrent state of one sequence."""

    start: int
    stop: int
    num_cells: int
    position: int
    """Of the last token that the state has seen; -1 without a cell."""
    num_layers: int
    """Of the model; those without a recurrent state have no rows."""
    history_rows: tuple[RowFormat, ...]
    state_rows: tuple[RowFormat, ...]


Section = AttentionSection | RecurrentSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An earlier state of the part of the memory that cannot go back."""

    num_tokens: int
    first_position: int
    last_position: int
    sections: tuple[Section, ...]
    draft: tuple[int, int]
    """Offsets of what a draft model has for it: start, stop."""
    speculation: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """All that follows the token list."""

    sections: tuple[Section, ...]
    checkpoints: tuple[Checkpoint, ...]


def read_memory(raw: NDArray[np.uint8], start: int, *, version: int) -> Memory:
    """Read the sections and checkpoints from `start` to the end of `raw`.

    Raises StateFormatError where there is no way to read them, or more than one.
    """
    walk = _Walk(raw, version)
    way = walk.only_way(start, len(raw), can_have_checkpoints=True)
    checkpoints: tuple[Checkpoint, ...] = ()
    stop = way[-1].stop
    if stop < len(raw):
        checkpoints = tuple(_read_checkpoints(walk, stop))
    return Memory(way, checkpoints)


class _Walk:
    """The search for the one way to read some sections."""

    def __init__(self, raw: NDArray[np.uint8], version: int) -> None:
        self.raw = raw
        self._version = version
        self._steps = 0
        # the failure that was met farthest into the file tells most
        self._farthest = -1
        self._reason = ""

    def spend(self, steps: int) -> None:
        """Count steps. Raises StateFormatError where there were too many."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _TooManySteps("too many ways to read the state")

    def only_way(
        self, start: int, stop: int, *, can_have_checkpoints: bool
    ) -> tuple[Section, ...]:
        """Return the sections from `start` to `stop`, one at least."""
        self._farthest, self._reason = -1, ""
        found: tuple[Section, ...] | None = None
        for way in self._ways(start, stop, MAX_SECTIONS, can_have_checkpoints):
            if found is not None:
                raise StateFormatError("the state can be read in two ways")
            found = way
        if found is None:
            raise StateFormatError(self._reason or "no section")
        return found

    def _ways(
        self, start: int, stop: int, sections_left: int, can_have_checkpoints: bool
    ) -> Iterator[tuple[Section, ...]]:
        for section in self._sections(start, stop):
            at = section.stop
            if at == stop or (can_have_checkpoints and self._has_mark(at, stop)):
                yield (section,)
            elif sections_left > 1:
                for rest in self._ways(
                    at, stop, sections_left - 1, can_have_checkpoints
                ):
                    yield (section, *rest)
            else:
                self._note(at, f"{stop - at} bytes follow the state")

    def _has_mark(self, position: int, stop: int) -> bool:
        mark = self.raw[position : position + 4].tobytes()
        return stop - position >= 4 and mark == CHECKPOINTS_MARK

    def _note(self, position: int, reason: str) -> None:
        if position > self._farthest:
            self._farthest, self._reason = position, reason

    def _sections(self, start: int, stop: int) -> Iterator[Section]:
        """Yield what may begin at `start`."""
        extra = (CELL_WORDS, EXTENDED_CELL_WORDS[self._version])
        readers: tuple[Callable[[Reader], Iterator[Section]], ...] = (
            lambda reader: self._attention(reader, extra[0]),
            lambda reader: self._attention(reader, extra[1]),
            self._recurrent,
        )
        for read in readers:
            self.spend(1)
            reader = Reader(self.raw, start, stop)
            try:
                yield from read(reader)
            except _TooManySteps:
                raise
            except StateFormatError as error:
                self._note(reader.position, str(error))

    # -- attention --------------------------------------------------------------------

    def _attention(self, reader: Reader, cell_words: int) -> Iterator[AttentionSection]:
        start = reader.position
        n_stream = reader.u32("number of streams")
        if not 1 <= n_stream <= MAX_STREAMS:
            raise StateFormatError(f"{n_stream} streams")
        counts = reader.words(min(n_stream, reader.left // 4), "number of cells")
        filled = np.flatnonzero(counts)
        stream = int(filled[0]) if len(filled) else n_stream
        reader.position = start + 4 + stream * 4
        if stream == n_stream:
            if cell_words == CELL_WORDS:
                yield AttentionSection(
                    start=start, stop=reader.position, n_stream=n_stream
                )
            return
        num_cells = reader.u32("number of cells")
        cells_start = reader.position
        words = reader.words(num_cells * cell_words, "cells")
        self.spend(num_cells // _CELLS_PER_STEP)
        if not bool((words[1::cell_words] == 1).all()):
            raise StateFormatError("a cell does not belong to exactly one sequence")
        v_trans, num_layers = reader.u32("v_trans"), reader.u32("number of layers")
        if v_trans > 1:
            raise StateFormatError(f"v_trans is {v_trans}")
        if not 1 <= num_layers <= MAX_LAYERS:
            raise StateFormatError(f"{num_layers} layers")
        rotations = [0, 0]
        if DATA_HEADER_WORDS[self._version] > 2:
            rotations = [reader.u32("n_rot_k"), reader.u32("n_rot_v")]
        rows_start = reader.position
        k_layers = self._layers(reader, num_layers, num_cells, is_transposed=False)
        num_after = n_stream - stream - 1
        k_stop = reader.position

        def section(v_layers: tuple[RowFormat, ...]) -> AttentionSection:
            if any(reader.words(num_after, "number of cells")):
                raise StateFormatError("more than one stream holds cells")
            return AttentionSection(
                start=start,
                stop=reader.position,
                n_stream=n_stream,
                stream=stream,
                num_cells=num_cells,
                cell_words=cell_words,
                cells_start=cells_start,
                v_trans=v_trans,
                n_rot_k=rotations[0],
                n_rot_v=rotations[1],
                rows_start=rows_start,
                k_layers=k_layers,
                v_layers=v_layers,
            )

        try:
            v_layers = self._layers(
                reader, num_layers, num_cells, is_transposed=bool(v_trans)
            )
            yield section(v_layers)
        except _TooManySteps:
            raise
        except StateFormatError as error:
            self._note(reader.position, str(error))
        reader.position = k_stop
        yield section(())  # multi-head latent attention has no V

    def _layers(
        self, reader: Reader, num_layers: int, num_cells: int, *, is_transposed: bool
    ) -> tuple[RowFormat, ...]:
        """Read K or V of all layers; some layers may have none."""
        self.spend(num_layers)
        layers = tuple(
            _read_layer(reader, num_cells, is_transposed=is_transposed)
            for _ in range(num_layers)
        )
        if not any(rows.row_bytes for rows in layers):
            raise StateFormatError("rows of 0 bytes in all layers")
        return layers

    # -- recurrent --------------------------------------------------------------------

    def _recurrent(self, reader: Reader) -> Iterator[RecurrentSection]:
        start = reader.position
        num_cells, position = reader.u32("number of cells"), -1
        if num_cells > 1:
            raise StateFormatError(f"{num_cells} cells of a recurrent state")
        if num_cells:
            position = reader.i32("position")
            if reader.u32("number of sequences"):
                raise StateFormatError("a recurrent state that names its sequence")
        if reader.u32("s_trans"):
            raise StateFormatError("a transposed recurrent state")
        num_layers = reader.u32("number of layers")
        if not 1 <= num_layers <= MAX_LAYERS:
            raise StateFormatError(f"{num_layers} layers")
        rows: list[RowFormat] = []
        num_first = 0  # how many are like the first one
        while len(rows) < 2 * num_layers:
            self.spend(1)
            rows.append(_read_state_row(reader, num_cells))
            if rows[-1] == rows[0] and num_first == len(rows) - 1:
                num_first += 1
            elif rows[-1] != rows[num_first]:
                raise StateFormatError("states of different sizes")
            half, is_odd = divmod(len(rows), 2)
            if not is_odd and num_first in (half, len(rows)):
                yield RecurrentSection(
                    start=start,
                    stop=reader.position,
                    num_cells=num_cells,
                    position=position,
                    num_layers=num_layers,
                    history_rows=tuple(rows[:half]),
                    state_rows=tuple(rows[half:]),
                )


class _TooManySteps(StateFormatError):
    """Ends the whole search, not one way of it."""


def _read_layer(reader: Reader, num_cells: int, *, is_transposed: bool) -> RowFormat:
    ggml_type = reader.u32("type of a layer")
    if ggml_type > MAX_GGML_TYPE:
        raise StateFormatError(f"type {ggml_type} of a layer")
    element_bytes = 0
    if is_transposed:
        element_bytes = reader.u32("bytes of an element")
        row_bytes = element_bytes * reader.u32("elements of a layer")
        if not element_bytes:
            raise StateFormatError("elements of 0 bytes")
    else:
        row_bytes = reader.u64("bytes of a row")
    if row_bytes > MAX_ROW_BYTES:
        raise StateFormatError(f"rows of {row_bytes} bytes")
    reader.take(num_cells * row_bytes, "rows of a layer")
    return RowFormat(ggml_type, row_bytes, element_bytes)


def _read_state_row(reader: Reader, num_cells: int) -> RowFormat:
    ggml_type = reader.u32("type of a state")
    row_bytes = reader.u64("bytes of a state")
    if ggml_type > MAX_GGML_TYPE or row_bytes > MAX_STATE_ROW_BYTES:
        raise StateFormatError(f"a state of {row_bytes} bytes, type {ggml_type}")
    reader.take(num_cells * row_bytes, "state of a layer")
    return RowFormat(ggml_type, row_bytes)


def _read_checkpoints(walk: _Walk, start: int) -> Iterator[Checkpoint]:
    """Read the checkpoints; they must end where the file does."""
    reader = Reader(walk.raw, start + 4, len(walk.raw))
    version, count = reader.u32("version"), reader.u32("number of checkpoints")
    if version != CHECKPOINTS_VERSION or not 1 <= count <= MAX_CHECKPOINTS:
        raise StateFormatError(f"{count} checkpoints of version {version}")
    for _ in range(count):
        num_tokens = reader.u64("tokens of a checkpoint")
        first, last = reader.i32("first position"), reader.i32("last position")
        start, stop = _take_blob(reader)
        head = Reader(walk.raw, start, stop)
        if head.u32("magic of a checkpoint") != MEMORY_MAGIC:
            raise StateFormatError("a checkpoint is not a memory")
        head.u32("sequence of a checkpoint")
        yield Checkpoint(
            num_tokens=num_tokens,
            first_position=first,
            last_position=last,
            sections=walk.only_way(head.position, stop, can_have_checkpoints=False),
            draft=_take_blob(reader),
            speculation=_take_blob(reader),
        )
    if reader.left:
        raise StateFormatError(f"{reader.left} bytes follow the checkpoints")


def _take_blob(reader: Reader) -> tuple[int, int]:
    size = reader.u64("size of a checkpoint")
    start = reader.position
    reader.take(size, "a checkpoint")
    return start, reader.position
