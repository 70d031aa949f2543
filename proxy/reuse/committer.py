"""From a slot into the store, after the answer and behind its back.

Rules:
1. `commit` takes over the lease of a slot and ends it: when nothing is to be saved,
   when the engine has written the file, or when that takes longer than its bound.
2. A slot is saved only if at least one full block of it is not stored yet, or a tail
   was made for it, and only blocks that the store lacks are put; tails after them.
3. The token list in the file is the truth about the slot. A file that does not begin
   with what the slot is believed to hold, or is of another length, is not used.
4. All tasks belong to this owner; too many of them drop a commit, never a reply.
5. The model counts as used until the engine has written the file: its process must
   not be ended before.
6. Whoever needs a prefix that is on its way into the store can wait for it: an agent's
   next request comes within milliseconds of the answer, before the commit is done.
   The wait is bounded by what commits took so far, and one in vain is the last for
   `WAITS_OFF_SECONDS`.
"""

import asyncio
import logging
import mmap
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack

from proxy.blocks import BlockKey, BlockLayout, Fingerprint
from proxy.errors import ReuseError, RunnerGone, SlotError, StoreError
from proxy.llamacpp import state
from proxy.llamacpp.client import SavedSlot
from proxy.llamacpp.runner import Sharing
from proxy.llamacpp.slot_files import SaveFile
from proxy.metrics import Metrics
from proxy.prefix.hashing import (
    TokenIds,
    common_prefix_tokens,
    hash_blocks,
    tail_key,
)
from proxy.reuse.arbiter import Line
from proxy.reuse.plan import RequestedReuse
from proxy.reuse.slots import Slot, SlotPool
from proxy.reuse.snapshots import put_snapshot
from proxy.reuse.trace import CommitReport
from proxy.store.base import (
    NOTHING_PUT,
    BlockRef,
    BlockStore,
    PutOptions,
    PutOutcome,
)

logger = logging.getLogger(__name__)

MAX_PENDING_COMMITS = 16
MAX_CONCURRENT_PUTS = 2
CONTAINS_DEADLINE_SECONDS = 0.25
SAVE_TIMEOUT_SECONDS = 60.0
MIN_SAVE_BOUND_SECONDS = 0.5
SLOWEST_SAVE_BYTES_PER_SECOND = 200e6
"""A waiting request waits for a save at most size / this, or the minimum above."""
SLOWEST_PUT_BYTES_PER_SECOND = 50e6
LOOKUP_PATIENCE_SECONDS = 0.4
PUT_PATIENCE_SECONDS = 5.0
"""A store that was silent for a moment (a busy machine; memory being mounted) is waited
for by a commit, where a request would go on without it."""
WAIT_FACTOR = 1.5
MIN_WAIT_SECONDS = 0.05
LOOK_SECONDS = 0.05
WAITS_OFF_SECONDS = 30.0
MAX_UNEXPECTED_TOKENS = 2
"""By so much the saved tokens may differ from prompt + reply: the last sampled token
is not in the KV, and a stop string may end a reply one token early."""


class Committer:
    """Saves slots and puts their new blocks into the store."""

    def __init__(self, *, store: BlockStore | None, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        # the mutable state
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: set[_Commit] = set()
        self._puts = asyncio.Semaphore(MAX_CONCURRENT_PUTS)
        self._cost = Line(fixed=0.03, slope=1 / 1e9, weight=0.5, at=5e7)
        self._waits_off_until = 0.0

    def __repr__(self) -> str:
        return f"<Committer {len(self._tasks)} pending>"

    def commit(
        self,
        slot: Slot,
        pool: SlotPool,
        *,
        use: AbstractContextManager[None],
        sharing: Sharing,
        reuse: RequestedReuse,
        num_tokens: int,
        has_new_tails: bool = False,
    ) -> CommitReport:
        """Take over the lease of `slot`; store its new blocks if that is possible.

        `use` is entered for as long as the runner has to live. `num_tokens` is how
        many the slot holds; it may know fewer of their ids. `has_new_tails` tells that
        there is something to store besides blocks. What is returned is filled in when
        the commit has ended.
        """
        store = self._store
        if store is None or not store.is_available:
            pool.release(slot)
            return CommitReport("the store is away" if store else "no store")
        if len(self._tasks) >= MAX_PENDING_COMMITS:
            self._metrics.commits.labels("dropped").inc()
            pool.release(slot)
            return CommitReport("dropped")
        commit = _Commit(slot, pool, sharing, reuse, num_tokens)
        commit.has_new_tails = has_new_tails
        commit.use.enter_context(use)
        self._under_way.add(commit)
        task = asyncio.create_task(self._run(commit, store))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return commit.report

    def coming_tokens(
        self, token_ids: TokenIds, fingerprint: Fingerprint, *, is_patient: bool
    ) -> int:
        """Tell how many leading tokens, in whole blocks, are worth waiting for.

        Who is patient waits also where the last wait was in vain.
        """
        if not is_patient and time.monotonic() < self._waits_off_until:
            return 0
        commit = self._best_under_way(token_ids, fingerprint)
        return commit.shared_tokens(token_ids) if commit else 0

    async def wait_for(
        self,
        token_ids: TokenIds,
        fingerprint: Fingerprint,
        *,
        timeout_seconds: float,
        is_patient: bool,
    ) -> None:
        """Wait for the commit that `coming_tokens` speaks of.

        At most `timeout_seconds`, and, unless patient, not much longer than such a
        commit takes.
        """
        commit = self._best_under_way(token_ids, fingerprint)
        if commit is None:
            return
        spent = time.monotonic() - commit.started
        expected = WAIT_FACTOR * self._cost.predict(float(commit.num_bytes))
        bound = timeout_seconds
        if not is_patient:
            bound = min(bound, max(MIN_WAIT_SECONDS, expected - spent))
        try:
            async with asyncio.timeout(bound):
                await commit.done.wait()
        except TimeoutError:
            self._waits_off_until = time.monotonic() + WAITS_OFF_SECONDS

    def _best_under_way(
        self, token_ids: TokenIds, fingerprint: Fingerprint
    ) -> "_Commit | None":
        fitting = [c for c in self._under_way if c.fingerprint == fingerprint]
        return max(fitting, key=lambda c: c.shared_tokens(token_ids), default=None)

    async def drain(self, *, timeout_seconds: float) -> None:
        """Wait for the commits under way, at most so long, then cancel them."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout_seconds)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _run(self, commit: "_Commit", store: BlockStore) -> None:
        result = "cancelled"
        try:
            result = await self._save_and_put(commit, store)
        except (ReuseError, RunnerGone) as exc:
            result = "failed"
            self._metrics.failed_open.labels("commit").inc()
            logger.warning(
                "event=failed_open stage=commit runner=%s reason=%r",
                commit.slot.runner.runner_id,
                str(exc),
            )
        except Exception:
            result = "failed"
            logger.exception("event=commit.crashed")
        finally:
            commit.use.close()
            commit.release()
            self._under_way.discard(commit)
            commit.done.set()
            commit.report.result = result
            commit.report.seconds = time.monotonic() - commit.started
        self._metrics.commits.labels(result).inc()
        if result == "stored":
            seconds = time.monotonic() - commit.started
            self._cost.observe(float(commit.num_bytes), seconds)

    async def _save_and_put(self, commit: "_Commit", store: BlockStore) -> str:
        num_blocks = commit.num_tokens // commit.sharing.block_size
        if not num_blocks:
            return "nothing new"
        present = await self._present(commit, store)
        commit.report.present_blocks = sum(present)
        is_stored = all(present) and len(present) == num_blocks
        if is_stored and not commit.has_new_tails:
            return "nothing new"
        file = await self._save(commit)
        commit.use.close()
        commit.release()
        if file is None:
            return "too slow"
        try:
            async with self._puts:
                return await self._put(commit, store, file, present)
        finally:
            file.close()

    async def _present(self, commit: "_Commit", store: BlockStore) -> list[bool]:
        """Ask which of the known blocks are stored; a put asks again anyway."""
        keys = commit.keys(commit.expected)
        if not commit.sharing.layout.has_attention:
            return [True] * (commit.num_tokens // commit.sharing.block_size)
        try:
            return await store.contains(
                keys, deadline_seconds=CONTAINS_DEADLINE_SECONDS
            )
        except StoreError:
            if not await _comes_back(store, LOOKUP_PATIENCE_SECONDS):
                raise
            return [False] * len(keys)

    async def _save(self, commit: "_Commit") -> SaveFile | None:
        """Have the engine save the slot; None if that took longer than its bound."""
        runner, slot = commit.slot.runner, commit.slot
        name = runner.directory.new_name("save")
        bound = max(
            MIN_SAVE_BOUND_SECONDS, commit.num_bytes / SLOWEST_SAVE_BYTES_PER_SECOND
        )
        save = asyncio.ensure_future(
            runner.client.save_slot(
                slot.slot_id, name, timeout_seconds=SAVE_TIMEOUT_SECONDS
            )
        )
        saved: SavedSlot | None = None
        try:
            await asyncio.wait({save}, timeout=bound)
            if save.done():
                saved = save.result()
            else:
                commit.release()
                await save
        finally:
            save.cancel()
            if saved is None:
                await runner.directory.remove(name)
        if saved is None:
            return None
        self._metrics.phase.labels("save").observe(saved.seconds)
        runner.check_process()  # else it may be another one's KV that was saved
        return await runner.directory.open_saved(name, expected_bytes=saved.num_bytes)

    async def _put(
        self,
        commit: "_Commit",
        store: BlockStore,
        file: SaveFile,
        present: Sequence[bool],
    ) -> str:
        if commit.sharing.layout.is_opaque:
            outcome = await self._put_snapshot(commit, store, file)
        else:
            outcome = await self._put_parts(commit, store, file, present)
        if outcome == NOTHING_PUT:
            return "nothing new"
        report = commit.report
        report.stored_blocks = outcome.stored_blocks
        report.present_blocks += outcome.present_blocks
        report.failed_blocks = outcome.failed_blocks
        report.stored_bytes = outcome.stored_bytes
        self._metrics.committed_bytes.inc(outcome.stored_bytes)
        return "refused" if outcome.failed_blocks else "stored"

    async def _put_snapshot(
        self, commit: "_Commit", store: BlockStore, file: SaveFile
    ) -> PutOutcome:
        layout, token_ids = await asyncio.to_thread(_read_tokens, file)
        commit.check_tokens(token_ids)
        keys = commit.keys(token_ids)
        if not keys or layout.digest_fields() != commit.sharing.layout.digest_fields():
            return NOTHING_PUT
        return await put_snapshot(
            store,
            file.fd,
            file.size,
            token_ids,
            keys[-1],
            fingerprint=commit.fingerprint,
            deadline_seconds=2.0 + file.size / SLOWEST_PUT_BYTES_PER_SECOND,
            options=commit.options,
        )

    async def _put_parts(
        self,
        commit: "_Commit",
        store: BlockStore,
        file: SaveFile,
        present: Sequence[bool],
    ) -> PutOutcome:
        parsed = await asyncio.to_thread(_parse, file, commit.sharing.window_tokens)
        commit.check(parsed)
        if commit.slot.token_ids is commit.expected:  # not used since: now we know
            commit.slot.hold(parsed.token_ids, parsed.tails)
        keys = commit.keys(parsed.token_ids)
        num_known = len(present)
        outcome = NOTHING_PUT
        if commit.sharing.layout.has_attention:
            blocks = [
                BlockRef(key, index)
                for index, key in enumerate(keys)
                if index >= num_known or not present[index]
            ]
            layout = state.block_layout(parsed, commit.sharing.block_size)
            outcome = await _put_patiently(commit, store, file, layout, blocks)
        for num_blocks, place in commit.tails(parsed):
            outcome += await _put_patiently(
                commit,
                store,
                file,
                state.payload_layout(*place),
                [BlockRef(tail_key(keys[num_blocks - 1]), 0)],
            )
        return outcome


async def _put_patiently(
    commit: "_Commit",
    store: BlockStore,
    file: SaveFile,
    layout: BlockLayout,
    blocks: Sequence[BlockRef],
) -> PutOutcome:
    """Put blocks of one layout; once more where the store was silent for a moment."""
    if not blocks:
        return NOTHING_PUT
    num_bytes = len(blocks) * layout.block_bytes

    def put() -> Awaitable[PutOutcome]:
        return store.put_from(
            file.fd,
            layout,
            blocks,
            fingerprint=commit.fingerprint,
            deadline_seconds=2.0 + num_bytes / SLOWEST_PUT_BYTES_PER_SECOND,
            options=commit.options,
        )

    try:
        return await put()
    except StoreError:
        if not await _comes_back(store, PUT_PATIENCE_SECONDS):
            raise
        outcome = await put()
        # What the first one has stored is present now.
        return PutOutcome(
            outcome.stored_blocks + outcome.present_blocks,
            0,
            outcome.failed_blocks,
            outcome.stored_bytes + outcome.present_blocks * layout.block_bytes,
        )


class _Commit:
    """One slot on its way into the store."""

    def __init__(
        self,
        slot: Slot,
        pool: SlotPool,
        sharing: Sharing,
        reuse: RequestedReuse,
        num_tokens: int,
    ) -> None:
        self.num_tokens = num_tokens
        self.num_bytes = num_tokens * sharing.layout.kv_bytes_per_token
        self.started = time.monotonic()
        self.slot = slot
        self.sharing = sharing
        self.fingerprint = sharing.fingerprint(reuse.namespace)
        self.options = PutOptions(
            replica_num=reuse.replica_num, soft_pin=reuse.soft_pin
        )
        self.report = CommitReport()
        self.expected = slot.token_ids
        self.has_new_tails = False
        self.done = asyncio.Event()
        self.use = ExitStack()
        self._pool: SlotPool | None = pool

    def release(self) -> None:
        """End the lease, once: the slot may be somebody else's after that."""
        if self._pool is not None:
            self._pool.release(self.slot)
            self._pool = None

    def shared_tokens(self, token_ids: TokenIds) -> int:
        """Return how many leading tokens of a prompt it stores, in whole blocks."""
        shared = common_prefix_tokens(self.expected, token_ids)
        return shared // self.sharing.block_size * self.sharing.block_size

    def keys(self, token_ids: TokenIds) -> list[BlockKey]:
        """Return the keys of the full blocks of `token_ids`."""
        return hash_blocks(
            token_ids,
            block_size=self.sharing.block_size,
            fingerprint=self.fingerprint,
        )

    def tails(self, parsed: state.ParsedState) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the tails at the ends of blocks: how many blocks, place in the file."""
        for num_tokens, place in parsed.tails.items():
            num_blocks, rest = divmod(num_tokens, self.sharing.block_size)
            if not rest:
                yield num_blocks, place

    def check_tokens(self, token_ids: TokenIds) -> None:
        """Raise SlotError unless these are what the slot should hold."""
        expected = self.expected
        shared = common_prefix_tokens(token_ids, expected)
        missing = len(expected) - shared
        off = abs(len(token_ids) - self.num_tokens)
        if max(missing, off) > MAX_UNEXPECTED_TOKENS:
            raise SlotError(
                f"the saved slot holds {len(token_ids)} tokens instead of"
                f" {self.num_tokens}; {shared} of {len(expected)} known ones agree"
            )

    def check(self, parsed: state.ParsedState) -> None:
        """Raise SlotError unless the file holds what the slot should hold."""
        self.check_tokens(parsed.token_ids)
        if parsed.num_media or not parsed.is_contiguous:
            raise SlotError("the saved cells are not one plain run of tokens")
        if parsed.layout.digest_fields() != self.sharing.layout.digest_fields():
            raise SlotError("the saved file has another layout than the runner's")


async def _comes_back(store: BlockStore, patience_seconds: float) -> bool:
    """Wait until the store can be used again, at most so long; tell whether it can."""
    deadline = time.monotonic() + patience_seconds
    while not store.is_available and time.monotonic() < deadline:  # noqa: ASYNC110 - a store has no event for it
        await asyncio.sleep(LOOK_SECONDS)
    return store.is_available


def _read_tokens(file: SaveFile) -> tuple[state.StateLayout, TokenIds]:
    with mmap.mmap(file.fd, file.size, prot=mmap.PROT_READ) as view:
        return state.read_tokens(view, file.size)


def _parse(file: SaveFile, window_tokens: int) -> state.ParsedState:
    with mmap.mmap(file.fd, file.size, prot=mmap.PROT_READ) as view:
        return state.parse(view, file.size, window_tokens=window_tokens)
