"""The tiers: who may be asked when the tier above is in trouble."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from proxy.blocks import BlockKey
from proxy.errors import StoreError
from proxy.store.backend import Transfer
from proxy.store.base import BlockRef
from proxy.store.gate import CallGate
from proxy.store.tiers import Tier, TieredBackend

BLOCKS = (BlockRef(BlockKey(bytes(32)), 0),)


class HangingRam:
    """A RAM tier whose reads hang inside of a real gate, until they are let go."""

    def __init__(self) -> None:
        self.gate = CallGate()
        self.gate.open()
        self.inside = threading.Event()
        self.may_go_on = threading.Event()
        self.wrote_late = threading.Event()

    def get(self, transfer: Transfer) -> list[bool]:
        """Hang, then write to the slot file as a thawed thread does."""

        def read() -> list[bool]:
            self.inside.set()
            self.may_go_on.wait(10)
            self.wrote_late.set()
            return [True]

        return self.gate.run(read, timeout_seconds=10.0)

    def close(self) -> None:
        """Let a hanging read end."""
        self.may_go_on.set()


class FullDisk:
    """A disk tier that has everything."""

    def __init__(self) -> None:
        self.reads = 0

    def get(self, transfer: Transfer) -> list[bool]:
        """Fill all places."""
        self.reads += 1
        return [True] * len(transfer.blocks)

    def contains(self, keys: Any) -> list[bool]:  # noqa: ANN401
        """Tell that all is there."""
        return [True] * len(keys)

    def read_object(self, key: BlockKey) -> None:
        """Have nothing to move."""

    def close(self) -> None:
        """Hold nothing."""


class AnyTransfer:
    """As much of a transfer as the tiers look at."""

    blocks = BLOCKS
    is_given_up = False
    give_up_at = time.monotonic() + 60

    def only(self, blocks: tuple[BlockRef, ...]) -> "AnyTransfer":
        """Return the same for some of the blocks."""
        return self


def test_a_read_that_may_still_write_is_not_answered_from_disk() -> None:
    """The call fails, so that its slot file is not used again; the next is served."""
    ram, disk = HangingRam(), FullDisk()
    ram_tier: Any = ram
    disk_tier: Any = disk
    tiers = TieredBackend(cast(Tier, ram_tier), cast(Tier, disk_tier))
    transfer = cast(Transfer, AnyTransfer())
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(tiers.get, transfer)
        assert ram.inside.wait(5)
        ram.gate.fail_all("the master is frozen")
        with pytest.raises(StoreError, match="frozen"):
            call.result(5)
        assert disk.reads == 0
        assert not ram.wrote_late.is_set()
        assert tiers.get(transfer) == [True]  # the gate is shut: nothing is begun
        assert disk.reads == 1
    tiers.close()
    assert ram.wrote_late.wait(5)
