"""Slot files: allocated, reused, private, and an error where there is no room."""

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.errors import SlotError
from proxy.llamacpp.slot_files import (
    MIN_RESTORE_BYTES,
    SlotDirectory,
    remove_stale_files,
)


async def test_a_restore_file_is_allocated_private_and_reused(tmp_path: Path) -> None:
    """Its pages exist before it is mapped; the next restore gets the same inode."""
    directory = SlotDirectory(tmp_path)
    file = await directory.acquire(100)
    found = file.path.stat()
    assert found.st_size == file.size == MIN_RESTORE_BYTES
    assert found.st_blocks * 512 >= file.size
    assert found.st_mode & 0o777 == 0o600
    file.write([(0, b"qs"), (2, b"gg")])
    assert file.path.read_bytes()[:4] == b"qsgg"
    await directory.release(file)
    assert await directory.acquire(MIN_RESTORE_BYTES) is file
    await directory.release(file)
    directory.close()
    assert not list(tmp_path.iterdir())


async def test_a_file_that_somebody_removed_is_not_used_again(tmp_path: Path) -> None:
    """The engine opens files by name: a lost name means a new file."""
    directory = SlotDirectory(tmp_path)
    file = await directory.acquire(1)
    await directory.release(file)
    file.path.unlink()
    other = await directory.acquire(1)
    assert other is not file
    assert other.path.exists()
    await directory.discard(other)
    assert not list(tmp_path.iterdir())


async def test_only_the_largest_idle_files_are_kept(tmp_path: Path) -> None:
    """Memory for idle restore files is bounded."""
    directory = SlotDirectory(tmp_path)
    files = [await directory.acquire(MIN_RESTORE_BYTES * n) for n in (1, 2, 3)]
    for file in files:
        await directory.release(file)
    assert sorted(path.stat().st_size for path in tmp_path.iterdir()) == sorted(
        file.size for file in files[1:]
    )
    directory.close()


async def test_a_closed_directory_keeps_nothing(tmp_path: Path) -> None:
    """A file that comes back after the runner's end is closed, not kept."""
    directory = SlotDirectory(tmp_path)
    file = await directory.acquire(1)
    directory.close()
    await directory.release(file)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)


async def test_no_directory_is_an_error_of_sharing(tmp_path: Path) -> None:
    """A slot directory that was removed is a SlotError, not a crash."""
    with pytest.raises(SlotError, match="cannot create"):
        await SlotDirectory(tmp_path / "gone").acquire(1)


def test_a_full_file_system_is_an_error_of_sharing(tmp_path: Path) -> None:
    """No room gives SlotError and leaves nothing; no page fault can hit it later."""
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from proxy.errors import SlotError\n"
        "from proxy.llamacpp.slot_files import SlotDirectory\n"
        "async def go():\n"
        "    try:\n"
        "        await SlotDirectory(Path(sys.argv[1])).acquire(1 << 22)\n"
        "    except SlotError as exc:\n"
        "        print(exc)\n"
        "asyncio.run(go())\n"
    )

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=limit_file_size,
    )
    assert "no room for a slot file" in done.stdout
    assert not list(tmp_path.iterdir())


async def test_a_saved_file_is_opened_and_unlinked(tmp_path: Path) -> None:
    """What the engine wrote can be read, in full, and its name is gone."""
    directory = SlotDirectory(tmp_path)
    (tmp_path / "kvbus-save-1").write_bytes(b"x" * 50)
    file = await directory.open_saved("kvbus-save-1", expected_bytes=50)
    assert os.pread(file.fd, 100, 0) == b"x" * 50
    assert not list(tmp_path.iterdir())
    file.close()


@pytest.mark.parametrize("content", [None, b"short"])
async def test_a_saved_file_that_is_not_whole_is_refused(
    tmp_path: Path, content: bytes | None
) -> None:
    """Neither a missing nor a short file is used, and none is left."""
    if content is not None:
        (tmp_path / "kvbus-save-1").write_bytes(content)
    with pytest.raises(SlotError):
        await SlotDirectory(tmp_path).open_saved("kvbus-save-1", expected_bytes=50)
    assert not list(tmp_path.iterdir())


async def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """A symlink under the name of a save file is refused."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 50)
    slots = tmp_path / "slots"
    slots.mkdir()
    (slots / "kvbus-save-1").symlink_to(secret)
    with pytest.raises(SlotError):
        await SlotDirectory(slots).open_saved("kvbus-save-1", expected_bytes=50)
    assert secret.exists()


async def test_a_file_that_somebody_cut_is_not_used_again(tmp_path: Path) -> None:
    """Neither while it was idle nor while it was in use; and nothing crashes."""
    directory = SlotDirectory(tmp_path)
    file = await directory.acquire(1)
    await directory.release(file)
    os.truncate(file.path, 100)
    other = await directory.acquire(1)
    assert other is not file
    os.truncate(other.path, 100)
    with pytest.raises(SlotError, match="cut"):
        other.write([(0, b"q"), (1000, b"q")])
    await directory.discard(other)
    assert not list(tmp_path.iterdir())


def open_fds() -> int:
    """Return how many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_what_a_cancelled_task_had_made_is_closed(tmp_path: Path) -> None:
    """A client that leaves while a file is allocated costs no file and no memory."""
    directory = SlotDirectory(tmp_path)
    before = open_fds()
    kept = await directory.acquire(1)
    await directory.release(kept)
    for num_bytes in (1, 5 * MIN_RESTORE_BYTES, 5 * MIN_RESTORE_BYTES):
        task = asyncio.create_task(directory.acquire(num_bytes))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    directory.close()
    async with asyncio.timeout(10):
        while list(tmp_path.iterdir()) or open_fds() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_files_of_dead_owners_are_removed(tmp_path: Path) -> None:
    """Only of owners that are no more: not our own, not anybody else's files."""
    directory = SlotDirectory(tmp_path)
    ours = await directory.acquire(1)
    dead = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nfrom pathlib import Path\n"
            "from proxy.llamacpp.slot_files import SlotDirectory\n"
            "name = SlotDirectory(Path(sys.argv[1])).new_name('restore')\n"
            "Path(sys.argv[1], name).write_bytes(b'x')\nprint(name)",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    others = tmp_path / "kvbus-notes.txt"
    others.write_text("mine")
    assert (tmp_path / dead).exists()
    remove_stale_files(tmp_path)
    assert set(tmp_path.iterdir()) == {ours.path, others}
    await directory.discard(ours)
