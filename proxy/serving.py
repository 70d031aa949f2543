"""Brings models and their runners up, and keeps them up.

Two kinds of runners: embedded ones, started here, and given llama-servers. Rules:
1. Every runner is one task of `Serving`; a task that fails is logged and tried again.
   All are started at once; what nobody uses is parked later.
2. Two given servers with one name and different contents are refused; the same
   content is one model with several runners.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.errors import ConfigError, KvbusError, RunnerGone
from proxy.llamacpp import attached, embedded
from proxy.llamacpp.attached import AttachedOptions, AttachedRunner
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.embedded import EmbeddedOptions, EmbeddedRunner, ModelFiles
from proxy.llamacpp.embeddings import is_embedding_model, needs_whole_batch
from proxy.llamacpp.gguf_facts import ModelFacts, load_facts
from proxy.llamacpp.runner import Runner
from proxy.metrics import Metrics
from proxy.model_sources import ModelSource
from proxy.reuse.models import Model, ModelCatalog, full_name

logger = logging.getLogger(__name__)

FIRST_LOOK_SECONDS = 5.0
"""How long start-up waits for given servers that do not answer."""

DEFAULT_CONTEXT_TOKENS = 8192
DEFAULT_BATCH_CONTEXT_TOKENS = 2048
"""Of models that take an input in one batch, whose memory grows with the square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How embedded runners are started; the same for all models."""

    runners: int
    slots: int
    context_tokens: int | None
    """Per slot; None: 8192 or what the model was trained for, if that is less."""
    kv_type: str
    flash_attention: str
    threads: int | None
    cache_ram_mib: int | None
    block_size: int | None
    is_opaque: bool
    """Whether slot files that are not understood are stored whole."""
    keep_alive_seconds: float
    """How long a model stays loaded without a use, where no request says."""

    @property
    def runner_threads(self) -> int | None:
        """Threads of one runner: given, else its share of the cores.

        The engine's threads spin while they wait for each other: more of them than
        cores makes all runners crawl. One runner alone keeps the engine's default.
        """
        if self.threads is not None or self.runners == 1:
            return self.threads
        return cpu_share(self.runners)


def cpu_share(runners: int) -> int:
    """Return how many CPU threads each of several runners on this host gets."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return max(1, (cores or 1) // runners)


class Serving:
    """All runners of this process."""

    def __init__(
        self,
        *,
        catalog: ModelCatalog,
        metrics: Metrics,
        engine: EngineOptions,
        cache_dir: Path,
        socket_dir: Path,
        slot_dir: Path,
    ) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._engine = engine
        self._cache_dir = cache_dir
        self._socket_dir = socket_dir
        self._slot_dir = slot_dir
        # the mutable state
        self._tasks: list[asyncio.Task[None]] = []
        self._num_embedded = 0
        self.upstreams: dict[str, str] = {}
        """Why each given URL is not used; "" where it is."""

    async def start_embedded(self, name: str, source: ModelSource) -> Model:
        """Serve a model with runners of ours. Raises ConfigError."""
        files = await source.look(self._cache_dir)
        model = Model(
            name=full_name(name),
            facts=files.facts,
            modelfile=files.modelfile,
            metrics=self._metrics,
            keep_alive_seconds=self._engine.keep_alive_seconds,
        )
        self._catalog.add(model)
        model.projector = files.projector_facts
        _say_what_differs(files)
        if is_embedding_model(files.facts):
            self._start_runner(model, f"{model.name}/0", source, files)
            return model
        for number in range(self._engine.runners):
            self._start_runner(model, f"{model.name}/{number}", source, files)
        model.companion = companion = Model(
            name=model.name,
            facts=files.facts,
            modelfile=files.modelfile,
            metrics=self._metrics,
            keep_alive_seconds=self._engine.keep_alive_seconds,
            is_companion=True,
        )
        self._start_runner(companion, f"{model.name}/embeddings", source, files)
        return model

    def _start_runner(
        self, model: Model, runner_id: str, source: ModelSource, files: ModelFiles
    ) -> None:
        """Start a runner of ours; that of a companion once it is wanted."""
        runner = self._runner(
            runner_id, model, patience=embedded.PATIENCE, can_park=True
        )
        if model.is_companion:
            runner.park()
        engine, name = self._engine, f"runner-{self._num_embedded}"
        self._num_embedded += 1
        options = EmbeddedOptions(
            alias=model.name,
            # one at a time: an embedding then depends on its own text alone
            slots=1 if model.makes_embeddings_only else engine.slots,
            context_tokens=self._context_tokens(files),
            kv_type=engine.kv_type,
            flash_attention=engine.flash_attention,
            threads=engine.runner_threads,
            cache_ram_mib=engine.cache_ram_mib,
            socket_path=self._socket_dir / f"{name}.sock",
            slot_directory=self._slot_dir / name,
            makes_embeddings=model.makes_embeddings_only,
        )
        life = EmbeddedRunner(
            runner,
            options,
            look=lambda: source.look(self._cache_dir),
            on_files=lambda files: model.renew(
                files.facts, files.modelfile, projector=files.projector_facts
            ),
        ).run()
        self._tasks.append(asyncio.create_task(life))

    def _context_tokens(self, files: ModelFiles) -> int:
        """Return the context of a slot: the setting, the model's wish, our default."""
        default = DEFAULT_CONTEXT_TOKENS
        if needs_whole_batch(files.facts):
            default = DEFAULT_BATCH_CONTEXT_TOKENS
        elif self._engine.context_tokens is not None:
            return self._engine.context_tokens
        wanted = self._engine.context_tokens
        if wanted is None:
            wanted = files.modelfile.parameters.get("num_ctx")
        if not isinstance(wanted, int) or wanted <= 0:
            wanted = default
        return min(wanted, files.facts.context_length or default)

    async def start_attached(self, upstreams: list[AttachedOptions]) -> None:
        """Serve what given llama-servers hold; looks again for those that are away.

        Raises ConfigError when two of them contradict each other.
        """
        looks: list[asyncio.Future[None]] = []
        for options in upstreams:
            seen: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            looks.append(seen)
            self._tasks.append(asyncio.create_task(self._follow(options, seen)))
        if looks:
            done, _ = await asyncio.wait(looks, timeout=FIRST_LOOK_SECONDS)
            for look in done:
                look.result()

    async def stop(self) -> None:
        """End all runners of ours and leave the given ones alone."""
        for model in self._catalog.models():
            model.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _runner(
        self, runner_id: str, model: Model, *, patience: int, can_park: bool
    ) -> Runner:
        runner = Runner(
            runner_id=runner_id,
            facts=model.facts,
            listener=model,
            block_size=self._engine.block_size,
            patience=patience,
            can_park=can_park,
            is_opaque=self._engine.is_opaque,
        )
        model.runners.append(runner)
        return runner

    async def _follow(
        self, options: AttachedOptions, seen: "asyncio.Future[None]"
    ) -> None:
        """Use the server at one URL, whatever process is behind it."""
        client = LlamaServerClient(url=options.url)
        said = ""
        self.upstreams[options.url] = "not reached yet"

        def note_seen() -> None:
            self.upstreams[options.url] = ""
            _resolve(seen)

        try:
            while True:
                try:
                    await self._use(options, client, note_seen)
                    said = ""
                    self.upstreams[options.url] = "it is away"
                except ConfigError as exc:
                    if not seen.done():
                        seen.set_exception(exc)
                        return
                    said = _say_once(options.url, str(exc), said)
                except RunnerGone as exc:
                    reason = f"cannot be reached: {exc.reason}"
                    said = _say_once(options.url, reason, said)
                except KvbusError as exc:
                    said = _say_once(options.url, str(exc), said)
                except Exception:
                    logger.exception("event=upstream.defect url=%s", options.url)
                self.upstreams[options.url] = said or self.upstreams[options.url]
                await asyncio.sleep(attached.POLL_SECONDS)
        finally:
            await client.close()

    async def _use(
        self,
        options: AttachedOptions,
        client: LlamaServerClient,
        on_seen: Callable[[], None],
    ) -> None:
        """Serve one process of a given llama-server until it is gone."""
        props = await client.props()
        path = str(props.get("model_path", ""))
        process = await asyncio.to_thread(attached.find_process, options.url)
        refusal = await asyncio.to_thread(attached.look_at, process, options.url, path)
        if process is not None and not refusal:
            facts = await load_facts(process.resolve(path), self._cache_dir)
        else:
            facts = await client.model_facts()
        if not refusal and is_embedding_model(facts):
            refusal = embedded.EMBEDDINGS_REFUSAL
        model = self._model_of(props, facts)
        runner = self._runner(
            f"{model.name}@{options.url.rpartition('/')[2]}",
            model,
            patience=attached.PATIENCE,
            can_park=False,
        )
        server = AttachedRunner(
            runner, client, options=options, process=process, refusal=refusal
        )
        try:
            await server.run(on_seen)
        finally:
            runner.close_files()
            model.runners.remove(runner)

    def _model_of(self, props: Mapping[str, Any], facts: ModelFacts) -> Model:
        alias = str(props.get("model_alias") or "")
        path = str(props.get("model_path") or "")
        if not alias or alias == path:
            alias = Path(path).stem or "model"
        name = full_name(alias)
        model = self._catalog.resolve(name)
        if model is None:
            model = Model(name=name, facts=facts, metrics=self._metrics)
            self._catalog.add(model)
        elif model.facts.content_digest != facts.content_digest:
            if model.runners:
                raise ConfigError(
                    f"two servers have different models called {name}, or the model of"
                    " one cannot be seen"
                )
            self._catalog.remove(model)
            return self._model_of(props, facts)
        return model


def _say_what_differs(files: ModelFiles) -> None:
    """Tell where a model out of Ollama's folder gets other prompts than there."""
    modelfile = files.modelfile
    if modelfile.needs_ollama:
        logger.warning(
            "event=model.prompt model=%s reason=%r",
            modelfile.source,
            f"{', '.join(modelfile.needs_ollama)} is a part of Ollama: the model file's"
            " chat template is used instead",
        )


def _resolve(seen: "asyncio.Future[None]") -> None:
    if not seen.done():
        seen.set_result(None)


def _say_once(url: str, reason: str, said: str) -> str:
    """Log why a server is not used, unless that was the last thing said of it."""
    if reason != said:
        logger.warning("event=upstream.away url=%s reason=%r", url, reason)
    return reason
