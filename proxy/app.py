"""The composition root: builds everything, brings it up in order, takes it down.

The only place that constructs concrete classes. Order of start: listener (requests
wait for their model), store and runners at once, then the ready line. Order of end:
no new connections, streams get `STREAM_GRACE_SECONDS`, commits under way a moment,
then runners and store; all within five seconds.
"""

import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from proxy.admin import Admin
from proxy.config import ServeOptions
from proxy.connections import bound_stalls
from proxy.errors import ConfigError, StoreError
from proxy.in_flight import InFlight
from proxy.metered_store import MeteredStore
from proxy.metrics import Metrics
from proxy.model_files import DEFAULT_MODEL_NAME, fetch_default_model
from proxy.model_sources import ModelSource
from proxy.observer import MetricsObserver
from proxy.ollama.embedding_handlers import EmbeddingsApi
from proxy.ollama.guard import GuardOptions, install_guard
from proxy.ollama.handlers import ApiOptions, OllamaApi
from proxy.ollama.sharing import SharingPolicy
from proxy.reuse.models import Model, ModelCatalog
from proxy.reuse.orchestrator import Orchestrator
from proxy.reuse.request_log import RequestLog
from proxy.reuse.switch import SharingSwitch
from proxy.runtime import OwnedDirectory
from proxy.serving import EngineOptions, Serving
from proxy.store.supervisor import StoreSupervisor
from proxy.v1.embeddings import V1Embeddings
from proxy.v1.handlers import V1Api

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20
"""Bodies hold prompts and images; Ollama itself sets no limit."""

MAX_HEADER_BYTES = 1 << 16
"""Of one header, or of the request line: tokens and cookies can be long."""

STREAM_GRACE_SECONDS = 3.0
CANCEL_GRACE_SECONDS = 0.2
"""aiohttp waits so long twice: for handlers to end, and to end once cancelled."""

COMMIT_GRACE_SECONDS = 0.3
STORE_RETRY_SECONDS = 5.0


class Application:
    """One `kvbus serve`."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self.metrics = Metrics()
        self.catalog = ModelCatalog()
        store_options = options.store_options()
        self._supervisor = StoreSupervisor(store_options) if store_options else None
        self._store = self._supervisor.client if self._supervisor else None
        self._switch = SharingSwitch(self.metrics)
        self._log = RequestLog()
        self._orchestrator = Orchestrator(
            catalog=self.catalog,
            store=MeteredStore(self._store, self.metrics) if self._store else None,
            mode=options.restore,
            metrics=self.metrics,
            switch=self._switch,
            log=self._log,
        )
        # the mutable state
        self.is_ready = False
        self.port = 0
        self._background: set[asyncio.Task[None]] = set()
        self._in_flight = InFlight()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises ConfigError when it cannot start."""
        async with AsyncExitStack() as stack:
            options = self._options
            sockets = OwnedDirectory(options.runtime, "serve-")
            stack.callback(sockets.close)
            slot_files = OwnedDirectory(options.slot_root, "serve-")
            stack.callback(slot_files.close)
            serving = Serving(
                catalog=self.catalog,
                metrics=self.metrics,
                engine=EngineOptions(
                    runners=options.runners,
                    slots=options.slots,
                    context_tokens=options.ctx,
                    kv_type=options.kv_type,
                    flash_attention=options.flash_attn,
                    threads=options.threads,
                    cache_ram_mib=options.cache_ram,
                    block_size=options.block_size,
                    is_opaque=options.opaque,
                    keep_alive_seconds=options.keep_alive,
                ),
                cache_dir=options.cache,
                socket_dir=sockets.path,
                slot_dir=slot_files.path,
            )
            front = await self._listen(serving)
            stack.push_async_callback(self._take_down, front, serving)
            starting = asyncio.create_task(self._bring_up(serving))
            stopping = asyncio.create_task(stop.wait())
            stack.callback(starting.cancel)
            stack.callback(stopping.cancel)
            await asyncio.wait(
                {starting, stopping}, return_when=asyncio.FIRST_COMPLETED
            )
            if starting.done():
                starting.result()
                self.is_ready = True
                say(await self._ready_line())
            await stopping
            self.is_ready = False

    async def _listen(self, serving: Serving) -> web.AppRunner:
        host, port = self._options.listen
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        observer = MetricsObserver(self.metrics, self._log)
        app.middlewares.append(observer.middleware())
        app.middlewares.append(bound_stalls(self._options.stall_timeout))
        app.on_response_prepare.append(observer.add_id)
        is_loopback = all(map(_is_loopback, await _resolve(host, port)))
        install_guard(
            app,
            GuardOptions(
                is_loopback_listener=is_loopback, origins=self._options.origins
            ),
        )
        sharing_policy = SharingPolicy(self._transports)
        api = OllamaApi(
            self.catalog,
            self._orchestrator,
            observer=observer,
            options=ApiOptions(response_headers=self._options.response_headers),
            reuse_policy=sharing_policy,
        )
        v1 = V1Api(
            self.catalog,
            self._orchestrator,
            observer=observer,
            response_headers=self._options.response_headers,
            reuse_policy=sharing_policy,
        )
        admin = Admin(
            catalog=self.catalog,
            metrics=self.metrics,
            store=self._store,
            switch=self._switch,
            log=self._log,
            upstreams=lambda: serving.upstreams,
            transports=self._transports,
            is_ready=lambda: self.is_ready,
            is_loopback_listener=is_loopback,
        )
        app.middlewares.append(self._in_flight.middleware())
        app.add_routes(api.routes())
        app.add_routes(v1.routes())
        app.add_routes(EmbeddingsApi(self.catalog, observer=observer).routes())
        app.add_routes(V1Embeddings(self.catalog, observer=observer).routes())
        app.add_routes(admin.routes())
        front = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            auto_decompress=False,  # as Ollama; what comes packed has bounds of its own
            shutdown_timeout=CANCEL_GRACE_SECONDS,
        )
        await front.setup()
        try:
            await web.TCPSite(front, host, port).start()
        except OSError as exc:
            await front.cleanup()
            raise ConfigError(f"--listen {host}:{port}: {exc.strerror}") from exc
        self.port = front.addresses[0][1]
        return front

    def _transports(self) -> Sequence[str]:
        """Tell which ways the store has, as options of requests name them."""
        options = self._options.store_options()
        if self._supervisor is None or options is None:
            return ()
        hello = self._supervisor.client.hello
        if (hello.kind if hello else options.kind) == "disk":
            return ("disk",)
        return ("tcp", "disk") if options.disk_size_bytes else ("tcp",)

    async def _bring_up(self, serving: Serving) -> None:
        options = self._options
        models = options.model_sources
        if not models and not options.upstream:
            path = await fetch_default_model(options.cache, say)
            models = [(DEFAULT_MODEL_NAME, ModelSource(model=path))]
        store = asyncio.create_task(self._start_store())
        try:
            for name, source in models:
                await serving.start_embedded(name, source)
            await serving.start_attached(list(options.upstream))
            for model in self.catalog.models():
                await _settle(model)
            await store
        finally:
            store.cancel()

    async def _start_store(self) -> None:
        """Bring the store up; without it kvbus serves, and goes on trying."""
        if self._supervisor is None:
            return
        try:
            await self._supervisor.start()
        except StoreError as exc:
            logger.warning("event=store.away reason=%r", str(exc))
            task = asyncio.create_task(self._retry_store(self._supervisor))
            self._background.add(task)

    async def _retry_store(self, supervisor: StoreSupervisor) -> None:
        while True:
            await asyncio.sleep(STORE_RETRY_SECONDS)
            try:
                await supervisor.start()
            except (StoreError, ConfigError) as exc:
                logger.warning("event=store.away reason=%r", str(exc))
            else:
                return

    async def _take_down(self, front: web.AppRunner, serving: Serving) -> None:
        for site in list(front.sites):
            await site.stop()
        await self._in_flight.wait_none(timeout_seconds=STREAM_GRACE_SECONDS)
        await front.cleanup()
        for task in self._background:
            task.cancel()
        await self._orchestrator.drain(timeout_seconds=COMMIT_GRACE_SECONDS)
        ends = [serving.stop()]
        if self._supervisor is not None:
            ends.append(self._supervisor.stop())
        await asyncio.gather(*ends)

    async def _ready_line(self) -> str:
        host = self._options.listen[0]
        shown = f"[{host}]" if ":" in host else host
        models = ", ".join(
            f"{model.name} ({_count(len(model.runners), 'runner')},"
            f" {_count(len(model.pool.slots), 'slot')})"
            for model in self.catalog.models()
        )
        store = await self._store_line()
        url = f"http://{shown}:{self.port}"
        return f"kvbus is ready on {url} - models: {models or 'none'} - store: {store}"

    async def _store_line(self) -> str:
        if self._supervisor is None:
            return "none"
        try:
            status = await self._supervisor.client.status()
        except StoreError as exc:
            return f"away ({exc})"
        isolation = "isolated" if status["isolated"] else "NOT isolated"
        reason = f", {status['reason']}" if status.get("reason") else ""
        size = status["capacity_bytes"] / (1 << 30)
        return f"{status['kind']}, {size:.1f} GiB, {isolation}{reason}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def serve(options: ServeOptions) -> int:
    """Run `kvbus serve`; returns its exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # cores hold prompts
    logging.basicConfig(
        stream=sys.stderr,
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    logging.getLogger("aiohttp.server").addFilter(_is_not_a_bad_request)
    asyncio.run(_serve(options))
    return 0


async def _serve(options: ServeOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await Application(options).run(stop)


def _is_not_a_bad_request(record: logging.LogRecord) -> bool:
    """Keep what is no HTTP out of the log: aiohttp quotes it, it may be a prompt."""
    exc = record.exc_info[1] if record.exc_info else None
    return not isinstance(exc, HttpProcessingError)


def say(text: str) -> None:
    """Tell the operator something, at once."""
    print(text, flush=True)


async def _settle(model: Model) -> None:
    """Wait until each runner of a model is up, is parked, or has failed for good.

    Raises ConfigError if all have failed then.
    """
    while not all(
        runner.is_ready or runner.parked.is_set() or runner.has_failed
        for runner in model.runners
    ):
        await model.wait_change()
    if model.runners and all(runner.has_failed for runner in model.runners):
        raise ConfigError(f"model {model.name}: {model.runners[0].failure}")


async def _resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"--listen {host}:{port}: {exc.strerror}") from exc
    return [str(address[4][0]) for address in found]


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
