"""Whether the engine may have shifted a slot's context, where nobody says so.

A shifted slot holds KV that no prompt would make: what is reused of it would spoil
blocks that are stored later. Rules:
1. In doubt a slot counts as shifted. That costs what it holds, and nothing else.
2. An answer that broke off tells no counts. What was heard of it bounds them: text is
   held back for a while at most, so that a token has an event, or nearly. The engine
   does not wait for whoever reads it: what it may have said while the reader was busy
   counts as well.
"""

import math
from collections.abc import Mapping
from typing import Any

from proxy.reuse.turn import ActiveTurn

TOKENS_OF_AN_EVENT = 2
HELD_BACK_TOKENS = 256
FASTEST_TOKENS_PER_SECOND = 4000
"""Of one reply: twice what a model of 2 layers does on a CPU."""

_LIMITS = ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens")


def may_have_shifted(turn: ActiveTurn) -> bool:
    """Tell of a turn that broke off whether its slot may have been shifted."""
    runner, num_prompt_tokens = turn.slot.runner, len(turn.request.token_ids)
    if not runner.shifts_context or turn.is_refused:
        return False
    if not num_prompt_tokens:
        return True
    decoded = min(_most_heard(turn), _most_asked(turn.request.body))
    return num_prompt_tokens + decoded >= runner.context_tokens


def _most_heard(turn: ActiveTurn) -> float:
    if not turn.is_streamed:
        return math.inf
    unheard = HELD_BACK_TOKENS + FASTEST_TOKENS_PER_SECOND * turn.held_seconds
    return TOKENS_OF_AN_EVENT * turn.num_events + unheard


def _most_asked(body: Mapping[str, Any]) -> float:
    """Return the limit that a body states; the engine heeds one of them at least."""
    return max(
        (
            limit
            for name in _LIMITS
            if isinstance(limit := body.get(name), int)
            and not isinstance(limit, bool)
            and limit > 0
        ),
        default=math.inf,
    )
