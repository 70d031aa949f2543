"""Finding, starting, keeping and leaving a store."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.errors import ConfigError, StoreError
from proxy.store.options import StoreOptions
from proxy.store.process import find_holder
from proxy.store.supervisor import StoreSupervisor, spawn_store
from tests.store.conftest import (
    StartStore,
    make_options,
    make_supervisor,
    store_pid,
    until,
)
from tests.store.test_faults import works


async def test_two_proxies_that_start_at_once_share_one_store(folder: Path) -> None:
    """Whoever comes second joins; the store ends with the last of them."""
    options = make_options("disk", folder)
    first, second = make_supervisor(options), make_supervisor(options)
    await asyncio.gather(first.start(), second.start())
    pid = store_pid(first)
    assert store_pid(second) == pid
    await first.stop()
    assert await works(second.client, "x")
    await second.stop()
    await until(lambda: find_holder(options.lock_path) is None)
    await until(lambda: not _is_alive(pid))


async def test_a_child_that_comes_too_late_is_not_left_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second store that is still starting when all is over ends with its proxy."""
    options = make_options("disk", folder)
    children: list[subprocess.Popen[bytes]] = []

    def spawn_late(options: StoreOptions) -> subprocess.Popen[bytes]:
        if not children:
            children.append(spawn_store(options))
        else:  # a busy machine: it takes its time
            command = [sys.executable, "-m", "proxy.store.server", options.to_json()]
            script = 'sleep 2; exec "$@"'
            children.append(subprocess.Popen(["sh", "-c", script, "sh", *command]))
        return children[-1]

    monkeypatch.setattr("proxy.store.supervisor.spawn_store", spawn_late)
    first, second = make_supervisor(options), make_supervisor(options)
    await asyncio.gather(first.start(), second.start())
    await first.stop()
    await second.stop()
    assert len(children) == 2
    # in no more time than an ended one needs to go; the late one would take two seconds
    await until(
        lambda: all(child.poll() is not None for child in children), within_seconds=1.5
    )
    assert find_holder(options.lock_path) is None


async def test_a_store_survives_the_proxy_that_started_it(folder: Path) -> None:
    """Its first owner stops while another uses it: nothing is lost."""
    options = make_options("embedded", folder)
    owner = make_supervisor(options)
    await owner.start()
    other = make_supervisor(options)
    await other.start()
    assert await works(other.client, "kept")
    await owner.stop()
    assert await works(other.client, "kept")
    pid = store_pid(other)
    await other.stop()
    await until(lambda: not _is_alive(pid))


async def test_without_leave_to_spawn_an_absent_store_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that may not start a store says that there is none."""
    monkeypatch.setattr("proxy.store.supervisor.START_SECONDS", 0.2)
    supervisor = StoreSupervisor(make_options("disk", folder), spawn=False)
    with pytest.raises(StoreError, match="no block store"):
        await supervisor.start()
    assert not supervisor.client.is_available
    await supervisor.stop()


async def test_a_store_that_refuses_its_settings_tells_why(folder: Path) -> None:
    """The last words of the store are the text of the error."""
    (folder / "blocks").write_text("a file in the way")
    supervisor = StoreSupervisor(make_options("disk", folder))
    with pytest.raises(ConfigError, match="block folder"):
        await supervisor.start()


async def test_one_folder_serves_one_store(
    folder: Path, start_store: StartStore
) -> None:
    """A second store with another socket cannot open the same blocks."""
    options = make_options("disk", folder)
    await start_store(options)
    other = StoreOptions(
        runtime_dir=folder / "other",
        kind="disk",
        disk_dir=options.disk_dir,
        disk_size_bytes=options.disk_size_bytes,
        linger_seconds=30,
    )
    with pytest.raises(ConfigError, match="another store uses"):
        await StoreSupervisor(other).start()


async def test_a_frozen_store_found_at_the_start_is_replaced(
    folder: Path, start_store: StartStore
) -> None:
    """One that takes connections and says nothing is killed, if a proxy started it."""
    options = make_options("disk", folder)
    first = await start_store(options)
    pid = store_pid(first)
    assert first._watcher is not None
    first._watcher.cancel()  # so that it is the second one that finds out
    os.kill(pid, signal.SIGSTOP)
    second = await start_store(options)
    assert store_pid(second) != pid
    assert await works(second.client, "x")


async def test_the_log_of_a_spawned_store_is_private_and_short(
    folder: Path, start_store: StartStore
) -> None:
    """What a store prints goes to one small file that only we may read."""
    options = make_options("disk", folder)
    options.runtime_dir.mkdir(mode=0o700)
    options.log_path.write_bytes(b"x" * (2 << 20))
    await start_store(options)
    found = options.log_path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size < 10_000


def _is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and ") Z " not in path.read_text()
