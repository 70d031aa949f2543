"""Mistakes, clients that leave and runners that die, on the routes of /v1."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import zstandard

from tests.e2e.processes import Kvbus

USER = [{"role": "user", "content": "Weather?"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
REMOTE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
FETCHED = {"type": "input_image", "image_url": "https://127.0.0.1:9/x.png"}
LONG = "word " * 9000

STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Once"},
    "/v1/responses": {"input": "Once"},
    "/v1/messages": {"messages": USER, "max_tokens": 100000},
}


def body_of(path: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Make a body for a stream that does not end by itself."""
    stays = {"temperature": 0, "stream": True, "ignore_eos": True}
    return {"model": "endless", **stays, **STREAMS[path], **fields}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", b"", 400, "missing request body"),
        ("/v1/chat/completions", b"{nope", 400, "invalid character 'n'"),
        ("/v1/chat/completions", b"[]", 400, "must be a JSON object"),
        ("/v1/chat/completions", {"messages": USER}, 400, "model is required"),
        ("/v1/chat/completions", {"model": "x"}, 404, "model 'x' not found"),
        ("/v1/chat/completions", {"model": "talker:1b"}, 400, "[] is too short"),
        (
            "/v1/chat/completions",
            {"model": "talker:1b", "messages": [{"role": "user", "content": [IMAGE]}]},
            400,
            '"talker:1b" does not support images',
        ),
        (
            "/v1/chat/completions",
            {"model": "talker:1b", "messages": [{"role": "user", "content": [REMOTE]}]},
            400,
            "only data URLs are read",
        ),
        (
            "/v1/responses",
            {"model": "talker:1b", "input": [{"role": "user", "content": [FETCHED]}]},
            400,
            "only data URLs are read",
        ),
        (
            "/v1/chat/completions",
            {"model": "talker:1b", "messages": [{"role": "user", "content": LONG}]},
            400,
            "exceeds the available context size",
        ),
        (
            "/v1/chat/completions",
            {"model": "talker:1b", "messages": USER, "mooncake": {"reed": True}},
            400,
            "mooncake.reed",
        ),
        (
            "/v1/chat/completions",
            {"model": "talker:1b", "messages": 5},
            400,
            "an array",
        ),
        ("/v1/completions", {"model": "x"}, 404, "model 'x' not found"),
        ("/v1/completions", {"model": "talker:1b"}, 400, ""),
        (
            "/v1/completions",
            {"model": "talker:1b", "prompt": ["a", "b"]},
            400,
            "one prompt a request",
        ),
        ("/v1/responses", {"model": "talker:1b"}, 400, "'input' is required"),
        (
            "/v1/responses",
            {"model": "talker:1b", "input": "x", "previous_response_id": "r"},
            400,
            "previous_response_id",
        ),
        ("/v1/messages", {"model": "x", "messages": USER}, 404, "not found"),
        (
            "/v1/messages",
            {"model": "talker:1b", "messages": USER},
            400,
            "max_tokens is required and must be positive",
        ),
        (
            "/v1/messages",
            {"model": "talker:1b", "max_tokens": 9, "messages": [{"role": "user"}]},
            400,
            "content",
        ),
        ("/v1/messages/count_tokens", b"nope", 400, "invalid character"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_mistakes_have_their_status_and_the_routes_shape(
    served: Kvbus,
    path: str,
    body: bytes | dict[str, Any],
    status: int,
    says: str,
    is_streamed: bool,
) -> None:
    """OpenAI's and Anthropic's error objects, whether a stream was asked for or not."""
    if isinstance(body, dict):
        body = json.dumps({**body, "stream": is_streamed}).encode()
    answer = httpx.post(
        f"{served.url}{path}", content=body, trust_env=False, timeout=60
    )
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/json"
    reply = answer.json()
    error = reply["error"]
    assert says in error["message"]
    assert not error["message"].startswith("{")
    kinds = {400: "invalid_request_error", 404: "not_found_error", 500: "api_error"}
    assert error["type"] == kinds[status]
    if path.startswith("/v1/messages"):
        assert set(reply) == {"type", "error", "request_id"}
        assert set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}


def test_what_would_leave_the_slot_is_not_heeded(served: Kvbus) -> None:
    """A slot that does not exist, and two replies: one reply, in our own slot."""
    body = {"model": "talker:1b", "messages": USER, "n": 2, "id_slot": 99}
    answer = served.post("/v1/chat/completions", {**body, "max_tokens": 3})
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 1


def test_a_body_in_zstd_is_read(served: Kvbus) -> None:
    """As Codex sends it; other codings are refused with what to do."""
    body = json.dumps({"model": "talker:1b", "input": "Hi"}).encode()
    for coding, content, status in (
        ("zstd", zstandard.compress(body), 200),
        ("gzip", body, 400),
        ("zstd", zstandard.compress(bytes(21 << 20)), 413),
    ):
        answer = httpx.post(
            f"{served.url}/v1/responses",
            content=content,
            headers={"Content-Encoding": coding},
            trust_env=False,
            timeout=60,
        )
        assert answer.status_code == status, answer.text


def test_models_are_listed(served: Kvbus) -> None:
    """All of them, and each by itself, under any of its names."""
    client = httpx.Client(base_url=served.url, trust_env=False)
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert {model["id"] for model in listed["data"]} == {"talker:1b", "endless:latest"}
    assert {model["owned_by"] for model in listed["data"]} == {"library"}
    one = client.get("/v1/models/ENDLESS").json()
    assert one["id"] == "endless:latest"
    assert one in listed["data"]
    missing = client.get("/v1/models/some%2Fbody:x")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "model 'some/body:x' not found"


@contextmanager
def streaming(kvbus: Kvbus, path: str, **fields: Any) -> Iterator[list[str]]:  # noqa: ANN401
    """Stream an answer in a thread; gives its lines as they come."""
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        url, body = f"{kvbus.url}{path}", body_of(path, **fields)
        with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as got:
            assert got.headers["Content-Type"] == "text/event-stream"
            assert got.headers["X-Accel-Buffering"] == "no"
            for line in got.iter_lines():
                lines.append(line)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert begun.wait(30)
        yield lines
    finally:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("path", STREAMS)
def test_a_runner_that_dies_ends_a_stream_with_an_error(
    served: Kvbus, path: str
) -> None:
    """The client's library raises; no mark says that the answer is complete."""
    with streaming(served, path) as lines:
        busy = [
            runner["pid"]
            for runner in runners(served)
            if any(slot["leased"] for slot in runner["slots"])
        ]
        assert len(busy) == 1
        os.kill(busy[0], signal.SIGKILL)
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    error = json.loads(data[-1])
    message = error.get("message") or error["error"]["message"]
    assert "unexpectedly stopped" in message
    assert "[DONE]" not in data
    assert not any("message_stop" in line for line in lines)
    if path in ("/v1/responses", "/v1/messages"):
        assert "event: error" in lines
    answer = served.post(path, body_of(path, stream=False, max_tokens=5))
    assert answer.status_code == 200, answer.text


def leased(kvbus: Kvbus) -> int:
    """Count the slots in use."""
    return sum(slot["leased"] for each in runners(kvbus) for slot in each["slots"])


def runners(kvbus: Kvbus) -> list[dict[str, Any]]:
    """Return the status of all runners."""
    return [each for model in kvbus.status()["models"] for each in model["runners"]]


def open_files(kvbus: Kvbus) -> list[int]:
    """Count the open files of the proxy and of its runners."""
    pids = [kvbus.pid, *kvbus.runner_pids()]
    return [len([*Path(f"/proc/{pid}/fd").iterdir()]) for pid in pids]


def begin(
    kvbus: Kvbus,
    path: str,
    sent: float = 1.0,
    **fields: Any,  # noqa: ANN401
) -> socket.socket:
    """Send (a part of) a request by a connection of its own."""
    address = urlsplit(kvbus.url)
    body = json.dumps(body_of(path, **fields)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    raw = socket.create_connection((address.hostname, address.port or 0), 30)
    raw.sendall(head.encode() + b"\r\n" + body[: int(sent * len(body))])
    return raw


def test_clients_that_leave_leave_nothing_behind(served: Kvbus) -> None:
    """In the body, in the queue, in the prefill and in the text: 36 of them."""
    prefill: dict[str, Any] = {
        "messages": [{"role": "user", "content": "long " * 3500}]
    }
    served.wait(lambda: all(each["ready"] for each in runners(served)), what="runners")
    for path in STREAMS:  # what is opened once for good, is opened
        served.post(
            path, body_of(path, stream=False, max_tokens=2, max_output_tokens=2)
        )
    served.wait(lambda: leased(served) == 0, what="a first rest")
    failures = served.metric("kvbus_runner_failures_total")
    before = open_files(served)
    paths = [*STREAMS] * 3
    for path in paths:
        begin(served, path, 0.5).close()
    for path in paths:
        with begin(served, path) as raw:
            assert raw.recv(16).startswith(b"HTTP/1.1 200")
    for number in range(4):
        begin(served, "/v1/chat/completions", 1.0, **prefill, user=number).close()
    with ExitStack() as stack:
        for path in ("/v1/messages", "/v1/chat/completions"):
            raw = stack.enter_context(begin(served, path))
            assert raw.recv(16).startswith(b"HTTP/1.1 200")
        waiting = [begin(served, path) for path in [*STREAMS] * 2]
        served.wait(
            lambda: served.metric("kvbus_waiting_requests") == 8, what="a queue"
        )
        for raw in waiting:
            raw.close()
        served.wait(
            lambda: served.metric("kvbus_waiting_requests") == 0, what="no queue"
        )
    served.wait(lambda: leased(served) == 0, what="free slots")
    for path in STREAMS:
        body = body_of(path, stream=False, max_tokens=2, max_output_tokens=2)
        assert served.post(path, body).status_code == 200
    served.wait(
        lambda: all(
            now <= then + 1
            for now, then in zip(open_files(served), before, strict=True)
        ),
        what=f"as few open files as before: {before}",
    )
    assert served.metric("kvbus_runner_failures_total") == failures
    assert "Traceback" not in served.log_text()
