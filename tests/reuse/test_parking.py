"""Freeing a model while its KV is on the way into the store, or somebody comes."""

import asyncio

import pytest

from proxy.reuse.committer import MIN_SAVE_BOUND_SECONDS
from tests.reuse.test_orchestrator import Bench, bench

SOON_SECONDS = 5.0


async def keeps_nothing(it: Bench) -> None:
    """Have a prompt continued, with a keep-alive of 0; the commit goes on."""
    with it.model.in_use(0.0):
        await it.ask(drains=False)


@pytest.mark.parametrize("wait_seconds", [0.0, MIN_SAVE_BOUND_SECONDS + 0.1])
async def test_a_slow_commit_is_waited_for(wait_seconds: float) -> None:
    """Also when its slot was given to others: the process lives until it is saved."""
    async with bench() as it:
        it.runner.can_park = True
        it.server.may_save.clear()
        await keeps_nothing(it)
        await asyncio.sleep(wait_seconds)
        assert it.runner.is_ready
        await it.model.unload()  # does not wait for a model that is in use
        assert it.runner.is_ready
        it.server.may_save.set()
        await it.orchestrator.drain(timeout_seconds=SOON_SECONDS)
        assert it.runner.parked.is_set()
        assert not it.model.pool.slots
        assert it.value("runner_failures") == 0
        if not wait_seconds:
            assert len(it.store.blocks) == 3


async def test_whoever_comes_before_the_end_finds_it_as_it_was() -> None:
    """A use that states another time while the commit goes on keeps the model."""
    async with bench() as it:
        it.runner.can_park = True
        it.server.may_save.clear()
        await keeps_nothing(it)
        with it.model.in_use(60.0):
            it.server.may_save.set()
            await it.orchestrator.drain(timeout_seconds=SOON_SECONDS)
        assert it.runner.is_ready
        assert it.model.remaining_seconds > 50
        it.model.close()


async def test_whoever_comes_after_the_end_has_it_started() -> None:
    """Waiting for a parked model wakes its runner; nobody else does."""
    async with bench() as it:
        it.runner.can_park = True
        await keeps_nothing(it)
        await it.orchestrator.drain(timeout_seconds=SOON_SECONDS)
        wanted = asyncio.create_task(it.runner.wait_wanted())
        await it.model.unload()
        assert not it.model.is_loaded
        assert not wanted.done()
        waiting = asyncio.create_task(it.model.wait_ready())
        await asyncio.wait_for(wanted, SOON_SECONDS)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})
