"""Restore or recompute? The cheaper of two predictions, learned from what happened.

    prefill(n)  = fixed + n tokens * seconds a token
    restore(n)  = fetch(bytes) + load(bytes), each fixed + bytes * seconds a byte

Each of the three is a straight line, fitted by least squares over all observations,
the older ones weighing less (`FORGET` per observation). One `CostModel` belongs to
one runner. Rules:
1. Pure and silent: no clock, no I/O. Time enters as an argument.
2. A prediction is never negative and never infinite.
3. A restore that nobody has tried for long gets cheaper in prediction, so that a
   store that was slow once is measured again.

Decision (`decide`), in this order:
1. nothing stored beyond what the slot holds            -> KEEP_SLOT or RECOMPUTE
2. the mode is `never`                                  -> KEEP_SLOT or RECOMPUTE
3. the mode is `always`                                 -> RESTORE
4. restore + prefill of the rest < prefill without it   -> RESTORE
5. else                                                 -> KEEP_SLOT or RECOMPUTE

>>> line = Line(fixed=0.0, slope=1.0, weight=1.0, at=10.0)
>>> for _ in range(30): line.observe(5.0, 10.0)
>>> round(line.predict(5.0), 1)
10.0
"""

import math
from dataclasses import dataclass, field

from proxy.reuse.plan import Decision, Lookup, RestoreMode, ReusePlan

FORGET = 0.8
"""Weight that an observation keeps when the next one arrives: about five count."""

STALE_SECONDS = 30.0
"""After this long without a restore its predicted cost is halved, again and again."""

MAX_STALE_HALVINGS = 4.0

ABANDONED_FACTOR = 4.0
"""A fetch that was given up is taken to cost this many times what was spent on it."""


class Line:
    """t = fixed + slope * x, by weighted least squares with forgetting.

    Starts from two made-up observations, at x = 0 and x = `at`, that lie on the given
    line and weigh `weight` each; they fade like the others.
    """

    def __init__(self, *, fixed: float, slope: float, weight: float, at: float) -> None:
        # the mutable state: weighted sums over (x, t)
        self._w = self._x = self._t = self._xx = self._xt = 0.0
        for x in (0.0, at):
            self._add(x, fixed + slope * x, weight)

    def observe(self, x: float, seconds: float) -> None:
        """Learn that `x` units took `seconds`."""
        if not (x >= 0.0 and 0.0 <= seconds < 1e6):
            return
        self._w *= FORGET
        self._x *= FORGET
        self._t *= FORGET
        self._xx *= FORGET
        self._xt *= FORGET
        self._add(x, seconds, 1.0)

    def predict(self, x: float) -> float:
        """Return the expected seconds for `x` units; at least 0."""
        mean_x, mean_t = self._x / self._w, self._t / self._w
        spread = self._xx / self._w - mean_x * mean_x
        through_zero = self._xt / self._xx if self._xx > 0 else 0.0
        if spread <= 1e-9 * max(1.0, mean_x * mean_x):
            return max(0.0, through_zero * x)
        slope = (self._xt / self._w - mean_x * mean_t) / spread
        fixed = mean_t - slope * mean_x
        if slope < 0.0 or fixed < 0.0:  # noise: no cost is negative
            return max(0.0, through_zero * x)
        return fixed + slope * x

    def _add(self, x: float, t: float, weight: float) -> None:
        self._w += weight
        self._x += weight * x
        self._t += weight * t
        self._xx += weight * x * x
        self._xt += weight * x * t


@dataclass(slots=True)
class CostModel:
    """What one runner's prefill and restores cost; the priors are a small GPU's."""

    _prefill: Line = field(
        default_factory=lambda: Line(fixed=0.005, slope=1 / 2000, weight=0.3, at=500.0)
    )
    _fetch: Line = field(
        default_factory=lambda: Line(fixed=0.003, slope=1 / 2e9, weight=0.5, at=5e7)
    )
    _load: Line = field(
        default_factory=lambda: Line(fixed=0.005, slope=1 / 2e9, weight=0.5, at=5e7)
    )
    _last_restore: float = 0.0

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learn from a prefill; very short ones say nothing about the rate."""
        if num_tokens >= 16:
            self._prefill.observe(float(num_tokens), seconds)

    def observe_restore(
        self, num_bytes: int, *, fetch_seconds: float, load_seconds: float, now: float
    ) -> None:
        """Learn from a restore: store to slot file, slot file to slot."""
        self._fetch.observe(float(num_bytes), fetch_seconds)
        self._load.observe(float(num_bytes), load_seconds)
        self._last_restore = now

    def observe_failed_fetch(
        self, num_bytes: int, seconds: float, *, now: float
    ) -> None:
        """Learn that a fetch was given up after `seconds`; it would have cost more.

        How much more is not known: a multiple, so that the next ones are declined
        until time has passed.
        """
        guess = ABANDONED_FACTOR * max(seconds, self.fetch(num_bytes))
        self._fetch.observe(float(num_bytes), guess)
        self._last_restore = now

    def prefill(self, num_tokens: int) -> float:
        """Predict the seconds that a prefill of `num_tokens` takes."""
        return self._prefill.predict(float(num_tokens)) if num_tokens > 0 else 0.0

    def fetch(self, num_bytes: int) -> float:
        """Predict the seconds from the store into a slot file."""
        return self._fetch.predict(float(num_bytes))

    def restore(self, num_bytes: int, *, now: float) -> float:
        """Predict the seconds of a whole restore, less what staleness takes off."""
        seconds = self.fetch(num_bytes) + self._load.predict(float(num_bytes))
        age = max(0.0, now - self._last_restore) if self._last_restore else 0.0
        return seconds * math.pow(0.5, min(age / STALE_SECONDS, MAX_STALE_HALVINGS))


def decide(
    lookup: Lookup, *, costs: CostModel, mode: RestoreMode, now: float
) -> ReusePlan:
    """Choose between the store, the slot and the prompt; see the module's docstring."""
    stored = lookup.stored_tokens
    if stored <= lookup.slot_tokens:
        return _without_restore(lookup, "nothing stored beyond the slot")
    if mode is RestoreMode.NEVER:
        return _without_restore(lookup, "restores are switched off")
    kept = costs.prefill(lookup.prompt_tokens - lookup.slot_tokens)
    restored = costs.restore(lookup.stored_bytes, now=now)
    restored += costs.prefill(max(1, lookup.prompt_tokens - stored))
    saving = kept - restored
    if mode is RestoreMode.ALWAYS:
        reason = "restores are forced"
    elif saving > 0.0:
        reason = "restoring is cheaper"
    else:
        return _without_restore(lookup, "prefill is cheaper")
    return ReusePlan(
        decision=Decision.RESTORE,
        reason=reason,
        restore_tokens=stored,
        predicted_saving_seconds=saving,
    )


def _without_restore(lookup: Lookup, reason: str) -> ReusePlan:
    is_hot = lookup.slot_tokens > 0
    return ReusePlan(
        decision=Decision.KEEP_SLOT if is_hot else Decision.RECOMPUTE, reason=reason
    )
