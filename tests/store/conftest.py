"""Real store processes for the tests, ended by pid whatever happens."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from proxy.errors import StoreError
from proxy.store.client import StoreClient
from proxy.store.client_facts import ClientTiming
from proxy.store.master import MooncakeMaster
from proxy.store.options import StoreOptions
from proxy.store.process import ensure_private_folder
from proxy.store.supervisor import StoreSupervisor, spawn_store

MIB = 1 << 20
RAM_BYTES = 256 * MIB
SEGMENT_BYTES = 128 * MIB
DISK_BYTES = 256 * MIB

KINDS = ("disk", "embedded", "mooncake", "tiered")

PATIENT = ClientTiming(missed_beats=100)
"""For tests of something else than time: other work shares this machine."""


class StartStore(Protocol):
    """Start (or join) the store of some options; it is stopped after the test."""

    def __call__(
        self, options: StoreOptions, *, timing: ClientTiming = PATIENT
    ) -> Awaitable[StoreSupervisor]:
        """Return a supervisor that has started."""
        ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of this test that only we may enter."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
async def start_store() -> AsyncIterator[StartStore]:
    """Supervisors that are stopped, and their stores killed, after the test."""
    started: list[StoreSupervisor] = []
    pids: set[int] = set()

    async def start(
        options: StoreOptions, *, timing: ClientTiming = PATIENT
    ) -> StoreSupervisor:
        supervisor = make_supervisor(options, timing=timing)
        started.append(supervisor)
        await supervisor.start()
        assert supervisor.client.hello is not None
        pids.add(supervisor.client.hello.pid)
        return supervisor

    yield start
    for supervisor in started:
        if supervisor.client.hello is not None:
            pids.add(supervisor.client.hello.pid)
        await supervisor.stop()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def pool_master() -> Iterator[MooncakeMaster]:
    """Run a Mooncake master that belongs to no store."""
    master = MooncakeMaster()
    master.start()
    yield master
    master.kill()


def make_options(
    kind: str, folder: Path, *, linger_seconds: float | None = 30.0
) -> StoreOptions:
    """Return small options of a kind; `pool_options` for a pool."""
    if kind == "disk":
        return StoreOptions(
            runtime_dir=folder / "run",
            kind="disk",
            disk_dir=folder / "blocks",
            disk_size_bytes=DISK_BYTES,
            linger_seconds=linger_seconds,
        )
    return StoreOptions(
        runtime_dir=folder / "run",
        kind="embedded",
        ram_size_bytes=RAM_BYTES,
        segment_bytes=SEGMENT_BYTES,
        disk_dir=folder / "blocks" if kind == "tiered" else None,
        disk_size_bytes=DISK_BYTES if kind == "tiered" else 0,
        linger_seconds=linger_seconds,
    )


def pool_options(master: MooncakeMaster, runtime_dir: Path) -> StoreOptions:
    """Return options of a small member of a master's pool."""
    return StoreOptions(
        runtime_dir=runtime_dir,
        kind="mooncake",
        master_host="127.0.0.1",
        master_port=master.rpc_port,
        master_metrics_port=master.http_port,
        ram_size_bytes=RAM_BYTES,
        segment_bytes=SEGMENT_BYTES,
        linger_seconds=30.0,
    )


@pytest.fixture(params=KINDS, scope="module")
def shared_options(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreOptions]:
    """Run a store of each kind for all tests of a module; return its options."""
    folder = tmp_path_factory.mktemp(request.param)
    folder.chmod(0o700)
    with contextlib.ExitStack() as stack:
        if request.param == "mooncake":
            master = MooncakeMaster()
            master.start()
            stack.callback(master.kill)
            options = pool_options(master, folder / "run")
        else:
            options = make_options(request.param, folder)
        ensure_private_folder(options.runtime_dir)
        process = spawn_store(options)
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield options


@pytest.fixture
async def client(shared_options: StoreOptions) -> AsyncIterator[StoreClient]:
    """Return a client of a running store of each kind."""
    client = StoreClient(shared_options.socket_path, timing=PATIENT)
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(StoreError):
                await client.connect()
                break
            await asyncio.sleep(0.02)
    yield client
    client._drop("the test is over")  # without a bye: the store is for others too
    await client.close()


def make_supervisor(
    options: StoreOptions, *, timing: ClientTiming = PATIENT
) -> StoreSupervisor:
    """Return a supervisor that does not take a busy machine for a dead store."""
    supervisor = StoreSupervisor(options)
    supervisor.client.timing = timing
    return supervisor


async def until(condition: Callable[[], bool], *, within_seconds: float = 10.0) -> None:
    """Wait until `condition` holds; fail when it does not in time."""
    async with asyncio.timeout(within_seconds):
        while not condition():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.005)


def store_pid(supervisor: StoreSupervisor) -> int:
    """Return the process id of the store that a supervisor is connected to."""
    assert supervisor.client.hello is not None
    return supervisor.client.hello.pid


def child_pids(pid: int) -> list[int]:
    """Return the children of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that just ended
            found += [int(text) for text in (task / "children").read_text().split()]
    return found
