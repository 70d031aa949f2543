"""What is known of one turn: its stages in milliseconds and its counts.

One line of the log is made of it, and later whatever else explains a request. It
holds no text, no token id and no namespace.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from proxy.reuse.plan import Decision, ReuseOutcome, ReusePlan

NO_PLAN = ReusePlan(decision=Decision.RECOMPUTE, reason="not decided")


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
    outcome: ReuseOutcome | None = None
    result: str = "cancelled"
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; a stage entered twice adds up."""
        started = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - started
            self.stages[name] = self.stages.get(name, 0.0) + spent

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
        fields |= {f"{name}_ms": f"{1e3 * s:.1f}" for name, s in self.stages.items()}
        return " ".join(f"{key}={value}" for key, value in fields.items())
