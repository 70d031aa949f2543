"""How long an idle model is kept."""

import asyncio
import math

import pytest

from proxy.reuse.keep_alive import KeepAlive

SHORT = 0.02


class Idle(asyncio.Event):
    """Set when the model is to be freed; counts how often that was said."""

    count = 0

    def set(self) -> None:
        """Note one more time."""
        self.count += 1
        super().set()


async def test_the_time_runs_from_the_end_of_the_last_use() -> None:
    """While one of two uses goes on the model is not due, then after its time."""
    idle = Idle()
    kept = KeepAlive(default_seconds=SHORT, on_idle=idle.set)
    with kept.use():
        with kept.use():
            pass
        await asyncio.sleep(3 * SHORT)
        assert not idle.is_set()
        assert kept.remaining_seconds == SHORT
    assert 0 < kept.remaining_seconds <= SHORT
    await asyncio.wait_for(idle.wait(), 5)
    assert kept.is_due
    assert kept.remaining_seconds == 0


async def test_the_last_value_that_was_stated_holds() -> None:
    """A use without a value changes none; a model loaded anew has the default."""
    idle = Idle()
    kept = KeepAlive(default_seconds=60, on_idle=idle.set)
    for seconds in (5.0, math.inf, None):
        with kept.use(seconds):
            pass
    assert kept.remaining_seconds == math.inf
    with kept.use(0.0), kept.use():
        assert not idle.is_set()
    assert idle.is_set()
    kept.note_freed()
    assert not kept.is_due
    kept.note_loaded()
    assert kept.remaining_seconds == pytest.approx(60, abs=1)
    kept.close()


async def test_a_use_makes_what_is_due_undue() -> None:
    """Whoever frees a model step by step sees that somebody has come."""
    idle = Idle()
    kept = KeepAlive(default_seconds=60, on_idle=idle.set)
    kept.note_loaded()
    kept.end()
    assert kept.is_due
    with kept.use(30.0):
        assert not kept.is_due
    assert kept.remaining_seconds > 25
    assert idle.count == 1
    kept.close()


async def test_an_end_during_a_use_waits_for_it() -> None:
    """Requests in flight finish first."""
    idle = Idle()
    kept = KeepAlive(default_seconds=60, on_idle=idle.set)
    with kept.use():
        kept.end()
        assert not kept.is_due
    assert kept.is_due
    assert idle.count == 1


async def test_the_clock_starts_once() -> None:
    """A runner that is restarted while nobody uses it does not prolong anything."""
    kept = KeepAlive(default_seconds=60, on_idle=Idle().set)
    kept.note_loaded()
    await asyncio.sleep(SHORT)
    left = kept.remaining_seconds
    kept.note_loaded()
    assert kept.remaining_seconds <= left
    kept.close()
