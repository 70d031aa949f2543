"""What every kind of store does alike, through a real client and a real process."""

import asyncio
import os
from collections.abc import Sequence

import pytest

from proxy.blocks import BlockLayout, Fingerprint, RowRun
from proxy.errors import StoreError
from proxy.store.base import BlockRef, PutOutcome
from proxy.store.client import StoreClient
from tests.store.slotfile import (
    FINGERPRINT,
    TestFile,
    make_key,
    make_refs,
    small_layout,
)

DEADLINE = 5.0


async def put(
    client: StoreClient, file: TestFile, refs: Sequence[BlockRef]
) -> PutOutcome:
    """Put blocks out of a test file."""
    return await client.put_from(
        file.fd, file.layout, refs, fingerprint=FINGERPRINT, deadline_seconds=DEADLINE
    )


async def get(
    client: StoreClient, file: TestFile, refs: Sequence[BlockRef]
) -> list[bool]:
    """Get blocks into a test file."""
    return await client.get_into(
        file.fd, file.layout, refs, fingerprint=FINGERPRINT, deadline_seconds=DEADLINE
    )


async def test_blocks_come_back_as_they_were(client: StoreClient) -> None:
    """What was put out of one slot file arrives in another, and nothing else does."""
    layout, longer = small_layout(7), small_layout(11)
    refs = make_refs("a", 7)
    with TestFile(layout, seed=1) as source, TestFile(longer, seed=2) as target:
        before = target.everything().copy()
        assert await put(client, source, refs) == PutOutcome(
            7, 0, 0, 7 * layout.block_bytes
        )
        moved = [BlockRef(ref.key, ref.index + 3) for ref in refs]
        assert await get(client, target, moved) == [True] * 7
        for ref in refs:
            assert target.payload(ref.index + 3) == source.payload(ref.index)
            for offset, length in longer.pieces(ref.index + 3):
                before[offset : offset + length] = 0
        after = target.everything().copy()
        for ref in moved:
            for offset, length in longer.pieces(ref.index):
                after[offset : offset + length] = 0
        assert (before == after).all()


async def test_answers_keep_the_order_of_the_keys(client: StoreClient) -> None:
    """Present and absent keys are told apart in the order of the question."""
    layout = small_layout(6)
    refs = make_refs("b", 6)
    with TestFile(layout, seed=3) as source, TestFile(layout) as target:
        await put(client, source, refs[::2])
        keys = [ref.key for ref in refs]
        expected = [True, False] * 3
        assert await client.contains(keys, deadline_seconds=1) == expected
        assert await get(client, target, refs) == expected
        assert target.payload(1) == bytes(layout.block_bytes)


async def test_an_existing_block_is_never_changed(client: StoreClient) -> None:
    """A second put of a key is a success that changes nothing."""
    layout = small_layout(2)
    refs = make_refs("c", 2)
    with (
        TestFile(layout, seed=4) as first,
        TestFile(layout, seed=5) as second,
        TestFile(layout) as target,
    ):
        await put(client, first, refs)
        assert await put(client, second, refs) == PutOutcome(0, 2, 0, 0)
        assert await get(client, target, refs) == [True, True]
        assert target.payload(0) == first.payload(0)


async def test_one_key_twice_in_one_get_fills_both_places(client: StoreClient) -> None:
    """Each place that wants a block gets it, also where the key is the same."""
    layout = small_layout(4)
    with TestFile(layout, seed=6) as source, TestFile(layout) as target:
        await put(client, source, make_refs("d", 1))
        twice = [BlockRef(make_key("d0"), 1), BlockRef(make_key("d0"), 3)]
        assert await get(client, target, twice) == [True, True]
        assert target.payload(1) == target.payload(3) == source.payload(0)


async def test_two_writers_of_one_key_both_succeed(client: StoreClient) -> None:
    """Puts of the same keys at once leave one intact block of each."""
    layout = small_layout(8)
    refs = make_refs("e", 8)
    with TestFile(layout, seed=7) as source, TestFile(layout) as target:
        outcomes = await asyncio.gather(*(put(client, source, refs) for _ in range(4)))
        for outcome in outcomes:
            assert outcome.failed_blocks == 0
            assert outcome.stored_blocks + outcome.present_blocks == 8
        assert await get(client, target, refs) == [True] * 8
        assert target.payload(5) == source.payload(5)


async def test_another_models_block_is_a_miss_and_dropped(client: StoreClient) -> None:
    """A block that was stored for another fingerprint is not given out, ever again."""
    layout = small_layout(1)
    refs = make_refs("f", 1)
    other = Fingerprint(b"o" * 32)
    with TestFile(layout, seed=8) as source, TestFile(layout) as target:
        await client.put_from(
            source.fd, layout, refs, fingerprint=other, deadline_seconds=DEADLINE
        )
        assert await get(client, target, refs) == [False]
        assert await client.contains([refs[0].key], deadline_seconds=1) == [False]
        assert await put(client, source, refs) == PutOutcome(
            1, 0, 0, layout.block_bytes
        )
        assert await get(client, target, refs) == [True]


async def test_a_block_of_another_shape_is_a_miss(client: StoreClient) -> None:
    """Same size, other pieces: another layout's block does not fit."""
    wide = BlockLayout((RowRun(0, 65536, 4, 8192),), num_blocks=4)
    narrow = BlockLayout((RowRun(0, 65536, 8, 4096),), num_blocks=4)
    assert wide.block_bytes == narrow.block_bytes
    refs = make_refs("g", 1)
    with TestFile(wide, seed=9) as source, TestFile(narrow) as target:
        await put(client, source, refs)
        assert await get(client, target, refs) == [False]


async def test_thousands_of_tiny_pieces(client: StoreClient) -> None:
    """Element-major V (more pieces a block than one call may have) comes back."""
    layout = BlockLayout(
        (RowRun(64, 4096, 4, 4096), RowRun(16448, 1024, 3000, 64)), num_blocks=1
    )
    refs = make_refs("h", 1)
    with TestFile(layout, seed=10) as source, TestFile(layout) as target:
        assert (await put(client, source, refs)).stored_blocks == 1
        assert await get(client, target, refs) == [True]
        assert target.payload(0) == source.payload(0)


async def test_a_batch_of_two_thousand_blocks(client: StoreClient) -> None:
    """A batch far beyond the limits of a single Mooncake call is one call here."""
    layout = small_layout(2000, piece_bytes=256)
    refs = make_refs("i", 2000)
    with TestFile(layout, seed=11) as source, TestFile(layout) as target:
        assert (await put(client, source, refs)).stored_blocks == 2000
        keys = [ref.key for ref in refs]
        assert all(await client.contains(keys, deadline_seconds=2))
        assert all(await get(client, target, refs))
        assert all(target.payload(i) == source.payload(i) for i in range(0, 2000, 97))


async def test_removed_blocks_are_gone(client: StoreClient) -> None:
    """A removed block is absent, one that was not there does not count."""
    layout = small_layout(2)
    refs = make_refs("j", 2)
    with TestFile(layout, seed=12) as source:
        await put(client, source, refs)
        keys = [refs[0].key, make_key("never")]
        assert await client.remove(keys, deadline_seconds=DEADLINE) == 1
        found = await client.contains([r.key for r in refs], deadline_seconds=1)
        assert found == [False, True]


async def test_a_short_slot_file_is_refused(client: StoreClient) -> None:
    """A file that ends before the layout does is refused; the store lives on."""
    layout = small_layout(3)
    refs = make_refs("k", 3)
    with TestFile(layout, seed=13) as file:
        os.ftruncate(file.fd, layout.end - 1)
        for call in (put, get):
            with pytest.raises(StoreError, match="slot file"):
                await call(client, file, refs)
        os.ftruncate(file.fd, layout.end)
        assert (await put(client, file, refs)).stored_blocks == 3


async def test_only_regular_files_are_slot_files(client: StoreClient) -> None:
    """A pipe and an unwritable file are refused, and the connection goes on."""
    layout = small_layout(1)
    refs = make_refs("l", 1)
    reader, writer = os.pipe()
    try:
        with pytest.raises(StoreError, match="regular"):
            await client.get_into(
                reader, layout, refs, fingerprint=FINGERPRINT, deadline_seconds=1
            )
    finally:
        os.close(reader)
        os.close(writer)
    with TestFile(layout, seed=14) as file:
        read_only = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY)
        try:
            with pytest.raises(StoreError, match="mapped"):
                await client.get_into(
                    read_only, layout, refs, fingerprint=FINGERPRINT, deadline_seconds=1
                )
            outcome = await client.put_from(
                read_only, layout, refs, fingerprint=FINGERPRINT, deadline_seconds=1
            )
            assert outcome.stored_blocks == 1
        finally:
            os.close(read_only)


async def test_status_tells_what_is_stored(client: StoreClient) -> None:
    """The status names the kind, the capacity and what is in use."""
    layout = small_layout(4)
    with TestFile(layout, seed=15) as source:
        await put(client, source, make_refs("m", 4))
    status = await client.status()
    assert status["kind"] in {"disk", "embedded", "mooncake"}
    assert status["capacity_bytes"] >= status["used_bytes"] > 4 * layout.block_bytes
    assert status["blocks"] >= 0
    assert status["isolated"] is (status["kind"] != "mooncake")


async def test_a_client_killed_during_a_put_leaves_the_store_well(
    client: StoreClient,
) -> None:
    """A connection that ends in mid-call costs nobody else anything."""
    layout = small_layout(64, piece_bytes=16384)
    refs = make_refs("n", 64)
    other = StoreClient(client._path, timing=client.timing)
    await other.connect()
    with TestFile(layout, seed=16) as source, TestFile(layout) as target:
        task = asyncio.create_task(put(other, source, refs))
        await asyncio.sleep(0)
        other._drop("killed")
        with pytest.raises(StoreError):
            await task
        await other.close()
        outcome = await put(client, source, refs)
        assert outcome.failed_blocks == 0
        assert await get(client, target, refs) == [True] * 64
        assert target.payload(63) == source.payload(63)
