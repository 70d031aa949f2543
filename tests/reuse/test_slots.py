"""Leases: order, placement, cancelling, runners that come and go."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from proxy.errors import RequestError, RunnerGone, UpstreamError
from proxy.llamacpp.runner import Runner
from proxy.prefix.hashing import TokenIds
from proxy.reuse.slots import MAX_WAITING, NO_TOKENS, Slot, SlotPool


@dataclass(eq=False)
class TwoSlots:
    """As much of a runner as a pool looks at."""

    sharing = None
    num_slots: int = 2


def runner() -> Runner:
    """Return a runner with two slots."""
    return cast(Runner, TwoSlots())


def ids(start: int, count: int = 100) -> TokenIds:
    """Return token ids that differ by `start`."""
    return np.arange(start, start + count, dtype=np.int32)


async def test_waiting_requests_are_served_in_order() -> None:
    """Who came first gets the slot that is freed first."""
    pool = SlotPool()
    pool.add_runner(runner())
    held = [await pool.lease(NO_TOKENS) for _ in range(2)]
    served: list[int] = []

    async def wait(number: int) -> None:
        slot = await pool.lease(NO_TOKENS)
        served.append(number)
        pool.release(slot)

    tasks = [asyncio.create_task(wait(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert repr(pool) == "<SlotPool 2/2 leased, 5 waiting>"
    pool.release(held[0])
    await asyncio.gather(*tasks)
    assert served == [0, 1, 2, 3, 4]
    assert repr(pool) == "<SlotPool 1/2 leased, 0 waiting>"


async def test_a_hot_slot_is_preferred_and_a_busy_one_is_not_waited_for() -> None:
    """The slot with the longest prefix; if that is leased, one of an idle runner."""
    pool, hot, cold = SlotPool(), runner(), runner()
    pool.add_runner(cold)
    pool.add_runner(hot)
    slot = pool.slots[3]
    slot.token_ids = ids(0)
    assert await pool.lease(ids(0)) is slot
    other = await pool.lease(ids(0))
    assert other.runner is cold


async def test_a_common_template_does_not_make_a_slot_hot() -> None:
    """A few shared tokens do not draw all requests to one runner."""
    pool, first, second = SlotPool(), runner(), runner()
    pool.add_runner(first)
    pool.add_runner(second)
    for slot in pool.slots[:2]:
        slot.token_ids = ids(0)
    busy = await pool.lease(ids(0))
    assert busy.runner is first
    assert (await pool.lease(ids(0, 20))).runner is second


async def test_a_cancelled_request_leaves_the_queue() -> None:
    """Its place goes to the next one, and no slot is lost."""
    pool = SlotPool()
    pool.add_runner(runner())
    held = [await pool.lease(NO_TOKENS) for _ in range(2)]
    waiting = asyncio.create_task(pool.lease(NO_TOKENS))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.num_waiting == 0
    # cancelled in the very moment in which the slot was granted
    late = asyncio.create_task(pool.lease(NO_TOKENS))
    await asyncio.sleep(0)
    pool.release(held[0])
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert repr(pool) == "<SlotPool 1/2 leased, 0 waiting>"


async def test_slots_of_a_lost_runner_are_forgotten() -> None:
    """A lease of a runner that went away ends without effect on the new slots."""
    pool, one = SlotPool(), runner()
    pool.add_runner(one)
    old = await pool.lease(NO_TOKENS)
    pool.drop_runner(one)
    pool.add_runner(one)
    pool.release(old)
    assert repr(pool) == "<SlotPool 0/2 leased, 0 waiting>"
    assert old not in pool.slots


async def test_who_waits_in_vain_hears_so() -> None:
    """When no slot will come every waiting request gets the error."""
    pool = SlotPool()
    waiting = [asyncio.create_task(pool.lease(NO_TOKENS)) for _ in range(3)]
    await asyncio.sleep(0)
    pool.fail_waiting(UpstreamError(500, "gone"))
    results: list[Any] = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [UpstreamError] * 3


async def test_who_leaves_as_its_wait_is_in_vain_has_left() -> None:
    """A cancelled request ends as cancelled, and no error takes its place."""
    pool = SlotPool()
    task = asyncio.create_task(pool.lease(NO_TOKENS))
    await asyncio.sleep(0)
    pool.fail_waiting(UpstreamError(500, "gone"))
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_the_queue_is_bounded() -> None:
    """One too many gets Ollama's 503 at once."""
    pool = SlotPool()
    waiting = [asyncio.create_task(pool.lease(NO_TOKENS)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="server busy") as caught:
        await pool.lease(NO_TOKENS)
    assert caught.value.status == 503
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_all_slots_of_a_runner_are_leased_at_once_and_in_order() -> None:
    """Later requests wait behind it; they go on when it ends."""
    pool, first = SlotPool(), runner()
    pool.add_runner(first)
    held = await pool.lease(NO_TOKENS)
    happened: list[str] = []

    async def take_all() -> None:
        async with pool.lease_all(first) as slots:
            happened.append(f"all {len(slots)} {all(s.is_leased for s in slots)}")
            await asyncio.sleep(0)
            assert happened == ["all 2 True"]

    async def take_one() -> None:
        pool.release(await pool.lease(NO_TOKENS))
        happened.append("one")

    tasks = [asyncio.create_task(take_all()), asyncio.create_task(take_one())]
    await asyncio.sleep(0)
    assert (happened, pool.num_waiting) == ([], 2)
    pool.release(held)
    await asyncio.gather(*tasks)
    assert happened == ["all 2 True", "one"]
    assert not any(slot.is_leased for slot in pool.slots)


async def test_who_wants_all_slots_and_leaves_blocks_nobody() -> None:
    """A cancelled wait lets those behind it go on; a lost runner ends it."""
    pool, first = SlotPool(), runner()
    pool.add_runner(first)
    held = await pool.lease(NO_TOKENS)

    async def take_all() -> None:
        async with pool.lease_all(first):
            raise AssertionError("there was no moment for this")

    impatient = asyncio.create_task(take_all())
    await asyncio.sleep(0)
    behind = asyncio.create_task(pool.lease(NO_TOKENS))
    await asyncio.sleep(0)
    assert not behind.done()
    impatient.cancel()
    assert (await behind) is not held
    with pytest.raises(asyncio.CancelledError):
        await impatient
    waiting = asyncio.create_task(take_all())
    await asyncio.sleep(0)
    pool.drop_runner(first)
    with pytest.raises(RunnerGone):
        await waiting


def test_a_memory_that_cannot_be_cut_is_reused_from_its_boundaries() -> None:
    """Or from its end, where the prompt goes on with all that it holds."""
    slot = Slot(runner(), 0, boundaries=())
    held = np.arange(100, dtype=np.int32)
    slot.hold(held, [0, 48, 80, 120])
    assert slot.boundaries == (48, 80)
    longer = np.arange(120, dtype=np.int32)
    assert slot.shared_tokens(longer, "") == 100
    for shared, usable in ((99, 80), (80, 80), (79, 48), (47, 0)):
        prompt = np.concatenate([held[:shared], np.full(9, 999, dtype=np.int32)])
        assert slot.shared_tokens(prompt, "") == usable
    slot.hold(held[:80], slot.boundaries)
    assert slot.boundaries == (48, 80)
    plain = Slot(runner(), 0)
    plain.hold(held, [48])
    assert plain.boundaries is None
    assert plain.shared_tokens(longer, "") == 100
