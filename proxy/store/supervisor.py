"""Keeps a block store process at hand: finds a running one, or starts it.

Rules:
1. Everybody with the same `StoreOptions` ends up on one store: who starts a second
   one sees it end with `EXIT_TAKEN`, and connects to the first.
2. A store is killed only when a proxy started it (it says so in its hello), and only
   after it was connected and silent for `FROZEN_SECONDS`. A service is waited for.
3. A store that ended is started again, with back-off; the proxy goes on meanwhile.
4. `stop` ends the store only when no other client uses it.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from proxy.errors import ConfigError, StoreError, StoreTimeout
from proxy.store.client import StoreClient
from proxy.store.options import StoreOptions
from proxy.store.process import (
    EXIT_CONFIG,
    EXIT_TAKEN,
    ensure_private_folder,
    find_holder,
)

logger = logging.getLogger(__name__)

START_SECONDS = 15.0
"""For a store to become ready: import, master, segments; about 1 s when idle."""
FROZEN_SECONDS = 2.0
STOP_SECONDS = 1.0
"""For a store to end by itself; after that it is killed: what it holds is in memory,
and its disk tier bears that at any moment."""
_LOOK_SECONDS = 0.25
_CONNECT_SECONDS = 0.03
_MAX_LOG_BYTES = 1 << 20
_LAST_BACKOFF_SECONDS = 10.0


class StoreSupervisor:
    """Owner of this proxy's `StoreClient` and of the store that it started."""

    def __init__(self, options: StoreOptions, *, spawn: bool = True) -> None:
        self._options = options
        self._may_spawn = spawn
        self.client = StoreClient(options.socket_path)
        # mutable state
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.spawns = 0

    def __repr__(self) -> str:
        pid = None if self._child is None else self._child.pid
        return f"<StoreSupervisor {self._options.socket_path} child={pid}>"

    async def start(self) -> None:
        """Connect to the running store, or start one.

        Raises ConfigError when the store refuses its settings, StoreError when none
        is ready within `START_SECONDS`; nothing is left running then.
        """
        try:
            await self._bring_up()
        except BaseException:
            await self._end_child()
            raise
        self._watcher = asyncio.create_task(self._watch(), name="store supervisor")

    async def stop(self) -> None:
        """Leave the store; see it end when this proxy started it and was the last."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        hello = self.client.hello
        others = await self.client.close()
        if hello is None or (self._child and self._child.pid != hello.pid):
            # Never met; or it came second, maybe so late that it would be the first.
            await self._end_child()
        if hello is not None and hello.linger_seconds is not None:
            if others is None:  # it does not answer: frozen, or gone
                self._kill_frozen()
            if not others:
                await self._see_it_end(hello.pid)
        self._is_child_running()  # reaps it

    async def _bring_up(self) -> None:
        """Get the client connected, starting a store when there is none."""
        deadline = time.monotonic() + START_SECONDS
        silent_seconds = 0.0
        while True:
            try:
                await self.client.connect()
                return
            except StoreError as exc:
                if time.monotonic() > deadline:
                    words = self._last_words()
                    raise StoreError(
                        f"no block store within {START_SECONDS:g} s: {words}"
                    ) from exc
                if isinstance(exc, StoreTimeout):  # it took the connection, no more
                    silent_seconds += self.client.timing.hello_seconds
                    if silent_seconds >= FROZEN_SECONDS:
                        self._kill_frozen()
            if self._may_spawn and not self._is_child_running():
                self._check_exit()
                self._spawn()
            await asyncio.sleep(_CONNECT_SECONDS)

    def _is_child_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def _check_exit(self) -> None:
        """Judge how the child ended. Raises ConfigError, StoreError."""
        if self._child is None:
            return
        code = self._child.returncode
        self._child = None
        if code == EXIT_CONFIG:
            raise ConfigError(self._last_words())
        if code not in (0, EXIT_TAKEN):
            raise StoreError(f"the block store ended ({code}): {self._last_words()}")

    def _spawn(self) -> None:
        options = self._options
        ensure_private_folder(options.runtime_dir)
        ensure_private_folder(options.socket_path.parent)
        self._child = spawn_store(options)
        self.spawns += 1
        logger.info("started block store, pid %d", self._child.pid)

    def _last_words(self) -> str:
        return last_line(self._options.log_path) or "it said nothing"

    async def _watch(self) -> None:
        """Kill a frozen store, start an ended one again."""
        backoff = _LOOK_SECONDS
        while True:
            await asyncio.sleep(backoff)
            if self.client.is_connected:
                backoff = _LOOK_SECONDS
                if self.client.silent_seconds > FROZEN_SECONDS:
                    self._kill_frozen()
                continue
            if self._is_child_running() or not self._may_spawn:
                continue
            try:
                self._check_exit()
                self._spawn()
            except (ConfigError, StoreError, OSError) as exc:
                logger.warning("block store does not start again: %s", exc)
            backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)

    def _kill_frozen(self) -> None:
        holder = find_holder(self._options.lock_path)
        if holder is None or holder.is_service:
            return
        logger.warning("block store %d is frozen: killing it", holder.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(holder.pid, signal.SIGKILL)

    async def _see_it_end(self, pid: int) -> None:
        """Wait for the end of the store that this proxy was the last to leave."""
        deadline = time.monotonic() + STOP_SECONDS
        while (holder := find_holder(self._options.lock_path)) is not None:
            if holder.pid != pid:
                return  # somebody started the next one already
            if time.monotonic() > deadline:
                self._kill_frozen()
                return
            await asyncio.sleep(_CONNECT_SECONDS)

    async def _end_child(self) -> None:
        """End a child that did not become a store."""
        if self._child is not None and self._is_child_running():
            self._child.kill()
            await asyncio.to_thread(self._child.wait)


def spawn_store(options: StoreOptions) -> "subprocess.Popen[bytes]":
    """Start a store process, detached from this one's session and terminal."""
    log_path = options.log_path
    with contextlib.suppress(FileNotFoundError):
        if log_path.stat().st_size > _MAX_LOG_BYTES:
            log_path.unlink()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "proxy.store.server", options.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)


def last_line(path: Path) -> str:
    """Return the last line of a log that is not empty; an empty text if none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
