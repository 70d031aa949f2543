"""The order of the steps of a turn: lease, lookup, prepare, forward, commit.

Rules:
1. Sharing KV never fails a request. What goes wrong with it is caught here, in
   `_prepare`, and in the background commit, counted by stage, and the request goes on
   without it.
2. A slot is leased from before its restore until its save ended, was skipped, or took
   longer than its bound. What is read from a saved file happens after the lease.
3. What a restore was worth is what the engine says (`cache_n`), not what was put in.
   A runner that twice in a row reused less is not restored into any more.
4. An answer that is incomplete, or whose context was shifted, is never committed.
"""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from proxy.blocks import BlockKey, Fingerprint
from proxy.errors import (
    KvbusError,
    ReuseError,
    RunnerGone,
    SlotError,
    StoreError,
    StoreTimeout,
    UpstreamError,
)
from proxy.llamacpp import state
from proxy.llamacpp.runner import Sharing
from proxy.llamacpp.totals import EngineTotals
from proxy.metrics import Metrics
from proxy.prefix.hashing import (
    TokenIds,
    common_prefix_tokens,
    hash_blocks,
    leading_true,
)
from proxy.reuse.arbiter import CostModel, decide
from proxy.reuse.committer import Committer
from proxy.reuse.models import Model, ModelCatalog
from proxy.reuse.plan import (
    Decision,
    Lookup,
    RequestedTurn,
    RestoreMode,
    ReuseOutcome,
    ReusePlan,
)
from proxy.reuse.slots import NO_TOKENS, Slot
from proxy.reuse.trace import TurnTrace
from proxy.reuse.turn import ActiveTurn
from proxy.store.base import BlockRef, BlockStore

logger = logging.getLogger("proxy.turn")

LOOKUP_DEADLINE_SECONDS = 0.08
"""A store that is away or hung may cost one request at most 0.1 s, once."""

MIN_FETCH_DEADLINE_SECONDS = 0.1
FETCH_DEADLINE_FACTOR = 1.5
"""A fetch is given up when it takes this much longer than predicted."""

RESTORE_TIMEOUT_SECONDS = 30.0
MAX_INEFFECTIVE_RESTORES = 2


class Orchestrator:
    """Serves turns; the one place where sharing is decided and may fail."""

    def __init__(
        self,
        *,
        catalog: ModelCatalog,
        store: BlockStore | None,
        mode: RestoreMode,
        metrics: Metrics,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._mode = mode
        self._metrics = metrics
        self._committer = Committer(store=store, metrics=metrics)
        # the mutable state
        self._ineffective: dict[str, int] = {}

    async def drain(self, *, timeout_seconds: float) -> None:
        """Finish the commits that are under way, or give them up."""
        await self._committer.drain(timeout_seconds=timeout_seconds)

    @asynccontextmanager
    async def turn(self, request: RequestedTurn) -> AsyncIterator[ActiveTurn]:
        """Wait for a slot, restore into it what is worth it; commit and free it after.

        Raises UpstreamError when no runner comes up, RequestError when too many wait.
        """
        model = self._catalog.resolve(request.model.name)
        assert model is not None, "the front resolves names in the same catalog"
        trace = TurnTrace(
            request_id=secrets.token_hex(8),
            model=model.name,
            route=request.route,
            prompt_tokens=len(request.token_ids),
        )
        slot = await _lease(model, request, trace)
        turn = ActiveTurn(request, slot, trace, trace.stages["load"])
        try:
            trace.runner_id, trace.slot_id = slot.runner.runner_id, slot.slot_id
            await self._prepare(turn, model.costs(slot.runner))
            yield turn
        except RunnerGone as exc:
            trace.result = "runner gone"
            if not await slot.runner.client.is_healthy():
                slot.runner.report_lost(str(exc))
            raise
        except Exception:
            trace.result = "failed"
            raise
        finally:
            self._finish(turn, model)

    async def _prepare(self, turn: ActiveTurn, costs: CostModel) -> None:
        """Decide and, if worth it, restore. Fails open."""
        trace, slot = turn.trace, turn.slot
        token_ids = turn.request.token_ids
        trace.slot_tokens = common_prefix_tokens(slot.token_ids, token_ids)
        try:
            trace.plan = await self._plan_and_restore(turn, costs)
        except Exception as exc:  # a defect of ours fails no request either
            stage = _stage_of(exc)
            self._metrics.failed_open.labels(stage).inc()
            logger.warning(
                "event=failed_open id=%s runner=%s stage=%s reason=%r",
                trace.request_id,
                trace.runner_id,
                stage,
                str(exc),
                exc_info=None if isinstance(exc, KvbusError) else exc,
            )
            is_hot = common_prefix_tokens(slot.token_ids, token_ids) > 0
            trace.plan = ReusePlan(
                decision=Decision.KEEP_SLOT if is_hot else Decision.RECOMPUTE,
                reason=f"{stage} failed",
            )
        # from here on the slot's old contents beyond the common prefix are gone
        shared = common_prefix_tokens(slot.token_ids, token_ids)
        slot.token_ids = slot.token_ids[:shared]
        self._metrics.decisions.labels(trace.plan.decision, trace.plan.reason).inc()

    async def _plan_and_restore(self, turn: ActiveTurn, costs: CostModel) -> ReusePlan:
        trace, slot, request = turn.trace, turn.slot, turn.request
        sharing = slot.runner.sharing
        refusal = self._refusal(request, sharing)
        if refusal or sharing is None or self._store is None:
            is_hot = trace.slot_tokens > 0
            return ReusePlan(
                decision=Decision.KEEP_SLOT if is_hot else Decision.RECOMPUTE,
                reason=refusal,
            )
        fingerprint = sharing.fingerprint(request.reuse.namespace)
        keys = hash_blocks(
            request.token_ids, block_size=sharing.block_size, fingerprint=fingerprint
        )
        stored = 0
        if len(keys) * sharing.block_size > trace.slot_tokens:
            await self._wait_for_commit(turn, fingerprint, costs)
            with trace.stage("lookup"):
                found = await self._store.contains(
                    keys, deadline_seconds=LOOKUP_DEADLINE_SECONDS
                )
            stored = leading_true(found) * sharing.block_size
        plan = decide(
            Lookup(
                prompt_tokens=trace.prompt_tokens,
                slot_tokens=trace.slot_tokens,
                stored_tokens=stored,
                kv_bytes_per_token=sharing.layout.kv_bytes_per_token,
            ),
            costs=costs,
            mode=self._mode,
            now=time.monotonic(),
        )
        self._count_lookup(plan, stored=stored, slot_tokens=trace.slot_tokens)
        if plan.decision is Decision.RESTORE:
            trace.plan = plan
            num_blocks = plan.restore_tokens // sharing.block_size
            await self._restore(turn, sharing, fingerprint, keys[:num_blocks], costs)
        return plan

    async def _wait_for_commit(
        self, turn: ActiveTurn, fingerprint: Fingerprint, costs: CostModel
    ) -> None:
        """Wait for a prefix that is just being stored, if computing it takes longer."""
        token_ids, trace = turn.request.token_ids, turn.trace
        coming = self._committer.coming_tokens(token_ids, fingerprint)
        gain = coming - trace.slot_tokens
        if gain > 0 and self._mode is not RestoreMode.NEVER:
            with trace.stage("wait"):
                await self._committer.wait_for(
                    token_ids, fingerprint, timeout_seconds=costs.prefill(gain)
                )

    def _refusal(self, request: RequestedTurn, sharing: Sharing | None) -> str:
        if self._store is None:
            return "no store"
        if not request.reuse.read:
            return "the request forbids restores"
        if sharing is None:
            return "the runner's KV is not shared"
        if not self._store.is_available:
            return "the store is away"
        return ""

    def _count_lookup(self, plan: ReusePlan, *, stored: int, slot_tokens: int) -> None:
        if plan.decision is Decision.RESTORE:
            result = "hit"
        else:
            result = "declined" if stored > slot_tokens else "miss"
        self._metrics.lookups.labels(result).inc()

    async def _restore(
        self,
        turn: ActiveTurn,
        sharing: Sharing,
        fingerprint: Fingerprint,
        keys: Sequence[BlockKey],
        costs: CostModel,
    ) -> None:
        """Put the tokens of `keys` into the slot. Raises SlotError, StoreError."""
        slot, trace = turn.slot, turn.trace
        assert self._store is not None
        directory = slot.runner.directory
        num_tokens = len(keys) * sharing.block_size
        token_ids = turn.request.token_ids[:num_tokens]
        num_bytes = state.file_bytes(sharing.layout, num_tokens)
        file = await directory.acquire(num_bytes)
        is_reusable = False
        started = time.monotonic()
        predicted = costs.fetch(num_bytes)
        try:
            file.write(state.frame_parts(sharing.layout, token_ids))
            with trace.stage("fetch"):
                arrived = await self._store.get_into(
                    file.fd,
                    state.block_layout_for(
                        sharing.layout, num_tokens, block_size=sharing.block_size
                    ),
                    [BlockRef(key, index) for index, key in enumerate(keys)],
                    fingerprint=fingerprint,
                    deadline_seconds=max(
                        MIN_FETCH_DEADLINE_SECONDS, FETCH_DEADLINE_FACTOR * predicted
                    ),
                )
            fetched = time.monotonic()
            if not all(arrived):
                is_reusable = True
                raise StoreError("a block was gone, damaged or of another model")
            with trace.stage("restore"):
                await self._load_slot(slot, file.name, token_ids)
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
        trace.restored_tokens = num_tokens
        self._metrics.restored_bytes.inc(num_bytes)
        costs.observe_restore(
            num_bytes,
            fetch_seconds=fetched - started,
            load_seconds=loaded - fetched,
            now=loaded,
        )

    async def _load_slot(self, slot: Slot, name: str, token_ids: TokenIds) -> None:
        slot.runner.check_process()
        slot.token_ids = NO_TOKENS  # a restore that fails empties the slot
        claimed = await slot.runner.client.restore_slot(
            slot.slot_id, name, timeout_seconds=RESTORE_TIMEOUT_SECONDS
        )
        if claimed != len(token_ids):
            raise SlotError(f"the engine restored {claimed} of {len(token_ids)} tokens")
        slot.token_ids = token_ids

    def _finish(self, turn: ActiveTurn, model: Model) -> None:
        """Hand the slot to the committer, or free it; learn from what happened."""
        trace, totals = turn.trace, turn.totals
        if totals is None:
            model.pool.release(turn.slot)
        else:
            trace.result = "complete"
            try:
                self._hand_over(turn, model, totals)
            except Exception:  # an answer that we do not understand
                logger.exception("event=turn.defect id=%s", trace.request_id)
                turn.slot.token_ids = NO_TOKENS
                model.pool.release(turn.slot)
            try:
                self._learn(turn, model, totals)
            except Exception:
                logger.exception("event=turn.defect id=%s", trace.request_id)
        logger.info("%s", trace.line())

    def _hand_over(self, turn: ActiveTurn, model: Model, totals: EngineTotals) -> None:
        """End the lease of a slot whose answer is complete, now or by a commit."""
        slot, prompt_ids = turn.slot, turn.request.token_ids
        # The last token sampled is not in the KV.
        num_tokens = totals.prompt_tokens + max(0, totals.decoded_tokens - 1)
        is_shifted = totals.is_shifted
        if is_shifted is None:
            is_shifted = num_tokens + 1 >= slot.runner.context_tokens
        if is_shifted or len(prompt_ids) != totals.prompt_tokens:
            slot.token_ids = NO_TOKENS  # not known any more
        else:
            slot.token_ids = np.concatenate([prompt_ids, turn.reply_ids()])
        if not is_shifted and turn.request.reuse.write:
            self._committer.commit(
                slot,
                model.pool,
                namespace=turn.request.reuse.namespace,
                num_tokens=num_tokens,
            )
        else:
            model.pool.release(slot)

    def _learn(self, turn: ActiveTurn, model: Model, totals: EngineTotals) -> None:
        trace, runner = turn.trace, turn.slot.runner
        outcome = trace.outcome = ReuseOutcome(
            plan=trace.plan,
            prompt_tokens=totals.prompt_tokens,
            slot_tokens=trace.slot_tokens,
            restored_tokens=trace.restored_tokens,
            reused_tokens=totals.cached_tokens,
            prefilled_tokens=totals.prefilled_tokens,
            prefill_seconds=totals.prefill_seconds or 0.0,
        )
        trace.stages["prefill"] = outcome.prefill_seconds
        trace.stages["decode"] = totals.decode_seconds or 0.0
        if totals.prefill_seconds is not None:
            model.costs(runner).observe_prefill(
                outcome.prefilled_tokens, outcome.prefill_seconds
            )
        metrics, name = self._metrics, model.name
        metrics.avoided_tokens.labels(name).inc(outcome.avoided_tokens)
        metrics.prefilled_tokens.labels(name).inc(outcome.prefilled_tokens)
        metrics.queried_tokens.labels(name).inc(outcome.prompt_tokens)
        metrics.hit_tokens.labels(name).inc(outcome.reused_tokens)
        for phase, seconds in trace.stages.items():
            metrics.phase.labels(phase).observe(seconds)
        if outcome.restored_tokens and trace.prompt_tokens == outcome.prompt_tokens:
            self._judge(turn, outcome)

    def _judge(self, turn: ActiveTurn, outcome: ReuseOutcome) -> None:
        """Refuse a runner that keeps prefilling what was restored into it."""
        runner = turn.slot.runner
        if not outcome.is_ineffective:
            self._ineffective.pop(runner.runner_id, None)
            return
        self._metrics.restore_ineffective.labels(turn.trace.model).inc()
        count = self._ineffective.pop(runner.runner_id, 0) + 1
        if count < MAX_INEFFECTIVE_RESTORES:
            self._ineffective[runner.runner_id] = count
            return
        runner.refuse(
            f"the engine reused {outcome.reused_tokens} tokens"
            f" after {outcome.restored_tokens} were restored"
        )


async def _lease(model: Model, request: RequestedTurn, trace: TurnTrace) -> Slot:
    """Wait for a slot of a runner that still runs. Raises UpstreamError."""
    while True:
        with trace.stage("load"):
            await model.wait_ready()
        with trace.stage("queue"):
            slot = await model.pool.lease(request.token_ids)
        try:
            slot.runner.check_process()
        except RunnerGone:  # its listener has heard of it: the slot is none any more
            model.pool.release(slot)
        else:
            return slot


def _stage_of(error: Exception) -> str:
    """Name the part that failed, as a label."""
    if isinstance(error, StoreError):
        return "store"
    is_slot = isinstance(error, (ReuseError, UpstreamError))
    return "slot" if is_slot else "defect"
