"""What single requests and the operator say about sharing, on real parts."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import TEXT, restart_runner, store_arguments

NAMESPACE = "tenant-ü-7"


def ask(kvbus: Kvbus, path: str, method: str = "GET") -> Any:  # noqa: ANN401 - JSON
    """Ask a management route."""
    answer = httpx.request(method, f"{kvbus.url}{path}", trust_env=False, timeout=30)
    return answer.raise_for_status().json()


def generate(
    kvbus: Kvbus,
    *,
    header: dict[str, str] | None = None,
    **mooncake: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Generate, and return what is known of the request once its commit has ended."""
    body = {
        "model": "tiny",
        "prompt": TEXT,
        "raw": True,
        "stream": False,
        "options": {"temperature": 0, "num_predict": 4, "mooncake": mooncake},
    }
    answer = httpx.post(
        f"{kvbus.url}/api/generate",
        json=body,
        headers=header,
        trust_env=False,
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    path = f"/kvcache/requests/{answer.headers['X-KVBus-Request-Id']}"

    def told() -> dict[str, Any]:
        return dict(ask(kvbus, path))

    def has_ended() -> bool:
        turn = told()["turn"]
        return turn["commit"] is not None and turn["commit"]["result"] != "running"

    kvbus.wait(has_ended, what="the end of the commit")
    assert told()["status"] == 200
    return dict(told()["turn"])


def test_namespaces_block_sizes_and_switches(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Each request shares as it says, and nothing tells its namespace."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--restore", "always",
        "--log-level", "debug", *store_arguments("embedded", kvbus),
    )  # fmt: skip
    first = generate(kvbus)
    assert (first["decision"], first["commit"]["result"]) == ("recompute", "stored")
    assert first["commit"]["stored_bytes"] > 0
    other = generate(kvbus, namespace=NAMESPACE)
    assert (other["reused_tokens"], other["restored_tokens"]) == (0, 0)
    assert other["commit"]["stored_blocks"] == first["commit"]["stored_blocks"]
    header = {"X-KVBus-Options": f"namespace={NAMESPACE};write=false".encode()}
    assert generate(kvbus, header=header)["slot_tokens"] > 1700  # type: ignore[arg-type]
    restart_runner(kvbus)
    either: list[dict[str, Any]] = [{}, {"namespace": NAMESPACE}]
    for options in either:
        turn = generate(kvbus, **options)
        assert (turn["decision"], turn["commit"]["result"]) == (
            "restore",
            "nothing new",
        )
        assert turn["reused_tokens"] == turn["restored_tokens"] > 1700
        assert turn["restored_bytes"] > 0
    finer = generate(kvbus, block_size=32, namespace="finer")
    assert finer["commit"]["stored_blocks"] > 2 * first["commit"]["stored_blocks"]
    restart_runner(kvbus)
    assert generate(kvbus, enable=False)["reason"] == "the request forbids restores"
    bypass = generate(kvbus, header={"X-KVBus-Bypass": "1"})
    assert bypass["commit"]["result"] == "the request forbids it"
    restart_runner(kvbus)
    assert ask(kvbus, "/kvcache/pause", "POST")["paused"] is True
    paused = generate(kvbus)
    assert paused["reason"] == paused["commit"]["result"] == "sharing is paused"
    assert ask(kvbus, "/kvcache/resume", "POST")["paused"] is False
    restart_runner(kvbus)
    assert generate(kvbus)["decision"] == "restore"
    requests = ask(kvbus, "/kvcache/requests?limit=1000")
    assert len(requests["requests"]) == 10
    assert NAMESPACE not in kvbus.log_text() + str(requests)


@pytest.mark.parametrize(
    "path",
    [
        "/api/generate",
        "/api/chat",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
    ],
)
def test_wrong_options_are_refused(
    kvbus: Kvbus, models: dict[str, Path], path: str
) -> None:
    """A 400 in the route's shape names the key; the request is known by its id."""
    kvbus.start("--model", f"tiny={models['tiny']}", *store_arguments("disk", kvbus))
    for mooncake, text in (
        ({"namspace": "x"}, "did you mean namespace?"),
        ({"block_size": 7}, "mooncake.block_size"),
        ({"transport": "rdma"}, "the store has disk"),
    ):
        body = {
            "model": "tiny",
            "prompt": "Hi",
            "messages": [{"role": "user", "content": "Hi"}],
            "input": "Hi",
            "max_tokens": 4,
            "options": {"mooncake": mooncake},
            "mooncake": mooncake if path.startswith("/v1") else None,
        }
        answer = kvbus.post(path, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert text in (error["message"] if path.startswith("/v1") else error)
        request_id = answer.headers["X-KVBus-Request-Id"]
        told = ask(kvbus, f"/kvcache/requests/{request_id}")
        assert (told["status"], told["error"]) == (400, "RequestError")
        assert told["turn"] is None
