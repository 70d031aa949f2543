"""The words of a decision: what was found, what shall be done, what happened.

All values are frozen; none knows how it came about.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from proxy.prefix.hashing import TokenIds


class Decision(StrEnum):
    """Where the KV of a prompt's prefix comes from."""

    RESTORE = "restore"
    """From the store, into the slot."""
    KEEP_SLOT = "keep_slot"
    """The slot holds it already."""
    RECOMPUTE = "recompute"
    """From the prompt: nothing is found, or nothing is cheaper."""


class RestoreMode(StrEnum):
    """Who decides on a restore."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What is known of a prompt before anything is moved (counts of tokens)."""

    prompt_tokens: int
    slot_tokens: int
    """Leading tokens that the leased slot holds."""
    stored_tokens: int
    """Leading tokens, in whole blocks, that the store says it holds."""
    stored_bytes: int
    """Of a slot file of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePlan:
    """What shall be done, and why in a few words."""

    decision: Decision
    reason: str
    restore_tokens: int = 0
    """Tokens to restore; 0 unless the decision is RESTORE."""
    predicted_saving_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOutcome:
    """What happened, with the engine's own counts."""

    plan: ReusePlan
    prompt_tokens: int
    slot_tokens: int
    """Leading tokens that the slot held before the request."""
    restored_tokens: int
    """Tokens that were put into the slot; 0 where no restore took place."""
    reused_tokens: int
    """Prompt tokens that the engine did not evaluate (`cache_n`)."""
    prefilled_tokens: int
    """Prompt tokens that it did evaluate (`prompt_n`)."""
    prefill_seconds: float

    @property
    def avoided_tokens(self) -> int:
        """Prefill that was avoided by a restore, confirmed by the engine."""
        if not self.restored_tokens:
            return 0
        return max(0, min(self.reused_tokens, self.restored_tokens) - self.slot_tokens)

    @property
    def is_ineffective(self) -> bool:
        """Whether the engine reused less than what was restored for it.

        The last token of a prompt is always evaluated: its logits are needed.
        """
        expected = min(self.restored_tokens, self.prompt_tokens - 1)
        return self.reused_tokens < expected


class NamedModel(Protocol):
    """A model, as far as a turn has to name it."""

    @property
    def name(self) -> str:
        """Full name with its tag."""
        ...


class RequestedReuse(Protocol):
    """How far one request takes part in sharing KV."""

    @property
    def namespace(self) -> str:
        """Requests of different namespaces never share KV."""
        ...

    @property
    def read(self) -> bool:
        """Whether stored KV may be restored for it."""
        ...

    @property
    def write(self) -> bool:
        """Whether KV that it makes may be stored."""
        ...

    @property
    def block_size(self) -> int | None:
        """Tokens of a block; None: what the runner's blocks have."""
        ...

    @property
    def replica_num(self) -> int:
        """Copies of its new blocks that a pool shall keep."""
        ...

    @property
    def soft_pin(self) -> bool:
        """Whether its new blocks shall be evicted after all others."""
        ...


class RequestedTurn(Protocol):
    """One prompt to be continued by a model."""

    @property
    def model(self) -> NamedModel:
        """Who continues it."""
        ...

    @property
    def token_ids(self) -> TokenIds:
        """The prompt as the runner evaluates it; empty where that is not known.

        Exact for `/completion`. Elsewhere the runner renders the prompt itself: what
        is believed here decides on a restore, and is checked afterwards.
        """
        ...

    @property
    def path(self) -> str:
        """The runner's route that is asked; `/completion` gets the token ids."""
        ...

    @property
    def body(self) -> Mapping[str, Any]:
        """The body for it, without the slot (and for `/completion` the prompt)."""
        ...

    @property
    def route(self) -> str:
        """The client's route, a label."""
        ...

    @property
    def reuse(self) -> RequestedReuse:
        """What it allows."""
        ...
