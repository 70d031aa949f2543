"""The models that are served, and the runners of each.

Rules:
1. A model is found under its full name; `x` is `x:latest`, case does not matter.
2. A model listens to its runners: their slots are in its pool exactly while they are
   ready. When all of its runners have failed, whoever waits for a slot hears so.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from proxy.errors import ConfigError, RunnerGone, UpstreamError
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.llamacpp.props import RunnerProps
from proxy.llamacpp.runner import Runner
from proxy.metrics import Metrics
from proxy.prefix.hashing import TokenIds
from proxy.prefix.tokenizer import PrefixTokenizer
from proxy.reuse.arbiter import CostModel
from proxy.reuse.slots import SlotPool

LOAD_TIMEOUT_SECONDS = 300.0
"""How long a request waits for a model to be loaded (Ollama's OLLAMA_LOAD_TIMEOUT)."""

MAX_DEATHS = 2
"""So many runners may die under one question before the request fails."""

_Answer = TypeVar("_Answer")


class Model:
    """One model under its name."""

    def __init__(self, *, name: str, facts: ModelFacts, metrics: Metrics) -> None:
        self.name = name
        self.facts = facts
        self.pool = SlotPool()
        self.runners: list[Runner] = []
        self._costs: dict[str, CostModel] = {}
        self._metrics = metrics
        self._tokenizer = PrefixTokenizer(self._ask_tokenizer, facts.control_tokens)
        self._changed = asyncio.Event()

    @property
    def context_tokens(self) -> int:
        """Tokens, prompt and reply together, that every slot has room for."""
        ready = [runner.context_tokens for runner in self._ready()]
        return min(ready) if ready else self.facts.context_length

    @property
    def props(self) -> RunnerProps | None:
        """What a runner says of its prompts; None before one was up."""
        known = (runner.props for runner in self.runners)
        return next((props for props in known if props), None)

    @property
    def is_running(self) -> bool:
        """Whether at least one runner is ready."""
        return bool(self._ready())

    def costs(self, runner: Runner) -> CostModel:
        """Return what is learned of one runner; it outlives the runner's restarts."""
        return self._costs.setdefault(runner.runner_id, CostModel())

    def renew(self, facts: ModelFacts) -> None:
        """Hear which model file a new process has loaded.

        Another content under the same name is another model: its tokenizer is, and
        runners of the old one are ended, to load the new one.
        """
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
        self._notify()

    def runner_gone(self, runner: Runner, reason: str) -> None:
        """Forget the slots of a runner; fail those who wait in vain."""
        self._metrics.runner_restarts.labels(self.name).inc()
        self.pool.drop_runner(runner)
        if self._has_failed():
            self.pool.fail_waiting(self._failure())
        self._notify()

    async def wait_ready(self) -> None:
        """Wait until a runner is ready. Raises UpstreamError when none will be."""
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
        return await self._ask(lambda client: client.apply_template(body))

    async def tokenize(self, text: str) -> TokenIds:
        """Return the ids that a runner evaluates for `text`."""
        return await self._tokenizer.tokenize(text)

    async def _ask_tokenizer(self, text: str, add_special: bool) -> TokenIds:
        return await self._ask(
            lambda client: client.tokenize(text, add_special=add_special)
        )

    async def _ask(
        self, question: Callable[[LlamaServerClient], Awaitable[_Answer]]
    ) -> _Answer:
        """Ask any runner, for all would say the same; the next one if one dies.

        Raises UpstreamError.
        """
        for _ in range(MAX_DEATHS):
            await self.wait_ready()
            runner = self._any_ready()
            try:
                return await question(runner.client)
            except RunnerGone as exc:
                if not await runner.client.is_healthy():
                    runner.report_lost(str(exc))
        await self.wait_ready()
        return await question(self._any_ready().client)

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
        """Tell whether a runner of the model is ready."""
        return isinstance(model, Model) and model.is_running


def full_name(name: str) -> str:
    """Return a model name with its tag: `x` is `x:latest`."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _key(name: str) -> str:
    key = full_name(name).lower()
    for prefix in ("registry.ollama.ai/", "library/"):
        key = key.removeprefix(prefix)
    return key
