"""What benchmarks ask: a llama-server of its own kind, a kvbus, and streamed requests.

Rules:
1. The client is the same for everybody: one connection per request, no library
   between the socket and the clock but `http.client`.
2. The clock starts before the connection is made. First text is the first piece of
   the reply that is not empty, or the end of a reply without any. Only the lines up
   to it are parsed as they come.
3. What the engine says of a request is in its last event; a reply without one is an
   error.
"""

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from proxy.ollama.options import parse_options
from proxy.ollama.prompts import sampling_body
from tests.e2e.processes import Kvbus
from tests.runners import Runner

REQUEST_SECONDS = 600.0
STORE_BYTES = 1 << 30
STORE_PATIENCE_SECONDS = 30.0
FALLBACK_DISK_DIR = "blocks"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an HTTP server listens: a unix socket, or HOST:PORT."""

    address: str

    @classmethod
    def of(cls, server: Runner | Kvbus) -> "Endpoint":
        """Tell where a server listens."""
        if isinstance(server, Kvbus):
            return cls(urlsplit(server.url).netloc)
        return cls(str(server.socket))

    def connect(self) -> HTTPConnection:
        """Make a connection, which is opened by its first request."""
        if self.address.startswith("/"):
            return _UnixConnection(self.address)
        return HTTPConnection(self.address, timeout=REQUEST_SECONDS)


class _UnixConnection(HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=REQUEST_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One streamed reply, seen from the client."""

    ttft_seconds: float
    """Request to first text."""
    decode_seconds: float
    """First text to the end."""
    num_decoded_tokens: int
    num_prompt_tokens: int
    num_prefilled_tokens: int | None
    """As the engine says; kvbus tells it in its log only (None here)."""

    @property
    def total_seconds(self) -> float:
        """Request to the end."""
        return self.ttft_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens over the whole time, from the request to the end."""
        return self.num_decoded_tokens / self.total_seconds


def stream(endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> Reply:
    """Post a request and read its streamed reply to the end.

    Raises AssertionError for any other answer than a whole reply.
    """
    content = orjson.dumps(body)
    connection = endpoint.connect()
    started = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, content, headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        lines = _lines(response)
        head: list[bytes] = []
        for line in lines:
            head.append(line)
            if _text(orjson.loads(line)):
                break
        first_text = time.perf_counter()
        rest = [*head, *lines]
        ended = time.perf_counter()
    finally:
        connection.close()
    last = [orjson.loads(line) for line in rest[-3:]]
    return _reply(last, started, first_text, ended)


def _lines(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the JSON of each line or server-sent event."""
    while line := response.readline():
        data = line.removeprefix(b"data: ")
        if data.startswith(b"{"):
            yield data


def _text(event: Mapping[str, Any]) -> str:
    """Return the text of one event of any of the four protocols."""
    assert "error" not in event, event
    if choices := event.get("choices"):
        return choices[0].get("delta", {}).get("content") or ""
    message = event.get("message") or {}
    for text in (event.get("response"), message.get("content"), event.get("content")):
        if text:
            return str(text)
    return ""


def _reply(
    last: Sequence[Mapping[str, Any]], started: float, first_text: float, ended: float
) -> Reply:
    times = {
        "ttft_seconds": first_text - started,
        "decode_seconds": ended - first_text,
    }
    for event in reversed(last):
        if timings := event.get("timings"):
            return Reply(
                **times,
                num_decoded_tokens=timings["predicted_n"],
                num_prompt_tokens=timings["cache_n"] + timings["prompt_n"],
                num_prefilled_tokens=timings["prompt_n"],
            )
        if event.get("done"):
            return Reply(
                **times,
                num_decoded_tokens=event["eval_count"],
                num_prompt_tokens=event["prompt_eval_count"],
                num_prefilled_tokens=None,
            )
    raise AssertionError(f"the reply broke off: {last}")


# -- the same request at both ends ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt to be continued greedily, as kvbus and as llama-server take it."""

    prompt: str
    num_tokens: int

    @property
    def _options(self) -> dict[str, Any]:
        return {"temperature": 0, "num_predict": self.num_tokens}

    def through_kvbus(self, kvbus: Endpoint, *, model: str) -> Reply:
        """Send it to kvbus as a raw prompt."""
        body = {
            "model": model,
            "prompt": self.prompt,
            "raw": True,
            "options": self._options,
        }
        return stream(kvbus, "/api/generate", body)

    def direct(self, server: Endpoint) -> Reply:
        """Send it to a llama-server, with the sampling options that kvbus sends."""
        sampling = sampling_body(
            parse_options(self._options),
            limit=1 << 20,
            room=None,
        )
        body = {
            **sampling,
            "prompt": self.prompt,
            "stream": True,
            "cache_prompt": True,
            "id_slot": 0,
        }
        return stream(server, "/completion", body)


def cpu_seconds(pid: int) -> float:
    """Return how long the threads of a process that live now have been running."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9


# -- kvbus with a store -----------------------------------------------------------


def start_with_store(kvbus: Kvbus, *arguments: str) -> str:
    """Start kvbus with the embedded store if that works here, else one on disk.

    Returns the kind of the store in use.
    """
    size = ("--store-size", str(STORE_BYTES))
    try:
        kvbus.start(*arguments, "--store", "embedded", *size)
        deadline = time.monotonic() + STORE_PATIENCE_SECONDS
        while time.monotonic() < deadline:  # a busy machine keeps a new store waiting
            store = kvbus.status()["store"]
            if store["available"] and "kind" in store:
                return str(store["kind"])
            time.sleep(0.1)
    except AssertionError:
        print("the embedded store does not start here; a disk store is used")
    kvbus.stop()
    directory = kvbus.slot_root / FALLBACK_DISK_DIR
    kvbus.start(*arguments, "--store", f"disk:{directory}", *size)
    return str(kvbus.status()["store"]["kind"])


@contextmanager
def store_in_use(cache_dir: Path, *arguments: str) -> Iterator[tuple[Kvbus, str]]:
    """Run kvbus with a store; yields it and the kind of the store."""
    with Kvbus(cache_dir) as kvbus:
        yield kvbus, start_with_store(kvbus, *arguments)
