"""Block keys: chained, stable, and only of full blocks."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from proxy.blocks import Fingerprint
from proxy.prefix.hashing import common_prefix_tokens, hash_blocks, leading_true

FINGERPRINT = Fingerprint(bytes(range(32)))
PINNED = ["5b731a3ce80f5ab7", "f92cf24eefec3d12"]
IDS = st.lists(st.integers(0, 3), max_size=40).map(
    lambda ids: np.array(ids, dtype=np.int32)
)


@given(IDS, IDS, st.integers(1, 8))
def test_equal_keys_mean_equal_prefixes(
    one: np.ndarray, other: np.ndarray, block_size: int
) -> None:
    """As many leading keys are equal as whole blocks of the common prefix."""
    keys = [
        hash_blocks(ids, block_size=block_size, fingerprint=FINGERPRINT)
        for ids in (one, other)
    ]
    shared = common_prefix_tokens(one, other) // block_size
    equal = [a == b for a, b in zip(*keys, strict=False)]
    assert leading_true(equal) == min(shared, len(equal))
    assert len(keys[0]) == len(one) // block_size
    assert not any(equal[shared:])


@given(IDS, IDS)
def test_common_prefix_agrees_with_a_loop(one: np.ndarray, other: np.ndarray) -> None:
    """The vectorised count equals the obvious one."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    assert common_prefix_tokens(one, other) == count


def test_keys_are_pinned() -> None:
    """Keys stay what they were: stores outlive versions of the code."""
    ids = np.array([1, 2, 3, 4, -1, 2**31 - 1], dtype=np.int32)
    keys = hash_blocks(ids, block_size=3, fingerprint=FINGERPRINT)
    assert [key.hex()[:16] for key in keys] == PINNED


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    """Two processes with different PYTHONHASHSEED make the same keys."""
    code = (
        "import numpy as np\n"
        "from proxy.prefix.hashing import hash_blocks\n"
        "ids = np.arange(64, dtype=np.int32)\n"
        "keys = hash_blocks(ids, block_size=16, fingerprint=bytes(32))\n"
        "print(keys[-1].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_another_fingerprint_shares_nothing() -> None:
    """Keys of two models, or namespaces, never meet."""
    ids = np.arange(32, dtype=np.int32)
    mine = hash_blocks(ids, block_size=8, fingerprint=FINGERPRINT)
    other = hash_blocks(ids, block_size=8, fingerprint=Fingerprint(bytes(32)))
    assert not set(mine) & set(other)
