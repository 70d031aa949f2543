"""Who may use which slot, and what each slot is believed to hold.

Rules:
1. A slot has at most one lease. It is held from before a restore until the slot was
   saved, or the save was skipped or took too long.
2. Waiting requests are served in the order of their arrival.
3. A request gets the free slot that holds the longest prefix of its prompt; where
   none holds a hot one (`MIN_HOT_TOKENS`), one of the runner with the fewest leases;
   of those the slot that was used longest ago.
4. Slots of a runner that went away are forgotten; their leases end without effect.
5. All of it happens on the event loop, synchronously: no locks.
6. What a slot holds belongs to the namespace that its last turn was of. For turns of
   others it holds nothing.
7. Whoever wants all slots of a runner waits in the same line; those behind wait too.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from proxy.errors import KvbusError, RequestError, RunnerGone
from proxy.llamacpp.runner import Runner
from proxy.prefix.hashing import TokenIds, common_prefix_tokens

MAX_WAITING = 512
"""Ollama's own bound on pending requests (OLLAMA_MAX_QUEUE)."""

MIN_HOT_TOKENS = 64
"""Shorter common prefixes are the chat template's own words, which all prompts of a
model share: following them would send everything to one runner."""

NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence place of a runner. `token_ids` is a belief, not a promise."""

    runner: Runner
    slot_id: int
    token_ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    namespace: str | None = field(default="", repr=False)
    """None: what it holds must not be reused by anybody."""
    is_leased: bool = False
    last_used: int = 0
    boundaries: tuple[int, ...] | None = None
    """Where a memory that cannot be cut goes on from, in tokens, besides its end; None:
    the memory can be cut anywhere."""

    def forget(self) -> None:
        """Let nobody reuse what it holds, whatever that is."""
        self.namespace, self.token_ids = None, NO_TOKENS

    def hold(self, token_ids: TokenIds, boundaries: Iterable[int] = ()) -> None:
        """Note what it holds now, and where a memory with a tail can go back to."""
        self.token_ids = token_ids
        if self.boundaries is not None:
            held = {one for one in boundaries if 0 < one <= len(token_ids)}
            self.boundaries = tuple(sorted(held))

    def shared_tokens(self, token_ids: TokenIds, namespace: str) -> int:
        """Return how many leading tokens of a prompt it holds for a namespace."""
        if self.namespace != namespace:
            return 0
        shared = common_prefix_tokens(self.token_ids, token_ids)
        if self.boundaries is None or shared == len(self.token_ids):
            return shared
        return max((one for one in self.boundaries if one <= shared), default=0)


@dataclass(slots=True, eq=False)
class _Waiter:
    token_ids: TokenIds
    namespace: str = field(repr=False)
    granted: asyncio.Future[Sequence[Slot]]
    runner: Runner | None
    """Whose slots are wanted, all of them; None: any one slot."""


class SlotPool:
    """The slots of all runners of one model."""

    def __init__(self) -> None:
        # the mutable state
        self._slots: list[Slot] = []
        self._waiting: deque[_Waiter] = deque()
        self._clock = 0

    def __repr__(self) -> str:
        leased = sum(slot.is_leased for slot in self._slots)
        return (
            f"<SlotPool {leased}/{len(self._slots)} leased,"
            f" {len(self._waiting)} waiting>"
        )

    @property
    def slots(self) -> Sequence[Slot]:
        """All slots that can be leased or are."""
        return tuple(self._slots)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def add_runner(self, runner: Runner) -> None:
        """Take in the (empty) slots of a runner that became ready."""
        self.drop_runner(runner)
        sharing = runner.sharing
        can_cut = sharing is None or sharing.layout.can_be_cut
        boundaries = None if can_cut else ()
        self._slots += [
            Slot(runner, slot_id, boundaries=boundaries)
            for slot_id in range(runner.num_slots)
        ]
        self._grant()

    def drop_runner(self, runner: Runner) -> None:
        """Forget the slots of a runner that went away."""
        self._slots = [slot for slot in self._slots if slot.runner is not runner]
        self._grant()  # whoever wants all of its slots waits in vain

    def fail_waiting(self, error: KvbusError) -> None:
        """Give every waiting request `error`: no slot will come."""
        while self._waiting:
            granted = self._waiting.popleft().granted
            if not granted.done():
                granted.set_exception(error)

    async def lease(self, token_ids: TokenIds, namespace: str = "") -> Slot:
        """Wait for a slot for a prompt. Raises RequestError when too many wait."""
        (slot,) = await self._wait(token_ids, namespace, runner=None)
        return slot

    @asynccontextmanager
    async def lease_all(self, runner: Runner) -> AsyncIterator[Sequence[Slot]]:
        """Lease all slots of a runner, once none of them is leased, for the block.

        Raises RequestError when too many wait, RunnerGone when the runner went away.
        """
        slots = await self._wait(NO_TOKENS, "", runner=runner)
        if not slots:
            raise RunnerGone("it went away before its slots were free")
        try:
            yield slots
        finally:
            for slot in slots:
                slot.is_leased = False
            self._grant()

    async def _wait(
        self, token_ids: TokenIds, namespace: str, *, runner: Runner | None
    ) -> Sequence[Slot]:
        if len(self._waiting) >= MAX_WAITING:
            raise RequestError(
                503, "server busy, please try again.  maximum pending requests exceeded"
            )
        loop = asyncio.get_running_loop()
        waiter = _Waiter(token_ids, namespace, loop.create_future(), runner)
        self._waiting.append(waiter)
        self._grant()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.granted.cancelled() and not waiter.granted.exception():
                for slot in waiter.granted.result():
                    slot.is_leased = False
            self._grant()
            raise

    def lease_idle(self, slot: Slot) -> bool:
        """Lease this very slot if it is free now; tell whether it was."""
        if slot.is_leased or slot not in self._slots:
            return False
        slot.is_leased = True
        return True

    def release(self, slot: Slot) -> None:
        """End a lease. Twice is as good as once."""
        slot.is_leased = False
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            slots = self._choose(self._waiting[0])
            if slots is None:
                return
            granted = self._waiting.popleft().granted
            if granted.done():
                continue
            self._clock += 1
            for slot in slots:
                slot.is_leased = True
                slot.last_used = self._clock
            granted.set_result(slots)

    def _choose(self, waiter: _Waiter) -> Sequence[Slot] | None:
        """Return the slots for a waiter; None where it has to wait on."""
        if waiter.runner is not None:
            wanted = [slot for slot in self._slots if slot.runner is waiter.runner]
            return None if any(slot.is_leased for slot in wanted) else wanted
        free = [slot for slot in self._slots if not slot.is_leased]
        if not free:
            return None
        leases: dict[int, int] = {}
        for slot in self._slots:
            leases[id(slot.runner)] = leases.get(id(slot.runner), 0) + slot.is_leased

        def rank(slot: Slot) -> tuple[int, int, int]:
            shared = slot.shared_tokens(waiter.token_ids, waiter.namespace)
            is_hot = shared >= MIN_HOT_TOKENS
            return (-shared if is_hot else 0, leases[id(slot.runner)], slot.last_used)

        return [min(free, key=rank)]
