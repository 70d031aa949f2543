"""Where a memory that cannot be cut is kept, and what is stored of it."""

import pytest

from proxy.blocks import BlockKey
from proxy.llamacpp.totals import EngineTotals, of_pieces
from proxy.reuse import boundaries
from proxy.reuse.arbiter import CostModel
from proxy.reuse.boundaries import SeenBlocks, choose_boundaries
from proxy.reuse.plan import RestoreMode
from proxy.reuse.stored import StoredPrefix

B = 64


def keys(*numbers: int) -> list[BlockKey]:
    """Return some keys."""
    return [BlockKey(bytes([n]) * 32) for n in numbers]


def costs(tokens_per_second: float) -> CostModel:
    """Return a model that has seen this rate."""
    model = CostModel()
    for n in (500, 1000, 2000):
        for _ in range(6):
            model.observe_prefill(n, n / tokens_per_second)
    return model


def choose(
    prompt: int,
    *,
    held: int = 0,
    seen: int = 0,
    blocks: int = 0,
    tails: tuple[int, ...] = (),
    rate: float = 1000.0,
    mode: RestoreMode = RestoreMode.AUTO,
) -> list[int]:
    """Choose boundaries, in blocks; `tails` are stored after so many blocks."""
    there = tuple(i + 1 in tails for i in range(prompt // B))
    chosen = choose_boundaries(
        prompt_tokens=prompt,
        block_size=B,
        held_tokens=held,
        seen_blocks=seen,
        stored=StoredPrefix(blocks, there),
        costs=costs(rate),
        mode=mode,
    )
    assert all(one % B == 0 for one in chosen)
    return [one // B for one in chosen]


def test_a_new_prompt_is_kept_at_its_last_block() -> None:
    """The engine's checkpoint lies four tokens before an end."""
    assert choose(1000) == [15]
    assert choose(15 * B + 4) == [15]
    assert choose(15 * B + 3) == [14]
    assert choose(B) == []
    assert choose(0) == []


def test_a_prompt_that_leaves_others_is_kept_there_too() -> None:
    """By the blocks that were seen, or that are stored."""
    assert choose(1000, seen=8) == [8, 15]
    assert choose(1000, blocks=8) == [8, 15]
    assert choose(1000, seen=15) == [15]
    assert choose(1000, blocks=15) == [15]


def test_nothing_is_made_that_is_there_or_that_is_passed() -> None:
    """A tail that is stored; a slot that holds more than that."""
    assert choose(1000, seen=8, tails=(8,)) == [15]
    assert choose(1000, seen=8, tails=(8, 15)) == []
    assert choose(1000, seen=8, held=8 * B) == [15]
    assert choose(1000, held=15 * B) == []


def test_what_is_computed_in_no_time_is_not_kept() -> None:
    """Unless restores are wanted whatever they cost."""
    assert choose(1000, rate=1e6) == []
    assert choose(1000, rate=1e6, mode=RestoreMode.ALWAYS) == [15]
    assert choose(1000, tails=(14,), rate=10_000) == []


def test_blocks_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently seen are forgotten."""
    monkeypatch.setattr(boundaries, "MAX_SEEN_BLOCKS", 4)
    seen = SeenBlocks()
    assert seen.count(keys(1, 2, 3)) == 0
    assert seen.count(keys(1, 2, 4)) == 2
    assert seen.count(keys(1, 2, 4, 5)) == 3
    assert seen.count(keys(3)) == 0


def test_a_restore_needs_the_blocks_and_the_tail() -> None:
    """The longest one that is whole."""
    assert StoredPrefix(5, None).restorable_blocks == 5
    assert StoredPrefix(5, (True, False, True, False, False)).restorable_blocks == 3
    assert StoredPrefix(2, (True, False, True)).restorable_blocks == 1
    assert StoredPrefix(2, (False, False)).restorable_blocks == 0


def test_pieces_of_a_prompt_are_counted_once() -> None:
    """Reused is what the first piece found; what it left is no reuse."""
    first = EngineTotals(
        cached_tokens=100, prefilled_tokens=904, decoded_tokens=0, prefill_seconds=2.0
    )
    last = EngineTotals(
        cached_tokens=1004, prefilled_tokens=16, decoded_tokens=5, prefill_seconds=0.5
    )
    whole = of_pieces(last, [first])
    assert (whole.cached_tokens, whole.prefilled_tokens) == (100, 920)
    assert whole.prompt_tokens == last.prompt_tokens
    assert (whole.prefill_seconds, whole.decoded_tokens) == (2.5, 5)
    assert of_pieces(last, []) is last
