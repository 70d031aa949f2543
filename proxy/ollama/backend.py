"""What the front asks of the rest of kvbus: models, turns, and somebody who counts.

Rules:
1. The front knows no runner, slot or store. It names a model, hands over the exact
   token ids of the prompt, and reads events.
2. A turn is one exclusive use of one slot. Leaving its context frees the slot,
   however it is left: finished, failed or cancelled.
3. Nothing here raises but `UpstreamError` (the runner refused) and its child
   `RunnerGone` (the runner died, or its answer broke off).
4. An observer never raises and never waits.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.llamacpp.embeddings import EmbeddingOptions, EngineEmbeddings, Input
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.llamacpp.props import RunnerProps
from proxy.llamacpp.totals import EngineTotals
from proxy.ollama_folder import Modelfile
from proxy.prefix.hashing import TokenIds

COMPLETION_PATH = "/completion"
CHAT_PATH = "/v1/chat/completions"


class Embedder(Protocol):
    """What makes the embeddings of one model."""

    def in_use(
        self, keep_alive_seconds: float | None = None
    ) -> AbstractContextManager[None]:
        """Keep it loaded while the block runs, as `ServedModel.in_use` does."""
        ...

    async def wait_ready(self) -> None:
        """Wait until it is loaded. Raises UpstreamError when it will not be."""
        ...

    async def embed(
        self, inputs: Sequence[Input], options: EmbeddingOptions
    ) -> EngineEmbeddings:
        """Make one embedding for each input, in their order.

        Raises RequestError (400) for an input that is too long, UpstreamError.
        """
        ...


class ServedModel(Protocol):
    """One model under its name, with the runners that serve it."""

    @property
    def name(self) -> str:
        """Full name with its tag, as in `smollm2:135m`."""
        ...

    @property
    def facts(self) -> ModelFacts:
        """What the model file says about itself."""
        ...

    @property
    def props(self) -> RunnerProps | None:
        """What a runner says of the prompts that it takes; None before one was up."""
        ...

    @property
    def embedder(self) -> Embedder:
        """What makes its embeddings; asked of a model without, it raises."""
        ...

    @property
    def modelfile(self) -> Modelfile:
        """What it brings along besides its weights."""
        ...

    @property
    def projector(self) -> ModelFacts | None:
        """What the file says that makes images into what the model reads."""
        ...

    @property
    def context_tokens(self) -> int:
        """How many tokens, prompt and reply together, one slot holds.

        Exact once a runner is ready.
        """
        ...

    @property
    def remaining_seconds(self) -> float:
        """How long it stays loaded if nobody uses it from now on; or infinity."""
        ...

    @property
    def loaded_bytes(self) -> int:
        """Memory that it takes while it is loaded."""
        ...

    @property
    def vram_bytes(self) -> int:
        """How much of that is a device's."""
        ...

    def in_use(
        self, keep_alive_seconds: float | None = None
    ) -> AbstractContextManager[None]:
        """Keep it loaded while the block runs, and after it for its keep-alive.

        `keep_alive_seconds` is the keep-alive from now on, unless it is None.
        """
        ...

    async def unload(self) -> None:
        """Free it now, or where it is used after that."""
        ...

    async def wait_ready(self) -> None:
        """Wait until a runner is loaded. Raises UpstreamError when none will be."""
        ...

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, extra: Mapping[str, Any]
    ) -> str:
        """Render messages by the model's chat template (`/apply-template`).

        `extra` goes into the same body (`tools`, `chat_template_kwargs`, ...).
        Raises UpstreamError.
        """
        ...

    async def tokenize(self, text: str) -> TokenIds:
        """Tell the ids that the runner would evaluate for `text` as a prompt.

        Special tokens are added and parsed. Raises UpstreamError.
        """
        ...


class Catalog(Protocol):
    """The models that this process serves."""

    def resolve(self, name: str) -> ServedModel | None:
        """Find a model; case is ignored, and `x` is `x:latest`."""
        ...

    def models(self) -> Sequence[ServedModel]:
        """All models, one entry per full name."""
        ...

    def is_running(self, model: ServedModel) -> bool:
        """Whether a runner of this model is loaded now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOptions:
    """How far one request takes part in sharing KV."""

    namespace: str = field(default="", repr=False)
    """Requests of different namespaces never share KV. Never logged."""
    read: bool = True
    """Whether stored KV may be restored for it."""
    write: bool = True
    """Whether KV that it makes may be stored."""
    block_size: int | None = None
    """Tokens of a block, a power of two; None: what the runner's blocks have."""
    replica_num: int = 1
    """Copies of its new blocks that a pool shall keep."""
    soft_pin: bool = False
    """Whether its new blocks shall be evicted after all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One prompt to be continued by a model."""

    model: ServedModel
    token_ids: TokenIds
    """The prompt; empty where it is not known (it is forwarded all the same)."""
    path: str = COMPLETION_PATH
    """llama-server's route. Where it is not `/completion` the body holds the prompt,
    and `token_ids` are what the runner is believed to make of it."""
    body: Mapping[str, Any]
    """The body for it, less what the turn source decides itself: `id_slot`, in a
    stream of events also `stream`, `cache_prompt` and `return_progress`, and for
    `/completion` also `prompt` and `return_tokens`."""
    route: str
    """`/api/chat` and the like: a label for metrics."""
    reuse: ReuseOptions


class Forwarded(Protocol):
    """A runner's answer that is passed on as it is."""

    @property
    def status(self) -> int:
        """HTTP status."""
        ...

    @property
    def content_type(self) -> str:
        """The `Content-Type` as sent."""
        ...

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        ...

    @property
    def totals(self) -> EngineTotals | None:
        """The engine's counts; None before the end of the body."""
        ...

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body: of a stream whole server-sent events, else any pieces."""
        ...


class Turn(Protocol):
    """A turn that holds its slot, with what was decided about reuse."""

    @property
    def request_id(self) -> str:
        """Short, unique, safe in a header and in a log."""
        ...

    @property
    def decision(self) -> str:
        """What was done before the prefill, in one word."""
        ...

    @property
    def reason(self) -> str:
        """Why, in one short label."""
        ...

    @property
    def restored_tokens(self) -> int:
        """How many tokens were brought back from the store."""
        ...

    @property
    def load_seconds(self) -> float:
        """How long the turn waited for a runner to be loaded (not for a slot)."""
        ...

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield llama-server's events; the last one has the `timings`.

        A generator, because it is closed at once where a reply is given up.

        Raises UpstreamError (before the first event) and RunnerGone (any time).
        """
        ...


class TurnSource(Protocol):
    """Where turns come from."""

    def turn(self, request: TurnRequest) -> AbstractAsyncContextManager[Turn]:
        """Wait for a slot, bring back what is worth it; commit and free at exit.

        Cancelling the task frees the slot at once. Raises UpstreamError, and
        RequestError when too many wait.
        """
        ...


class RelayTurn(Turn, Protocol):
    """A turn whose answer is passed on as it is."""

    def forward(self) -> AbstractAsyncContextManager[Forwarded]:
        """Send the body as it is, with the slot named; relay the answer unchanged.

        An error answer of the runner is relayed like any other. Raises RunnerGone,
        then or while the chunks are read.
        """
        ...


class RelayTurnSource(Protocol):
    """Where such turns come from; the same owner as a `TurnSource`."""

    def turn(self, request: TurnRequest) -> AbstractAsyncContextManager[RelayTurn]:
        """See `TurnSource.turn`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """What became of one generating request. Holds no text of it."""

    route: str
    model: str
    """Full name of the model served; empty where none was found."""
    status: int
    """Status sent, 499 where the client left before the end."""
    error: str
    """`""`, or the class of what went wrong."""
    done_reason: str
    """`stop`, `length`, `load`, `unload`; empty where the turn did not end."""
    request_id: str
    decision: str
    reason: str
    restored_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the engine confirmed it did not evaluate."""
    num_decoded_tokens: int
    first_token_seconds: float | None
    """From the receipt of the request to the first text; None without any."""
    total_seconds: float


class RequestObserver(Protocol):
    """Whoever counts requests and writes the line per request."""

    def started(self, route: str) -> None:
        """Note a generating request that has arrived."""
        ...

    def first_token(self, route: str, *, model: str, seconds: float) -> None:
        """Note the first text of a reply, so long after the request's receipt."""
        ...

    def finished(self, outcome: RequestOutcome) -> None:
        """Note the end of a request; called once for each `started`."""
        ...
