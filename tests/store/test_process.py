"""The life of a store process: who may use it, when it ends, what it leaves."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.errors import ConfigError, StoreError
from proxy.store.client import StoreClient
from proxy.store.options import StoreOptions
from proxy.store.process import EXIT_CONFIG, EXIT_TAKEN, find_holder
from tests.store.conftest import (
    PATIENT,
    StartStore,
    child_pids,
    make_options,
    store_pid,
    until,
)
from tests.store.test_faults import works

SERVER = [sys.executable, "-m", "proxy.store.server"]


@contextlib.contextmanager
def running(options: StoreOptions) -> Iterator[subprocess.Popen[str]]:
    """Run a store in the foreground until it is ready."""
    process = subprocess.Popen(
        [*SERVER, options.to_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["ready"] is True
        assert ready["pid"] == process.pid
        yield process
    finally:
        process.kill()
        process.communicate()


async def connected(options: StoreOptions) -> StoreClient:
    """Return a connected client."""
    client = StoreClient(options.socket_path, timing=PATIENT)
    await client.connect()
    return client


def leftovers(options: StoreOptions) -> list[str]:
    """Return what a store left in its folder, but for its log."""
    return sorted(
        path.name for path in options.runtime_dir.iterdir() if path.suffix != ".log"
    )


@pytest.mark.parametrize("kind", ["disk", "embedded"])
async def test_a_signal_ends_the_store_and_leaves_nothing(
    kind: str, folder: Path
) -> None:
    """SIGTERM ends a service within 3 s: no socket, no lock, no master."""
    options = make_options(kind, folder, linger_seconds=None)
    with running(options) as process:
        client = await connected(options)
        assert await works(client, "x")
        children = child_pids(process.pid)
        assert len(children) == (kind == "embedded")
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 5) == 0
        assert time.monotonic() - started < 3
        await client.close()
    assert leftovers(options) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


async def test_a_killed_store_takes_its_master_along(folder: Path) -> None:
    """After kill -9 of the store the kernel ends the master; the next store starts."""
    options = make_options("embedded", folder)
    with running(options) as process:
        (master,) = child_pids(process.pid)
        process.kill()
        process.wait()
        await until(lambda: not Path(f"/proc/{master}/task").exists(), within_seconds=2)
    with running(options):
        client = await connected(options)
        assert await works(client, "x")
        await client.close()


async def test_the_last_goodbye_ends_a_store_that_lingers(folder: Path) -> None:
    """It ends at once when its last client said bye, not before."""
    options = make_options("disk", folder, linger_seconds=60)
    with running(options) as process:
        first, second = await connected(options), await connected(options)
        assert await first.close() == 1
        assert await works(second, "x")
        assert process.poll() is None
        assert await second.close() == 0
        assert await asyncio.to_thread(process.wait, 3) == 0
    assert leftovers(options) == []


async def test_a_lost_client_is_waited_for(folder: Path) -> None:
    """Without a bye the store lingers, and serves who comes back in time."""
    options = make_options("disk", folder, linger_seconds=1.0)
    with running(options) as process:
        lost = await connected(options)
        assert await works(lost, "kept")
        lost._drop("killed")
        await lost.close()
        await asyncio.sleep(0.4)
        back = await connected(options)
        assert await works(back, "kept")
        await asyncio.sleep(1.2)
        assert process.poll() is None
        back._drop("killed")
        await back.close()
        started = time.monotonic()
        assert await asyncio.to_thread(process.wait, 5) == 0
        assert time.monotonic() - started > 0.5


async def test_a_store_that_nobody_asks_ends(folder: Path) -> None:
    """Without any client it ends after its linger time; a service does not."""
    with running(make_options("disk", folder, linger_seconds=0.3)) as process:
        assert await asyncio.to_thread(process.wait, 5) == 0
    with running(make_options("disk", folder, linger_seconds=None)) as process:
        await asyncio.sleep(0.7)
        assert process.poll() is None


def test_a_second_store_of_one_socket_is_told_apart(folder: Path) -> None:
    """It ends with a code of its own and one clear line."""
    options = make_options("disk", folder)
    with running(options) as process:
        holder = find_holder(options.lock_path)
        assert holder is not None
        assert (holder.pid, holder.is_service) == (process.pid, False)
        second = subprocess.run(
            [*SERVER, options.to_json()], capture_output=True, text=True, timeout=20
        )
    assert second.returncode == EXIT_TAKEN
    assert "another store holds" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert find_holder(options.lock_path) is None


def test_wrong_settings_are_one_line(folder: Path) -> None:
    """Options that cannot be read, or a folder open to others, end with code 2."""
    result = subprocess.run(
        [*SERVER, '{"kind": "tape"}'], capture_output=True, text=True, timeout=20
    )
    assert result.returncode == EXIT_CONFIG
    assert len(result.stderr.splitlines()) == 1
    (folder / "run").mkdir(mode=0o755)
    result = subprocess.run(
        [*SERVER, make_options("disk", folder).to_json()],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.returncode == EXIT_CONFIG
    assert "open to others" in result.stderr


def test_a_busy_process_turns_into_a_store(folder: Path) -> None:
    """`run` starts afresh under the same pid, isolated though threads existed."""
    script = (
        "import sys, threading, time\n"
        "from proxy.store import server\n"
        "from proxy.store.options import StoreOptions\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "server.run(StoreOptions.from_json(sys.argv[1]))\n"
    )
    options = make_options("embedded", folder)
    process = subprocess.Popen(
        [sys.executable, "-c", script, options.to_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["pid"] == process.pid
        assert ready["kind"] in {"embedded", "disk"}
        assert "threads" not in ready["reason"]
    finally:
        process.kill()
        process.communicate()


def test_options_survive_json(folder: Path) -> None:
    """Options read back are equal; the socket's name tells different stores apart."""
    embedded, disk = make_options("embedded", folder), make_options("disk", folder)
    for options in (embedded, disk):
        assert StoreOptions.from_json(options.to_json()) == options
    assert embedded.socket_path != disk.socket_path
    service = make_options("disk", folder, linger_seconds=None)
    assert service.socket_path == disk.socket_path
    for text in ("[]", "{}", '{"runtime_dir": "/x", "kind": "disk"}', "nonsense"):
        with pytest.raises(ConfigError):
            StoreOptions.from_json(text)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 5) + b"{]}[]",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 23) + b'{"id":1,"op":"explode"}',
        struct.pack("<I", 19) + b'{"id":1,"op":"get"}',
        struct.pack("<I", 1 << 30),
    ],
)
async def test_garbage_ends_its_own_connection_alone(
    garbage: bytes, folder: Path, start_store: StartStore
) -> None:
    """Whatever is no request closes that connection; others go on."""
    supervisor = await start_store(make_options("disk", folder))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(supervisor.client._path))
        sock.sendall(garbage)
        assert sock.recv(100) == b""
    assert await works(supervisor.client, "x")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
async def test_another_user_is_refused(folder: Path, start_store: StartStore) -> None:
    """Neither the folder nor, with that open, the store lets another uid in."""
    options = make_options("disk", folder)
    supervisor = await start_store(options)
    found = options.socket_path.stat()
    assert found.st_mode & 0o777 == 0o600
    assert options.runtime_dir.stat().st_mode & 0o777 == 0o700
    for path in (folder, *folder.parents, options.runtime_dir):
        if path != Path("/"):
            path.chmod(path.stat().st_mode | 0o011)
    options.socket_path.chmod(0o666)
    script = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect(sys.argv[1])\n"
        "sys.exit(0 if s.recv(1) == b'' else 1)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(options.socket_path)],
        timeout=20,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert await works(supervisor.client, "x")


async def test_a_hello_of_another_version_is_refused(
    folder: Path, start_store: StartStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy of another kvbus does not use this store."""
    options = make_options("disk", folder)
    await start_store(options)
    monkeypatch.setattr("proxy.store.client.WIRE_VERSION", 999)
    client = StoreClient(options.socket_path)
    with pytest.raises(StoreError, match="version"):
        await client.connect()
    assert not client.is_available


async def test_core_files_are_off_and_memory_is_given_back(
    folder: Path, start_store: StartStore
) -> None:
    """No prompt gets into a core file; an unlinked slot file is unmapped soon."""
    supervisor = await start_store(make_options("disk", folder))
    pid = store_pid(supervisor)
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert "Max core file size        0                    0" in limits
    from proxy.store.base import BlockRef
    from tests.store.slotfile import FINGERPRINT, make_key, small_layout

    layout = small_layout(1)
    path = folder / "slotfile"
    path.write_bytes(bytes(layout.end))
    with path.open("r+b") as file:
        await supervisor.client.get_into(
            file.fileno(),
            layout,
            [BlockRef(make_key("none"), 0)],
            fingerprint=FINGERPRINT,
            deadline_seconds=2,
        )
    assert str(path) in Path(f"/proc/{pid}/maps").read_text()
    path.unlink()
    await until(lambda: str(path) not in Path(f"/proc/{pid}/maps").read_text())
