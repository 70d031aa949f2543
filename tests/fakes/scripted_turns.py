"""A catalog of one model and turns that follow a script.

The shapes of the events are those of a real llama-server (`/completion`, streamed,
`return_tokens`). A script is a list of steps: an event is yielded, an exception is
raised, an `asyncio.Event` is waited for.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from proxy.errors import UpstreamError
from proxy.llamacpp.embeddings import EmbeddingOptions, EngineEmbeddings, Input
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.llamacpp.props import RunnerProps
from proxy.ollama.backend import RequestOutcome, ServedModel, TurnRequest
from proxy.ollama_folder import Modelfile
from proxy.prefix.hashing import TokenIds

Step = dict[str, Any] | Exception | asyncio.Event

FACTS = ModelFacts(
    path="/models/smol.gguf",
    size_bytes=98_362_432,
    mtime_ns=1_796_112_000_120_034_000,
    content_digest="c0" * 32,
    file_sha256="5d" * 32,
    architecture="llama",
    name="Smol",
    parameter_count=134_520_000,
    parameter_size="134.52M",
    quantization_level="Q4_1",
    context_length=8192,
    embedding_length=576,
    block_count=30,
    head_count=9,
    head_count_kv=3,
    metadata={"general.architecture": "llama", "llama.context_length": 8192},
    chat_template="{{ messages }}",
    tokenizer_model="gpt2",
    tokenizer_pre="smollm",
    bos_id=1,
    eos_id=2,
    add_bos=False,
    control_tokens=((1, "<|im_start|>"), (2, "<|im_end|>")),
    longest_token_bytes=16,
    license="apache-2.0",
)


def text_event(text: str) -> dict[str, Any]:
    """Make an event in the middle of a turn."""
    return {
        "index": 0,
        "content": text,
        "tokens": [5],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": 1,
        "tokens_evaluated": 27,
    }


def last_event(
    *, stop_type: str = "eos", cache_n: int = 26, prompt_n: int = 1, text: str = ""
) -> dict[str, Any]:
    """Make the last event of a turn."""
    return {
        "index": 0,
        "content": text,
        "tokens": [],
        "id_slot": 1,
        "stop": True,
        "stop_type": stop_type,
        "stopping_word": "",
        "truncated": False,
        "timings": {
            "cache_n": cache_n,
            "prompt_n": prompt_n,
            "prompt_ms": 12.24,
            "predicted_n": 4,
            "predicted_ms": 55.817,
        },
    }


def chat_event(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Make a chunk of a chat; with a finish reason the last one of a turn."""
    choice = {"finish_reason": finish_reason, "index": 0, "delta": delta}
    chunk: dict[str, Any] = {"choices": [choice], "object": "chat.completion.chunk"}
    if finish_reason is not None:
        chunk["timings"] = last_event()["timings"]
    return chunk


def call_event(
    index: int, arguments: str, *, name: str = "", call_id: str = ""
) -> dict[str, Any]:
    """Make a chunk with a piece of a call; the first one of each has the name."""
    call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name:
        call |= {"id": call_id, "type": "function"}
        call["function"]["name"] = name
    return chat_event(tool_calls=[call])


def simple_script(*texts: str) -> list[Step]:
    """Make the script of a turn that goes well."""
    return [*(text_event(text) for text in texts), last_event()]


@dataclass
class ScriptedEmbedder:
    """Makes the same vector of each input, one token of each character."""

    vector: tuple[float, ...] = (3.0, 0.0, 4.0)
    failure: Exception | None = None
    gate: asyncio.Event | None = None
    """Waited for before the embeddings are there."""
    is_stuck: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[list[Input], EmbeddingOptions]] = field(default_factory=list)
    uses: list[float | None] = field(default_factory=list)

    @contextmanager
    def in_use(self, keep_alive_seconds: float | None = None) -> Iterator[None]:
        """Note the use."""
        self.uses.append(keep_alive_seconds)
        yield

    async def wait_ready(self) -> None:
        """Be ready."""

    async def embed(
        self, inputs: Sequence[Input], options: EmbeddingOptions
    ) -> EngineEmbeddings:
        """Note what was asked; answer, or fail."""
        self.asked.append((list(inputs), options))
        if self.gate is not None:
            self.is_stuck.set()
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        vector = np.array(self.vector, dtype=np.float32)
        return EngineEmbeddings((vector,) * len(inputs), sum(map(len, inputs)))


@dataclass
class ScriptedModel:
    """A model whose template and tokenizer are toys: one token per character."""

    name: str = "smol:latest"
    facts: ModelFacts = FACTS
    modelfile: Modelfile = field(default_factory=Modelfile)
    projector: ModelFacts | None = None
    context_tokens: int = 4096
    props: RunnerProps | None = None
    failure: Exception | None = None
    """Raised instead of rendering."""
    embedder: ScriptedEmbedder = field(default_factory=ScriptedEmbedder)
    rendered: list[list[Mapping[str, Any]]] = field(default_factory=list)
    extras: list[Mapping[str, Any]] = field(default_factory=list)
    """What went to the template beside the messages, each time."""
    remaining_seconds: float = math.inf
    loaded_bytes: int = 160_432_128
    vram_bytes: int = 0
    uses: list[float | None] = field(default_factory=list)
    """The keep-alive of each use, in order; unloading counts as one of 0 seconds."""

    @contextmanager
    def in_use(self, keep_alive_seconds: float | None = None) -> Iterator[None]:
        """Note the use."""
        self.uses.append(keep_alive_seconds)
        yield

    async def unload(self) -> None:
        """Note it."""
        self.uses.append(0.0)

    async def wait_ready(self) -> None:
        """Be ready."""

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, extra: Mapping[str, Any]
    ) -> str:
        """Render as ChatML."""
        if self.failure is not None:
            raise self.failure
        self.rendered.append(list(messages))
        self.extras.append(extra)
        turns = [
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in messages
        ]
        return "".join([*turns, "<|im_start|>assistant\n"])

    async def tokenize(self, text: str) -> TokenIds:
        """Make one token of each character."""
        return np.fromiter(map(ord, text), dtype=np.int32, count=len(text))


class ScriptedCatalog:
    """A catalog of the given models."""

    def __init__(self, *models: ScriptedModel) -> None:
        self._models = models

    def resolve(self, name: str) -> ServedModel | None:
        """Find by name, without case, `:latest` added."""
        wanted = name.lower() if ":" in name else f"{name.lower()}:latest"
        return next((model for model in self._models if model.name == wanted), None)

    def models(self) -> Sequence[ServedModel]:
        """List all."""
        return self._models

    def is_running(self, model: ServedModel) -> bool:
        """All are."""
        return True


@dataclass
class ScriptedTurn:
    """One turn, played from its script."""

    script: Sequence[Step]
    is_stuck: asyncio.Event
    decision: str = "restore"
    reason: str = "cheaper"
    restored_tokens: int = 24
    request_id: str = "00ff"
    load_seconds: float = 0.5
    is_closed: bool = False
    """Whether the generator of events was ended."""

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Play the script."""
        try:
            for step in self.script:
                match step:
                    case asyncio.Event():
                        self.is_stuck.set()
                        await step.wait()
                    case Exception():
                        raise step
                    case _:
                        yield step
        finally:
            self.is_closed = True


class ScriptedTurns:
    """A source of turns that all follow `script`; remembers what was asked of it."""

    def __init__(self, script: Sequence[Step] = ()) -> None:
        self.script: Sequence[Step] = script or simple_script("Hi", " there.")
        self.refusal: UpstreamError | None = None
        self.end_gate: asyncio.Event | None = None
        """Waited for when a turn ends well, as a slow commit would."""
        self.requests: list[TurnRequest] = []
        self.turns: list[ScriptedTurn] = []
        self.open_turns = 0
        self.is_stuck = asyncio.Event()
        """Set when a turn waits for an event of its script."""
        self.ended = asyncio.Event()
        self.exit_reason: BaseException | None = None

    @asynccontextmanager
    async def turn(self, request: TurnRequest) -> AsyncIterator[ScriptedTurn]:
        """Open a turn."""
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        turn = ScriptedTurn(self.script, self.is_stuck)
        self.turns.append(turn)
        self.open_turns += 1
        try:
            yield turn
            if self.end_gate is not None:
                await self.end_gate.wait()
        except BaseException as exc:
            self.exit_reason = exc
            raise
        finally:
            self.open_turns -= 1
            self.ended.set()


class RecordingObserver:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.routes: list[str] = []
        self.first_tokens: list[float] = []
        self.outcomes: list[RequestOutcome] = []
        self.num_finished = asyncio.Semaphore(0)
        """Released once for each outcome."""

    def started(self, route: str) -> None:
        """Keep the route."""
        self.routes.append(route)

    def first_token(self, route: str, *, model: str, seconds: float) -> None:
        """Keep the time."""
        self.first_tokens.append(seconds)

    def finished(self, outcome: RequestOutcome) -> None:
        """Keep the outcome."""
        self.outcomes.append(outcome)
        self.num_finished.release()


def model_named(name: str, *, mtime_ns: int = FACTS.mtime_ns) -> ScriptedModel:
    """Make a model of another name or age."""
    return ScriptedModel(name=name, facts=replace(FACTS, mtime_ns=mtime_ns))
