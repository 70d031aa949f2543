"""When a slot counts as shifted though nobody says so."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from proxy.reuse.shifts import may_have_shifted
from proxy.reuse.turn import ActiveTurn

CONTEXT_TOKENS = 4096


def broken_off(
    *,
    num_prompt_tokens: int = 100,
    num_events: int = 0,
    held_seconds: float = 0.0,
    path: str = "/v1/chat/completions",
    is_refused: bool = False,
    shifts_context: bool = True,
    **body: Any,  # noqa: ANN401 - JSON
) -> bool:
    """Tell what is made of a turn that broke off."""
    runner = SimpleNamespace(
        shifts_context=shifts_context, context_tokens=CONTEXT_TOKENS
    )
    request = SimpleNamespace(
        token_ids=np.zeros(num_prompt_tokens, dtype=np.int32), path=path, body=body
    )
    turn = ActiveTurn(
        cast("Any", request),
        cast("Any", SimpleNamespace(runner=runner)),
        cast("Any", None),
        cast("Any", None),
        num_events=num_events,
        held_seconds=held_seconds,
        is_refused=is_refused,
    )
    return may_have_shifted(turn)


@pytest.mark.parametrize(
    ("turn", "is_doubtful"),
    [
        ({"stream": True, "num_events": 1000}, False),
        ({"stream": True, "num_events": 2000}, True),
        ({"stream": True, "num_events": 1000, "held_seconds": 0.1}, False),
        ({"stream": True, "num_events": 9, "held_seconds": 1.0}, True),
        ({"stream": True, "held_seconds": 9.0, "max_tokens": 100}, False),
        ({"stream": True, "num_prompt_tokens": 3900}, True),
        ({"stream": True, "num_prompt_tokens": 3900, "max_tokens": 100}, False),
        ({"stream": True, "num_events": 2000, "max_tokens": 8, "n_predict": -1}, False),
        ({"stream": True, "num_prompt_tokens": 0}, True),
        ({"stream": False}, True),
        ({"stream": False, "max_completion_tokens": 3000}, False),
        ({"stream": False, "max_completion_tokens": True}, True),
        ({"stream": False, "is_refused": True}, False),
        ({"stream": False, "shifts_context": False}, False),
        ({"path": "/completion", "num_events": 3, "n_predict": 40_000}, False),
        ({"path": "/completion", "num_events": 3000, "n_predict": 40_000}, True),
    ],
)
def test_a_slot_in_doubt_counts_as_shifted(
    turn: dict[str, Any], is_doubtful: bool
) -> None:
    """What was heard, or asked for, bounds what was generated; else it is unknown."""
    assert broken_off(**turn) == is_doubtful
