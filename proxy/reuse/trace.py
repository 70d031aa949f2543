"""What is known of one turn: its stages in milliseconds and its counts.

A line of the log is made of it, and what `/kvcache/requests` tells. It holds no text,
no token id and no namespace.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from proxy.reuse.plan import Decision, ReuseOutcome, ReusePlan

NO_PLAN = ReusePlan(decision=Decision.RECOMPUTE, reason="not decided")
RUNNING = "running"


@dataclass(slots=True)
class CommitReport:
    """What became of the KV that a turn left in its slot; filled in as it goes on."""

    result: str = RUNNING
    """As in the metric `kvbus_commits_total`, or why there was no commit."""
    stored_blocks: int = 0
    present_blocks: int = 0
    """Full blocks that were stored before."""
    failed_blocks: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        return {
            "result": self.result,
            "stored_blocks": self.stored_blocks,
            "present_blocks": self.present_blocks,
            "failed_blocks": self.failed_blocks,
            "stored_bytes": self.stored_bytes,
            "ms": _milliseconds(self.seconds),
        }


@dataclass(slots=True)
class TurnTrace:
    """Filled in as the turn goes on."""

    request_id: str
    model: str
    route: str
    prompt_tokens: int
    runner_id: str = ""
    slot_id: int = -1
    plan: ReusePlan = NO_PLAN
    slot_tokens: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    outcome: ReuseOutcome | None = None
    decoded_tokens: int = 0
    result: str = RUNNING
    deaths: int = 0
    """Runners that died under it."""
    commit: CommitReport | None = None
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage."""
    stage_now: str = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; a stage entered twice adds up."""
        started, before = time.monotonic(), self.stage_now
        self.stage_now = name
        try:
            yield
        finally:
            spent = time.monotonic() - started
            self.stages[name] = self.stages.get(name, 0.0) + spent
            self.stage_now = before

    def line(self) -> str:
        """Return the turn as `key=value` pairs."""
        outcome = self.outcome
        fields: dict[str, object] = {
            "event": "turn",
            "id": self.request_id,
            "model": self.model,
            "route": self.route,
            "result": self.result,
            "runner": self.runner_id,
            "slot": self.slot_id,
            "prompt_tokens": self.prompt_tokens,
            "slot_tokens": self.slot_tokens,
            "restored_tokens": self.restored_tokens,
            "reused_tokens": outcome.reused_tokens if outcome else "",
            "prefilled_tokens": outcome.prefilled_tokens if outcome else "",
            "decision": str(self.plan.decision),
            "reason": f'"{self.plan.reason}"',
        }
        if self.deaths:
            fields["deaths"] = self.deaths
        fields |= {f"{name}_ms": f"{1e3 * s:.1f}" for name, s in self.stages.items()}
        return " ".join(f"{key}={value}" for key, value in fields.items())

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON-ready values; null is "not known (yet)"."""
        outcome, is_planned = self.outcome, self.plan is not NO_PLAN
        return {
            "result": self.result,
            "stage": self.stage_now or None,
            "runner": self.runner_id or None,
            "slot": self.slot_id if self.runner_id else None,
            "deaths": self.deaths,
            "decision": str(self.plan.decision) if is_planned else None,
            "reason": self.plan.reason if is_planned else None,
            "prompt_tokens": outcome.prompt_tokens if outcome else self.prompt_tokens,
            "slot_tokens": self.slot_tokens,
            "restored_tokens": self.restored_tokens,
            "restored_bytes": self.restored_bytes,
            "reused_tokens": outcome.reused_tokens if outcome else None,
            "prefilled_tokens": outcome.prefilled_tokens if outcome else None,
            "avoided_tokens": outcome.avoided_tokens if outcome else None,
            "decoded_tokens": self.decoded_tokens if outcome else None,
            "stages_ms": {name: _milliseconds(s) for name, s in self.stages.items()},
            "commit": self.commit.to_dict() if self.commit else None,
        }


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 1)
