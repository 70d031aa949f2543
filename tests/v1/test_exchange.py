"""What one request comes to, over turns that follow a script."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson
import pytest
from aiohttp import ClientSession, web

from proxy.errors import RequestError, RunnerGone
from proxy.llamacpp.totals import EngineTotals
from proxy.ollama.backend import TurnRequest
from proxy.v1.handlers import V1Api
from tests.fakes.scripted_turns import (
    RecordingObserver,
    ScriptedCatalog,
    ScriptedModel,
)

TOTALS = EngineTotals(
    cached_tokens=20, prefilled_tokens=7, decoded_tokens=4, finish_reason="length"
)
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"


def chunk(delta: dict[str, object], reason: str | None = None) -> bytes:
    """Make one event of a chat, as the engine writes it."""
    choice = {"finish_reason": reason, "index": 0, "delta": delta}
    return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"


ROLE = chunk({"role": "assistant", "content": None})
HELLO = chunk({"content": "Hello"})
LAST = chunk({}, "length") + b"data: [DONE]\n\n"


@dataclass
class ScriptedTurns:
    """Turns whose answers have these pieces; an exception among them is raised."""

    script: Sequence[bytes | Exception] = (ROLE, HELLO, LAST)
    status: int = 200
    content_type: str = "text/event-stream"
    repeats: bool = False
    """Whether the pieces come again and again."""
    refusal: Exception | None = None
    end_gate: asyncio.Event | None = None
    """Waited for when a turn ends, as a slow commit would."""
    requests: list[TurnRequest] = field(default_factory=list)
    num_read: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def turn(self, request: TurnRequest) -> AsyncIterator["ScriptedTurn"]:
        """Open a turn."""
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        try:
            yield ScriptedTurn(self)
            if self.end_gate is not None:
                await self.end_gate.wait()
        finally:
            self.ended.set()


class ScriptedTurn:
    """One turn, and its answer."""

    request_id = "00ff"
    decision = "restore"
    reason = "cheaper"
    restored_tokens = 16
    load_seconds = 0.0

    def __init__(self, turns: ScriptedTurns) -> None:
        self._turns = turns
        self.status = turns.status
        self.content_type = turns.content_type
        self.is_event_stream = turns.content_type == "text/event-stream"
        self.totals: EngineTotals | None = None

    async def events(self) -> AsyncGenerator[dict[str, object], None]:
        """Be of no use here."""
        raise NotImplementedError
        yield {}

    @asynccontextmanager
    async def forward(self) -> AsyncIterator["ScriptedTurn"]:
        """Answer."""
        yield self

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the pieces."""
        while True:
            for step in self._turns.script:
                if isinstance(step, Exception):
                    raise step
                self._turns.num_read += 1
                yield step
            if not self._turns.repeats:
                break
        self.totals = TOTALS


@dataclass
class Front:
    """A running front and what stands behind it."""

    turns: ScriptedTurns
    observer: RecordingObserver
    session: ClientSession
    port: int

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """Serve one scripted model."""
    turns, observer = ScriptedTurns(), RecordingObserver()
    api = V1Api(
        ScriptedCatalog(ScriptedModel()),
        turns,
        observer=observer,
        response_headers=True,
    )
    app = web.Application()
    app.add_routes(api.routes())
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=1
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with ClientSession() as session:
        yield Front(turns, observer, session, runner.addresses[0][1])
    await runner.cleanup()


async def ask(front: Front, **fields: object) -> tuple[int, bytes]:
    """Ask for a chat; return status and body, once the request is over."""
    body = {**CHAT, "stream": True, **fields}
    async with front.session.post(front.url + PATH, json=body) as response:
        content = await response.read()
    await front.observer.num_finished.acquire()
    return response.status, content


async def test_a_stream_is_passed_on_byte_for_byte(front: Front) -> None:
    """The turn gets the body as it came; the observer hears of the first text."""
    assert await ask(front, temperature=0.5, n=3) == (200, ROLE + HELLO + LAST)
    (request,) = front.turns.requests
    assert request.body == {**CHAT, "stream": True, "temperature": 0.5}
    assert (request.path, request.route) == (PATH, PATH)
    assert len(request.token_ids) > 0
    (outcome,) = front.observer.outcomes
    assert front.observer.routes == [PATH]
    assert (outcome.route, outcome.model) == (PATH, "smol:latest")
    assert (outcome.status, outcome.error, outcome.done_reason) == (200, "", "length")
    assert (outcome.request_id, outcome.decision) == ("00ff", "restore")
    assert (outcome.num_prompt_tokens, outcome.num_cached_tokens) == (27, 20)
    assert front.observer.first_tokens == [outcome.first_token_seconds]


async def test_only_text_is_a_first_token(front: Front) -> None:
    """The role of a message, and comments, are none."""
    front.turns.script = (b": prefill\n\n", ROLE, LAST)
    assert await ask(front) == (200, b": prefill\n\n" + ROLE + LAST)
    assert front.observer.first_tokens == []
    deltas: list[dict[str, object]] = [
        {"reasoning_content": "x"},
        {"tool_calls": [{"index": 0}]},
        {"content": '"'},
    ]
    for delta in deltas:
        front.observer.first_tokens.clear()
        front.turns.script = (ROLE + chunk(delta) + LAST,)
        await ask(front)
        assert len(front.observer.first_tokens) == 1


async def test_headers_tell_what_was_decided(front: Front) -> None:
    """And keep other proxies from collecting the stream."""
    body = {**CHAT, "stream": True}
    async with front.session.post(front.url + PATH, json=body) as response:
        assert response.headers["X-KVBus-Decision"] == "restore"
        assert response.headers["X-KVBus-Restored-Tokens"] == "16"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Content-Type"] == "text/event-stream"


async def test_a_stream_that_breaks_off(front: Front) -> None:
    """What has come is followed by one error event; the status was sent before."""
    front.turns.script = (ROLE, HELLO, RunnerGone("it died"))
    status, content = await ask(front)
    assert status == 200
    assert content.startswith(ROLE + HELLO + b'data: {"error":{"message":"model runner')
    assert b"[DONE]" not in content
    (outcome,) = front.observer.outcomes
    assert (outcome.status, outcome.error) == (200, "RunnerGone")
    assert outcome.done_reason == ""


async def test_a_runner_that_dies_before_its_first_word(front: Front) -> None:
    """Nothing was sent: a status tells it."""
    front.turns.script = (RunnerGone("it died"),)
    front.turns.content_type = "application/json"
    status, content = await ask(front, stream=False)
    assert status == 500
    assert orjson.loads(content)["error"]["type"] == "api_error"


async def test_an_error_answer_keeps_status_and_message(front: Front) -> None:
    """The runner's object becomes OpenAI's."""
    error = {"error": {"code": 400, "message": "too long", "type": "exceed"}}
    front.turns.status, front.turns.content_type = 400, "application/json"
    front.turns.script = (orjson.dumps(error),)
    status, content = await ask(front)
    assert status == 400
    assert orjson.loads(content)["error"] == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert front.observer.outcomes[0].error == "UpstreamError"


async def test_a_defect_of_ours_is_one_answer(front: Front) -> None:
    """Whatever is raised, there is a status, and the observer hears the end."""
    front.turns.refusal = ZeroDivisionError("secret")
    status, content = await ask(front)
    assert status == 500
    assert b"secret" not in content
    front.turns.refusal = RequestError(503, "server busy")
    status, content = await ask(front)
    assert status == 503
    assert [outcome.status for outcome in front.observer.outcomes] == [500, 503]


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
async def test_the_client_does_not_wait_for_a_commit(
    front: Front, content_type: str
) -> None:
    """Streamed or not, the answer is whole before the turn has ended."""
    front.turns.end_gate = asyncio.Event()
    front.turns.content_type = content_type
    body = {**CHAT, "stream": content_type == "text/event-stream"}
    async with front.session.post(front.url + PATH, json=body) as response:
        assert await response.read() == ROLE + HELLO + LAST
    assert not front.turns.ended.is_set()
    front.turns.end_gate.set()
    await front.observer.num_finished.acquire()
    assert front.observer.outcomes[0].error == ""


async def test_a_slow_reader_slows_the_engine(front: Front) -> None:
    """What nobody reads is not asked for: buffers fill, and no more is read."""
    piece = chunk({"content": "x" * 60000})
    front.turns.script, front.turns.repeats = (piece,), True
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
    body = orjson.dumps({**CHAT, "stream": True})
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    before = -1
    while front.turns.num_read != before:  # until the buffers of the way are full
        before = front.turns.num_read
        await asyncio.sleep(0.2)
    assert before * len(piece) < 64 << 20
    assert not front.turns.ended.is_set()
    writer.transport.abort()
    await asyncio.wait_for(front.turns.ended.wait(), 5)
    await front.observer.num_finished.acquire()
    (outcome,) = front.observer.outcomes
    assert (outcome.status, outcome.error) == (499, "ClientGone")
