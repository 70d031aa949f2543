"""Real faults: every part killed or frozen; requests go on, nothing wrong is given."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Kvbus, children_of, is_alive
from tests.e2e.test_sharing import TEXT, restart_runner, store_arguments

LONG = {"num_predict": 50_000, "temperature": 0}
"""Far longer than any test: it is always cut off."""
SHORT = {"num_predict": 150, "temperature": 0}


def serve(
    kvbus: Kvbus, models: dict[str, Path], *more: str, kind: str = "disk"
) -> None:
    """Start kvbus with one model, restoring whatever is stored."""
    kvbus.start(
        "--model", f"tiny={models['endless']}", "--restore", "always",
        *store_arguments(kind, kvbus), *more,
    )  # fmt: skip


def prime(kvbus: Kvbus) -> dict[str, Any]:
    """Have the text prefilled and stored; returns the hot slot's greedy answer."""
    kvbus.generate("tiny", TEXT)
    kvbus.wait(
        lambda: kvbus.metric("kvbus_committed_bytes_total") > 0, what="the commit"
    )
    return kvbus.generate("tiny", TEXT + "What?")


def test_a_busy_runner_does_not_keep_its_prefix_to_itself(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """On the heels of an answer its prefix is restored into the other runner."""
    serve(
        kvbus, models, "--runners", "2", "--ctx", "60000", kind="embedded",
    )  # fmt: skip
    kvbus.generate("tiny", TEXT + "One?")
    kvbus.wait(lambda: kvbus.metric("kvbus_slots_leased") == 0, what="the save's end")
    with streaming(kvbus, LONG, TEXT + "One?") as lines:
        kvbus.generate("tiny", TEXT + "Two?")
        turn = kvbus.turns()[-1]
        assert turn["runner"] != kvbus.turns()[0]["runner"]
        assert turn["decision"] == "restore", kvbus.log_text()
        assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700
        index = int(kvbus.turns()[0]["runner"].rpartition("/")[2])
        os.kill(kvbus.runner_pids()[index], signal.SIGKILL)
    assert "unexpectedly stopped" in lines[-1]


@contextmanager
def streaming(
    kvbus: Kvbus, options: dict[str, int], prompt: str = "Go on"
) -> Iterator[list[str]]:
    """Stream an answer in a thread; gives its lines as they come."""
    lines: list[str] = []
    begun, left = threading.Event(), threading.Event()
    body = {"model": "tiny", "prompt": prompt, "raw": True, "options": options}

    def read() -> None:
        url = f"{kvbus.url}/api/generate"
        with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as got:
            for line in got.iter_lines():
                lines.append(line)
                begun.set()
                if left.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert begun.wait(30)
        yield lines
    except BaseException:
        left.set()  # the test has failed: its reply is not waited for
        raise
    finally:
        thread.join(60)
        assert not thread.is_alive()


def test_a_runner_killed_in_decode_gives_one_clear_error(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """The stream ends in an error line of Ollama's shape; the next request works."""
    serve(kvbus, models, "--ctx", "60000")
    with streaming(kvbus, LONG) as lines:
        os.kill(kvbus.runner_pids()[0], signal.SIGKILL)
    assert "model runner has unexpectedly stopped" in lines[-1]
    assert '"done":true' not in "".join(lines)
    assert kvbus.generate("tiny", "Next")["done"]


def test_two_runners_killed_in_prefill_give_status_500(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """The first death costs time only, the second one the request; the next works."""
    serve(kvbus, models, "--ctx", "60000")
    answers: list[httpx.Response] = []
    body = {"model": "tiny", "prompt": TEXT * 20, "raw": True}
    thread = threading.Thread(
        target=lambda: answers.append(kvbus.post("/api/generate", body))
    )
    thread.start()
    for deaths in range(2):
        kvbus.wait(
            lambda: kvbus.metric("kvbus_slots_leased") == 1, what="a prefill to begin"
        )
        time.sleep(0.05)  # well inside a prefill of seconds
        os.kill(kvbus.runner_pids()[0], signal.SIGKILL)
        if not deaths:
            kvbus.wait(lambda: "event=turn.moved" in kvbus.log_text(), what="a move")
    thread.join(30)
    assert answers[0].status_code == 500
    assert "unexpectedly stopped" in answers[0].json()["error"]
    assert answers[0].headers["X-KVBus-Request-Id"] in kvbus.log_text()
    assert kvbus.generate("tiny", "Next")["done"]


def test_waiting_requests_survive_the_death_of_their_runner(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Only the request that was being answered fails; the queue is served after."""
    serve(kvbus, models, "--ctx", "60000")
    answers: list[int] = []
    body = {"model": "tiny", "prompt": "Hi", "raw": True, "options": SHORT}

    def wait_in_line() -> None:
        answer = kvbus.post("/api/generate", {**body, "stream": False})
        answers.append(answer.status_code)

    threads = [threading.Thread(target=wait_in_line) for _ in range(3)]
    with streaming(kvbus, LONG) as lines:
        for thread in threads:
            thread.start()
        kvbus.wait(lambda: kvbus.metric("kvbus_waiting_requests") == 3, what="a queue")
        os.kill(kvbus.runner_pids()[0], signal.SIGKILL)
        for thread in threads:
            thread.join(60)
    assert "unexpectedly stopped" in lines[-1]
    assert answers == [200, 200, 200]


@pytest.mark.parametrize("kind", ["disk", "embedded"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_store_costs_no_request(
    kvbus: Kvbus, models: dict[str, Path], number: int, kind: str
) -> None:
    """Killed or frozen, before a request and during a stream: all are answered."""
    serve(kvbus, models, kind=kind)
    hot = prime(kvbus)
    store = kvbus.store_pid()
    with streaming(kvbus, SHORT, "Something else") as lines:
        os.kill(store, number)
    assert '"done":true' in lines[-1]
    answer = kvbus.generate("tiny", TEXT + "What?")
    assert answer["prompt_eval_count"] == hot["prompt_eval_count"]
    lookup = sum(float(turn.get("lookup_ms", 0)) for turn in kvbus.turns()[-2:])
    assert lookup < 1000
    kvbus.wait(
        lambda: kvbus.status()["store"].get("pid") not in (None, store),
        seconds=30,
        what="a new store",
    )
    kvbus.wait(lambda: not is_alive(store), seconds=5, what="the old store's end")
    before = kvbus.metric("kvbus_committed_bytes_total")
    kvbus.generate("tiny", "x" + TEXT)
    kvbus.wait(
        lambda: kvbus.metric("kvbus_committed_bytes_total") > before,
        what="a commit into the new store",
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_master_costs_no_request(
    kvbus: Kvbus, models: dict[str, Path], number: int
) -> None:
    """The Mooncake master killed or frozen: answers go on, the store comes back."""
    serve(kvbus, models, kind="embedded")
    prime(kvbus)
    store = kvbus.store_pid()
    masters = [
        pid
        for pid in children_of(store)
        if b"mooncake_master" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert masters
    os.kill(masters[-1], number)
    restart_runner(kvbus)
    started = time.monotonic()
    for number_of_request in range(3):
        assert kvbus.generate("tiny", TEXT + f"{number_of_request}")["done"]
    assert time.monotonic() - started < 20
    before = kvbus.metric("kvbus_committed_bytes_total")

    def commits_again() -> bool:
        kvbus.generate("tiny", f"{time.monotonic()}" + TEXT)
        return kvbus.metric("kvbus_committed_bytes_total") > before

    kvbus.wait(commits_again, seconds=40, what="a commit after the master's loss")


def test_a_damaged_block_is_a_miss(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """A flipped bit or a cut file never reaches the engine; the answer is right."""
    serve(kvbus, models)
    kvbus.generate("tiny", TEXT)
    kvbus.wait_commits(1)
    files = [p for p in (kvbus.root / "blocks").rglob("*") if p.stat().st_size > 1000]
    assert len(files) > 4
    for number, path in enumerate(path for path in files if path.is_file()):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if number % 2 else data[:-7])
    restart_runner(kvbus)
    kvbus.generate("tiny", TEXT + "What?")
    turn = kvbus.turns()[-1]
    assert (turn["result"], turn["reused_tokens"]) == ("complete", "0")
    assert kvbus.metric("kvbus_restored_bytes_total") == 0
    # the bad blocks are gone: what was just computed is stored anew
    kvbus.wait_commits(2)
    restart_runner(kvbus)
    kvbus.generate("tiny", TEXT + "What?")
    turn = kvbus.turns()[-1]
    assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700


def test_a_removed_slot_directory_costs_no_request(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Without it neither restores nor commits work; answers do."""
    serve(kvbus, models)
    prime(kvbus)
    for path in kvbus.slot_root.glob("serve-*/runner-*"):
        shutil.rmtree(path)
    assert kvbus.generate("tiny", "Something else" + TEXT)["done"]
    assert kvbus.generate("tiny", TEXT + "What?")["done"]
    kvbus.wait(
        lambda: kvbus.metric("kvbus_failed_open_total") > 0, what="a counted failure"
    )
    restart_runner(kvbus)  # makes the directory anew
    kvbus.generate("tiny", TEXT + "What?")
    assert kvbus.turns()[-1]["decision"] == "restore"


def test_a_full_memory_file_system_costs_no_request(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """With no room for slot files requests are answered without sharing."""
    if os.getuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = kvbus.root / "small"
    mount.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", str(mount)],
        check=True,
    )
    try:
        serve(kvbus, models, "--slot-dir", str(mount))
        kvbus.generate("tiny", TEXT)
        kvbus.wait_commits(1)
        restart_runner(kvbus)
        # 3 MiB hold a save of 1 MB, but no restore file of 16 MiB
        kvbus.generate("tiny", TEXT + "What?")
        turn = kvbus.turns()[-1]
        assert (turn["result"], turn["decision"]) == ("complete", "recompute")
        assert turn["reason"] == '"slot failed"'
        kvbus.wait_commits(2)
        with (mount / "filler").open("wb") as filler, suppress(OSError):
            filler.write(bytes(4 << 20))
        kvbus.generate("tiny", "Once more " + TEXT)  # the save fails now
        kvbus.wait_commits(3)
        assert kvbus.generate("tiny", "Hello")["done"]
        assert kvbus.metric("kvbus_failed_open_total") >= 2
    finally:
        kvbus.stop()
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_disconnect_frees_the_slot_within_a_second(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """The client goes in prefill and in decode; the only slot serves the next."""
    serve(kvbus, models, "--ctx", "60000")
    body = {"model": "tiny", "prompt": TEXT * 20, "raw": True, "options": LONG}
    for prompt, timeout in ((TEXT * 25, 0.3), ("Go on", None)):
        with httpx.Client(trust_env=False, timeout=timeout) as client:
            request = {**body, "prompt": prompt}
            try:
                with client.stream(
                    "POST", f"{kvbus.url}/api/generate", json=request
                ) as answer:
                    next(answer.iter_raw())
            except httpx.ReadTimeout:
                pass
        started = time.monotonic()
        kvbus.wait(lambda: kvbus.metric("kvbus_slots_leased") == 0, what="a free slot")
        kvbus.generate("tiny", "Next", num_predict=2)
        assert time.monotonic() - started < 1.5
    results = [turn["result"] for turn in kvbus.turns()]
    assert results.count("cancelled") == 2


def test_a_disconnect_in_prefill_beside_a_busy_slot(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """While another slot talks the engine still hears that a client has left."""
    serve(kvbus, models, "--ctx", "60000", "--slots", "2")
    body = {"model": "tiny", "prompt": TEXT * 25, "raw": True, "options": LONG}
    with (
        httpx.Client(trust_env=False, timeout=30) as client,
        client.stream(
            "POST", f"{kvbus.url}/api/generate", json={**body, "prompt": "Go on"}
        ) as talking,
    ):
        lines = talking.iter_raw()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{kvbus.url}/api/generate", json=body, timeout=1.0, trust_env=False
            )
        started = time.monotonic()
        kvbus.generate("tiny", "Next", num_predict=2)
        assert time.monotonic() - started < 2.5
        next(lines)


def test_many_disconnects_leave_nothing(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """A hundred clients that leave at all moments: no slot, task or file is lost."""
    serve(kvbus, models, "--slots", "2")
    prime(kvbus)
    fds = len(list(Path(f"/proc/{kvbus.pid}/fd").iterdir()))
    for number in range(100):
        timeout = httpx.Timeout(30, read=0.001 + (number % 20) * 0.004)
        body = {"model": "tiny", "prompt": f"{number} {TEXT}", "raw": True}
        try:
            httpx.post(
                f"{kvbus.url}/api/generate", json=body, timeout=timeout, trust_env=False
            )
        except httpx.ReadTimeout:
            continue
    kvbus.wait(lambda: kvbus.metric("kvbus_slots_leased") == 0, what="free slots")
    assert kvbus.generate("tiny", TEXT + "What?")["done"]
    kvbus.wait(lambda: kvbus.metric("kvbus_slots_leased") == 0, what="free slots")
    kvbus.wait(
        lambda: len(list(Path(f"/proc/{kvbus.pid}/fd").iterdir())) <= fds + 10,
        what="closed descriptors",
    )
    names = [path.name for path in kvbus.slot_root.rglob("*-save-*")]
    assert names == []


def test_many_clients_at_once(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """Forty requests on four slots of two runners: all are answered, in order."""
    serve(kvbus, models, "--slots", "2", "--runners", "2", kind="embedded")
    prime(kvbus)
    failures: list[Any] = []

    def ask(number: int) -> None:
        try:
            answer = kvbus.post(
                "/api/generate",
                {
                    "model": "tiny",
                    "prompt": TEXT * (number % 2) + f"Client {number}",
                    "raw": True,
                    "stream": False,
                    "options": {"num_predict": 12, "temperature": 0},
                },
            )
            if answer.status_code != 200 or not answer.json()["done"]:
                failures.append(answer.text)
        except httpx.HTTPError as exc:
            failures.append(exc)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert kvbus.metric("kvbus_restore_ineffective_total") == 0
    kvbus.wait(lambda: kvbus.metric("kvbus_slots_leased") == 0, what="free slots")
