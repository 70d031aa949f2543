"""A runner that we start ourselves, and start again when it dies.

Rules:
1. The process listens on a unix socket in a directory of ours: no other user of the
   host can read its slots or prompts, and no port can clash.
2. It holds the reading end of a pipe of ours; when we die, even by kill -9, it ends
   and removes its slot files.
3. Failed starts are repeated with a growing pause; a process that lived for a while
   resets it.
4. A process that turns cannot reach any more is ended, whether it lives or not.
5. What is known of the model's files is known of those that this process loaded: they
   are looked at for each start, and must be the same before and after the load.
6. A parked runner has no process, at whatever point of its life it was parked. Where
   it is wanted before its process has ended, another one is started after that.
"""

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from proxy.errors import KvbusError, RunnerGone
from proxy.llamacpp.client import LlamaServerClient
from proxy.llamacpp.embeddings import needs_whole_batch, pooling_flag
from proxy.llamacpp.gguf_facts import ModelFacts
from proxy.llamacpp.runner import Runner
from proxy.ollama_folder import NO_MODELFILE, Modelfile

logger = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 300.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 30.0
STABLE_SECONDS = 5.0
STOP_SECONDS = 1.5
LOST_GRACE_SECONDS = 0.5
"""A turn notices the end of a process before it has quite ended."""

PATIENCE = 3
"""After so many failed starts in a row requests fail instead of waiting."""

EMBEDDINGS_REFUSAL = "it makes embeddings, which leave no KV to share"

LONGEST_REPLY_CONTEXTS = 10
"""Ollama's bound on replies that go on past the context."""

LOG_TAIL_BYTES = 2000
LAST_LINES = 2
"""Of the log of a process that did not start: our own, and the engine's before it."""


_OLLAMA_SAMPLING = (
    "--temp", "1.0", "--top-p", "1.0", "--top-k", "40", "--min-p", "0.0",
    "--repeat-penalty", "1.0",
)  # fmt: skip
"""What Ollama samples with on its OpenAI-compatible routes where a request does not
say. Its own routes have other defaults, and state every value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What a runner loads, and what is known of it."""

    path: Path
    facts: ModelFacts
    projector: Path | None = None
    """Makes images into what the model reads."""
    projector_facts: ModelFacts | None = None
    modelfile: Modelfile = NO_MODELFILE


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """How a llama-server of ours is started."""

    alias: str
    """The model's name in the engine's own answers."""
    slots: int
    context_tokens: int
    """Per slot."""
    kv_type: str
    flash_attention: str
    threads: int | None
    """CPU threads; None: the engine's default."""
    cache_ram_mib: int | None
    """The engine's own RAM cache; None: its default."""
    socket_path: Path
    slot_directory: Path
    makes_embeddings: bool = False
    """Whether it is started for embeddings, and no text."""

    def flags(self, files: ModelFiles) -> list[str]:
        """Return the command line, without the program, of a llama-server."""
        flags = [
            "--model", str(files.path),
            "--host", str(self.socket_path),
            "--port", "0",
            "--ctx-size", str(self.context_tokens * self.slots),
            "--parallel", str(self.slots),
            "--cache-type-k", self.kv_type,
            "--cache-type-v", self.kv_type,
            "--flash-attn", self.flash_attention,
            *_OLLAMA_SAMPLING,
            "--alias", self.alias,
            "--context-shift",
            "--n-predict", str(LONGEST_REPLY_CONTEXTS * self.context_tokens),
            "--metrics",
            "--slots",
        ]  # fmt: skip
        if self.makes_embeddings:
            flags += self._embedding_flags(files.facts)
        else:
            flags += ["--slot-save-path", str(self.slot_directory)]
            if files.projector is not None:
                flags += ["--mmproj", str(files.projector)]
        if self.threads is not None:
            flags += ["--threads", str(self.threads)]
        if self.cache_ram_mib is not None:
            flags += ["--cache-ram", str(self.cache_ram_mib)]
        return flags

    def _embedding_flags(self, facts: ModelFacts) -> list[str]:
        flags = ["--embeddings"]
        pooling = pooling_flag(facts)
        if pooling is not None:
            flags += ["--pooling", pooling]
        if needs_whole_batch(facts):
            tokens = str(self.context_tokens)
            flags += ["--batch-size", tokens, "--ubatch-size", tokens]
        return flags


class EmbeddedRunner:
    """Keeps one llama-server process alive for a `Runner`."""

    def __init__(
        self,
        runner: Runner,
        options: EmbeddedOptions,
        *,
        look: Callable[[], Awaitable[ModelFiles]],
        on_files: Callable[[ModelFiles], None],
    ) -> None:
        """Take the parts; `on_files` hears which files a new process has loaded."""
        self.runner = runner
        self._options = options
        self._look = look
        self._on_files = on_files
        # the mutable state
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None

    async def run(self) -> None:
        """Start the process, wait for its end, start it again; until cancelled."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            await self.runner.wait_wanted()
            started = time.monotonic()
            try:
                reason = await self._live_until_parked()
            except (KvbusError, OSError) as exc:
                reason = str(exc)
            finally:
                await self._end()
            if reason is None:
                pause = FIRST_PAUSE_SECONDS
                continue
            if time.monotonic() - started > STABLE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            self.runner.report_gone(reason)
            logger.warning(
                "event=runner.ended runner=%s reason=%r restart_seconds=%.1f",
                self.runner.runner_id,
                reason,
                pause,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.runner.parked.wait()
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _live_until_parked(self) -> str | None:
        """Run the process once; returns why it ended, None where it was parked.

        Raises KvbusError, OSError.
        """
        life = asyncio.create_task(self._live())
        parked = asyncio.create_task(self.runner.parked.wait())
        try:
            await asyncio.wait({life, parked}, return_when=asyncio.FIRST_COMPLETED)
            return None if parked.done() else life.result()
        finally:
            for task in (life, parked):
                task.cancel()
            await asyncio.gather(life, parked, return_exceptions=True)

    async def _live(self) -> str:
        """Run the process once; returns why it ended. Raises KvbusError."""
        options = self._options
        await asyncio.to_thread(_make_empty, options.slot_directory)
        options.socket_path.unlink(missing_ok=True)
        files = await self._look()
        flags = options.flags(files)
        process = await self._spawn(flags)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                ready_line = await process.stdout.readline()
        except TimeoutError as exc:
            raise RunnerGone("timed out waiting for llama-server to start") from exc
        if not ready_line:
            await process.wait()
            raise RunnerGone(self._last_words())
        ready = _read_ready(ready_line)
        if await self._look() != files:
            raise RunnerGone("the model's file was changed while it was loaded")
        self.runner.facts = files.facts
        self._on_files(files)
        client = LlamaServerClient(url="http://runner", socket_path=options.socket_path)
        try:
            await self.runner.inspect(
                client,
                slot_directory=options.slot_directory,
                flags=flags,
                engine=str(ready.get("engine", "")),
                vram_bytes=int(ready.get("vram_bytes", 0)),
                pid=process.pid,
                refusal=EMBEDDINGS_REFUSAL if options.makes_embeddings else "",
                is_same_process=lambda: process.returncode is None,
            )
            await self._wait_end(process)
            if process.returncode is None:
                reason = f"it is not reached any more: {self.runner.failure}"
            else:
                reason = f"exit status {process.returncode}"
            self.runner.report_lost(reason)  # at once: no turn takes its slots now
        finally:
            await client.close()
        return reason

    async def _wait_end(self, process: asyncio.subprocess.Process) -> None:
        """Wait until the process has ended, or turns cannot reach it."""
        ends = asyncio.create_task(_read_to_end(process))
        is_lost = asyncio.create_task(self.runner.lost.wait())
        try:
            await asyncio.wait({ends, is_lost}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ends}, timeout=LOST_GRACE_SECONDS)
        finally:
            ends.cancel()
            is_lost.cancel()

    async def _spawn(self, flags: Sequence[str]) -> asyncio.subprocess.Process:
        reading, writing = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _end
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "proxy.llamacpp.server",
                *flags,
                "--parent-fd", str(reading),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._log,
                pass_fds=(reading,),
                start_new_session=True,  # a Ctrl-C is ours to handle
            )  # fmt: skip
        except BaseException as exc:
            os.close(writing)
            if isinstance(exc, OSError):
                raise RunnerGone(f"cannot start: {exc}") from exc
            raise
        finally:
            os.close(reading)
        self._lifeline = writing
        return self._process

    def _last_words(self) -> str:
        if self._log is None:
            return "no output"
        fd = self._log.fileno()
        size = os.fstat(fd).st_size
        tail = os.pread(fd, LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()
        return "; ".join(reversed(lines[-LAST_LINES:])) or "no output"

    async def _end(self) -> None:
        """End the process if it lives; gently first."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()
                try:
                    async with asyncio.timeout(STOP_SECONDS):
                        await process.wait()
                except TimeoutError:
                    with suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
            os.close(self._lifeline)
        if self._log is not None:
            self._log.close()
            self._log = None


async def _read_to_end(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while await process.stdout.readline():
        pass  # the engine has nothing to say there
    await process.wait()


def _make_empty(directory: Path) -> None:
    """Make the slot directory, without what a killed process left in it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in directory.iterdir():
        with suppress(OSError):  # somebody else's directory, or nothing can be removed
            path.unlink()


def _read_ready(line: bytes) -> dict[str, Any]:
    """Read what a process says of itself when it is ready. Raises RunnerGone."""
    try:
        ready = orjson.loads(line)
    except orjson.JSONDecodeError:
        ready = None
    if not isinstance(ready, dict):
        raise RunnerGone("the runner said something else than being ready")
    return ready
