"""The order of the steps of a turn: lease, lookup, prepare, forward, commit.

Rules:
1. Sharing KV never fails a request. What goes wrong with it is caught here, in
   `_prepare`, and in the background commit, counted by stage, and the request goes on
   without it.
2. A slot is leased from before its restore until its save ended, was skipped, or took
   longer than its bound. What is read from a saved file happens after the lease.
3. An answer that is incomplete, or whose context was shifted, is never committed. A
   slot that was shifted, or may have been, is emptied before its next use.
4. A turn whose runner died before the first word of its answer moves to another slot,
   until `MAX_DEATHS` runners have died under it.
5. Nothing is reused that another namespace left, in the store or in a slot.
6. A prompt is evaluated by the model whose tokens it is made of, or not at all: the
   file may be replaced while a turn waits.
"""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from proxy.blocks import BlockKey, Fingerprint
from proxy.errors import (
    KvbusError,
    RequestError,
    ReuseError,
    RunnerGone,
    SlotError,
    StoreError,
    UpstreamError,
)
from proxy.llamacpp import state
from proxy.llamacpp.runner import Sharing
from proxy.llamacpp.totals import EngineTotals
from proxy.metrics import Metrics
from proxy.prefix.hashing import hash_blocks
from proxy.reuse.arbiter import CostModel, decide
from proxy.reuse.boundaries import (
    CHECKPOINT_DISTANCE,
    SeenBlocks,
    choose_boundaries,
    make_boundaries,
)
from proxy.reuse.committer import Committer
from proxy.reuse.lessons import Lessons
from proxy.reuse.models import MAX_DEATHS, Model, ModelCatalog
from proxy.reuse.plan import (
    Decision,
    Lookup,
    RequestedTurn,
    RestoreMode,
    ReusePlan,
)
from proxy.reuse.request_log import RequestLog
from proxy.reuse.restoring import Restorer
from proxy.reuse.shifts import may_have_shifted
from proxy.reuse.slots import NO_TOKENS, Slot
from proxy.reuse.snapshots import find_snapshot
from proxy.reuse.stored import StoredPrefix, keys_to_ask, read_answer
from proxy.reuse.switch import SharingSwitch
from proxy.reuse.trace import NO_PLAN, RUNNING, CommitReport, TurnTrace
from proxy.reuse.turn import ActiveTurn
from proxy.store.base import BlockStore

logger = logging.getLogger("proxy.turn")

LOOKUP_DEADLINE_SECONDS = 0.08
"""A store that is away or hung may cost one request at most 0.1 s, once."""

PATIENCE_SECONDS = 5.0
"""With `--restore always` a lookup, or a commit under way, is waited for so long; a
store that gives no sign of life is given up as fast as ever."""

MAX_BLOCK_BYTES = 32 << 20
"""Larger blocks than this, which a request may ask for, would crowd a store out."""

PAUSED = "sharing is paused"
REPLACED = "the model was replaced while the request waited, please try again."


class Orchestrator:
    """Serves turns; the one place where sharing is decided and may fail."""

    def __init__(
        self,
        *,
        catalog: ModelCatalog,
        store: BlockStore | None,
        mode: RestoreMode,
        metrics: Metrics,
        switch: SharingSwitch | None = None,
        log: RequestLog | None = None,
    ) -> None:
        """Share by `store`, while `switch` is on; traces go into `log`."""
        self._catalog = catalog
        self._store = store
        self._mode = mode
        self._metrics = metrics
        self._switch = switch or SharingSwitch(metrics)
        self._log = log or RequestLog()
        self._committer = Committer(store=store, metrics=metrics)
        self._restorer = (
            Restorer(store=store, metrics=metrics, mode=mode) if store else None
        )
        self._lessons = Lessons(metrics)
        self._seen = SeenBlocks()
        self._lookup_seconds = (
            PATIENCE_SECONDS if mode is RestoreMode.ALWAYS else LOOKUP_DEADLINE_SECONDS
        )

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
        trace, content = self._trace(request, model), model.facts.content_digest
        with model.in_use():
            try:
                slot = await _lease(model, request, trace=trace, content=content)
            except BaseException as exc:
                trace.result = "failed" if isinstance(exc, Exception) else "cancelled"
                raise
            turn = ActiveTurn(request, slot, trace, partial(self._move, model, content))
            try:
                await self._prepare(turn, model)
                yield turn
            except RunnerGone as exc:
                trace.result = "runner gone"
                if not await turn.slot.runner.client.is_healthy():
                    turn.slot.runner.report_lost(str(exc))
                raise
            except ConnectionError:  # the client's: it was written to and is gone
                trace.result = "cancelled"
                raise
            except Exception:
                trace.result = "failed"
                raise
            finally:
                self._finish(turn, model)

    def _trace(self, request: RequestedTurn, model: Model) -> TurnTrace:
        record = self._log.current
        trace = TurnTrace(
            request_id=record.request_id if record else secrets.token_hex(8),
            model=model.name,
            route=request.route,
            prompt_tokens=len(request.token_ids),
        )
        if record is not None:
            record.trace = trace
        return trace

    async def _move(
        self, model: Model, content: str, turn: ActiveTurn, gone: RunnerGone
    ) -> None:
        """Give a turn another slot, prepared, if its runner is dead. Else raise."""
        trace, slot = turn.trace, turn.slot
        runner = slot.runner
        if slot in model.pool.slots:
            if await runner.client.is_healthy():
                raise gone
            runner.report_lost(str(gone))
        trace.deaths += 1
        if trace.deaths >= MAX_DEATHS:
            raise gone
        logger.warning(
            "event=turn.moved id=%s runner=%s", trace.request_id, runner.runner_id
        )
        model.pool.release(slot)
        turn.slot = await _lease(model, turn.request, trace=trace, content=content)
        await self._prepare(turn, model)

    async def _prepare(self, turn: ActiveTurn, model: Model) -> None:
        """Decide and, if worth it, restore. Fails open."""
        trace, slot, request = turn.trace, turn.slot, turn.request
        token_ids, namespace = request.token_ids, request.reuse.namespace
        trace.runner_id, trace.slot_id = slot.runner.runner_id, slot.slot_id
        trace.plan, trace.restored_tokens, trace.restored_bytes = NO_PLAN, 0, 0
        turn.start_over()
        turn.keeps_slot = slot.namespace == namespace
        if not turn.keeps_slot:
            slot.forget()  # until the engine has: this turn may be given up before
        trace.slot_tokens = slot.shared_tokens(token_ids, namespace)
        try:
            trace.plan = await self._plan_and_restore(turn, model.costs(slot.runner))
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
            is_hot = slot.shared_tokens(token_ids, namespace) > 0
            trace.plan = ReusePlan(
                decision=Decision.KEEP_SLOT if is_hot else Decision.RECOMPUTE,
                reason=f"{stage} failed",
            )
        if not turn.keeps_slot:
            await _empty(turn)
        # from here on the slot's old contents beyond the common prefix are gone
        shared = slot.shared_tokens(token_ids, namespace)
        slot.hold(slot.token_ids[:shared], slot.boundaries or ())
        if turn.wanted:
            await self._prefill_to_boundaries(turn)
        self._metrics.decisions.labels(trace.plan.decision, trace.plan.reason).inc()

    async def _prefill_to_boundaries(self, turn: ActiveTurn) -> None:
        """Prefill the prompt in pieces. Fails open: the rest is forwarded as it is."""
        try:
            await make_boundaries(turn)
        except (RunnerGone, UpstreamError) as exc:
            self._metrics.failed_open.labels("slot").inc()
            logger.warning(
                "event=failed_open id=%s runner=%s stage=boundary reason=%r",
                turn.request_id,
                turn.trace.runner_id,
                str(exc),
            )

    async def _plan_and_restore(self, turn: ActiveTurn, costs: CostModel) -> ReusePlan:
        trace, request = turn.trace, turn.request
        sharing = _sharing(turn)
        refusal = self._refusal(request, sharing)
        if refusal or not sharing or not self._store or not self._restorer:
            is_hot = trace.slot_tokens > 0
            return ReusePlan(
                decision=Decision.KEEP_SLOT if is_hot else Decision.RECOMPUTE,
                reason=refusal,
            )
        fingerprint = sharing.fingerprint(request.reuse.namespace)
        layout, token_ids = sharing.layout, request.token_ids
        if not layout.can_be_cut:
            # The last token is always evaluated: its logits are needed. A memory that
            # cannot step back by it would be computed anew from the beginning.
            token_ids = token_ids[:-1]
        keys = hash_blocks(
            token_ids, block_size=sharing.block_size, fingerprint=fingerprint
        )
        stored, snapshot = StoredPrefix(), None
        if len(keys) * sharing.block_size > trace.slot_tokens:
            await self._wait_for_commit(turn, fingerprint, costs)
            with trace.stage("lookup"):
                if layout.is_opaque:
                    snapshot = await find_snapshot(
                        self._store,
                        request.token_ids,
                        keys,
                        fingerprint=fingerprint,
                        deadline_seconds=self._lookup_seconds,
                    )
                else:
                    found = await self._store.contains(
                        keys_to_ask(layout, keys),
                        deadline_seconds=self._lookup_seconds,
                    )
                    stored = read_answer(layout, len(keys), found)
        stored_tokens = stored.restorable_blocks * sharing.block_size
        stored_bytes = state.file_bytes(layout, stored_tokens)
        if snapshot is not None:
            stored_tokens, stored_bytes = snapshot.num_tokens, snapshot.num_bytes
        plan = decide(
            Lookup(
                prompt_tokens=trace.prompt_tokens,
                slot_tokens=trace.slot_tokens,
                stored_tokens=stored_tokens,
                stored_bytes=stored_bytes,
            ),
            costs=costs,
            mode=self._mode,
            now=time.monotonic(),
        )
        self._count_lookup(plan, stored=stored_tokens, slot_tokens=trace.slot_tokens)
        if plan.decision is Decision.RESTORE:
            trace.plan = plan
            if snapshot is not None:
                await self._restorer.restore_snapshot(
                    turn, fingerprint, snapshot, costs
                )
            else:
                num_blocks = plan.restore_tokens // sharing.block_size
                await self._restorer.restore(
                    turn, sharing, fingerprint, keys[:num_blocks], costs
                )
        turn.wanted = self._boundaries(turn, sharing, keys, stored, costs)
        return plan

    def _boundaries(
        self,
        turn: ActiveTurn,
        sharing: Sharing,
        keys: Sequence[BlockKey],
        stored: StoredPrefix,
        costs: CostModel,
    ) -> list[int]:
        """Return where the engine shall keep what later prompts can go on from."""
        reuse, trace = turn.request.reuse, turn.trace
        if sharing.layout.tail is None or not reuse.write:
            return []
        held = turn.slot.shared_tokens(turn.request.token_ids, reuse.namespace)
        return choose_boundaries(
            prompt_tokens=trace.prompt_tokens,
            block_size=sharing.block_size,
            held_tokens=held,
            seen_blocks=self._seen.count(keys),
            stored=stored,
            costs=costs,
            mode=self._mode,
        )

    async def _wait_for_commit(
        self, turn: ActiveTurn, fingerprint: Fingerprint, costs: CostModel
    ) -> None:
        """Wait for a prefix that is just being stored, if computing it takes longer."""
        token_ids, trace = turn.request.token_ids, turn.trace
        is_patient = self._mode is RestoreMode.ALWAYS
        coming = self._committer.coming_tokens(
            token_ids, fingerprint, is_patient=is_patient
        )
        gain = coming - trace.slot_tokens
        if gain > 0 and self._mode is not RestoreMode.NEVER:
            with trace.stage("wait"):
                await self._committer.wait_for(
                    token_ids,
                    fingerprint,
                    timeout_seconds=(
                        PATIENCE_SECONDS if is_patient else costs.prefill(gain)
                    ),
                    is_patient=is_patient,
                )

    def _refusal(self, request: RequestedTurn, sharing: Sharing | None) -> str:
        if self._store is None:
            return "no store"
        if self._switch.is_paused:
            return PAUSED
        if not request.reuse.read:
            return "the request forbids restores"
        if sharing is None:
            return "the runner's KV is not shared"
        if _are_blocks_too_large(request, sharing):
            return "blocks of this size are too large"
        if not self._store.is_available:
            return "the store is away"
        return ""

    def _count_lookup(self, plan: ReusePlan, *, stored: int, slot_tokens: int) -> None:
        if plan.decision is Decision.RESTORE:
            result = "hit"
        else:
            result = "declined" if stored > slot_tokens else "miss"
        self._metrics.lookups.labels(result).inc()

    def _finish(self, turn: ActiveTurn, model: Model) -> None:
        """Hand the slot to the committer, or free it; learn from what happened."""
        trace, totals = turn.trace, turn.totals
        if totals is None:
            if trace.result == RUNNING:
                trace.result = "cancelled"
            if may_have_shifted(turn):
                turn.slot.forget()
            model.pool.release(turn.slot)
        else:
            trace.result = "complete"
            try:
                trace.commit = self._hand_over(turn, model, totals)
            except Exception:  # an answer that we do not understand
                logger.exception("event=turn.defect id=%s", trace.request_id)
                turn.slot.hold(NO_TOKENS)
                model.pool.release(turn.slot)
            try:
                self._lessons.learn(turn, model, totals)
            except Exception:
                logger.exception("event=turn.defect id=%s", trace.request_id)
        logger.info("%s", trace.line())

    def _hand_over(
        self, turn: ActiveTurn, model: Model, totals: EngineTotals
    ) -> CommitReport:
        """End the lease of a slot whose answer is complete, now or by a commit."""
        slot, prompt_ids, reuse = turn.slot, turn.request.token_ids, turn.request.reuse
        # The last token sampled is not in the KV.
        num_tokens = totals.prompt_tokens + max(0, totals.decoded_tokens - 1)
        is_shifted = totals.is_shifted
        if is_shifted is None:
            is_shifted = num_tokens + 1 >= slot.runner.context_tokens
        turn.take_slot()  # the engine has evaluated this turn's prompt in it
        if is_shifted and slot.runner.shifts_context:
            slot.forget()
        elif is_shifted or len(prompt_ids) != totals.prompt_tokens:
            slot.hold(NO_TOKENS)  # not known any more
        else:
            slot.hold(
                np.concatenate([prompt_ids, turn.reply_ids()]),
                [*(slot.boundaries or ()), len(prompt_ids) - CHECKPOINT_DISTANCE],
            )
        sharing = _sharing(turn)
        obstacle = ""
        if not reuse.write:
            obstacle = "the request forbids it"
        elif self._switch.is_paused:
            obstacle = PAUSED
        elif is_shifted:
            obstacle = "the context is full"
        elif sharing is None or _are_blocks_too_large(turn.request, sharing):
            obstacle = "the runner's KV is not shared"
        if obstacle or sharing is None:
            model.pool.release(slot)
            return CommitReport(result=obstacle)
        return self._committer.commit(
            slot,
            model.pool,
            use=model.in_use(),
            sharing=sharing,
            reuse=reuse,
            num_tokens=num_tokens,
            has_new_tails=bool(turn.boundaries) or sharing.layout.is_opaque,
        )


def _sharing(turn: ActiveTurn) -> Sharing | None:
    """Return how the KV of the turn's runner is shared, in blocks as it wants them."""
    sharing = turn.slot.runner.sharing
    return sharing and sharing.with_block_size(turn.request.reuse.block_size)


def _are_blocks_too_large(request: RequestedTurn, sharing: Sharing) -> bool:
    """Tell whether a request asks for larger blocks than it may."""
    is_asked = request.reuse.block_size is not None
    return is_asked and sharing.block_bytes > MAX_BLOCK_BYTES


async def _empty(turn: ActiveTurn) -> None:
    """Erase what another namespace, or a shift of the context, left in a slot.

    Where that does not work the engine is told not to reuse it; all of its routes but
    Anthropic's obey.
    """
    try:
        await turn.slot.runner.client.erase_slot(turn.slot.slot_id)
    except (SlotError, UpstreamError) as exc:
        logger.debug("event=erase.failed id=%s reason=%r", turn.request_id, str(exc))
    else:
        turn.take_slot()


async def _lease(
    model: Model, request: RequestedTurn, *, trace: TurnTrace, content: str
) -> Slot:
    """Wait for a slot of a runner that still runs.

    Raises UpstreamError, and RequestError where it has not loaded this `content`.
    """
    while True:
        with trace.stage("load"):
            await model.wait_ready()
        with trace.stage("queue"):
            slot = await model.pool.lease(request.token_ids, request.reuse.namespace)
        try:
            slot.runner.check_process()
        except RunnerGone:  # its listener has heard of it: the slot is none any more
            model.pool.release(slot)
            continue
        if slot.runner.facts.content_digest != content:
            model.pool.release(slot)
            raise RequestError(503, REPLACED)
        return slot


def _stage_of(error: Exception) -> str:
    """Name the part that failed, as a label."""
    if isinstance(error, StoreError):
        return "store"
    is_slot = isinstance(error, (ReuseError, UpstreamError))
    return "slot" if is_slot else "defect"
