"""Start, end and death of kvbus: nothing is left behind, blocks survive."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Kvbus, children_of, is_alive
from tests.e2e.test_sharing import TEXT, store_arguments


def leftovers(kvbus: Kvbus) -> list[Path]:
    """Return what lies in the directories of sockets and slot files."""
    return [
        path
        for root in (kvbus.runtime_dir, kvbus.slot_root)
        for path in root.rglob("*")
        if path.suffix not in (".log", ".lock")
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_in_time(
    kvbus: Kvbus, models: dict[str, Path], number: int
) -> None:
    """Within five seconds all children, files and ports are gone, streams cut."""
    kvbus.start(
        "--model", f"tiny={models['endless']}", "--runners", "2", "--ctx", "100000",
        *store_arguments("embedded", kvbus),
    )  # fmt: skip
    body = {
        "model": "tiny",
        "prompt": "Go on",
        "raw": True,
        "options": {"num_predict": 90_000, "temperature": 0},
    }
    started = threading.Event()

    def stream() -> None:
        url = f"{kvbus.url}/api/generate"
        try:
            with httpx.stream(
                "POST", url, json=body, timeout=30, trust_env=False
            ) as answer:
                for _ in answer.iter_raw():
                    started.set()
        except httpx.HTTPError:
            pass

    reader = threading.Thread(target=stream)
    reader.start()
    assert started.wait(20)
    children = children_of(kvbus.pid)
    assert len(children) >= 4  # two runners, each with its engine
    assert kvbus.stop(number) < 5.0
    reader.join(5)
    assert not reader.is_alive()
    kvbus.wait(lambda: not any(map(is_alive, children)), seconds=2, what="the end")
    assert leftovers(kvbus) == []


def test_blocks_survive_the_death_of_the_proxy(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """After kill -9 runners end at once; the next proxy finds store and blocks."""
    arguments = (
        "--model", f"tiny={models['tiny']}", "--restore", "always",
        *store_arguments("embedded", kvbus),
    )  # fmt: skip
    kvbus.start(*arguments)
    kvbus.generate("tiny", TEXT + "One?")
    kvbus.wait_commits(1)
    store_pid = kvbus.store_pid()
    runners = [pid for pid in children_of(kvbus.pid) if pid in set(kvbus.runner_pids())]
    engines = [child for runner in runners for child in children_of(runner)]
    assert engines
    kvbus.stop(signal.SIGKILL)
    kvbus.wait(
        lambda: not any(map(is_alive, [*runners, *engines])),
        seconds=2,
        what="the end of the runners",
    )
    assert is_alive(store_pid)
    kvbus.start(*arguments)
    assert kvbus.store_pid() == store_pid
    kvbus.generate("tiny", TEXT + "Two?")
    turn = kvbus.turns()[-1]
    assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700
    kvbus.stop()
    kvbus.wait(lambda: not is_alive(store_pid), seconds=3, what="the store's end")
    assert leftovers(kvbus) == []


def test_a_store_that_runs_as_a_service_is_used_and_left(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """`kvbus store` started on its own is found, and is still there afterwards."""
    settings = [
        *store_arguments("disk", kvbus),
        "--runtime-dir", str(kvbus.runtime_dir),
        "--cache-dir", str(kvbus.cache_dir),
    ]  # fmt: skip
    service = subprocess.Popen(
        [sys.executable, "-m", "proxy", "store", *settings], stdout=subprocess.PIPE
    )
    try:
        assert service.stdout is not None
        assert b"ready" in service.stdout.readline()
        kvbus.start(
            "--model", f"tiny={models['tiny']}", *store_arguments("disk", kvbus)
        )
        assert kvbus.store_pid() == service.pid
        kvbus.generate("tiny", TEXT)
        kvbus.wait_commits(1)
        kvbus.stop()
        assert service.poll() is None
        service.send_signal(signal.SIGTERM)
        assert service.wait(5) == 0
    finally:
        service.kill()
        service.wait()
        assert service.stdout is not None
        service.stdout.close()


def test_a_taken_port_is_one_clear_line(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """A listener that cannot be opened ends the process with code 2."""
    kvbus.start("--model", f"tiny={models['tiny']}", "--store", "none")
    done = subprocess.run(
        [
            sys.executable, "-m", "proxy", "serve", "--store", "none",
            "--listen", kvbus.url.removeprefix("http://"),
            "--model", f"tiny={models['tiny']}",
            "--runtime-dir", str(kvbus.runtime_dir),
            "--slot-dir", str(kvbus.slot_root),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--listen" in done.stderr
    assert "in use" in done.stderr


@pytest.mark.parametrize("content", [None, b"", b"GGUF and then rubbish"])
def test_a_bad_model_file_is_one_clear_line(
    kvbus: Kvbus, tmp_path: Path, content: bytes | None
) -> None:
    """Missing, empty and damaged files end the process with code 2."""
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    done = subprocess.run(
        [
            sys.executable, "-m", "proxy", "serve", "--store", "none",
            "--listen", "127.0.0.1:0", "--model", f"bad={path}",
            "--runtime-dir", str(kvbus.runtime_dir),
            "--slot-dir", str(kvbus.slot_root),
            "--cache-dir", str(kvbus.cache_dir),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert str(path) in done.stderr


def test_health_is_told_apart_from_life(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """/livez and /healthz answer; metrics refuse a foreign Host name."""
    kvbus.start("--model", f"tiny={models['tiny']}", "--store", "none")
    get = httpx.Client(base_url=kvbus.url, trust_env=False).get
    assert get("/livez").status_code == get("/healthz").status_code == 200
    assert "kvbus_slots" in get("/metrics").text
    for path in ("/metrics", "/kvcache/status"):
        assert get(path, headers={"Host": "evil.test"}).status_code == 403


def test_slot_files_are_private(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """Directories are 0700 and files 0600: they hold prompts."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--restore", "always", "--runners", "2",
        *store_arguments("disk", kvbus),
    )  # fmt: skip
    kvbus.generate("tiny", TEXT)
    kvbus.wait_commits(1)
    kvbus.generate("tiny", "x" + TEXT)
    kvbus.wait_commits(2)
    found = list(kvbus.slot_root.rglob("*")) + list(kvbus.runtime_dir.rglob("*"))
    found += list((kvbus.root / "blocks").rglob("*"))
    assert len(found) > 8
    for path in found:
        assert path.lstat().st_mode & 0o077 == 0 or path.is_socket(), path
        assert path.stat().st_uid == os.getuid()
    text = kvbus.log_text()
    assert "lighthouse" not in text


def test_a_frozen_store_is_not_left_behind(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Ended while its store hangs, kvbus takes the store along, in time."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", *store_arguments("embedded", kvbus)
    )
    store = kvbus.store_pid()
    family = [store, *children_of(store)]
    os.kill(store, signal.SIGSTOP)
    assert kvbus.stop() < 5.0
    kvbus.wait(lambda: not any(map(is_alive, family)), seconds=2, what="the end")
    # a killed store cannot unlink its socket; the next one replaces it
    assert [path.name[:6] for path in leftovers(kvbus)] == ["store-"]
