"""Directories of processes: private, kept while their process lives, then removed."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from proxy import runtime
from proxy.errors import ConfigError
from proxy.runtime import OwnedDirectory, ensure_private, remove_stale

ROOT = Path(__file__).parents[1]
OWNER = """
import signal, sys
from pathlib import Path
from proxy.runtime import OwnedDirectory
print(OwnedDirectory(Path(sys.argv[1]), "serve-").path, flush=True)
signal.pause()
"""


def test_a_directory_lives_as_long_as_its_process(tmp_path: Path) -> None:
    """Another process leaves it alone until its owner was killed."""
    parent = tmp_path / "run"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert path.stat().st_mode & 0o077 == 0
        (path / "file").touch()
        OwnedDirectory(parent, "serve-").close()
        assert (path / "file").exists()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate(timeout=10)
    own = OwnedDirectory(parent, "serve-")
    assert list(parent.iterdir()) == [own.path]
    own.close()
    assert not parent.exists()


def test_a_directory_is_removed_before_its_lock_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who loses the new directory to another process's clearing makes a second one."""
    flock = fcntl.flock
    lost: list[Path] = []

    def clear_first(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not lost:
            lost.extend(tmp_path.iterdir())
            remove_stale(tmp_path, "serve-")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", clear_first)
    own = OwnedDirectory(tmp_path, "serve-")
    assert len(lost) == 1
    assert not lost[0].exists()
    assert own.path.is_dir()
    assert own.path != lost[0]
    remove_stale(tmp_path, "serve-")
    assert (own.path / runtime.LOCK_NAME).exists()
    own.close()


def test_the_parent_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent that its last user removes just now is made again."""
    parent = tmp_path / "run"
    mkdtemp = tempfile.mkdtemp
    tries: list[str] = []

    def remove_first(*, prefix: str, dir: Path) -> str:
        tries.append(prefix)
        if len(tries) == 1:
            parent.rmdir()
        return mkdtemp(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkdtemp", remove_first)
    own = OwnedDirectory(parent, "serve-")
    assert own.path.parent == parent
    assert len(tries) == 2
    own.close()


def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    """A link or a file in place of the directory is a ConfigError; modes are set."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link", "file/below"):
        with pytest.raises(ConfigError, match=str(tmp_path / name)):
            ensure_private(tmp_path / name)
    (tmp_path / "open").mkdir(mode=0o755)
    assert ensure_private(tmp_path / "open").stat().st_mode & 0o077 == 0
