"""What is learned from the engine's own account of a turn.

Rules:
1. What a restore was worth is what the engine says (`cache_n`), not what was put in.
2. A runner that twice in a row reused less than was restored into it is not restored
   into any more.
"""

from proxy.llamacpp.totals import EngineTotals
from proxy.metrics import Metrics
from proxy.reuse.models import Model
from proxy.reuse.plan import ReuseOutcome
from proxy.reuse.turn import ActiveTurn

MAX_INEFFECTIVE_RESTORES = 2


class Lessons:
    """Counts what turns came to, and judges runners by it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # the mutable state
        self._ineffective: dict[str, int] = {}

    def learn(self, turn: ActiveTurn, model: Model, totals: EngineTotals) -> None:
        """Learn from a turn whose answer is complete."""
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
        trace.decoded_tokens = totals.decoded_tokens
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
