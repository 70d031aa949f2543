"""How a sequence's KV lies in a llama.cpp sequence-state file (a *slot file*)?

Signatures first; the bodies follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.blocks import BlockLayout
from proxy.errors import StateFormatError

Buffer = bytes | bytearray | memoryview | NDArray[np.uint8] | Any


class UnsupportedStateError(StateFormatError):
    """A sound file of a memory kind that is not understood; `reason` says which."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"memory kind not supported yet: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RowFormat:
    """K or V of one layer: row-major (element_bytes 0) or element-major."""

    ggml_type: int
    row_bytes: int
    element_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What is the same in all slot files of one runner."""

    version: int
    has_packed_tokens: bool
    n_stream: int
    v_trans: int
    n_rot_k: int
    n_rot_v: int
    k_layers: tuple[RowFormat, ...]
    v_layers: tuple[RowFormat, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers."""
        raise NotImplementedError

    def digest_fields(self) -> bytes:
        """Canonical encoding of what must be equal for rows to fit (not n_stream)."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ParsedState:
    """One slot file as read."""

    layout: StateLayout
    token_ids: NDArray[np.int32]
    num_cells: int
    is_contiguous: bool
    num_media: int
    stream: int
    rows_start: int
    end: int


def parse(buffer: Buffer, size: int) -> ParsedState:
    """Read the first `size` bytes of `buffer` as one whole slot file."""
    raise NotImplementedError


def block_layout(parsed: ParsedState, block_size: int) -> BlockLayout:
    """Tell where the full blocks lie in the very file that was parsed."""
    raise NotImplementedError


def file_bytes(
    layout: StateLayout, num_tokens: int, *, n_stream: int | None = None
) -> int:
    """Tell how long a file of exactly `num_tokens` tokens is."""
    raise NotImplementedError


def block_layout_for(
    layout: StateLayout,
    num_tokens: int,
    *,
    block_size: int,
    n_stream: int | None = None,
) -> BlockLayout:
    """Tell where the blocks lie in a file of exactly `num_tokens` tokens."""
    raise NotImplementedError


def write_frame(
    buffer: Buffer,
    layout: StateLayout,
    *,
    token_ids: Sequence[int] | NDArray[np.int32],
    n_stream: int | None = None,
) -> int:
    """Write all of a file of exactly `token_ids` but the rows; give its length."""
    raise NotImplementedError
