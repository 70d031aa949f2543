"""From the store into a slot: a slot file is composed, filled, and loaded.

Rules:
1. The file is used again only where it is certain that nobody writes to it or reads
   it any more.
2. A restore that fails leaves the slot empty, and that is what is believed of it.
3. What it took is learned from, also where it was given up.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from proxy.blocks import BlockKey, BlockLayout, Fingerprint
from proxy.errors import SlotError, StoreError, StoreTimeout
from proxy.llamacpp import state
from proxy.llamacpp.runner import Sharing
from proxy.llamacpp.slot_files import RestoreFile
from proxy.metrics import Metrics
from proxy.prefix.hashing import TokenIds, tail_key
from proxy.reuse.arbiter import CostModel
from proxy.reuse.plan import RestoreMode
from proxy.reuse.slots import NO_TOKENS, Slot
from proxy.reuse.snapshots import Snapshot
from proxy.reuse.turn import ActiveTurn
from proxy.store.base import BlockRef, BlockStore

MIN_FETCH_DEADLINE_SECONDS = 0.1
FETCH_DEADLINE_FACTOR = 1.5
"""A fetch is given up when it takes this much longer than predicted."""

ALWAYS_FETCH_DEADLINE_SECONDS = 5.0
"""Who wants a restore whatever it costs waits longer for it."""

RESTORE_TIMEOUT_SECONDS = 30.0

END_MARK = bytes(16)
"""Written behind a state: what an earlier one has left there is no part of it."""


class Restorer:
    """Brings stored blocks into slots."""

    def __init__(
        self, *, store: BlockStore, metrics: Metrics, mode: RestoreMode
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._patience = (
            ALWAYS_FETCH_DEADLINE_SECONDS
            if mode is RestoreMode.ALWAYS
            else MIN_FETCH_DEADLINE_SECONDS
        )

    async def restore(
        self,
        turn: ActiveTurn,
        sharing: Sharing,
        fingerprint: Fingerprint,
        keys: Sequence[BlockKey],
        costs: CostModel,
    ) -> None:
        """Put the tokens of `keys` into the slot. Raises SlotError, StoreError."""
        layout, num_tokens = sharing.layout, len(keys) * sharing.block_size
        num_bytes = state.file_bytes(layout, num_tokens)

        def fetch(fd: int, deadline_seconds: float) -> Coroutine[Any, Any, list[bool]]:
            return fetch_state(
                self._store,
                fd,
                sharing,
                keys,
                fingerprint=fingerprint,
                deadline_seconds=deadline_seconds,
            )

        frame = state.frame_parts(layout, turn.request.token_ids[:num_tokens])
        await self._restore(turn, num_tokens, num_bytes, frame, fetch, costs)

    async def restore_snapshot(
        self,
        turn: ActiveTurn,
        fingerprint: Fingerprint,
        snapshot: Snapshot,
        costs: CostModel,
    ) -> None:
        """Put a whole slot file into the slot. Raises SlotError, StoreError."""
        num_tokens, num_bytes = snapshot.num_tokens, snapshot.num_bytes

        def fetch(fd: int, deadline_seconds: float) -> Coroutine[Any, Any, list[bool]]:
            return self._store.get_into(
                fd,
                state.payload_layout(0, num_bytes),
                [BlockRef(snapshot.key, 0)],
                fingerprint=fingerprint,
                deadline_seconds=deadline_seconds,
            )

        await self._restore(turn, num_tokens, num_bytes, [], fetch, costs)

    async def _restore(
        self,
        turn: ActiveTurn,
        num_tokens: int,
        num_bytes: int,
        frame: Iterable[tuple[int, bytes]],
        fetch: Callable[[int, float], Coroutine[Any, Any, list[bool]]],
        costs: CostModel,
    ) -> None:
        slot, trace = turn.slot, turn.trace
        directory = slot.runner.directory
        token_ids = turn.request.token_ids[:num_tokens]
        file = await directory.acquire(num_bytes + len(END_MARK))
        is_reusable = False
        started = time.monotonic()
        predicted = costs.fetch(num_bytes)
        patience = max(self._patience, FETCH_DEADLINE_FACTOR * predicted)
        try:
            with trace.stage("fetch"):
                arrived = await fill(
                    file,
                    [*frame, (num_bytes, END_MARK)],
                    fetch(file.fd, patience),
                )
            fetched = time.monotonic()
            if not all(arrived):
                is_reusable = True
                raise StoreError("a block was gone, damaged or of another model")
            with trace.stage("restore"):
                await _load_slot(slot, file.name, token_ids)
            turn.take_slot()
            loaded = time.monotonic()
            is_reusable = True
        except StoreTimeout:
            spent = time.monotonic() - started
            costs.observe_failed_fetch(num_bytes, spent, now=time.monotonic())
            raise
        finally:
            if is_reusable:
                await directory.release(file)
            else:  # the store may still be writing to it, or the engine reading it
                await directory.discard(file)
        trace.restored_tokens, trace.restored_bytes = num_tokens, num_bytes
        self._metrics.restored_bytes.inc(num_bytes)
        costs.observe_restore(
            num_bytes,
            fetch_seconds=fetched - started,
            load_seconds=loaded - fetched,
            now=loaded,
        )


async def fetch_state(
    store: BlockStore,
    fd: int,
    sharing: Sharing,
    keys: Sequence[BlockKey],
    *,
    fingerprint: Fingerprint,
    deadline_seconds: float,
) -> list[bool]:
    """Have the rows of the blocks `keys` filled in, and the tail at their end, if any.

    Returns what has arrived. Raises StoreError; the store may then still be writing.
    """
    layout, num_tokens = sharing.layout, len(keys) * sharing.block_size

    def get(places: BlockLayout, blocks: Sequence[BlockRef]) -> Awaitable[list[bool]]:
        return store.get_into(
            fd,
            places,
            blocks,
            fingerprint=fingerprint,
            deadline_seconds=deadline_seconds,
        )

    gets = []
    if layout.has_attention:
        places = state.block_layout_for(
            layout, num_tokens, block_size=sharing.block_size
        )
        gets.append(get(places, [BlockRef(key, i) for i, key in enumerate(keys)]))
    tail_bytes = state.payload_bytes(layout, num_tokens)
    for place in state.tail_frame(layout, num_tokens).places:
        tail = BlockRef(tail_key(keys[-1]), 0)
        gets.append(get(state.payload_layout(place, tail_bytes), [tail]))
    answers = await asyncio.gather(*gets)
    return [is_there for answer in answers for is_there in answer]


async def fill(
    file: RestoreFile,
    frame: Iterable[tuple[int, bytes]],
    fetch: Coroutine[Any, Any, list[bool]],
) -> list[bool]:
    """Fetch blocks into a file, and write its frame while they come.

    Returns which blocks have arrived. Raises SlotError, StoreError.
    """
    fetching = asyncio.ensure_future(fetch)
    try:
        await asyncio.sleep(0)  # in which the store is asked
        file.write(frame)
        return await fetching
    finally:
        fetching.cancel()


async def _load_slot(slot: Slot, name: str, token_ids: TokenIds) -> None:
    slot.runner.check_process()
    slot.hold(NO_TOKENS)  # a restore that fails empties the slot
    claimed = await slot.runner.client.restore_slot(
        slot.slot_id, name, timeout_seconds=RESTORE_TIMEOUT_SECONDS
    )
    if claimed != len(token_ids):
        raise SlotError(f"the engine restored {claimed} of {len(token_ids)} tokens")
    slot.hold(token_ids, [len(token_ids)])
