"""Blocks in Mooncake: damage in RAM, other members of a pool, growth, tiers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from proxy.errors import ConfigError, StoreError
from proxy.store.base import PutOptions
from proxy.store.master import MooncakeMaster, read_metrics
from proxy.store.mooncake import name_of
from proxy.store.options import StoreOptions
from proxy.store.supervisor import StoreSupervisor
from tests.store.conftest import (
    DISK_BYTES,
    StartStore,
    child_pids,
    make_options,
    pool_options,
    store_pid,
)
from tests.store.slotfile import (
    FINGERPRINT,
    TestFile,
    make_key,
    make_refs,
    small_layout,
)
from tests.store.test_contract import get, put
from tests.store.test_faults import until_it_works, works

PUT_FOREIGN = """
import sys
import numpy as np
from proxy.store.mooncake import MooncakeHandle
handle = MooncakeHandle.connect(sys.argv[1], local_host="127.0.0.1")
data = np.fromfile(sys.argv[3], dtype=np.uint8)
codes = handle.put([sys.argv[2]], [[data.ctypes.data]], [[len(data)]])
assert codes == [0], codes
import os
os._exit(0)
"""

FILL = """
import os, sys, time
import numpy as np
from proxy.store.base import PutOptions
from proxy.store.mooncake import MooncakeHandle
from proxy.store.segments import Segments
handle = MooncakeHandle.connect(sys.argv[1], local_host="127.0.0.1")
segments = Segments(segment_bytes=64 << 20, max_segments=1)
segments.grow(handle.mount, touch=False)
data = np.ones(1 << 20, dtype=np.uint8)
def put(prefix, count, **options):
    for number in range(count):
        for _ in range(100):
            where = [[data.ctypes.data]]
            name = [f"{prefix}{number}"]
            if handle.put(name, where, [[len(data)]], PutOptions(**options)) == [0]:
                break
            time.sleep(0.05)
put("pinned", 20, soft_pin=True)
put("plain", 20)
put("more", 200)
for prefix in ("pinned", "plain"):
    print(sum(handle.exist([f"{prefix}{number}" for number in range(20)])))
sys.stdout.flush()
os._exit(0)
"""


def flip_in_segments(pid: int, payload: bytes) -> int:
    """Flip a bit of `payload` wherever the RAM segments of a store hold it."""
    flipped = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "kvbus-segment" not in str(entry.readlink()):
                continue
            with entry.open("r+b") as file:
                content = np.memmap(file, dtype=np.uint8, mode="r+")
                start = bytes(content[: 64 << 20]).find(payload)
                if start >= 0:
                    content[start + len(payload) // 2] ^= 0x10
                    flipped += 1
                content.flush()
    return flipped


async def test_a_bit_flipped_in_ram_is_a_miss(
    folder: Path, start_store: StartStore
) -> None:
    """A block whose bytes changed in its segment is not given out, and dropped."""
    supervisor = await start_store(make_options("embedded", folder))
    client = supervisor.client
    layout = small_layout(3)
    refs = make_refs("flip", 3)
    with TestFile(layout, seed=1) as source, TestFile(layout) as target:
        await put(client, source, refs)
        assert flip_in_segments(store_pid(supervisor), source.payload(1)) == 1
        assert await get(client, target, refs) == [True, False, True]
        keys = [ref.key for ref in refs]
        assert await client.contains(keys, deadline_seconds=1) == [True, False, True]
        assert (await client.status())["damaged_blocks"] == 1
        assert (await put(client, source, refs)).stored_blocks == 1
        assert await get(client, target, refs) == [True] * 3


@pytest.mark.parametrize("size", [100, None])
async def test_an_object_that_somebody_else_put_is_a_miss(
    size: int | None,
    folder: Path,
    start_store: StartStore,
    pool_master: MooncakeMaster,
) -> None:
    """Noise under the right name, of the right or a wrong size, is never a block."""
    supervisor = await start_store(pool_options(pool_master, folder / "run"))
    layout = small_layout(1)
    object_bytes = size or 128 + layout.block_bytes
    noise = folder / "noise"
    noise.write_bytes(os.urandom(object_bytes))
    key = make_key("foreign0")
    await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-c", PUT_FOREIGN),
            *(f"127.0.0.1:{pool_master.rpc_port}", name_of(key), str(noise)),
        ],
        check=True,
        timeout=30,
        stderr=subprocess.DEVNULL,
    )
    client = supervisor.client
    with TestFile(layout) as target:
        assert await client.contains([key], deadline_seconds=1) == [True]
        assert await get(client, target, make_refs("foreign", 1)) == [False]
        assert await client.contains([key], deadline_seconds=1) == [False]


async def test_members_of_a_pool_share_blocks(
    folder: Path, start_store: StartStore, pool_master: MooncakeMaster
) -> None:
    """What one member put another gets, until its owner is gone: then it is a miss."""
    first = await start_store(pool_options(pool_master, folder / "first"))
    second = await start_store(pool_options(pool_master, folder / "second"))
    layout = small_layout(40)
    refs = make_refs("pool", 40)
    with TestFile(layout, seed=2) as source, TestFile(layout) as target:
        assert (await put(first.client, source, refs)).stored_blocks == 40
        assert (await put(second.client, source, refs)).present_blocks == 40
        assert await get(second.client, target, refs) == [True] * 40
        assert all(target.payload(i) == source.payload(i) for i in range(40))
        assert first._watcher is not None
        first._watcher.cancel()
        os.kill(store_pid(first), signal.SIGKILL)
        for _ in range(2):
            started = time.monotonic()
            filled = [True]
            with contextlib.suppress(StoreError):
                filled = await get(second.client, target, refs)
                assert not any(filled)
            assert time.monotonic() - started < 5.5
        await until_it_works(second.client)


async def test_a_block_with_two_copies_outlives_a_member(
    folder: Path, start_store: StartStore, pool_master: MooncakeMaster
) -> None:
    """Each copy lies with another member; of too many there are as many as members."""
    first = await start_store(pool_options(pool_master, folder / "first"))
    second = await start_store(pool_options(pool_master, folder / "second"))
    layout = small_layout(20)
    refs = make_refs("copies", 20)
    with TestFile(layout, seed=3) as source, TestFile(layout) as target:
        outcome = await first.client.put_from(
            source.fd,
            layout,
            refs,
            fingerprint=FINGERPRINT,
            deadline_seconds=5,
            options=PutOptions(replica_num=8, soft_pin=True),
        )
        assert (outcome.stored_blocks, outcome.failed_blocks) == (20, 0)
        assert first._watcher is not None
        first._watcher.cancel()
        os.kill(store_pid(first), signal.SIGKILL)
        assert await get(second.client, target, refs) == [True] * 20
        assert all(target.payload(i) == source.payload(i) for i in range(20))


def test_pinned_blocks_outlive_the_others(pool_master: MooncakeMaster) -> None:
    """Where all else was evicted what was put with a pin is still there."""
    done = subprocess.run(
        [sys.executable, "-c", FILL, f"127.0.0.1:{pool_master.rpc_port}"],
        check=True,
        timeout=60,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert done.stdout.split() == [b"20", b"0"]


async def test_a_frozen_member_of_a_pool_costs_no_more_than_the_deadline(
    folder: Path, start_store: StartStore, pool_master: MooncakeMaster
) -> None:
    """Gets from it end at their deadline; the store's own blocks stay available."""
    frozen = await start_store(pool_options(pool_master, folder / "frozen"))
    store = await start_store(pool_options(pool_master, folder / "store"))
    layout = small_layout(16)
    theirs, ours = make_refs("theirs", 16), make_refs("ours", 16)
    with TestFile(layout, seed=3) as source, TestFile(layout) as target:
        await put(frozen.client, source, theirs)
        await put(store.client, source, ours)
        assert frozen._watcher is not None
        frozen._watcher.cancel()
        os.kill(store_pid(frozen), signal.SIGSTOP)
        try:
            for _ in range(4):
                started = time.monotonic()
                filled = [False]
                with contextlib.suppress(StoreError):
                    filled = await store.client.get_into(
                        target.fd,
                        layout,
                        theirs,
                        fingerprint=FINGERPRINT,
                        deadline_seconds=0.5,
                    )
                assert not any(filled)
                assert time.monotonic() - started < 1.0
                assert await get(store.client, target, ours) == [True] * 16
            assert store.client.counters.circuit_openings == 0
        finally:
            os.kill(store_pid(frozen), signal.SIGKILL)


async def test_a_pool_that_is_away_is_waited_for(
    folder: Path, start_store: StartStore, pool_master: MooncakeMaster
) -> None:
    """The store starts without its master, fails calls at once, and joins later."""
    options = pool_options(pool_master, folder / "run")
    pool_master.kill()
    supervisor = await start_store(options)
    started = time.monotonic()
    assert not await works(supervisor.client, "x")
    assert time.monotonic() - started < 1
    await asyncio.to_thread(pool_master.start)
    await until_it_works(supervisor.client)
    pool_master.kill()
    await until_failure(supervisor)
    await asyncio.to_thread(pool_master.start)
    await until_it_works(supervisor.client)


async def until_failure(supervisor: StoreSupervisor) -> None:
    """Wait until the store notices that its pool is away."""
    async with asyncio.timeout(10):
        while await works(supervisor.client, f"f{time.monotonic()}"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_ram_grows_as_it_is_needed(folder: Path, start_store: StartStore) -> None:
    """One segment at first, more before eviction starts, up to the limit."""
    supervisor = await start_store(make_options("embedded", folder))
    client = supervisor.client
    status = await client.status()
    assert status["mounted_bytes"] < status["capacity_bytes"]
    layout = small_layout(100, piece_bytes=131072)  # 150 MiB
    refs = make_refs("grow", 100)
    with TestFile(layout, seed=4) as source, TestFile(layout) as target:
        assert (await put(client, source, refs)).stored_blocks == 100
        assert await get(client, target, refs) == [True] * 100
        assert target.payload(99) == source.payload(99)
    status = await client.status()
    assert status["mounted_bytes"] == status["capacity_bytes"]


async def test_one_put_may_need_several_segments(
    folder: Path, start_store: StartStore
) -> None:
    """A prefix of most of the store's size is stored whole, however fast it comes."""
    options = replace(make_options("embedded", folder), ram_size_bytes=512 << 20)
    store = await start_store(options)
    layout = small_layout(160, piece_bytes=64 << 10)
    for number in range(3):
        refs = make_refs(f"large{number}", layout.num_blocks)
        with TestFile(layout, seed=number) as source:
            outcome = await put(store.client, source, refs)
        assert outcome.stored_blocks * layout.block_bytes > 60 << 20
        assert outcome.failed_blocks == 0


async def test_a_tiered_store_brings_blocks_back_from_disk(
    folder: Path, start_store: StartStore
) -> None:
    """Blocks survive the whole process on disk, and are promoted to RAM when used."""
    options = make_options("tiered", folder)
    first = await start_store(options)
    layout = small_layout(50, piece_bytes=16384)
    refs = make_refs("tier", 50)
    with TestFile(layout, seed=5) as source, TestFile(layout) as target:
        await put(first.client, source, refs)
        await _until_status(first, lambda s: s["disk"]["blocks"] == 50)
        await first.stop()
        second = await start_store(options)
        keys = [ref.key for ref in refs]
        assert await second.client.contains(keys, deadline_seconds=2) == [True] * 50
        assert await get(second.client, target, refs) == [True] * 50
        assert target.payload(49) == source.payload(49)
        await _until_status(second, lambda s: s["moved_blocks"] == 50)
        assert await get(second.client, target, refs) == [True] * 50
        assert await second.client.remove(keys, deadline_seconds=2) == 50
        assert await second.client.contains(keys, deadline_seconds=2) == [False] * 50


async def test_a_tiered_store_serves_from_disk_while_its_master_is_away(
    folder: Path, start_store: StartStore
) -> None:
    """Trouble in RAM leaves the disk readable."""
    supervisor = await start_store(make_options("tiered", folder))
    layout = small_layout(4)
    refs = make_refs("below", 4)
    with TestFile(layout, seed=6) as source, TestFile(layout) as target:
        await put(supervisor.client, source, refs)
        await _until_status(supervisor, lambda s: s["disk"]["blocks"] == 4)
        (master,) = child_pids(store_pid(supervisor))
        os.kill(master, signal.SIGSTOP)
        # The call under way fails: it may write later. Those after it find the disk.
        with contextlib.suppress(StoreError):
            await get(supervisor.client, target, refs)
        status = await supervisor.client.status()
        assert status["trouble"] is not None
        with TestFile(layout) as another:
            assert await get(supervisor.client, another, refs) == [True] * 4
            assert another.payload(3) == source.payload(3)


async def _until_status(supervisor: StoreSupervisor, condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition(await supervisor.client.status()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_master_takes_other_ports_when_its_own_are_taken() -> None:
    """A clash of ports is met by choosing again."""
    first = MooncakeMaster()
    first.start()
    second = MooncakeMaster()
    second.rpc_port, second.http_port = first.rpc_port, first.http_port
    try:
        second._launch()
        second.kill()
        second.rpc_port = 0
        second.start()
        assert second.rpc_port != first.rpc_port
        metrics = read_metrics("127.0.0.1", second.http_port, 1.0)
        assert metrics is not None
        assert metrics["master_total_capacity_bytes"] == 0
    finally:
        first.kill()
        second.kill()
    assert read_metrics("127.0.0.1", second.http_port, 0.2) is None


def test_a_pool_on_another_host_needs_an_address_of_ours(folder: Path) -> None:
    """Advertising loopback to other hosts is refused: they could never read from us."""
    with pytest.raises(ConfigError, match="loopback"):
        StoreOptions(
            runtime_dir=folder / "run",
            kind="mooncake",
            master_host="192.0.2.1",
            master_port=50051,
            local_host="127.0.0.1",
            disk_size_bytes=DISK_BYTES,
            disk_dir=folder,
        )
