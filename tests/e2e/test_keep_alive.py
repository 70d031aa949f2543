"""Loading and unloading: runners are parked and come back, their KV with them."""

import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Kvbus, children_of, is_alive
from tests.e2e.test_attached import llama_server
from tests.e2e.test_sharing import TEXT, restart_runner, store_arguments


def loaded(kvbus: Kvbus) -> dict[str, Any]:
    """Return the loaded models by name, as /api/ps tells of them."""
    answer = httpx.get(f"{kvbus.url}/api/ps", trust_env=False, timeout=10).json()
    return {model["name"]: model for model in answer["models"]}


def seconds_left(model: dict[str, Any]) -> float:
    """Return in how many seconds a loaded model expires."""
    text = str(model["expires_at"])
    if "." in text:  # up to nine digits; fromisoformat takes three or six
        head, _, tail = text.partition(".")
        digits = tail.rstrip("Z").partition("+")[0].partition("-")[0]
        text = head + tail[len(digits) :]
    expires = datetime.fromisoformat(text)
    assert expires.tzinfo is not None
    return float((expires - datetime.now(expires.tzinfo)) / timedelta(seconds=1))


def ask(kvbus: Kvbus, **body: Any) -> dict[str, Any]:  # noqa: ANN401
    """Send a request to /api/generate that may be empty."""
    answer = kvbus.post("/api/generate", {"model": "tiny", "stream": False, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_conversation_goes_on_after_an_unload(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """The unloaded model's process is gone; the next request restores its prefix."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--runners", "2", "--restore", "always",
        *store_arguments("disk", kvbus),
    )  # fmt: skip
    (at_start,) = loaded(kvbus).values()
    assert 290 < seconds_left(at_start) <= 300
    assert at_start["size"] > models["tiny"].stat().st_size
    assert (at_start["size_vram"], at_start["context_length"]) == (0, 8192)
    kvbus.generate("tiny", TEXT + "One?")
    runners = set(kvbus.runner_pids())
    processes = [pid for pid in children_of(kvbus.pid) if pid in runners]
    engines = [child for pid in processes for child in children_of(pid)]
    assert len(engines) == 2
    assert ask(kvbus, keep_alive=0)["done_reason"] == "unload"
    assert not any(map(is_alive, [*processes, *engines]))
    assert loaded(kvbus) == {}
    (model,) = kvbus.status()["models"]
    assert [(r["ready"], r["parked"]) for r in model["runners"]] == [(False, True)] * 2
    assert httpx.get(f"{kvbus.url}/healthz", trust_env=False).status_code == 200
    kvbus.wait_commits(1)
    assert ask(kvbus, keep_alive=0)["done_reason"] == "unload"  # twice is once
    again = kvbus.generate("tiny", TEXT + "Two?")
    assert again["load_duration"] > 10_000_000
    turn = kvbus.turns()[-1]
    assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700
    assert kvbus.metric("kvbus_runner_failures_total") == 0
    assert list(loaded(kvbus)) == ["tiny:latest"]


def test_work_with_keep_alive_0_is_committed_before_the_end(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Answer, commit, free; the last stated value holds until it is loaded anew."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--restore", "always",
        "--keep-alive", "-1", *store_arguments("disk", kvbus),
    )  # fmt: skip
    assert str(loaded(kvbus)["tiny:latest"]["expires_at"]) > "2300"
    for round_number in (1, 2):
        answer = ask(
            kvbus, prompt=TEXT + "One?", raw=True, keep_alive=0,
            options={"num_predict": 4},
        )  # fmt: skip
        assert answer["done_reason"] == "length"
        kvbus.wait(lambda: not loaded(kvbus), what="the unloading")
        kvbus.wait_commits(round_number)
    assert int(kvbus.turns()[-1]["restored_tokens"]) > 1700
    assert ask(kvbus, keep_alive="1h30m")["done_reason"] == "load"
    for body in ({}, {"keep_alive": None}):
        assert ask(kvbus, **body)["done_reason"] == "load"
        assert 5300 < seconds_left(loaded(kvbus)["tiny:latest"]) <= 5400
    ask(kvbus, keep_alive=0)
    ask(kvbus)
    assert str(loaded(kvbus)["tiny:latest"]["expires_at"]) > "2300"
    refusal = kvbus.post("/api/generate", {"model": "tiny", "keep_alive": "90"})
    assert refusal.status_code == 400
    assert refusal.json() == {"error": 'time: missing unit in duration "90"'}


def test_what_nobody_uses_is_parked_by_itself(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Of two models the unused one goes, after the time that the setting says."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--model", f"other={models['other']}",
        "--store", "none",
        KVBUS_KEEP_ALIVE="2s",
    )  # fmt: skip
    ask(kvbus, keep_alive="1m")
    kvbus.wait(lambda: list(loaded(kvbus)) == ["tiny:latest"], what="the parking")
    assert kvbus.generate("other", "Hello", num_predict=1)["eval_count"] == 1
    assert list(loaded(kvbus)) == ["tiny:latest", "other:latest"]  # lasting ones first
    assert kvbus.metric("kvbus_runner_failures_total") == 0
    restart_runner(kvbus, 0)  # a death while loaded is a restart as ever
    assert kvbus.metric("kvbus_runner_failures_total") == 1


def test_requests_in_flight_finish_before_an_unload(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Unloading answers at once, and ends nothing that is being answered."""
    kvbus.start(
        "--model", f"tiny={models['endless']}", "--store", "none", "--ctx", "32768"
    )
    begun, lines = threading.Event(), list[str]()

    def stream() -> None:
        body = {
            "model": "tiny", "prompt": "Go on", "raw": True,
            "options": {"num_predict": 6_000, "temperature": 0},
        }  # fmt: skip
        url = f"{kvbus.url}/api/generate"
        with httpx.stream(
            "POST", url, json=body, timeout=60, trust_env=False
        ) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=stream)
    reader.start()
    try:
        assert begun.wait(20)
        assert ask(kvbus, keep_alive=0)["done_reason"] == "unload"
        assert list(loaded(kvbus)) == ["tiny:latest"]
    finally:
        reader.join(60)
    assert '"done":true' in lines[-1]
    assert '"eval_count":6000' in lines[-1]
    kvbus.wait(lambda: not loaded(kvbus), what="the unloading")


def test_requests_that_come_while_it_is_being_parked(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Unloading and asking at the same time, again and again: each is answered."""
    kvbus.start("--model", f"tiny={models['tiny']}", *store_arguments("disk", kvbus))
    failed: list[str] = []

    def unload() -> None:
        for _ in range(8):
            answer = kvbus.post("/api/generate", {"model": "tiny", "keep_alive": 0})
            if answer.status_code != 200:
                failed.append(answer.text)

    unloaders = [threading.Thread(target=unload) for _ in range(2)]
    for thread in unloaders:
        thread.start()
    for number in range(12):
        kvbus.generate("tiny", f"{TEXT} {number}?", num_predict=2)
    for thread in unloaders:
        thread.join(60)
    assert failed == []
    assert kvbus.metric("kvbus_runner_failures_total") == 0


@pytest.mark.parametrize("number", [15, 9])
def test_a_parked_proxy_ends_cleanly(
    kvbus: Kvbus, models: dict[str, Path], number: int
) -> None:
    """A signal while all runners are parked leaves no process behind."""
    kvbus.start("--model", f"tiny={models['tiny']}", "--store", "none")
    ask(kvbus, keep_alive=0)
    assert children_of(kvbus.pid) == []
    assert kvbus.stop(number) < 5


def test_a_given_server_is_emptied_but_not_ended(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Its slots are erased after the commit; it stays loaded unless told otherwise."""
    with llama_server(models["tiny"]) as url:
        kvbus.start(
            "--upstream", url, "--restore", "always", "--keep-alive", "1s",
            *store_arguments("disk", kvbus),
        )  # fmt: skip
        kvbus.generate("given", TEXT + "One?")
        assert str(loaded(kvbus)["given:latest"]["expires_at"]) > "2300"
        ask(kvbus, model="given", keep_alive=0)
        kvbus.wait_commits(1)
        kvbus.wait(lambda: not loaded(kvbus), what="the unloading")
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        slots = httpx.get(f"{url}/slots", trust_env=False).json()
        assert not any(slot.get("n_prompt_tokens") for slot in slots)
        kvbus.generate("given", TEXT + "Two?")
        turn = kvbus.turns()[-1]
        assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700
        assert "given:latest" in loaded(kvbus)
