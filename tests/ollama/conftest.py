"""A front over scripted turns, on a real port of the loopback."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiohttp import ClientSession, web

from proxy.ollama.guard import GuardOptions, install_guard
from proxy.ollama.handlers import ApiOptions, OllamaApi
from tests.fakes.scripted_turns import (
    RecordingObserver,
    ScriptedCatalog,
    ScriptedModel,
    ScriptedTurns,
)

MAX_BODY_BYTES = 64 << 20


@dataclass
class Front:
    """A running front and what stands behind it."""

    model: ScriptedModel
    turns: ScriptedTurns
    observer: RecordingObserver
    session: ClientSession
    port: int = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """Serve one scripted model."""
    model, turns, observer = ScriptedModel(), ScriptedTurns(), RecordingObserver()
    api = OllamaApi(
        ScriptedCatalog(model),
        turns,
        observer=observer,
        options=ApiOptions(response_headers=True),
    )
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    install_guard(app, GuardOptions(is_loopback_listener=True))
    app.add_routes(api.routes())
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=1
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with ClientSession() as session:
        front = Front(model, turns, observer, session, runner.addresses[0][1])
        yield front
    await runner.cleanup()
    assert not turns.open_turns
