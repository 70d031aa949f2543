"""Many clients at once, and some that do not read: all others are served."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import ClientSession, ClientTimeout, TCPConnector

from tests.e2e import raw
from tests.e2e.processes import Kvbus
from tests.e2e.test_leaving import ROUTES, begin, is_leased

NUM_CLIENTS = 200
VERBOSE = {"logprobs": True, "top_logprobs": 20}
"""Makes kilobytes of each token."""


@pytest.fixture(scope="module")
def served(models: dict[str, Path], cache_dir: Path) -> Iterator[Kvbus]:
    """Return one kvbus with two slots; its model does not end by itself."""
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(
            "--model", f"tiny={models['endless']}", "--ctx", "30000", "--slots", "2",
            "--store", f"disk:{kvbus.root}/blocks", "--store-size", "256M",
        )  # fmt: skip
        yield kvbus


def rss_bytes(kvbus: Kvbus) -> int:
    """Return the memory of the proxy."""
    status = Path(f"/proc/{kvbus.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


async def test_two_hundred_clients_at_once(served: Kvbus) -> None:
    """On all routes, streamed or not: each gets its whole answer, none an error."""
    paths = [*ROUTES]
    before = rss_bytes(served)
    connector = TCPConnector(limit=0)
    timeout = ClientTimeout(total=120)
    async with ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(number: int) -> tuple[int, bool]:
            path = paths[number % 6]
            is_streamed = number % 4 < 2
            short = {"max_tokens": 4, "max_output_tokens": 4}
            native = {"options": {"num_predict": 4, "temperature": 0}}
            body = {
                "model": "tiny",
                "stream": is_streamed,
                **(native if path.startswith("/api") else short),
                **ROUTES[path](f"Client {number}"),
                **short,
            }
            async with session.post(served.url + path, json=body) as response:
                content = await response.read()
            ends = (b'"done":true', b"[DONE]", b"message_stop", b"response.completed")
            if is_streamed:
                return response.status, any(end in content for end in ends)
            return response.status, isinstance(json.loads(content), dict)

        answers = await asyncio.gather(*map(ask, range(NUM_CLIENTS)))
    assert Counter(answers) == {(200, True): NUM_CLIENTS}
    assert served.metric("kvbus_waiting_requests") == 0
    assert served.metric("kvbus_runner_failures_total") == 0
    served.wait(lambda: not is_leased(served), what="free slots")
    assert rss_bytes(served) < before + (64 << 20)


def test_who_waits_is_served_in_turn(served: Kvbus) -> None:
    """Whatever the route: the order of arrival is the order of the turns."""
    served.wait(lambda: not is_leased(served), what="free slots")
    streams = [begin(served, "/api/generate", "Go on") for _ in range(2)]
    for stream in streams:
        assert stream.recv(12) == b"HTTP/1.1 200"
    paths = [*ROUTES] * 2
    short = {"options": {"num_predict": 1}, "max_tokens": 1, "max_output_tokens": 1}
    waiting = []
    for number, path in enumerate(paths):
        waiting.append(begin(served, path, f"Number {number}", **short))
        served.wait(
            lambda: served.metric("kvbus_waiting_requests") == len(waiting),
            what="a place in the line",
        )
    streams.pop().close()  # one slot is enough
    served.wait(lambda: served.metric("kvbus_waiting_requests") == 0, what="no queue")
    for connection in waiting:
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()
    streams.pop().close()
    served.wait(lambda: not is_leased(served), what="free slots")
    routes = [line["route"] for line in served._lines()[-len(paths) - 2 :]]
    ended = [route for route in routes if route in paths]
    assert Counter(ended)["/v1/messages"] == 2
    order = [r for r in ended if r != "/api/generate"]
    assert order == [path for path in paths if path != "/api/generate"]


def test_a_slow_reader_costs_no_memory(served: Kvbus) -> None:
    """While megabytes wait for it others are served; then it gets all of them."""
    served.wait(lambda: not is_leased(served), what="free slots")
    length = {"options": {"num_predict": 4000, "temperature": 0}}
    before = rss_bytes(served)
    with raw.connect(served.url, receive_buffer_bytes=1 << 14) as slow:
        body = {"model": "tiny", "prompt": "Go on", "raw": True, **VERBOSE, **length}
        slow.sendall(raw.post("/api/generate", body))
        assert slow.recv(12) == b"HTTP/1.1 200"
        for number in range(10):
            assert served.generate("tiny", f"Other {number}")["done"]
        assert rss_bytes(served) < before + (16 << 20)
        size = 0
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            piece = slow.recv(1 << 20)
            assert piece
            size += len(piece)
            tail = (tail + piece)[-4096:]
    assert b'"done":true,"done_reason":"length"' in tail
    assert size > 4 << 20


def test_a_client_that_never_reads_loses_its_slot(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """After the stall time its slot is free, with no more memory taken."""
    kvbus.start(
        "--model", f"tiny={models['endless']}", "--ctx", "30000", "--store", "none",
        "--stall-timeout", "1s",
    )  # fmt: skip
    length = {"options": {"num_predict": 25_000}, "max_tokens": 25_000}
    before = rss_bytes(kvbus)
    for path, fields in (
        ("/api/generate", {"prompt": "Go on", "raw": True, **VERBOSE}),
        ("/v1/completions", {"prompt": "Go on", "n_probs": 20, "stream": True}),
    ):
        with raw.connect(kvbus.url, receive_buffer_bytes=1 << 12) as stuck:
            body: dict[str, Any] = {"model": "tiny", **length, **fields}
            stuck.sendall(raw.post(path, body))
            kvbus.wait(lambda: is_leased(kvbus), what="its turn")
            kvbus.wait(lambda: not is_leased(kvbus), what="a free slot")
        assert kvbus.generate("tiny", "Next")["done"]
    assert rss_bytes(kvbus) < before + (32 << 20)
    assert kvbus.log_text().count("status=499 error=ClientGone") == 2


def test_one_that_waits_longer_than_the_stall_time_is_served(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """In line, where nothing is sent to it, a client may take its time."""
    kvbus.start(
        "--model", f"tiny={models['endless']}", "--ctx", "30000", "--store", "none",
        "--stall-timeout", "1s",
    )  # fmt: skip
    answers: list[httpx.Response] = []
    with begin(kvbus, "/api/generate", "Go on") as stream:
        body = {"model": "tiny", "prompt": "Hi", "raw": True, "stream": False}
        waits = threading.Thread(
            target=lambda: answers.append(
                kvbus.post("/api/generate", {**body, "options": {"num_predict": 2}})
            )
        )
        waits.start()
        kvbus.wait(lambda: kvbus.metric("kvbus_waiting_requests") == 1, what="a line")
        read = 0
        while read < 400_000:  # seconds of talk
            read += len(stream.recv(1 << 16))
        assert kvbus.metric("kvbus_waiting_requests") == 1
    waits.join(30)
    assert [answer.status_code for answer in answers] == [200]


async def test_polls_beside_a_stream(served: Kvbus) -> None:
    """GETs and HEADs by the dozen are all answered, and the stream is whole."""
    polls = [("GET", "/"), ("HEAD", "/"), ("GET", "/api/ps"), ("GET", "/api/tags")]
    polls += [("HEAD", "/api/tags"), ("GET", "/api/version"), ("GET", "/v1/models")]
    body = {"model": "tiny", "prompt": "Go on", "raw": True}
    body |= {"options": {"num_predict": 1500, "temperature": 0}}
    done = asyncio.Event()
    statuses: Counter[int] = Counter()
    async with ClientSession() as session:

        async def poll() -> None:
            number = 0
            while not done.is_set() or number < 50:
                method, path = polls[number % len(polls)]
                async with session.request(method, served.url + path) as response:
                    content = await response.read()
                    assert bool(content) == (method == "GET")
                    statuses[response.status] += 1
                number += 1
                await asyncio.sleep(0.02)

        polling = asyncio.create_task(poll())
        url = f"{served.url}/api/generate"
        async with session.post(url, json=body) as response:
            lines = [json.loads(line) async for line in response.content]
        done.set()
        await polling
    assert set(statuses) == {200}
    assert lines[-1]["eval_count"] == 1500
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
