"""The models that are served, and the runners of each.

Rules:
1. A model is found under its full name; `x` is `x:latest`, case does not matter.
2. A model listens to its runners: their slots are in its pool exactly while they are
   ready. When all of its runners have failed, whoever waits for a slot hears so.
3. A model that was not used for its keep-alive is freed: runners of ours are parked,
   and the slots of given ones, which are not ours to end, are erased. Commits count as
   uses until the engine has written the slot. Whoever waits for a runner wants it.
4. A model that generates may have a companion: the same file, in a process that makes
   embeddings alone. It comes and goes by its own uses, and is unloaded with the model.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from proxy.errors import ConfigError, KvbusError, RunnerGone, UpstreamError
from proxy.llamacpp.embeddings import is_embedding_model
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.llamacpp.props import RunnerProps
from proxy.llamacpp.runner import Runner
from proxy.metrics import Metrics
from proxy.ollama_folder import NO_MODELFILE, Modelfile
from proxy.prefix.hashing import TokenIds
from proxy.prefix.tokenizer import PrefixTokenizer
from proxy.reuse.arbiter import CostModel
from proxy.reuse.embedder import Embedder
from proxy.reuse.keep_alive import KeepAlive
from proxy.reuse.slots import NO_TOKENS, SlotPool

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_SECONDS = 300.0
"""How long a request waits for a model to be loaded (Ollama's OLLAMA_LOAD_TIMEOUT)."""

MAX_DEATHS = 2
"""So many runners may die under one question before the request fails."""

UNLOAD_SECONDS = 10.0
"""How long whoever unloads a model waits for the end of its processes."""

_Answer = TypeVar("_Answer")


class Model:
    """One model under its name."""

    def __init__(
        self,
        *,
        name: str,
        facts: ModelFacts,
        metrics: Metrics,
        modelfile: Modelfile = NO_MODELFILE,
        keep_alive_seconds: float = math.inf,
        is_companion: bool = False,
    ) -> None:
        """Describe a model that is freed after so long without a use, or never."""
        self.name = name
        self.facts = facts
        self.modelfile = modelfile
        self.projector: ModelFacts | None = None
        self.pool = SlotPool()
        self.runners: list[Runner] = []
        self.companion: Model | None = None
        self.is_companion = is_companion
        self._embedder = Embedder(self)
        self._costs: dict[str, CostModel] = {}
        self._metrics = metrics
        self._tokenizer = PrefixTokenizer(self._ask_tokenizer, facts.control_tokens)
        self._changed = asyncio.Event()
        self._keep_alive = KeepAlive(
            default_seconds=keep_alive_seconds, on_idle=self._free
        )
        self._is_erased = False
        self._erasing: asyncio.Task[None] | None = None

    @property
    def context_tokens(self) -> int:
        """Tokens, prompt and reply together, that every slot has room for.

        Exact once a runner was ready.
        """
        known = [runner.context_tokens for runner in self._ready() or self.runners]
        return min(filter(None, known), default=self.facts.context_length)

    @property
    def props(self) -> RunnerProps | None:
        """What a runner says of its prompts; None before one was up."""
        known = (runner.props for runner in self.runners)
        return next((props for props in known if props), None)

    @property
    def embedder(self) -> Embedder:
        """What makes its embeddings."""
        return self.companion.embedder if self.companion else self._embedder

    @property
    def makes_embeddings_only(self) -> bool:
        """Whether its runners are for embeddings alone."""
        return self.is_companion or is_embedding_model(self.facts)

    @property
    def is_running(self) -> bool:
        """Whether at least one runner is ready."""
        return bool(self._ready())

    @property
    def is_loaded(self) -> bool:
        """Whether a runner is ready, and was not freed since the last use."""
        is_loaded = self.is_running and not self._is_erased
        return is_loaded or bool(self.companion and self.companion.is_loaded)

    @property
    def remaining_seconds(self) -> float:
        """How long it stays loaded if nobody uses it from now on; or infinity."""
        kept = [self._keep_alive.remaining_seconds]
        if self.companion is not None and self.companion.is_loaded:
            others = self.companion.remaining_seconds
            kept = [*kept, others] if self.is_running else [others]
        return max(kept)

    @property
    def loaded_bytes(self) -> int:
        """Memory that its runners take: weights once, and the KV of all slots."""
        kv_bytes = sum(
            runner.sharing.layout.kv_bytes_per_token
            * runner.context_tokens
            * runner.num_slots
            for runner in self._ready()
            if runner.sharing is not None
        )
        return max(self.facts.size_bytes + kv_bytes, self.vram_bytes)

    @property
    def vram_bytes(self) -> int:
        """Device memory that its runners took when they loaded."""
        others = self.companion.vram_bytes if self.companion else 0
        return others + sum(runner.vram_bytes for runner in self._ready())

    def in_use(
        self, keep_alive_seconds: float | None = None
    ) -> AbstractContextManager[None]:
        """Keep it loaded while the block runs, and after it for its keep-alive.

        `keep_alive_seconds` is the keep-alive from now on, unless it is None.
        """
        return self._keep_alive.use(keep_alive_seconds)

    async def unload(self) -> None:
        """Free it now, or where it is used after that.

        Returns when the processes have ended, or at once where it is used.
        """
        self._keep_alive.end()
        if self.companion is not None:
            await self.companion.unload()
        with suppress(TimeoutError):
            async with asyncio.timeout(UNLOAD_SECONDS):
                if self._erasing is not None:
                    await asyncio.wait({self._erasing})
                for runner in self.runners:
                    await runner.wait_ended()

    def close(self) -> None:
        """Free nothing any more."""
        if self.companion is not None:
            self.companion.close()
        self._keep_alive.close()
        if self._erasing is not None:
            self._erasing.cancel()

    def costs(self, runner: Runner) -> CostModel:
        """Return what is learned of one runner; it outlives the runner's restarts."""
        costs = self._costs.get(runner.runner_id)
        if costs is None:
            costs = self._costs[runner.runner_id] = CostModel()
        return costs

    def renew(
        self, facts: ModelFacts, modelfile: Modelfile, *, projector: ModelFacts | None
    ) -> None:
        """Hear which model files a new process has loaded.

        Another content under the same name is another model: its tokenizer is, and
        runners of the old one are ended, to load the new one.
        """
        self.modelfile, self.projector = modelfile, projector
        if self.companion is not None:
            self.companion.renew(facts, modelfile, projector=None)
        old, self.facts = self.facts, facts
        if old.content_digest == facts.content_digest:
            return
        self._tokenizer = PrefixTokenizer(self._ask_tokenizer, facts.control_tokens)
        for runner in self.runners:
            if runner.facts.content_digest != facts.content_digest:
                runner.report_lost("its model's file was replaced")

    def runner_ready(self, runner: Runner) -> None:
        """Take in the slots of a runner."""
        self.pool.add_runner(runner)
        self._is_erased = False
        self._keep_alive.note_loaded()
        self._notify()

    def runner_gone(self, runner: Runner, reason: str) -> None:
        """Forget the slots of a runner; fail those who wait in vain."""
        self._metrics.runner_restarts.labels(self.name).inc()
        self.pool.drop_runner(runner)
        if self._has_failed():
            self.pool.fail_waiting(self._failure())
        self._notify()

    def runner_parked(self, runner: Runner) -> None:
        """Forget the slots of a runner that is ended on purpose."""
        self.pool.drop_runner(runner)
        self._notify()

    async def wait_ready(self) -> None:
        """Wait until a runner is ready, and have parked ones started.

        Raises UpstreamError when none will be.
        """
        self._is_erased = False
        for runner in self.runners:
            runner.want()
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_SECONDS):
                while not self.is_running:
                    if self._has_failed():
                        raise self._failure()
                    await self._changed.wait()
        except TimeoutError as exc:
            raise UpstreamError(
                500, "timed out waiting for llama-server to start"
            ) from exc

    async def wait_change(self) -> None:
        """Wait until a runner comes or goes."""
        await self._changed.wait()

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, extra: Mapping[str, Any]
    ) -> str:
        """Render messages by the chat template of the runner."""
        body = {"messages": list(messages), **extra}
        return await self.ask(lambda runner: runner.client.apply_template(body))

    async def tokenize(self, text: str) -> TokenIds:
        """Return the ids that a runner evaluates for `text`."""
        return await self._tokenizer.tokenize(text)

    async def _ask_tokenizer(self, text: str, add_special: bool) -> TokenIds:
        return await self.ask(
            lambda runner: runner.client.tokenize(text, add_special=add_special)
        )

    async def ask(self, question: Callable[[Runner], Awaitable[_Answer]]) -> _Answer:
        """Ask any runner, for all would say the same; the next one if one dies.

        Raises UpstreamError.
        """
        with self.in_use():
            for _ in range(MAX_DEATHS):
                await self.wait_ready()
                runner = self._any_ready()
                try:
                    return await question(runner)
                except RunnerGone as exc:
                    if not await runner.client.is_healthy():
                        runner.report_lost(str(exc))
            await self.wait_ready()
            return await question(self._any_ready())

    def _free(self) -> None:
        """Park the runners of ours at once; erase slots of the others, in a task."""
        for runner in self.runners:
            runner.park()
        given = [runner for runner in self._ready() if not runner.can_park]
        if not given:
            self._keep_alive.note_freed()
        elif self._erasing is None or self._erasing.done():
            self._erasing = asyncio.create_task(self._erase(given))

    async def _erase(self, runners: Sequence[Runner]) -> None:
        """Empty all slots, unless somebody comes to use them."""
        for slot in self.pool.slots:
            if not self._keep_alive.is_due:
                return
            if slot.runner not in runners or not self.pool.lease_idle(slot):
                continue
            try:
                slot.token_ids = NO_TOKENS
                await slot.runner.client.erase_slot(slot.slot_id)
            except KvbusError as exc:
                logger.info(
                    "event=erase.failed runner=%s slot=%d reason=%r",
                    slot.runner.runner_id,
                    slot.slot_id,
                    str(exc),
                )
            finally:
                self.pool.release(slot)
        if self._keep_alive.is_due:
            self._is_erased = True
            self._keep_alive.note_freed()

    def _ready(self) -> list[Runner]:
        return [runner for runner in self.runners if runner.is_ready]

    def _any_ready(self) -> Runner:
        for runner in self._ready():
            return runner
        raise RunnerGone("no runner of the model is up")

    def _has_failed(self) -> bool:
        return all(runner.has_failed for runner in self.runners)

    def _failure(self) -> UpstreamError:
        reason = next((runner.failure for runner in self.runners), "")
        return UpstreamError(500, f"llama-server process has terminated: {reason}")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ModelCatalog:
    """All models of this process."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    def add(self, model: Model) -> None:
        """Serve a model. Raises ConfigError if its name is taken."""
        key = _key(model.name)
        if key in self._models:
            raise ConfigError(f"two models are called {model.name}")
        self._models[key] = model

    def remove(self, model: Model) -> None:
        """Serve a model no longer."""
        del self._models[_key(model.name)]

    def resolve(self, name: str) -> Model | None:
        """Find a model by a name that a client sent."""
        return self._models.get(_key(name))

    def models(self) -> Sequence[Model]:
        """Return all models in the order in which they were added."""
        return tuple(self._models.values())

    def is_running(self, model: object) -> bool:
        """Tell whether the model is loaded."""
        return isinstance(model, Model) and model.is_loaded


def full_name(name: str) -> str:
    """Return a model name with its tag: `x` is `x:latest`."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _key(name: str) -> str:
    key = full_name(name).lower()
    for prefix in ("registry.ollama.ai/", "library/"):
        key = key.removeprefix(prefix)
    return key
