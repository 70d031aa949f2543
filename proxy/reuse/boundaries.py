"""Where a memory that cannot be cut is kept for later prompts, and how.

Of an attention cache any leading tokens can be restored. Of a window or a recurrent
state there is only what the engine keeps as a checkpoint: it makes one four tokens
before the end of each prompt. So a prompt that is worth it is prefilled in pieces, each
to four tokens past a *boundary*; the checkpoints are saved with the slot, and stored as
tails. Rules:
1. Boundaries are the ends of full blocks: a lookup asks for those alone.
2. Two of them are of use to a prompt. The last one: the next turn of a conversation
   goes on behind it. And the one where it leaves what was seen before: where two
   prompts part, others will, as agents do after their system text and tools.
3. One is made only where computing its tokens again would take longer than making it
   and moving it, as far as that is known.
4. What is prefilled here is counted as prefilled for the turn, never as reused.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from proxy.blocks import BlockKey
from proxy.llamacpp.totals import is_final, read_event
from proxy.reuse.arbiter import CostModel
from proxy.reuse.plan import RestoreMode
from proxy.reuse.stored import StoredPrefix
from proxy.reuse.turn import COMPLETION_PATH, ActiveTurn

logger = logging.getLogger(__name__)

CHECKPOINT_DISTANCE = 4
"""So many tokens before a prompt's end the engine makes a checkpoint (llama.cpp,
server-context.cpp)."""
MIN_WORTH_SECONDS = 0.05
"""A prefill that takes less is not saved by a tail, which costs two more questions to
the engine and a longer save."""
MAX_SEEN_BLOCKS = 1 << 17
"""Keys of blocks that are remembered, 32 bytes each."""


class SeenBlocks:
    """The blocks of the prompts that were served lately."""

    def __init__(self) -> None:
        # the mutable state: the least recently seen first
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def count(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks of a prompt were seen; see them all now."""
        known = [key in self._keys for key in keys]
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_SEEN_BLOCKS:
            self._keys.popitem(last=False)
        return known.index(False) if False in known else len(known)


def choose_boundaries(
    *,
    prompt_tokens: int,
    block_size: int,
    held_tokens: int,
    seen_blocks: int,
    stored: StoredPrefix,
    costs: CostModel,
    mode: RestoreMode,
) -> list[int]:
    """Return up to where a prompt shall be prefilled before the rest, ascending.

    `held_tokens` are in the slot already; `seen_blocks` of it were seen before.
    """
    last = max(0, prompt_tokens - CHECKPOINT_DISTANCE) // block_size
    branch = max(stored.num_blocks if stored.num_blocks < last else 0, seen_blocks)
    tails = stored.tails or ()
    chosen: list[int] = []
    for blocks in sorted({min(last, branch), last}):
        before = [i + 1 for i, is_there in enumerate(tails[:blocks]) if is_there]
        best = max([*before, *(end // block_size for end in chosen)], default=0)
        gain = (blocks - best) * block_size
        if not gain or blocks * block_size <= held_tokens:
            continue
        if mode is RestoreMode.ALWAYS or costs.prefill(gain) >= MIN_WORTH_SECONDS:
            chosen.append(blocks * block_size)
    return chosen


async def make_boundaries(turn: ActiveTurn) -> None:
    """Prefill the turn's prompt up to where it is wanted, in its slot.

    Raises RunnerGone, UpstreamError.
    """
    slot, trace = turn.slot, turn.trace
    for boundary in turn.wanted:
        prompt = turn.request.token_ids[: boundary + CHECKPOINT_DISTANCE]
        body = {
            "prompt": np.ascontiguousarray(prompt),
            "n_predict": 0,
            "id_slot": slot.slot_id,
            "cache_prompt": turn.keeps_slot,
            "stream": True,
            "return_progress": True,  # so that the engine notices who leaves
        }
        client = slot.runner.client
        with trace.stage("boundary"):
            async with client.stream_completion(COMPLETION_PATH, body) as events:
                async for event in events:
                    if is_final(event):
                        turn.early.append(read_event(event))
                        break
        turn.take_slot()
        slot.hold(prompt, (*(slot.boundaries or ()), boundary))
        turn.boundaries.append(boundary)
