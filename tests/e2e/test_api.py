"""The Ollama API over real runners, by the official client and by hand."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import ollama
import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import TEXT, store_arguments

MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
OPTIONS = {"num_predict": 12, "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def served(models: dict[str, Path], cache_dir: Path) -> Iterator[Kvbus]:
    """Return one kvbus for all tests of this module."""
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(
            "--model", f"tiny:1b={models['tiny']}", "--ctx", "4096",
            "--response-headers", "true", "--restore", "always",
            *store_arguments("disk", kvbus),
        )  # fmt: skip
        yield kvbus


def test_the_official_client_generates_and_chats(served: Kvbus) -> None:
    """Streamed and whole answers say the same, with all counts."""
    client = ollama.Client(served.url)
    whole = client.chat("tiny:1b", MESSAGES, options=OPTIONS)
    parts = list(client.chat("tiny:1b", MESSAGES, options=OPTIONS, stream=True))
    assert "".join(part.message.content or "" for part in parts)
    assert parts[-1].done
    assert parts[-1].done_reason in ("stop", "length")
    assert whole.prompt_eval_count == parts[-1].prompt_eval_count
    assert whole.eval_count is not None
    assert 0 < whole.eval_count <= 12
    assert (whole.total_duration or 0) > (whole.eval_duration or 0) > 0
    generated = client.generate(
        "tiny:1b", "Tell me", system="Be brief.", options=OPTIONS
    )
    assert generated.done
    raw = client.generate("tiny:1b", "Tell me", raw=True, options=OPTIONS)
    assert (raw.prompt_eval_count or 0) < (generated.prompt_eval_count or 0)


async def test_the_official_asynchronous_client(served: Kvbus) -> None:
    """Eight streams at once on one slot: each is complete."""
    client = ollama.AsyncClient(served.url)

    async def ask(number: int) -> int:
        stream = await client.generate(
            "tiny:1b", f"Number {number}", stream=True, options=OPTIONS
        )
        done = [part.done async for part in stream]
        return done.count(True)

    assert await asyncio.gather(*map(ask, range(8))) == [1] * 8


def test_the_client_lists_and_shows(served: Kvbus, models: dict[str, Path]) -> None:
    """Tags, ps, show and version describe the model file."""
    client = ollama.Client(served.url)
    (listed,) = client.list().models
    assert listed.model == "tiny:1b"
    assert listed.size == models["tiny"].stat().st_size
    (running,) = client.ps().models
    assert running.model == "tiny:1b"
    assert running.context_length == 4096
    shown = client.show("TINY:1B")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.capabilities == ["completion"]
    version = httpx.get(f"{served.url}/api/version", trust_env=False).json()["version"]
    assert all(part.isdigit() for part in version.split("."))


def test_the_same_greedy_request_gives_the_same_text(served: Kvbus) -> None:
    """Temperature 0 arrives at the engine: a second answer equals the first."""
    prompt = TEXT[:6000]
    served.generate("tiny:1b", prompt, num_predict=1)
    hot = served.generate("tiny:1b", prompt + " And so?", num_predict=40)
    again = served.generate("tiny:1b", prompt + " And so?", num_predict=40)
    assert hot["response"] == again["response"] != ""


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "missing request body"),
        (b"{not json", 400, "invalid character"),
        (b'{"model": 5}', 400, "cannot unmarshal"),
        (b'{"model": "nope", "prompt": "x"}', 404, "model 'nope' not found"),
        (
            b'{"model": "tiny:1b", "prompt": "x", "options": {"num_ctx": "1"}}',
            500,
            "must be of type integer",
        ),
        (
            b'{"model": "tiny:1b", "prompt": "' + b"word " * 8000 + b'", "options":'
            b' {"num_ctx": 100000}}',
            400,
            "num_ctx 100000 is larger than the context length",
        ),
        (
            b'{"model": "tiny:1b", "raw": true, "shift": false, "prompt": "'
            + b"word " * 8000
            + b'"}',
            400,
            "context length",
        ),
    ],
)
def test_bad_input_gets_ollamas_error(
    served: Kvbus, body: bytes, status: int, says: str
) -> None:
    """Status and text of each mistake, in Ollama's shape."""
    url = f"{served.url}/api/generate"
    answer = httpx.post(url, content=body, trust_env=False, timeout=30)
    assert answer.status_code == status
    assert says in answer.json()["error"]


def test_a_body_of_50_megabytes(served: Kvbus) -> None:
    """It is read, and refused as too long at once; others are served meanwhile."""
    prompt = "word " * 10_000_000
    body = {"model": "tiny:1b", "raw": True, "shift": False, "prompt": prompt}
    answer = served.post("/api/generate", body)
    assert answer.status_code == 400
    assert "context length" in answer.json()["error"]
    assert served.generate("tiny:1b", "Hello")["done"]


def test_what_is_no_http_is_not_logged(served: Kvbus) -> None:
    """A broken request gets 400, and no byte of it comes into the log."""
    address = urlsplit(served.url)
    head = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((address.hostname, address.port or 0), 10) as raw:
        raw.sendall(head + b"my secret prompt\r\n")
        answer = raw.recv(65536)
    assert answer.split()[1] == b"400"
    assert served.generate("tiny:1b", "Hello")["done"]
    assert "secret" not in served.log_text()
    assert "Traceback" not in served.log_text()


def test_unknown_routes_get_the_routers_answer(served: Kvbus) -> None:
    """404 and 405 as Ollama's router gives them; HEAD works on the root."""
    client = httpx.Client(base_url=served.url, trust_env=False)
    assert client.get("/nope").text == "404 page not found"
    assert client.get("/api/chat").status_code == 405
    assert client.head("/").status_code == 200
    assert client.get("/").text == "Ollama is running"


def test_headers_tell_what_was_decided(served: Kvbus) -> None:
    """Opt-in headers name decision, restored tokens and the request."""
    answer = served.post(
        "/api/generate",
        {"model": "tiny:1b", "prompt": "Hi", "raw": True, "options": OPTIONS},
    )
    assert answer.headers["X-KVBus-Decision"] in ("recompute", "keep_slot", "restore")
    assert answer.headers["X-KVBus-Restored-Tokens"] == "0"
    identifier = answer.headers["X-KVBus-Request-Id"]
    served.wait(lambda: identifier in served.log_text(), what="the turn's line")
