"""Clients that leave, at every moment and on every route, leave nothing behind."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import raw
from tests.e2e.processes import Kvbus
from tests.e2e.test_faults import serve
from tests.e2e.test_sharing import TEXT

SOON_SECONDS = 2.0
"""It takes far less, but not on a machine that is busy with other tests."""

LONG_PROMPT = TEXT * 4

ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/api/generate": lambda text: {"prompt": text, "raw": True},
    "/api/chat": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/chat/completions": lambda text: {
        "messages": [{"role": "user", "content": text}]
    },
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 50_000,
    },
}


@pytest.fixture(scope="module")
def served(models: dict[str, Path], cache_dir: Path) -> Iterator[Kvbus]:
    """Return one kvbus with one slot; its model does not end by itself."""
    with Kvbus(cache_dir) as kvbus:
        serve(kvbus, models, "--ctx", "60000", "--cache-ram", "0")
        yield kvbus


def body_of(path: str, text: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    """Make a request for a stream without an end."""
    endless = {"temperature": 0, "num_predict": 50_000}
    native = {"options": endless} if path.startswith("/api") else {"temperature": 0}
    return {"model": "tiny", "stream": True, **native, **ROUTES[path](text), **fields}


def begin(kvbus: Kvbus, path: str, text: str, **fields: Any) -> socket.socket:  # noqa: ANN401
    """Send a request by a connection of its own."""
    connection = raw.connect(kvbus.url)
    connection.sendall(raw.post(path, body_of(path, text, **fields)))
    return connection


def is_leased(kvbus: Kvbus) -> bool:
    """Tell whether a slot is in use."""
    return kvbus.metric("kvbus_slots_leased") > 0


def engine_slots(kvbus: Kvbus) -> list[dict[str, Any]]:
    """Ask the runner itself what its slots do."""
    (path,) = kvbus.runtime_dir.glob("serve-*/*.sock")
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://runner") as client:
        return list(client.get("/slots", timeout=10).json())


def is_prefilling(kvbus: Kvbus) -> bool:
    """Tell whether the engine reads a prompt."""
    return any(
        slot["is_processing"] and not slot.get("next_token", [{}])[0].get("n_decoded")
        for slot in engine_slots(kvbus)
    )


def is_idle(kvbus: Kvbus) -> bool:
    """Tell whether nothing is leased and the engine does nothing."""
    return not is_leased(kvbus) and not any(
        slot["is_processing"] for slot in engine_slots(kvbus)
    )


@contextmanager
def rest_follows(kvbus: Kvbus) -> Iterator[None]:
    """Check that all is free within a second after the block, and serves the next."""
    kvbus.wait(lambda: is_idle(kvbus), what="a rest before")
    yield
    kvbus.wait(lambda: is_idle(kvbus), seconds=SOON_SECONDS, what="a rest after")
    assert kvbus.generate("tiny", "Next", num_predict=2)["done"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_client_leaves_at_any_moment(served: Kvbus, path: str) -> None:
    """In prefill, in its text and while its whole answer is made: all is free soon."""
    with rest_follows(served):
        connection = begin(served, path, f"{path} {LONG_PROMPT}")
        served.wait(lambda: is_prefilling(served), what="a prefill")
        connection.close()
    with rest_follows(served):
        connection = begin(served, path, "Go on")
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()
    with rest_follows(served):
        connection = begin(served, path, "Go on", stream=False)
        served.wait(
            lambda: any(slot["is_processing"] for slot in engine_slots(served)),
            what="a generation",
        )
        connection.close()


@pytest.mark.parametrize("path", ROUTES)
def test_a_client_leaves_the_queue(served: Kvbus, path: str) -> None:
    """Who waits behind a stream goes; the stream does not notice."""
    served.wait(lambda: is_idle(served), what="a rest before")
    with begin(served, "/api/generate", "Go on") as stream:
        assert stream.recv(12) == b"HTTP/1.1 200"
        waiting = [begin(served, path, LONG_PROMPT) for _ in range(3)]
        served.wait(
            lambda: served.metric("kvbus_waiting_requests") == 3, what="a queue"
        )
        for connection in waiting:
            connection.close()
        served.wait(
            lambda: served.metric("kvbus_waiting_requests") == 0,
            seconds=SOON_SECONDS,
            what="no queue",
        )
        assert is_leased(served)
        assert stream.recv(1 << 16)
    served.wait(lambda: is_idle(served), seconds=SOON_SECONDS, what="a rest after")


def num_processing(kvbus: Kvbus) -> int:
    """Count the slots in which the engine generates."""
    return sum(slot["is_processing"] for slot in engine_slots(kvbus))


def test_clients_leave_beside_a_busy_slot(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Another slot talks on, and the engine hears all the same who has left."""
    serve(kvbus, models, "--ctx", "60000", "--slots", "2")
    with begin(kvbus, "/api/generate", "Go on") as stream:
        assert stream.recv(12) == b"HTTP/1.1 200"
        for path in ROUTES:
            with begin(kvbus, path, "Go on as well", stream=False):
                kvbus.wait(lambda: num_processing(kvbus) == 2, what="two generations")
            kvbus.wait(
                lambda: num_processing(kvbus) == 1,
                seconds=SOON_SECONDS,
                what=f"one generation after {path}",
            )
        assert kvbus.generate("tiny", "Next", num_predict=2)["done"]


def test_a_client_leaves_in_a_restore(served: Kvbus) -> None:
    """At many moments from the look-up to the first token; what is right stays so."""
    prompts = [TEXT + "What?", "Once " + TEXT + "What?"]
    hot = {}
    for prompt in prompts:
        commits = served.metric("kvbus_commits_total")
        hot[prompt] = served.generate("tiny", prompt)["response"]
        served.wait_commits(commits + 1)
    for number in range(30):
        prompt = prompts[number % 2]
        path = ("/api/generate", "/v1/completions")[number // 2 % 2]
        with begin(served, path, prompt):
            time.sleep(0.003 * number)
    served.wait(lambda: is_idle(served), seconds=SOON_SECONDS, what="a rest")
    for prompt in prompts:
        assert served.generate("tiny", prompt)["response"] == hot[prompt]
        assert served.turns()[-1]["decision"] == "restore"
        served.wait(lambda: is_idle(served), what="the commit")
    left = [path.name for path in served.slot_root.rglob("*-save-*")]
    assert left == []


@pytest.mark.parametrize("path", ["/api/chat", "/v1/messages"])
def test_a_client_that_retries_is_served_once(served: Kvbus, path: str) -> None:
    """Three times it gives up in its prefill and comes again at once: one at a time."""
    served.wait(lambda: is_idle(served), what="a rest before")
    text = f"{path} once more {LONG_PROMPT}"
    for _ in range(3):
        with begin(served, path, text):
            served.wait(lambda: is_prefilling(served), what="a prefill")
        assert sum(slot["is_processing"] for slot in engine_slots(served)) <= 1
    started = time.monotonic()
    with begin(served, path, text) as connection:
        served.wait(lambda: is_leased(served), what="the last try")
        assert served.metric("kvbus_waiting_requests") == 0
        assert time.monotonic() - started < SOON_SECONDS
        assert connection.recv(12) == b"HTTP/1.1 200"
    served.wait(lambda: is_idle(served), seconds=SOON_SECONDS, what="a rest after")
    assert served.metric("kvbus_runner_failures_total") == 0


def resources(kvbus: Kvbus) -> dict[str, int]:
    """Count what the proxy holds."""
    status = Path(f"/proc/{kvbus.pid}/status").read_text()
    return {
        "fds": len([*Path(f"/proc/{kvbus.pid}/fd").iterdir()]),
        "threads": int(status.partition("Threads:")[2].split()[0]),
        "MiB": int(status.partition("VmRSS:")[2].split()[0]) >> 10,
        "files": len([path for path in kvbus.slot_root.rglob("*") if path.is_file()]),
    }


def test_a_hundred_clients_leave_nothing(served: Kvbus) -> None:
    """On all routes, at all moments: no file, thread, lease or memory is lost."""
    for path in ROUTES:
        with begin(served, path, "Go on") as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
    served.wait(lambda: is_idle(served), what="a rest before")
    before = resources(served)
    paths = [*ROUTES]
    for number in range(100):
        text = (TEXT, "Go on", LONG_PROMPT)[number % 3] + str(number)
        stream = number % 2 == 0
        with begin(served, paths[number % 6], text, stream=stream):
            time.sleep(0.002 * (number % 15))
    served.wait(lambda: is_idle(served), seconds=5, what="a rest after")
    served.wait(
        lambda: served.metric("kvbus_requests_in_flight") == 0, what="no request"
    )
    served.wait(
        lambda: resources(served)["fds"] <= before["fds"] + 2, what="closed files"
    )
    after = resources(served)
    assert after["threads"] <= before["threads"] + 2
    assert after["files"] <= before["files"] + 1
    assert after["MiB"] <= before["MiB"] + 32
    assert served.metric("kvbus_runner_failures_total") == 0
    assert "Traceback" not in served.log_text()


def test_a_silent_prefill_is_not_cut(served: Kvbus) -> None:
    """The engine stops for longer than any question to it may take; nobody gives up."""
    served.wait(lambda: is_idle(served), what="a rest before")
    (guard,) = served.runner_pids()
    (engine,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    short = {"max_tokens": 3, "options": {"num_predict": 3}}
    connections = [
        begin(served, path, f"{path} silent {TEXT * 3}", **{**short, **fields})
        for path, fields in (
            ("/v1/messages", {}),
            ("/api/chat", {"stream": False}),
        )
    ]
    served.wait(lambda: is_prefilling(served), what="a prefill")
    os.kill(int(engine), signal.SIGSTOP)
    try:
        time.sleep(11)  # longer than any bound on a question
        assert is_leased(served)
    finally:
        os.kill(int(engine), signal.SIGCONT)
    for connection in connections:
        with connection:
            reply = raw.read_one(connection)
        assert raw.head_of(reply)[0] == 200, reply
        assert b"message_stop" in reply or json.loads(reply.partition(b"\r\n\r\n")[2])
    assert served.runner_pids() == [guard]
