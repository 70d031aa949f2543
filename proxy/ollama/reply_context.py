"""`context` of /api/generate: the token ids of a prompt and its reply.

Rules:
1. They have no BOS in front: the next request's own comes before them.
2. They are the ids that the engine has in its slot, so that the next request finds
   all of its KV. Where the engine did not tell all of them (it holds parts of a
   character and of stop strings back) the text is tokenized instead, as Ollama does.
3. The thinking of a reply is part of it, between the marks of the model's template.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from proxy.errors import KvbusError, RequestError
from proxy.ollama.backend import ServedModel
from proxy.ollama.events import Piece, TurnTotals
from proxy.ollama.thinking import thinking_marks
from proxy.prefix.hashing import TokenIds

_INT32_LIMIT = 2**31


async def special_start(model: ServedModel) -> TokenIds:
    """Return what the tokenizer puts in front of every text: a BOS, or nothing.

    Raises UpstreamError.
    """
    facts = model.facts
    if not facts.tokenizer_model:  # a server whose model file nobody can read
        return await model.tokenize("")
    has_bos = facts.add_bos and facts.bos_id is not None
    return np.array([facts.bos_id] if has_bos else [], dtype=np.int32)


def without_start(token_ids: TokenIds, special: TokenIds) -> TokenIds:
    """Leave out what the tokenizer has put in front."""
    start = token_ids[: len(special)]
    return token_ids[len(special) :] if np.array_equal(start, special) else token_ids


def check_context(context: Sequence[int], model: ServedModel) -> TokenIds:
    """Read the `context` of a request. Raises RequestError (400)."""
    limit = model.facts.vocabulary_size or _INT32_LIMIT
    for token_id in context:
        if not 0 <= token_id < limit:
            raise RequestError(
                400,
                f"invalid context: {token_id} is no token of the model, whose "
                f"vocabulary has {limit} tokens",
            )
    return np.array(context, dtype=np.int32)


class ReplyContext:
    """Gathers what the `context` of one reply is."""

    def __init__(
        self, model: ServedModel, *, prompt: TokenIds, text: str, special: TokenIds
    ) -> None:
        """Begin with a prompt; `text` is what it was made of, empty if it was not."""
        self._model = model
        self._prompt = prompt
        self._text = text
        self._special = special
        # the mutable state
        self._generated: list[int] = []
        self._said: list[str] = []
        self._thought: list[str] = []
        self._num_unsaid = 0

    def note(self, event: Mapping[str, Any], piece: Piece) -> None:
        """Hear an event of the turn, and what was read of it."""
        if event.get("stop"):
            # the end of the turn is a token, too, but no part of what was said
            self._num_unsaid = event.get("stop_type") == "eos"
        else:
            self._generated += event.get("tokens", ())
        self._said.append(piece.text)
        self._thought.append(piece.thinking)

    async def finish(self, totals: TurnTotals) -> list[int] | None:
        """Return the ids; None where the runner cannot tell them any more."""
        prompt = without_start(self._prompt, self._special)
        if len(self._generated) == totals.num_decoded_tokens - self._num_unsaid:
            return [*prompt.tolist(), *self._generated]
        said = "".join([*self._thinking(), *self._said])
        try:
            token_ids = await self._model.tokenize(self._text + said)
        except KvbusError:
            return None
        reply = without_start(token_ids, self._special).tolist()
        return reply if self._text else [*prompt.tolist(), *reply]

    def _thinking(self) -> Sequence[str]:
        """Write the thinking as the model has written it, as far as that is known."""
        thought = "".join(self._thought).strip()
        template = (self._model.props or self._model.facts).chat_template
        marks = thinking_marks(template)
        if not thought or marks is None:
            return ()
        is_open = self._text.rstrip().endswith(marks.opening)
        opening = "" if is_open else f"{marks.opening}\n"
        return (opening, thought, f"\n{marks.closing}\n\n")
