"""Management routes over a real listener: whom they answer."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.admin import Admin
from proxy.metrics import Metrics
from proxy.ollama.guard import GuardOptions, install_guard
from proxy.reuse.models import ModelCatalog

MANAGEMENT = ("/metrics", "/kvcache/status")
HEALTH = ("/livez", "/healthz")


async def serve(*, is_loopback_listener: bool) -> TestServer:
    """Start a front of management routes alone."""
    app = web.Application()
    install_guard(app, GuardOptions(is_loopback_listener=is_loopback_listener))
    admin = Admin(
        catalog=ModelCatalog(),
        metrics=Metrics(),
        store=None,
        is_ready=lambda: True,
        is_loopback_listener=is_loopback_listener,
    )
    app.add_routes(admin.routes())
    server = TestServer(app)
    await server.start_server()
    return server


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
