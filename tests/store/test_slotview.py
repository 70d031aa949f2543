"""Blocks go to their places and come back, whatever the shape of the runs."""

import numpy as np
import pytest

from proxy.blocks import BlockLayout, RowRun
from proxy.store.envelope import checksum
from proxy.store.slotview import SlotView, part_bytes_for

PART_BYTES = part_bytes_for(1)
THIRD = PART_BYTES // 3
LAYOUTS = {
    "one part": (RowRun(100, 1000, 4, 300),),
    "parts of several pieces": (RowRun(7, 3 * THIRD, 8, THIRD),),
    "pieces larger than a part": (RowRun(0, 2 * PART_BYTES + 40, 3, PART_BYTES + 13),),
    "many tiny pieces": (RowRun(64, 200, PART_BYTES // 48, 64),),
    "rows of V after those of K": (
        RowRun(12, 3000, 4, 500),
        RowRun(12 + 4 * 3000, 3000, 4, 500),
        RowRun(12 + 8 * 3000, 3000, 2, 501),
    ),
    "elements of V in some layers": (
        RowRun(12, 2000, 3, 2000),
        *(RowRun(8000 + layer * 9000, 128, 70, 64) for layer in range(5)),
    ),
    "layers at unequal distances": (
        *(RowRun(layer * layer * 9000, 128, 70, 64) for layer in range(5)),
        *(RowRun(300_000 + layer * 9000, 128, 70, 62) for layer in range(2)),
    ),
    "many elements in many layers": tuple(
        RowRun(layer * 200 * 900, 200, 900, 100) for layer in range(13)
    ),
    "elements in layers that are larger than a part": tuple(
        RowRun(layer * 4 * PART_BYTES, 256, PART_BYTES // 96, 128) for layer in range(3)
    ),
    "pieces about as large as an item": (
        *(RowRun(layer * 9000, 1100, 8, 256) for layer in range(3)),
        *(RowRun(30_000 + layer * 9000, 1100, 8, 257) for layer in range(3)),
    ),
    "runs of all kinds": (
        RowRun(0, 4 * THIRD, 5, 2 * THIRD),
        RowRun(20 * THIRD, 256, 3000, 128),
        RowRun(20 * THIRD + 256 * 3000, 1, 1, 1),
    ),
}


@pytest.mark.parametrize("runs", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_blocks_move_as_the_layout_says(runs: tuple[RowRun, ...]) -> None:
    """Scatter fills the pieces and nothing else; gather and checksums agree."""
    layout = BlockLayout(runs, num_blocks=2 if runs[-1].stride > 1 else 1)
    chance = np.random.default_rng(1)
    file = chance.integers(0, 256, layout.end + 99, dtype=np.uint8)
    payload = chance.integers(0, 256, layout.block_bytes, dtype=np.uint8)
    expected, start = file.copy(), 0
    index = layout.num_blocks - 1
    for offset, length in layout.pieces(index):
        expected[offset : offset + length] = payload[start : start + length]
        start += length

    view = SlotView(file, layout, part_bytes=PART_BYTES)
    assert view.scatter(index, payload) == checksum(payload)
    assert np.array_equal(file, expected)
    back = np.zeros_like(payload)
    assert view.gather(index, back) == checksum(payload)
    assert np.array_equal(back, payload)
