"""The client of a runner: what it sends, and that an answer given up ends at once."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import RunnerGone, SlotError, UpstreamError
from proxy.llamacpp.client import LlamaServerClient
from tests.models import write_tiny_model
from tests.runners import Runner, running

SOON_SECONDS = 10.0
ENDLESS: dict[str, Any] = {
    "prompt": "a b c",
    "n_predict": -1,
    "ignore_eos": True,
    "stream": True,
    "return_progress": True,
    "id_slot": 0,
}
SHORT = {**ENDLESS, "n_predict": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one tiny model for all tests."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", seed=2)


@pytest.fixture(scope="module")
def runner(model: Path) -> Iterator[Runner]:
    """Run a runner of one slot, in which a reply does not end for a long time."""
    with running(model, ctx_size=1 << 17, parallel=1) as runner:
        yield runner


@asynccontextmanager
async def client_of(socket_path: Path) -> AsyncIterator[LlamaServerClient]:
    """Make a client, and close it."""
    client = LlamaServerClient(url="http://runner", socket_path=socket_path)
    try:
        yield client
    finally:
        await client.close()


async def reply(client: LlamaServerClient, body: dict[str, Any]) -> list[str]:
    """Generate to the end; returns the names of the last event's fields."""
    async with client.stream_completion("/completion", body) as events:
        async for event in events:
            if event.get("stop"):
                return list(event)
    raise AssertionError("no last event")


async def open_sockets() -> int:
    """Count the sockets of this process, less those that are just being closed."""
    for _ in range(2):
        await asyncio.sleep(0)
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            names.append(str(entry.readlink()))
    return sum(name.startswith("socket:") for name in names)


async def wait_sockets(count: int) -> None:
    """Wait until this process has so many sockets."""
    async with asyncio.timeout(SOON_SECONDS):
        while await open_sockets() != count:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def wait_idle(client: LlamaServerClient) -> None:
    """Wait until the slot has nothing to do."""
    async with asyncio.timeout(SOON_SECONDS):
        while any(  # noqa: ASYNC110 - the engine tells nobody
            slot["is_processing"] for slot in await client.slots()
        ):
            await asyncio.sleep(0.01)


async def read_endlessly(
    client: LlamaServerClient, begun: asyncio.Event | None = None
) -> None:
    """Read a reply that does not end; tells when it has begun."""
    async with client.stream_completion("/completion", ENDLESS) as events:
        async for _ in events:
            if begun is not None:
                begun.set()


@asynccontextmanager
async def two_replies(
    client: LlamaServerClient,
) -> AsyncIterator[tuple["asyncio.Task[None]", "asyncio.Task[None]"]]:
    """Read one reply, and wait for another one in the same slot."""
    before = await open_sockets()
    begun = asyncio.Event()
    reading = asyncio.create_task(read_endlessly(client, begun))
    waiting = None
    try:
        await asyncio.wait_for(begun.wait(), SOON_SECONDS)
        waiting = asyncio.create_task(read_endlessly(client))
        await wait_sockets(before + 2)
        yield reading, waiting
    finally:
        for task in filter(None, (reading, waiting)):
            await cancel(task)


@contextmanager
def deaf_port() -> Iterator[int]:
    """Listen at a port whose queue is full: attempts to connect hang."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        with socket.create_connection(address), socket.socket() as another:
            another.setblocking(False)
            with suppress(BlockingIOError):
                another.connect(address)
            yield address[1]


def engine_pid(runner: Runner) -> int:
    """Return the pid of the process that serves: the child of the one we started."""
    guard = runner.process.pid
    children = Path(f"/proc/{guard}/task/{guard}/children").read_text()
    (pid,) = children.split()
    return int(pid)


async def cancel(task: "asyncio.Task[Any]", *, times: int = 1) -> None:
    """Cancel a task, once an iteration of the loop, and wait for its end."""
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)


async def test_a_closed_client_says_that_the_runner_is_gone(tmp_path: Path) -> None:
    """A turn may outlive the process of its slot, whose client is closed then."""
    client = LlamaServerClient(url="http://runner", socket_path=tmp_path / "r.sock")
    await client.close()
    await client.close()
    assert not await client.is_healthy()
    with pytest.raises(RunnerGone):
        await client.tokenize("a", add_special=True)
    with pytest.raises(RunnerGone):
        async with client.stream_completion("/completion", {}):
            pass


async def test_a_runner_that_is_not_there_is_gone(tmp_path: Path) -> None:
    """A missing socket and a refused connection say why, without naming the path."""
    async with client_of(tmp_path / "none.sock") as client:
        assert not await client.is_healthy()
        with pytest.raises(RunnerGone, match=r"No such file or directory$"):
            await client.props()
    client = LlamaServerClient(url="http://127.0.0.1:1")
    with pytest.raises(RunnerGone, match=r"stopped: .*[Rr]efused"):
        await client.props()
    await client.close()


async def test_a_socket_may_have_spaces_in_its_path(
    runner: Runner, tmp_path: Path
) -> None:
    """The path of a unix socket is taken as it is."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    path = folder / "a socket?#%20"
    path.symlink_to(runner.socket)
    async with client_of(path) as client:
        assert await client.is_healthy()
        assert len(await client.tokenize("a b", add_special=False)) > 0


async def test_errors_of_the_runner_keep_status_and_text(runner: Runner) -> None:
    """What is no success is an UpstreamError, and a SlotError for a slot."""
    async with client_of(runner.socket) as client:
        with pytest.raises(UpstreamError) as caught:
            async with client.stream_completion("/nowhere", {}):
                pass
        assert caught.value.status == 404
        assert "error" in caught.value.body
        async with client.open_answer("/nowhere", {}) as answer:
            assert (answer.status, answer.is_event_stream) == (404, False)
            assert (await answer.read()).startswith(b'{"error"')
        with pytest.raises(SlotError, match="restore failed"):
            await client.restore_slot(0, "none", timeout_seconds=SOON_SECONDS)


async def test_bodies_and_lines_have_no_limit(runner: Runner) -> None:
    """Megabytes are sent in pieces, and an event's line is as long as it is."""
    stops = ["x" * (3 << 20)]
    async with client_of(runner.socket) as client:
        assert "timings" in await reply(client, {**SHORT, "stop": stops})
        async with client.open_answer("/completion", {**SHORT, "stop": stops}) as one:
            events = [event async for event in one.events()]
        assert len(events[-1]) > len(stops[0])
        text = "ab " * (1 << 19)
        token_ids = await client.tokenize(text, add_special=False)
        assert len(token_ids) > len(text) // 16


async def test_a_caller_that_leaves_ends_the_generation(runner: Runner) -> None:
    """Leaving the block, by whatever exception, closes the connection at once."""
    async with client_of(runner.socket) as client:
        before = await open_sockets()
        for error in (KeyError, ConnectionResetError):
            with suppress(error):
                async with client.stream_completion("/completion", ENDLESS) as events:
                    await anext(events)
                    raise error
            assert await open_sockets() == before
        async with client.open_answer("/completion", ENDLESS) as answer:
            await anext(answer.chunks)
        assert await open_sockets() == before
        await wait_idle(client)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_reply_ends_the_generation(
    runner: Runner, times: int
) -> None:
    """Wherever a task is cancelled, and however often, nothing is left of it."""
    async with client_of(runner.socket) as client:
        await reply(client, SHORT)
        before = await open_sockets()
        for iterations in range(60):
            begun = asyncio.Event()
            task = asyncio.create_task(read_endlessly(client, begun))
            if iterations >= 40:
                await asyncio.wait_for(begun.wait(), SOON_SECONDS)
            for _ in range(iterations % 40):
                await asyncio.sleep(0)
            await cancel(task, times=times)
            assert await open_sockets() == before
        await wait_idle(client)
        assert "timings" in await reply(client, SHORT)


async def test_a_request_that_waits_for_its_slot_can_be_cancelled(
    runner: Runner,
) -> None:
    """Before the answer's first byte the engine notices that its client is gone."""
    async with client_of(runner.socket) as client:
        before = await open_sockets()
        async with two_replies(client) as (reading, waiting):
            await cancel(waiting)
            assert await open_sockets() == before + 1
            assert not reading.done()
        await wait_idle(client)
        assert "timings" in await reply(client, SHORT)


async def test_a_cancelled_connection_is_closed() -> None:
    """An attempt to connect that gets no answer leaves nothing when cancelled."""
    with deaf_port() as port:
        client = LlamaServerClient(url=f"http://127.0.0.1:{port}")
        before = await open_sockets()
        task = asyncio.create_task(client.props())
        await wait_sockets(before + 1)
        assert not task.done()
        await cancel(task)
        assert await open_sockets() == before
        await client.close()


async def test_a_runner_that_dies_in_a_reply_is_gone(model: Path) -> None:
    """Its end is heard at once, by whoever reads an answer or waits for one."""
    with running(model, ctx_size=1 << 16, parallel=1) as runner:
        async with client_of(runner.socket) as client:
            before = await open_sockets()
            async with two_replies(client) as tasks:
                os.kill(engine_pid(runner), signal.SIGKILL)
                for task in tasks:
                    with pytest.raises(RunnerGone, match="closed the connection"):
                        await asyncio.wait_for(task, SOON_SECONDS)
            assert await open_sockets() == before
            assert not await client.is_healthy()


async def test_closing_tells_those_who_wait(runner: Runner) -> None:
    """A client that is closed ends replies that have begun and those that have not."""
    async with client_of(runner.socket) as client, client_of(runner.socket) as other:
        before = await open_sockets()
        async with two_replies(client) as tasks:
            await client.close()
            for task in tasks:
                with pytest.raises(RunnerGone):
                    await asyncio.wait_for(task, SOON_SECONDS)
        assert await open_sockets() == before
        await wait_idle(other)


async def test_a_frozen_runner_does_not_hold_up_closing(model: Path) -> None:
    """A body that the runner does not read is given up with its process."""
    with running(model, ctx_size=1 << 10, parallel=1) as runner:
        pid = engine_pid(runner)
        os.kill(pid, signal.SIGSTOP)
        try:
            client = LlamaServerClient(url="http://runner", socket_path=runner.socket)
            before = await open_sockets()
            text = "a" * (8 << 20)
            stuck = asyncio.create_task(client.tokenize(text, add_special=True))
            waiting = asyncio.create_task(read_endlessly(client))
            await wait_sockets(before + 2)
            await asyncio.wait_for(client.close(), SOON_SECONDS)
            with pytest.raises(RunnerGone):
                await asyncio.wait_for(waiting, SOON_SECONDS)
        finally:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunnerGone):
            await asyncio.wait_for(stuck, SOON_SECONDS)
        assert await open_sockets() == before
