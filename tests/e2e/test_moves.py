"""A runner killed under requests that had heard nothing of it: none of them fails."""

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import TEXT, store_arguments

IN_FLIGHT = 30


def post_all(kvbus: Kvbus, bodies: list[dict[str, Any]]) -> list[threading.Thread]:
    """Post each body in a thread of its own; its answer is put into the body."""

    def post(body: dict[str, Any]) -> None:
        path = "/v1/completions" if "max_tokens" in body else "/api/generate"
        body["answer"] = kvbus.post(path, {**body})

    threads = [threading.Thread(target=post, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def ask_for(kvbus: Kvbus, answer: httpx.Response) -> dict[str, Any]:
    """Return what is known of a request by the id that its answer tells."""
    request_id = answer.headers["X-KVBus-Request-Id"]
    url = f"{kvbus.url}/kvcache/requests/{request_id}"
    return dict(httpx.get(url, trust_env=False).raise_for_status().json())


def test_no_request_dies_with_a_runner_that_told_nothing(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Thirty requests on two runners, one frozen and then killed: all are answered."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--runners", "2", "--slots", "3",
        "--restore", "always", *store_arguments("embedded", kvbus),
    )  # fmt: skip
    kvbus.generate("tiny", TEXT)
    kvbus.wait_commits(1)
    victim = kvbus.runner_pids()[1]
    os.kill(victim, signal.SIGSTOP)
    options = {"num_predict": 4, "temperature": 0}
    bodies: list[dict[str, Any]] = [
        {
            "model": "tiny",
            "prompt": f"{number} {TEXT if number % 3 else ''}",
            "raw": True,
            "stream": number % 2 == 0,
            **({"max_tokens": 4} if number % 4 < 2 else {"options": options}),
        }
        for number in range(IN_FLIGHT)
    ]
    threads = post_all(kvbus, bodies)

    def slots_of_victim() -> list[bool]:
        runners = kvbus.status()["models"][0]["runners"]
        return [slot["leased"] for slot in runners[1]["slots"]]

    kvbus.wait(lambda: all(slots_of_victim()), what="leases of the frozen runner")
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(100)
    answers = [body["answer"] for body in bodies]
    assert [a.text[:200] for a in answers if a.status_code != 200] == []
    assert all(
        re.search(r'"done":true|"finish_reason":"(length|stop)"', a.text)
        for a in answers
    )
    assert kvbus.metric("kvbus_runner_failures_total") == 1
    told = [ask_for(kvbus, answer) for answer in answers]
    moved = [request for request in told if request["turn"]["deaths"]]
    assert 1 <= len(moved) <= 3
    assert kvbus.log_text().count("event=turn.moved") == len(moved)
    for request in moved:
        assert request["status"] == 200
        assert request["turn"]["result"] == "complete"
        assert request["turn"]["deaths"] == 1
