"""Calls that hang are given up; those that come later are not held up by them."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from proxy.errors import StoreError, StoreTimeout
from proxy.store.backend import CopyThreads
from proxy.store.gate import MAX_CALLS, CallGate


def open_gate() -> CallGate:
    """Return a gate that lets calls in."""
    gate = CallGate()
    gate.open()
    return gate


def test_a_gate_returns_what_its_call_returns() -> None:
    """Results and errors of calls pass through."""
    gate = open_gate()
    assert gate.run(lambda: 7, timeout_seconds=5) == 7
    with pytest.raises(ZeroDivisionError):
        gate.run(lambda: 1 // 0, timeout_seconds=5)
    assert gate.num_inside == 0


def test_a_shut_gate_fails_calls_at_once() -> None:
    """Before it opens, and after it was shut, calls fail with the reason."""
    gate = CallGate()
    with pytest.raises(StoreError, match="not started"):
        gate.run(lambda: 7, timeout_seconds=5)
    gate.open()
    gate.fail_all("the master died")
    assert gate.shut_reason == "the master died"
    with pytest.raises(StoreError, match="master died"):
        gate.run(lambda: 7, timeout_seconds=5)


def test_hanging_calls_fail_together_and_are_left_behind() -> None:
    """After `fail_all` a gate that opens again works, whatever still hangs."""
    gate, release = open_gate(), threading.Event()
    with ThreadPoolExecutor(MAX_CALLS) as callers:
        hanging = [
            callers.submit(gate.run, release.wait, timeout_seconds=30)
            for _ in range(MAX_CALLS)
        ]
        while gate.num_inside < MAX_CALLS:
            time.sleep(0.001)
        started = time.monotonic()
        with pytest.raises(StoreError, match="too many"):
            gate.run(lambda: 7, timeout_seconds=5)
        gate.fail_all("frozen")
        for call in hanging:
            with pytest.raises(StoreError, match="frozen"):
                call.result(timeout=1)
        assert time.monotonic() - started < 1
        assert gate.num_inside == MAX_CALLS
        gate.open()
        assert gate.run(lambda: 7, timeout_seconds=5) == 7
        release.set()
        while gate.num_inside:
            time.sleep(0.001)


def test_a_call_past_its_time_is_given_up() -> None:
    """Its caller goes on; the place it holds is free when it comes back."""
    gate, release = open_gate(), threading.Event()
    started = time.monotonic()
    with pytest.raises(StoreTimeout):
        gate.run(release.wait, timeout_seconds=0.05)
    assert time.monotonic() - started < 1
    assert gate.num_inside == 1
    release.set()
    while gate.num_inside:
        time.sleep(0.001)
    assert not gate.wait_for_call(0)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_copy_threads_do_everything_once(num_threads: int) -> None:
    """Each item is worked on by one thread; an error of one reaches the caller."""
    copy = CopyThreads(num_threads)
    for count in (0, 1, 2, 100):
        done: list[int] = []
        copy.for_each(iter(range(count)), done.append)
        assert sorted(done) == list(range(count))

    def fail(item: int) -> None:
        if item == 50:
            raise StoreError("no")

    with pytest.raises(StoreError, match="no"):
        copy.for_each(range(100), fail)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_copy_threads_keep_off_the_callers_cpu() -> None:
    """Helpers leave the caller its CPU, where there are others; it goes anywhere."""
    copy, caller = CopyThreads(3), threading.get_ident()
    allowed = os.sched_getaffinity(0)
    both_work = threading.Barrier(2)
    cpus: dict[bool, set[int]] = {}

    def work(_: int) -> None:
        both_work.wait(timeout=5)
        cpus[threading.get_ident() == caller] = os.sched_getaffinity(0)

    copy.for_each(range(2), work)
    assert cpus[True] == allowed
    assert len(cpus[False]) == max(1, len(allowed) - 1)
    assert cpus[False] <= allowed
