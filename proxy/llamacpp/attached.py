"""A runner that somebody else starts: a llama-server at a given URL.

Its process is looked up on this host, for its command line tells the slot directory
and all that could change KV. Where it cannot be seen, or what listens is a relay in
front of it, its KV is not shared. Rules:
1. Nothing of it is changed: it is polled, probed once in its emptiest slot, used.
2. Another process behind the same URL is another runner: inspected anew. The end of
   the one that was inspected is seen at once, by a pidfd, not at the next poll.
"""

import asyncio
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from proxy.errors import ConfigError, RunnerGone
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.runner import Runner

POLL_SECONDS = 1.0
PATIENCE = 1
"""Requests do not wait for a server that we cannot start."""

CLOCK_TICKS_SECONDS = 0.02
"""Start times are told in ticks of 10 ms; a server needs longer to open its model."""

TCP_LISTEN_STATE = "0A"
"""Kernel, include/net/tcp_states.h: TCP_LISTEN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedOptions:
    """A llama-server that runs already."""

    url: str
    slot_directory: Path | None
    """None: found from the command line of the process."""

    @classmethod
    def parse(cls, text: str) -> "AttachedOptions":
        """Read `URL` or `URL#slot-dir=DIR`. Raises ConfigError."""
        if "://" not in text:
            text = f"http://{text}"
        parts = urlsplit(text)
        try:
            has_port = parts.port is not None
        except ValueError as exc:
            raise ConfigError(f"upstream {text}: {exc}") from exc
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"upstream {text}: give http://HOST:PORT")
        directory: Path | None = None
        if parts.fragment:
            name, _, value = parts.fragment.partition("=")
            if name != "slot-dir" or not value:
                raise ConfigError(f"upstream {text}: only #slot-dir=DIR is known")
            directory = Path(value)
        url = f"{parts.scheme}://{parts.netloc}" + ("" if has_port else ":8080")
        return cls(url=url + parts.path.rstrip("/"), slot_directory=directory)


_LIKE_FLAGS = ("LLAMA_ARG_", "LLAMA_ATTN_ROT_DISABLE=")
"""Variables of a llama-server that it takes for flags. The last one changes quantised
K and V, which state files before version 4 do not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProcess:
    """The process that listens on a port of this host."""

    pid: int
    started: str
    """Its start time in clock ticks: pids are used again."""
    arguments: tuple[str, ...]
    """Its command line with the program."""
    environment: tuple[str, ...]
    """Its variables that act like flags, sorted."""

    @property
    def flags(self) -> list[str]:
        """Return what may change KV: arguments after the program, and variables."""
        start = 1
        if Path(self.arguments[0]).name.startswith("python"):
            start = next(
                (i for i, arg in enumerate(self.arguments) if arg.startswith("--")), 1
            )
        return [*self.arguments[start:], *self.environment]

    @property
    def started_at(self) -> float:
        """When it was started, in seconds since the epoch, to a clock tick."""
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        age = since_boot - int(self.started) / os.sysconf("SC_CLK_TCK")
        return time.time() - age

    @property
    def model_variable(self) -> str | None:
        """The model as an environment variable names it."""
        name = "LLAMA_ARG_MODEL="
        found = (item for item in self.environment if item.startswith(name))
        return next((item.removeprefix(name) for item in found), None)

    def resolve(self, path: str) -> Path:
        """Return a path of its command line as seen from here."""
        return Path(f"/proc/{self.pid}/cwd").resolve() / path

    def flag(self, name: str) -> str | None:
        """Return the value of a flag of the command line."""
        for i, argument in enumerate(self.arguments):
            if argument == name and i + 1 < len(self.arguments):
                return self.arguments[i + 1]
            if argument.startswith(f"{name}="):
                return argument.partition("=")[2]
        return None


class AttachedRunner:
    """Watches one process of a llama-server that is not ours, for a `Runner`."""

    def __init__(
        self,
        runner: Runner,
        client: LlamaServerClient,
        *,
        options: AttachedOptions,
        process: LocalProcess | None,
        refusal: str,
    ) -> None:
        """Watch `process`; a `refusal` says why its KV must not be shared."""
        self.runner = runner
        self._client = client
        self._options = options
        self._process = process
        self._refusal = refusal

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Inspect the server, say so, and watch it until it is gone.

        Raises RunnerGone or UpstreamError if it cannot be inspected.
        """
        process, loop = self._process, asyncio.get_running_loop()
        if process is None:
            await self._inspect(lambda: True)
            on_ready()
            await self._watch()
            return
        with process_handle(process) as handle:
            await self._inspect(lambda: not _has_ended(handle))
            on_ready()
            loop.add_reader(handle, self.runner.report_lost, "its process has ended")
            try:
                await self._watch()
            finally:
                loop.remove_reader(handle)

    async def _inspect(self, is_same_process: Callable[[], bool]) -> None:
        process = self._process
        await self.runner.inspect(
            self._client,
            slot_directory=self._slot_directory(),
            flags=process.flags if process else (),
            refusal=self._refusal,
            engine=await asyncio.to_thread(_engine, process) if process else "",
            pid=process.pid if process else None,
            is_same_process=is_same_process,
        )

    async def _watch(self) -> None:
        """Wait until the server is gone; tell the runner."""
        reason = ""
        while not reason:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self.runner.lost.wait()
                    reason = self.runner.failure
            if not reason and not await self._client.is_healthy():
                reason = f"llama-server at {self._options.url} is away"
        self.runner.report_gone(reason)

    def _slot_directory(self) -> Path | None:
        if self._options.slot_directory is not None:
            return self._options.slot_directory
        process = self._process
        found = process.flag("--slot-save-path") if process else None
        if process is None or found is None:
            return None
        return process.resolve(found)


@contextmanager
def process_handle(process: LocalProcess) -> Iterator[int]:
    """Open a pidfd (pidfd_open(2)): it names this very process, for good.

    Raises RunnerGone if the process is not there any more.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except OSError as exc:
        raise RunnerGone("its process has ended") from exc
    try:
        if _describe(Path(f"/proc/{process.pid}")) != process:
            raise RunnerGone("its process has ended")
        yield handle
    finally:
        os.close(handle)


def _has_ended(handle: int) -> bool:
    """Tell, at once, whether the process of a pidfd has ended."""
    return bool(select.select([handle], [], [], 0)[0])


def look_at(process: LocalProcess | None, url: str, model_path: str) -> str:
    """Return why the KV of a listener must not be shared, "" if nothing is known.

    What listens may be a relay, whose command line says nothing of the server behind
    it; and the model's file may be newer than what the server has loaded (blocking).
    """
    if process is None:
        return "the runner's process cannot be seen on this host"
    named = process.flag("--model") or process.flag("-m") or process.model_variable
    port = process.flag("--port")
    is_there = port in (None, "0", str(urlsplit(url).port))
    if (
        not named
        or not is_there
        or process.resolve(named) != process.resolve(model_path)
    ):
        return "what listens at the URL is not the llama-server itself"
    try:
        changed = process.resolve(named).stat().st_ctime
    except OSError as exc:
        return f"the runner's model file cannot be read: {exc.strerror}"
    if changed > process.started_at + CLOCK_TICKS_SECONDS:
        return "the model's file was changed after the runner had started"
    return ""


def find_process(url: str) -> LocalProcess | None:
    """Find the process of this host that listens at `url` (blocking); None if unseen.

    Looks the port's socket up in /proc/net/tcp and its owner in /proc/PID/fd
    (proc(5)); processes of other users cannot be seen.
    """
    port = urlsplit(url).port
    inodes = _listening_inodes(port) if port else set()
    links = {f"socket:[{inode}]" for inode in inodes}
    if not links:
        return None
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and _owns_socket(path, links):
            return _describe(path)
    return None


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            is_listening = fields[3] == TCP_LISTEN_STATE
            if is_listening and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _owns_socket(path: Path, links: set[str]) -> bool:
    try:
        for entry in os.scandir(path / "fd"):
            try:
                if str(Path(entry.path).readlink()) in links:
                    return True
            except OSError:
                continue
    except OSError:
        return False
    return False


def _describe(path: Path) -> LocalProcess | None:
    try:
        arguments = _nul_separated(path / "cmdline")
        environment = _nul_separated(path / "environ")
        started = (path / "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
    if not arguments:
        return None
    return LocalProcess(
        pid=int(path.name),
        started=started,
        arguments=tuple(arguments),
        environment=tuple(
            sorted(item for item in environment if item.startswith(_LIKE_FLAGS))
        ),
    )


def _nul_separated(path: Path) -> Sequence[str]:
    return path.read_bytes().decode(errors="replace").rstrip("\0").split("\0")


def _engine(process: LocalProcess) -> str:
    """Name a llama-server by its executable, for builds that do not name themselves."""
    executable = Path(f"/proc/{process.pid}/exe")
    try:
        found = executable.stat()
        return f"{executable.resolve()} {found.st_size} {found.st_mtime_ns}"
    except OSError:
        return f"unknown {process.pid} {process.started}"
