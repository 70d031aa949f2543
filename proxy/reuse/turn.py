"""A turn that holds its slot: it forwards the prompt and hears the reply.

Rules:
1. The slot is pinned and named in each forwarded body.
2. The stream stops after the engine's final event, or when its reader leaves.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proxy.prefix.hashing import TokenIds
from proxy.reuse.plan import RequestedTurn
from proxy.reuse.slots import NO_TOKENS, Slot
from proxy.reuse.trace import TurnTrace


@dataclass(slots=True, eq=False)
class ActiveTurn:
    """A turn that holds its slot."""

    request: RequestedTurn
    slot: Slot
    trace: TurnTrace
    load_seconds: float
    generated: list[int] = field(default_factory=list)
    final: dict[str, Any] | None = None

    @property
    def request_id(self) -> str:
        """Short, unique, safe in a header and in a log."""
        return self.trace.request_id

    @property
    def decision(self) -> str:
        """What was done before the prefill."""
        return str(self.trace.plan.decision)

    @property
    def reason(self) -> str:
        """Why."""
        return self.trace.plan.reason

    @property
    def restored_tokens(self) -> int:
        """How many tokens were restored from the store."""
        return self.trace.restored_tokens

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """Forward the prompt to the slot; yield the engine's events up to the last.

        Raises UpstreamError before the first event and RunnerGone at any time.
        """
        body = {
            **self.request.body,
            "prompt": np.ascontiguousarray(self.request.token_ids),
            "id_slot": self.slot.slot_id,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
            # The engine looks whether its client is still there when it has something
            # to say. Without progress that is not before the first token, as long as
            # another slot keeps it talking.
            "return_progress": True,
        }
        self.slot.runner.check_process()
        client = self.slot.runner.client
        with self.trace.stage("forward"):
            async with client.stream_completion("/completion", body) as events:
                async for event in events:
                    if "prompt_progress" in event:
                        continue
                    if event.get("stop"):
                        self.final = event
                    else:
                        self.generated += event.get("tokens", ())
                    yield event
                    if self.final is not None:
                        return

    def reply_ids(self, num_decoded: int) -> TokenIds:
        """Return the ids of the reply that are in the slot; none where one is unknown.

        The engine sends no event for a token whose text it holds back: the middle of
        a character, or the possible beginning of a stop string.
        """
        assert self.final is not None
        num_sent = num_decoded - (self.final.get("stop_type") == "eos")
        if len(self.generated) != num_sent:
            return NO_TOKENS
        return np.array(self.generated[: max(0, num_decoded - 1)], dtype=np.int32)
