"""KV is never given to a process other than the one that it was made for."""

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_attached import llama_server
from tests.e2e.test_sharing import TEXT, restart_runner, store_arguments


def test_a_replaced_model_file_is_another_model(
    kvbus: Kvbus, models: dict[str, Path], tmp_path: Path
) -> None:
    """New weights under the old path: a miss, and the new weights' own answer."""
    path = Path(shutil.copy(models["tiny"], tmp_path / "m.gguf"))
    arguments = ("--restore", "always", *store_arguments("disk", kvbus))
    kvbus.start("--model", f"m={path}", "--runners", "2", *arguments)
    old = kvbus.generate("m", TEXT + "What?")
    kvbus.wait_commits(1)
    other = Path(shutil.copy(models["other"], tmp_path / "new.gguf"))
    times = path.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    pids = set(kvbus.runner_pids())
    restart_runner(kvbus)
    kvbus.wait(
        lambda: (
            not pids & set(kvbus.runner_pids()) and kvbus.metric("kvbus_slots") == 2
        ),
        what="the end of the other runner of the old file",
    )
    new = kvbus.generate("m", TEXT + "What?")
    turn = kvbus.turns()[-1]
    assert (turn["restored_tokens"], turn["reused_tokens"]) == ("0", "0")
    kvbus.wait_commits(2)
    kvbus.stop()
    with Kvbus(kvbus.cache_dir) as fresh:
        fresh.start("--model", f"m={models['other']}", "--store", "none")
        cold = fresh.generate("m", TEXT + "What?")
    assert new["response"] == cold["response"] != old["response"]


def test_another_model_behind_the_same_port_gets_nothing(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """A given server that is replaced at once neither gets nor poisons blocks."""
    with llama_server(models["tiny"]) as url:
        kvbus.start(
            "--upstream", url, "--restore", "always", *store_arguments("disk", kvbus)
        )
        kvbus.generate("given", TEXT + "What?")
        kvbus.wait_commits(1)
    port = int(url.rpartition(":")[2])
    stored = kvbus.status()["store"]["blocks"]
    with llama_server(models["other"], port=port):
        # at once, before any poll can have noticed: it fails or is answered, plainly
        kvbus.post(
            "/api/generate",
            {"model": "given", "prompt": TEXT, "raw": True, "stream": False},
        )
        kvbus.wait(
            lambda: any(r["ready"] for r in kvbus.status()["models"][0]["runners"]),
            what="the other server",
        )
        kvbus.generate("given", TEXT + "What?")
        assert kvbus.turns()[-1]["restored_tokens"] == "0"
        kvbus.wait(
            lambda: kvbus.status()["store"]["blocks"] > stored, what="its own blocks"
        )
    with llama_server(models["tiny"], port=port):
        kvbus.wait(
            lambda: any(r["ready"] for r in kvbus.status()["models"][0]["runners"]),
            what="the first model again",
        )
        restored = kvbus.generate("given", TEXT + "What?")
        assert int(kvbus.turns()[-1]["restored_tokens"]) > 1700
        hot = kvbus.generate("given", TEXT + "What?")
        assert restored["response"] == hot["response"]


@contextmanager
def relay(target: str) -> Iterator[str]:
    """Relay a TCP port to a server, in this process; gives its URL."""
    loop = asyncio.new_event_loop()
    host, _, port = target.removeprefix("http://").rpartition(":")

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.close()

    async def connect(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            other = await asyncio.open_connection(host, int(port))
            await asyncio.gather(copy(reader, other[1]), copy(other[0], writer))
        except OSError:
            writer.close()

    async def listen() -> asyncio.Server:
        return await asyncio.start_server(connect, "127.0.0.1", 0)

    server = loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()


def test_behind_a_relay_nothing_is_shared(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """What listens is not the llama-server: its flags tell nothing, and it is said."""
    with llama_server(models["tiny"]) as url, relay(url) as outside:
        kvbus.start(
            "--upstream", f"{outside}#slot-dir=/dev/shm",
            *store_arguments("disk", kvbus),
        )  # fmt: skip
        runner = kvbus.status()["models"][0]["runners"][0]
        assert runner["ready"]
        assert not runner["sharing"]
        assert "not the llama-server itself" in runner["reason"]
        assert kvbus.generate("given", "Hello")["done"]
        kvbus.stop()


def test_a_file_that_is_newer_than_its_server_is_not_trusted(
    kvbus: Kvbus, models: dict[str, Path], tmp_path: Path
) -> None:
    """The file on disk may not be what the server has loaded."""
    path = Path(shutil.copy(models["tiny"], tmp_path / "m.gguf"))
    with llama_server(path) as url:
        Path(shutil.copy(models["other"], tmp_path / "new.gguf")).replace(path)
        kvbus.start("--upstream", url, *store_arguments("disk", kvbus))
        runner = kvbus.status()["models"][0]["runners"][0]
        assert not runner["sharing"]
        assert "changed after the runner had started" in runner["reason"]


def test_a_killed_given_server_is_noticed_at_once(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """The next request hears of it, whatever the poll interval."""
    with llama_server(models["tiny"]) as url:
        kvbus.start("--upstream", url, *store_arguments("disk", kvbus))
        pid = kvbus.runner_pids()[0]
        os.kill(pid, signal.SIGKILL)
        kvbus.wait(lambda: not kvbus.runner_pids(), seconds=5, what="its loss")
        answer = kvbus.post("/api/generate", {"model": "given", "prompt": "x"})
        assert answer.status_code in (500, 502)


@pytest.mark.parametrize("context", ["2048", "8192"])
def test_longrope_depends_on_the_context(
    kvbus: Kvbus, models: dict[str, Path], context: str
) -> None:
    """KV made with the long factors is not restored where the short ones are used."""
    base = ("--model", f"rope={models['longrope']}", "--restore", "always")
    store = store_arguments("disk", kvbus)
    kvbus.start(*base, *store, "--ctx", "8192")
    kvbus.generate("rope", TEXT[:7000] + "One?")
    kvbus.wait_commits(1)
    kvbus.stop()
    kvbus.start(*base, *store, "--ctx", context)
    kvbus.generate("rope", TEXT[:7000] + "Two?")
    assert (int(kvbus.turns()[-1]["restored_tokens"]) > 0) == (context == "8192")
