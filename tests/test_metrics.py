"""What is counted: requests by their route and end, and calls to the store."""

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from proxy.blocks import BlockKey, BlockLayout, Fingerprint, RowRun
from proxy.errors import StoreError, StoreTimeout
from proxy.metered_store import MeteredStore
from proxy.metrics import Metrics
from proxy.observer import MetricsObserver
from proxy.ollama.guard import GuardOptions, install_guard
from proxy.ollama.handlers import OllamaApi
from proxy.reuse.request_log import RequestLog
from proxy.store.base import BlockRef
from tests.fakes.memory_store import MemoryStore
from tests.fakes.scripted_turns import (
    ScriptedCatalog,
    ScriptedModel,
    ScriptedTurns,
    simple_script,
    text_event,
)

GENERATE = {"model": "smol", "prompt": "Hello"}


class CountedFront:
    """A front over scripted turns, with metrics."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.turns = ScriptedTurns(simple_script("Hi"))
        observer = MetricsObserver(self.metrics, RequestLog())
        app = web.Application()
        app.middlewares.append(observer.middleware())
        install_guard(app, GuardOptions(is_loopback_listener=True))
        catalog = ScriptedCatalog(ScriptedModel())
        app.add_routes(OllamaApi(catalog, self.turns, observer=observer).routes())
        self.server = TestServer(app, handler_cancellation=True)

    def counted(self) -> dict[tuple[str, str], float]:
        """Return the requests counted, by route and status."""
        return {
            (sample.labels["route"], sample.labels["status"]): sample.value
            for metric in self.metrics.requests.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    async def wait_counted(self, route: str, status: str) -> None:
        """Wait until such a request has ended."""
        deadline = time.monotonic() + 5
        while (route, status) not in self.counted():
            assert time.monotonic() < deadline, self.counted()
            await asyncio.sleep(0.01)


@pytest.fixture
async def front() -> AsyncIterator[CountedFront]:
    """Serve one scripted model."""
    front = CountedFront()
    await front.server.start_server()
    yield front
    await front.server.close()


async def test_every_request_is_counted_once(front: CountedFront) -> None:
    """Routes are those registered, whatever is asked for; each request counts one."""
    asked = [
        ("GET", "/", {}),
        ("GET", "/api/tags", {}),
        ("GET", "/api/tags", {"Origin": "http://evil.test"}),
        ("HEAD", "/api/blobs/sha256:0", {}),
        ("GET", "/nothing", {}),
        ("GET", "/nothing/else", {}),
        ("DELETE", "/api/tags", {}),
        ("POST", "/api/generate", {}),
        ("POST", "/api/generate", {"Host": "evil.test"}),
        ("POST", "/api/chat", {}),
    ]
    async with ClientSession() as session:
        for method, path, headers in asked:
            body = GENERATE if path == "/api/generate" else None
            url = front.server.make_url(path)
            async with session.request(
                method, url, headers=headers, json=body
            ) as answer:
                await answer.read()
    await front.wait_counted("/api/chat", "400")
    counted = front.counted()
    assert counted == {
        ("/", "200"): 1,
        ("/api/tags", "200"): 1,
        ("/api/tags", "403"): 1,
        ("/api/blobs/{digest}", "501"): 1,
        ("other", "404"): 2,
        ("other", "405"): 1,
        ("/api/generate", "200"): 1,
        ("/api/generate", "403"): 1,
        ("/api/chat", "400"): 1,
    }


async def test_a_client_that_leaves_is_a_499(front: CountedFront) -> None:
    """A stream that was begun and not taken to its end is no success."""
    front.turns.script = [text_event("Hi"), asyncio.Event()]
    async with ClientSession() as session:
        url = front.server.make_url("/api/generate")
        answer = await session.post(url, json=GENERATE)
        assert answer.status == 200
        await answer.content.readline()
        in_flight = front.metrics.requests_in_flight.labels("/api/generate")
        assert in_flight._value.get() == 1
        answer.close()
        await front.wait_counted("/api/generate", "499")
    assert front.counted() == {("/api/generate", "499"): 1}
    assert in_flight._value.get() == 0


KEY = BlockKey(b"k" * 32)
LAYOUT = BlockLayout((RowRun(0, 8, 2, 4),), 2)
FINGERPRINT = Fingerprint(b"f" * 32)


def store_metric(metrics: Metrics, name: str, **labels: str) -> float:
    """Return one value."""
    value = metrics.registry.get_sample_value(name, labels)
    assert value is not None
    return value


async def call_all(store: MeteredStore, expected: type[Exception] | None) -> None:
    """Make each call once."""
    fd = os.memfd_create("slot file")
    os.ftruncate(fd, LAYOUT.end)
    block = [BlockRef(KEY, 0)]

    async def contains() -> None:
        assert await store.contains([KEY], deadline_seconds=0.01) == [True]

    async def get() -> None:
        filled = await store.get_into(
            fd, LAYOUT, block, fingerprint=FINGERPRINT, deadline_seconds=0.01
        )
        assert filled == [True]

    async def put() -> None:
        outcome = await store.put_from(
            fd, LAYOUT, block, fingerprint=FINGERPRINT, deadline_seconds=0.01
        )
        assert outcome.failed_blocks == 0

    try:
        for call in (put, contains, get):
            if expected is None:
                await call()
            else:
                with pytest.raises(expected):
                    await call()
    finally:
        os.close(fd)


async def test_calls_to_the_store_are_counted() -> None:
    """Errors and time-outs are told apart, by call; a put that went well is timed."""
    metrics, inner = Metrics(), MemoryStore()
    store = MeteredStore(inner, metrics)
    calls = ("contains", "get", "put")

    def counted(name: str) -> list[float]:
        return [
            store_metric(metrics, f"kvbus_store_{name}_total", call=call)
            for call in calls
        ]

    await call_all(store, None)
    assert counted("errors") == counted("timeouts") == [0, 0, 0]
    assert store_metric(metrics, "kvbus_phase_seconds_count", phase="put") == 1

    inner.gate = asyncio.Event()
    await call_all(store, StoreTimeout)
    assert counted("errors") == [0, 0, 0]
    assert counted("timeouts") == [1, 1, 1]

    inner.is_available = False
    assert not store.is_available
    await call_all(store, StoreError)
    assert counted("errors") == counted("timeouts") == [1, 1, 1]
    assert store_metric(metrics, "kvbus_phase_seconds_count", phase="put") == 1
    with pytest.raises(StoreError):
        await store.status()
    assert counted("errors") == [1, 1, 1]
