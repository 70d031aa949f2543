"""Management routes over a real listener: whom they answer, and what."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.admin import Admin
from proxy.metrics import Metrics
from proxy.ollama.guard import GuardOptions, install_guard
from proxy.reuse.models import ModelCatalog
from proxy.reuse.request_log import RequestLog
from proxy.reuse.switch import SharingSwitch
from proxy.reuse.trace import TurnTrace
from tests.fakes.memory_store import MemoryStore

MANAGEMENT = ("/metrics", "/kvcache/status", "/kvcache/requests")
HEALTH = ("/livez", "/healthz")
SWITCHES = ("/kvcache/pause", "/kvcache/resume")


@dataclass
class Management:
    """A front of management routes alone, and what stands behind it."""

    is_loopback_listener: bool = True
    metrics: Metrics = field(default_factory=Metrics)
    log: RequestLog = field(default_factory=lambda: RequestLog(max_ended=3))
    upstreams: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.switch = SharingSwitch(self.metrics)
        app = web.Application()
        install_guard(app, GuardOptions(is_loopback_listener=self.is_loopback_listener))
        admin = Admin(
            catalog=ModelCatalog(),
            metrics=self.metrics,
            store=MemoryStore(),
            switch=self.switch,
            log=self.log,
            upstreams=lambda: self.upstreams,
            transports=lambda: ["tcp"],
            is_ready=lambda: True,
            is_loopback_listener=self.is_loopback_listener,
        )
        app.add_routes(admin.routes())
        self.server = TestServer(app)

    async def ask(self, method: str, path: str, **headers: str) -> httpx.Response:
        """Ask under the listener's own address."""
        async with httpx.AsyncClient(trust_env=False) as client:
            url = str(self.server.make_url(path))
            return await client.request(method, url, headers=headers)

    async def json(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Return a JSON answer."""
        return (await self.ask("GET", path)).raise_for_status().json()


async def serve(*, is_loopback_listener: bool) -> TestServer:
    """Start a front of management routes alone."""
    server = Management(is_loopback_listener).server
    await server.start_server()
    return server


@pytest.fixture
async def management() -> AsyncIterator[Management]:
    """Give a front that listens on loopback, with its parts."""
    management = Management()
    await management.server.start_server()
    yield management
    await management.server.close()


@pytest.fixture
async def front() -> AsyncIterator[TestServer]:
    """Give a front that listens on loopback."""
    server = await serve(is_loopback_listener=True)
    yield server
    await server.close()


async def ask(server: TestServer, path: str, host: str) -> int:
    """Ask under a name; give the status."""
    async with httpx.AsyncClient(trust_env=False) as client:
        url = str(server.make_url(path))
        return (await client.get(url, headers={"Host": host})).status_code


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:11435",
        "kvbus.localhost:80",
        "127.0.0.1:1",
        "127.8.9.10",
        "[::1]",
        "[::1]:11435",
    ],
)
async def test_names_of_loopback_are_answered(front: TestServer, host: str) -> None:
    """Whatever loopback is called, with any port, gets all routes."""
    for path in (*MANAGEMENT, *HEALTH):
        assert await ask(front, path, host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "anything.internal",
        "printer.local:80",
        "10.1.2.3",
        "192.168.0.1:11435",
        "0.0.0.0",
        "[::]:1",
    ],
)
async def test_other_names_of_this_machine_get_health_alone(
    front: TestServer, host: str
) -> None:
    """Names that Ollama accepts, and a stranger's page may use, get no management."""
    for path in MANAGEMENT:
        assert await ask(front, path, host) == 403
    for path in HEALTH:
        assert await ask(front, path, host) == 200


@pytest.mark.parametrize(
    "host", ["localhost.evil.test", "127.0.0.1.evil.test", "evil.test", "::1", "[x]"]
)
async def test_names_that_look_alike_are_refused(front: TestServer, host: str) -> None:
    """Names that only begin like loopback get no management."""
    for path in MANAGEMENT:
        assert await ask(front, path, host) == 403


@pytest.mark.parametrize(
    ("request_lines", "status"),
    [
        ("GET http://anything.internal/metrics HTTP/1.1\r\nHost: localhost", 403),
        ("GET http://localhost/metrics HTTP/1.1\r\nHost: anything.internal", 403),
        ("GET http://localhost:1/metrics HTTP/1.1\r\nHost: localhost", 200),
        ("GET /metrics?x=http://a.internal HTTP/1.1\r\nHost: localhost", 200),
        ("GET /metrics HTTP/1.0", 403),
    ],
)
async def test_every_name_of_a_request_counts(
    front: TestServer, request_lines: str, status: int
) -> None:
    """A full URL is looked at as well as the header, and no name is none of ours."""
    reader, writer = await asyncio.open_connection(front.host, front.port)
    try:
        writer.write(f"{request_lines}\r\nConnection: close\r\n\r\n".encode())
        line = await asyncio.wait_for(reader.readline(), 5)
        assert int(line.split()[1]) == status
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_front_for_others_answers_any_name() -> None:
    """Where the front listens for other hosts, names are theirs to choose."""
    server = await serve(is_loopback_listener=False)
    try:
        for path in (*MANAGEMENT, *HEALTH):
            assert await ask(server, path, "kvbus.example") == 200
    finally:
        await server.close()


@pytest.mark.parametrize("is_loopback_listener", [True, False])
@pytest.mark.parametrize("host", ["anything.internal", "10.1.2.3", "evil.test"])
async def test_a_strangers_page_switches_nothing(
    host: str, is_loopback_listener: bool
) -> None:
    """A name that may have been pointed here cannot pause, wherever we listen."""
    management = Management(is_loopback_listener)
    await management.server.start_server()
    try:
        for path in SWITCHES:
            for headers in ({}, {"Origin": f"http://{host}"}):
                answer = await management.ask("POST", path, Host=host, **headers)
                assert answer.status_code == 403
        assert not management.switch.is_paused
    finally:
        await management.server.close()


async def test_sharing_is_paused_and_resumed(management: Management) -> None:
    """Both are idempotent, answer with the state, and are seen in all places."""
    assert (await management.json("/kvcache/status"))["sharing"] == {
        "paused": False,
        "since": None,
    }
    first = await management.ask("POST", "/kvcache/pause")
    again = await management.ask("POST", "/kvcache/pause")
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert first.json()["paused"] is True
    assert "kvbus_paused 1.0" in (await management.ask("GET", "/metrics")).text
    status = await management.json("/kvcache/status")
    assert status["sharing"] == first.json()
    resumed = await management.ask("POST", "/kvcache/resume")
    assert resumed.json()["paused"] is False
    assert "kvbus_paused 0.0" in (await management.ask("GET", "/metrics")).text
    assert (await management.ask("GET", "/kvcache/pause")).status_code == 405


async def test_status_names_upstreams_and_transports(management: Management) -> None:
    """Every given URL is listed, with the reason where it is not used."""
    management.upstreams = {"http://a:1": "", "http://b:2": "cannot be reached"}
    status = await management.json("/kvcache/status")
    assert status["upstreams"] == [
        {"url": "http://a:1", "away": False, "reason": None},
        {"url": "http://b:2", "away": True, "reason": "cannot be reached"},
    ]
    assert status["store"]["transports"] == ["tcp"]


async def test_a_request_is_told_while_it_runs_and_after(
    management: Management,
) -> None:
    """What is not known yet is null; what has ended stays until others push it out."""
    log = management.log
    record = log.begin("/api/chat")
    running = await management.json(f"/kvcache/requests/{record.request_id}")
    assert running["running"] is True
    assert running["turn"] is running["status"] is None
    record.trace = TurnTrace(
        request_id=record.request_id, model="m", route="/api/chat", prompt_tokens=7
    )
    with record.trace.stage("queue"):
        waiting = await management.json(f"/kvcache/requests/{record.request_id}")
    assert waiting["turn"]["stage"] == "queue"
    assert waiting["turn"]["decision"] is waiting["turn"]["runner"] is None
    record.status, record.total_seconds = 200, 0.5
    log.end(record)
    log.end(record)
    ended = await management.json(f"/kvcache/requests/{record.request_id}")
    assert (ended["running"], ended["status"], ended["total_ms"]) == (False, 200, 500)
    assert ended["turn"]["prompt_tokens"] == 7
    for _ in range(3):
        log.end(log.begin("/api/chat"))
    gone = await management.ask("GET", f"/kvcache/requests/{record.request_id}")
    assert gone.status_code == 404
    assert gone.json() == {"error": "no recent request has this id"}


async def test_requests_are_listed_the_latest_first(management: Management) -> None:
    """Those that run come first, however many others have ended since."""
    log = management.log
    running = log.begin("/v1/messages")
    ended = [log.begin("/api/chat") for _ in range(5)]
    for record in ended:
        log.end(record)
    listed = (await management.json("/kvcache/requests"))["requests"]
    expected = [running, *reversed(ended[2:])]
    assert [item["id"] for item in listed] == [item.request_id for item in expected]
    short = (await management.json("/kvcache/requests?limit=1"))["requests"]
    assert [item["id"] for item in short] == [running.request_id]
    for limit in ("0", "-1", "x", "1001", "%D9%A1", ""):
        answer = await management.ask("GET", f"/kvcache/requests?limit={limit}")
        assert answer.status_code == 400
        assert "limit" in answer.json()["error"]
