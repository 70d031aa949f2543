"""The arbiter: its predictions, and each branch of its decision."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.reuse.arbiter import CostModel, Line, decide
from proxy.reuse.plan import Decision, Lookup, RestoreMode

BYTES = 36_864


def lookup(*, prompt: int = 2000, slot: int = 0, stored: int = 1920) -> Lookup:
    """Return what was found for a prompt."""
    return Lookup(
        prompt_tokens=prompt,
        slot_tokens=slot,
        stored_tokens=stored,
        stored_bytes=stored * BYTES,
    )


def costs(*, prefill: float, restore: float) -> CostModel:
    """Return a model that has seen these rates: tokens/s and bytes/s."""
    model = CostModel()
    for n in (500, 1000, 2000):
        for _ in range(6):
            model.observe_prefill(n, n / prefill)
            size = n * BYTES
            model.observe_restore(
                size,
                fetch_seconds=size / restore / 2,
                load_seconds=size / restore / 2,
                now=100.0,
            )
    return model


@pytest.mark.parametrize(
    ("found", "rates", "mode", "decision"),
    [
        (lookup(stored=0), (1e2, 1e9), RestoreMode.ALWAYS, Decision.RECOMPUTE),
        (lookup(slot=1920), (1e2, 1e9), RestoreMode.ALWAYS, Decision.KEEP_SLOT),
        (lookup(), (1e2, 1e9), RestoreMode.NEVER, Decision.RECOMPUTE),
        (lookup(slot=64), (1e2, 1e9), RestoreMode.NEVER, Decision.KEEP_SLOT),
        (lookup(), (1e6, 1e5), RestoreMode.ALWAYS, Decision.RESTORE),
        (lookup(), (1e2, 1e9), RestoreMode.AUTO, Decision.RESTORE),
        (lookup(slot=1900), (1e4, 1e8), RestoreMode.AUTO, Decision.KEEP_SLOT),
        (lookup(), (1e6, 1e6), RestoreMode.AUTO, Decision.RECOMPUTE),
    ],
)
def test_each_branch(
    found: Lookup,
    rates: tuple[float, float],
    mode: RestoreMode,
    decision: Decision,
) -> None:
    """The decision is the one that the module's list of rules names."""
    model = costs(prefill=rates[0], restore=rates[1])
    plan = decide(found, costs=model, mode=mode, now=100.0)
    assert plan.decision is decision
    restores = decision is Decision.RESTORE
    assert plan.restore_tokens == (found.stored_tokens if restores else 0)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e5)), max_size=30),
    st.floats(0, 1e10),
)
def test_predictions_are_never_negative(
    seen: list[tuple[float, float]], x: float
) -> None:
    """Whatever was observed, a prediction is finite and at least 0."""
    line = Line(fixed=0.01, slope=1e-6, weight=0.5, at=1000.0)
    for amount, seconds in seen:
        line.observe(amount, seconds)
    assert 0.0 <= line.predict(x) < float("inf")


def test_a_tenfold_change_is_learned_within_ten_observations() -> None:
    """Old observations fade: predictions follow within a quarter of the truth."""
    line = Line(fixed=0.0, slope=1e-3, weight=1.0, at=100.0)
    for n in (100, 200, 300, 400, 500) * 3:
        line.observe(n, n * 1e-3)
    for n in (100, 200, 300, 400, 500) * 2:
        line.observe(n, n * 1e-2)
    assert line.predict(300.0) == pytest.approx(3.0, rel=0.25)


def test_a_slow_store_is_declined_and_later_tried_again() -> None:
    """A restore that was dear is avoided, and gets its second chance with time."""
    model = costs(prefill=2000.0, restore=1e9)
    size = 1920 * BYTES
    for _ in range(3):
        model.observe_failed_fetch(size, 3.0, now=100.0)
    early = decide(lookup(), costs=model, mode=RestoreMode.AUTO, now=101.0)
    late = decide(lookup(), costs=model, mode=RestoreMode.AUTO, now=250.0)
    assert (early.decision, late.decision) == (Decision.RECOMPUTE, Decision.RESTORE)
