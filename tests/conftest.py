"""What holds for all tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
REAL = ("e2e", "clients", "store", "llamacpp", "v1", "reuse", "test_benchmarks.py")
"""Where tests run real processes against the deadlines that users have."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Try a failed test of real processes once more; the summary lists each of them.

    A machine that stops for a second breaks such deadlines, rightly so. A test that
    fails twice in a row does so for another reason.
    """
    for item in items:
        if item.path.is_relative_to(ROOT) and (
            item.path.relative_to(ROOT).parts[0] in REAL
        ):
            item.add_marker(pytest.mark.flaky(reruns=1))
