"""A real model decodes the same after a restore as in the slot that held it."""

from pathlib import Path

import pytest

from benchmarks.exactness import KV_FLAGS, run
from proxy.model_files import default_cache_dir, ensure_default_model


@pytest.fixture(scope="module")
def model() -> Path:
    """Give the default model, fetched once for this machine."""
    return ensure_default_model(default_cache_dir(), print)


@pytest.mark.parametrize("kv_type", list(KV_FLAGS))
def test_restored_and_hot_decode_alike(model: Path, kv_type: str) -> None:
    """In another process, all of the prefix is reused and the reply is the same."""
    trials = run(model, kv_type=kv_type, count=3, num_decoded=24)
    assert all(trial.is_exact for trial in trials), trials
    assert all(trial.num_restored_tokens >= 64 for trial in trials)
    assert {trial.num_decoded_tokens for trial in trials} == {24}
