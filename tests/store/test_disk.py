"""Blocks in a folder: damage, limits, full disks, restarts."""

import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proxy.blocks import BlockKey
from proxy.errors import ConfigError
from proxy.store.backend import CopyThreads, Transfer
from proxy.store.base import PutOutcome
from proxy.store.disk import DiskBackend
from proxy.store.slotfiles import SlotFiles
from tests.store.conftest import StartStore, make_options, store_pid
from tests.store.slotfile import (
    FINGERPRINT,
    TestFile,
    make_key,
    make_refs,
    small_layout,
)
from tests.store.test_contract import get, put

MIB = 1 << 20
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


def open_disk(folder: Path, size_bytes: int = 64 * MIB) -> DiskBackend:
    """Open a backend in this process."""
    return DiskBackend(folder, size_bytes, CopyThreads(2))


def make_transfer(file: TestFile, name: str, count: int) -> Transfer:
    """Return a transfer of the first blocks of a test file."""
    return Transfer(
        slot=SlotFiles(part_bytes=1 << 20).view_for_get(file.fd, file.layout),
        blocks=tuple(make_refs(name, count)),
        fingerprint=FINGERPRINT,
        give_up_at=time.monotonic() + 20,
    )


def block_file(folder: Path, key: BlockKey) -> Path:
    """Return where a block lies."""
    return folder / key.hex()[:2] / key.hex()[2:]


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 2 MiB."""
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2M,mode=0700", "tmpfs", str(folder)],
        check=True,
    )
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("damage", ["bit", "short", "long", "empty", "gone"])
def test_a_damaged_file_is_a_miss_and_removed(damage: str, tmp_path: Path) -> None:
    """Whatever is wrong with a file, its block is a miss once and absent then."""
    disk = open_disk(tmp_path)
    layout = small_layout(3)
    with TestFile(layout, seed=1) as source, TestFile(layout) as target:
        disk.put(make_transfer(source, "a", 3))
        path = block_file(tmp_path, make_key("a1"))
        data = bytearray(path.read_bytes())
        match damage:
            case "bit":
                data[-1] ^= 1
            case "short":
                del data[-1:]
            case "long":
                data += b"x"
            case _:
                data.clear()
        path.write_bytes(data)
        if damage == "gone":
            path.unlink()
        transfer = make_transfer(target, "a", 3)
        assert disk.get(transfer) == [True, False, True]
        assert not path.exists()
        assert disk.contains([make_key("a1")]) == [False]
        assert disk.damaged_blocks == 1
        assert disk.get(transfer) == [True, False, True]
        assert disk.damaged_blocks == 1
        assert disk.put(make_transfer(source, "a", 3)).stored_blocks == 1
        assert disk.get(transfer) == [True] * 3


async def test_blocks_survive_a_killed_store(
    folder: Path, start_store: StartStore
) -> None:
    """After kill -9 in the midst of puts, what is visible is whole; no temporaries."""
    options = make_options("disk", folder)
    supervisor = await start_store(options)
    layout = small_layout(256, piece_bytes=16384)
    refs = make_refs("kill", 256)
    with TestFile(layout, seed=2) as source, TestFile(layout) as target:
        await put(supervisor.client, source, refs[:16])
        os.kill(store_pid(supervisor), signal.SIGKILL)
        assert options.disk_dir is not None
        (options.disk_dir / "ab").mkdir(exist_ok=True)
        (options.disk_dir / "ab" / ".tmp-1-1").write_bytes(b"half a block")
        again = await start_store(options)
        assert await get(again.client, target, refs[:16]) == [True] * 16
        assert target.payload(15) == source.payload(15)
        assert not (options.disk_dir / "ab" / ".tmp-1-1").exists()
        status = await again.client.status()
        assert status["damaged_blocks"] == 0


def test_files_are_private(tmp_path: Path) -> None:
    """Folders are 0700 and blocks 0600, whatever the umask."""
    before = os.umask(0)
    try:
        disk = open_disk(tmp_path / "new")
        layout = small_layout(1)
        with TestFile(layout, seed=3) as source:
            disk.put(make_transfer(source, "p", 1))
        path = block_file(tmp_path / "new", make_key("p0"))
        modes = [
            p.stat().st_mode & 0o777 for p in (path, path.parent, tmp_path / "new")
        ]
    finally:
        os.umask(before)
    assert modes == [0o600, 0o700, 0o700]


def test_the_limit_holds_and_the_least_used_goes_first(tmp_path: Path) -> None:
    """What was asked for lately stays, also over a restart."""
    layout = small_layout(8, piece_bytes=16384)
    size = 8 * (layout.block_bytes + 4096)
    disk = open_disk(tmp_path, size)
    with TestFile(layout, seed=4) as source:
        disk.put(make_transfer(source, "a", 4))
        disk.put(make_transfer(source, "b", 4))
        for path in tmp_path.glob("*/*"):
            os.utime(path, ns=(1, 1))  # long ago, so that the next use is noted
        disk.close()
        disk = open_disk(tmp_path, size)
        assert disk.contains([make_key(f"a{i}") for i in range(4)]) == [True] * 4
        disk.close()
        disk = open_disk(tmp_path, size)
        assert disk.put(make_transfer(source, "c", 3)).stored_blocks == 3
        assert disk.contains([make_key(f"a{i}") for i in range(4)]) == [True] * 4
        assert sum(disk.contains([make_key(f"b{i}") for i in range(4)])) == 1
        assert disk.status()["used_bytes"] <= size
        stored = sum(p.stat().st_size for p in tmp_path.glob("*/*"))
        assert stored <= disk.status()["used_bytes"]


def test_leased_blocks_are_not_evicted(tmp_path: Path) -> None:
    """A put that could only fit by evicting what was just asked for fails."""
    layout = small_layout(8, piece_bytes=16384)
    disk = open_disk(tmp_path, 4 * (layout.block_bytes + 4096))
    with TestFile(layout, seed=5) as source:
        disk.put(make_transfer(source, "a", 4))
        keys = [make_key(f"a{i}") for i in range(4)]
        assert disk.contains(keys) == [True] * 4
        assert disk.put(make_transfer(source, "b", 2)).failed_blocks == 2
        assert disk.contains(keys) == [True] * 4


@needs_root
def test_a_full_disk_fails_puts_and_nothing_else(small_tmpfs: Path) -> None:
    """ENOSPC leaves no trace of the block; what is stored is still served."""
    layout = small_layout(64, piece_bytes=8192)  # 64 x 96 KiB on 2 MiB
    disk = open_disk(small_tmpfs)
    with TestFile(layout, seed=6) as source, TestFile(layout) as target:
        outcome = disk.put(make_transfer(source, "a", 64))
        assert outcome.failed_blocks > 0
        assert outcome.stored_blocks > 0
        assert len(list(small_tmpfs.glob("*/*"))) == outcome.stored_blocks
        assert sum(disk.get(make_transfer(target, "a", 64))) == outcome.stored_blocks
        assert disk.status()["blocks"] == outcome.stored_blocks
        started = time.monotonic()
        assert disk.put(make_transfer(source, "b", 64)).stored_blocks == 0
        assert time.monotonic() - started < 0.5  # refused, not tried 64 times
    disk.close()


@needs_root
def test_a_read_only_folder_serves_and_refuses(small_tmpfs: Path) -> None:
    """Gets go on where nothing can be written."""
    layout = small_layout(4)
    disk = open_disk(small_tmpfs)
    with TestFile(layout, seed=7) as source, TestFile(layout) as target:
        disk.put(make_transfer(source, "a", 2))
        disk.close()
        subprocess.run(["mount", "-o", "remount,ro", str(small_tmpfs)], check=True)
        disk = open_disk(small_tmpfs)
        try:
            assert disk.put(make_transfer(source, "a", 4)) == PutOutcome(0, 2, 2, 0)
            filled = disk.get(make_transfer(target, "a", 4))
        finally:
            disk.close()
        assert filled == [True, True, False, False]


def test_one_store_at_a_time(tmp_path: Path) -> None:
    """A second backend of one folder is refused in one line."""
    disk = open_disk(tmp_path)
    with pytest.raises(ConfigError, match="another store uses"):
        open_disk(tmp_path)
    disk.close()
    open_disk(tmp_path).close()


def test_a_hundred_thousand_blocks_are_found_quickly(tmp_path: Path) -> None:
    """The index of a large folder is read within a few seconds."""
    count = 20_000
    for i in range(count):
        path = block_file(tmp_path, BlockKey(hashlib.sha256(b"%d" % i).digest()))
        path.parent.mkdir(exist_ok=True)
        path.touch()
    started = time.process_time()
    disk = open_disk(tmp_path)
    seconds = time.process_time() - started
    assert disk.status()["blocks"] == count
    assert seconds * 100_000 / count < 5
    disk.close()


def test_objects_move_whole(tmp_path: Path) -> None:
    """What is read as an object can be written as one, and is the same block."""
    layout = small_layout(1)
    disk, other = open_disk(tmp_path / "a"), open_disk(tmp_path / "b")
    with TestFile(layout, seed=8) as source, TestFile(layout) as target:
        disk.put(make_transfer(source, "o", 1))
        data = disk.read_object(make_key("o0"))
        assert data is not None
        assert other.write_object(make_key("o0"), np.array(data))
        assert other.get(make_transfer(target, "o", 1)) == [True]
        assert target.payload(0) == source.payload(0)
        assert disk.read_object(make_key("none")) is None


def test_a_removed_folder_is_made_anew(tmp_path: Path) -> None:
    """Somebody deletes the whole store: it is empty, and works again after a put."""
    folder = tmp_path / "blocks"
    disk = open_disk(folder)
    with TestFile(small_layout(3), seed=1) as source:
        assert disk.put(make_transfer(source, "a", 3)).stored_blocks == 3
        shutil.rmtree(folder)
        assert disk.put(make_transfer(source, "b", 3)).failed_blocks > 0
        disk._puts_paused_until = 0.0
        assert disk.put(make_transfer(source, "b", 3)).failed_blocks == 0
    assert disk.contains([make_key("a1"), make_key("b1")]) == [False, True]
    with pytest.raises(ConfigError, match="another store"):
        open_disk(folder)  # the new folder is locked as well
    disk.close()
