"""A runner that dies, hangs or finds its files spoilt costs no more than its turns."""

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.processes import Kvbus
from tests.e2e.test_faults import LONG, SHORT, prime, serve, streaming
from tests.e2e.test_sharing import TEXT, restart_runner


def restored(kvbus: Kvbus) -> dict[str, Any]:
    """Return an answer after a restore; a busy machine may be too slow for one."""
    for _ in range(5):
        restart_runner(kvbus)
        answer = kvbus.generate("tiny", TEXT + "What?")
        if kvbus.turns()[-1]["decision"] == "restore":
            return answer
    raise AssertionError(f"never restored: {kvbus.log_text()}")


def test_one_death_is_one_failure(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """Four turns die with their runner; those that wait are served by the next one."""
    serve(kvbus, models, "--ctx", "60000", "--slots", "4")
    answers: list[httpx.Response] = []
    body = {"model": "tiny", "prompt": "Hi", "raw": True, "stream": False}

    def wait_in_line() -> None:
        answers.append(kvbus.post("/api/generate", {**body, "options": SHORT}))

    threads = [threading.Thread(target=wait_in_line) for _ in range(4)]
    with ExitStack() as stack:
        streams = [
            stack.enter_context(streaming(kvbus, LONG, f"{number}"))
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        kvbus.wait(lambda: kvbus.metric("kvbus_waiting_requests") == 4, what="a queue")
        os.kill(kvbus.runner_pids()[0], signal.SIGKILL)
        for thread in threads:
            thread.join(60)
    assert all("unexpectedly stopped" in lines[-1] for lines in streams)
    assert [(a.status_code, a.text[:99]) for a in answers if not a.is_success] == []
    assert kvbus.metric("kvbus_runner_failures_total") == 1


def test_a_prompt_is_tokenized_by_another_runner(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """A runner that has just died costs no request that had not come to its slot."""
    serve(kvbus, models, "--runners", "2")
    first, second = kvbus.runner_pids()
    for round_ in range(3):
        os.kill(kvbus.runner_pids()[round_ % 2], signal.SIGKILL)
        answer = kvbus.post("/api/show", {"model": "tiny"})
        assert answer.status_code == 200
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
        rendered = kvbus.post("/api/chat", {**chat, "_debug_render_only": True})
        assert rendered.status_code == 200, rendered.text
    assert {first, second} != set(kvbus.runner_pids())


def test_spoilt_slot_files_cost_no_request(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Cut restore files are not written to; foreign directories stop no restart."""
    serve(kvbus, models)
    hot = prime(kvbus)
    kvbus.wait_commits(2)
    assert restored(kvbus)["response"] == hot["response"]
    files = list(kvbus.slot_root.rglob("*-restore-*"))
    assert files
    for path in files:
        os.truncate(path, 0)
    kvbus.generate("tiny", "Something else")
    kvbus.generate("tiny", TEXT + "What?")
    assert kvbus.turns()[-1]["result"] == "complete"
    assert restored(kvbus)["response"] == hot["response"]
    (runner,) = kvbus.slot_root.glob("serve-*/runner-*")
    (runner / "kvbus-foreign").mkdir()
    assert restored(kvbus)["response"] == hot["response"]
