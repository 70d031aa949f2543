"""Keeps a Mooncake backend alive: its master, its client, its segments.

One thread. It looks at the master every second, and every 25 ms while calls are in
flight; what it finds decides whether the gate is open.

Rules:
1. A master that does not answer for about 0.1 s while calls are in flight fails all of
   them; calls are then refused until it answers again.
2. A master of our own that ended, or is silent for `FROZEN_SECONDS`, is killed and
   started again, with back-off. Its keys are gone: the store is empty.
3. A client that wedged, or does not find back to its master, ends the process, with
   `EXIT_WEDGED`: the library cannot be closed while calls hang in it, and closing it
   stops the whole interpreter for seconds. Whoever started the store starts another.
4. Nothing is asked of a master that is known to be away: connecting to one that does
   not answer stops the whole interpreter too.
"""

import logging
import os
import socket
import threading
import time
from typing import NoReturn

from proxy.errors import ConfigError, StoreError
from proxy.store.backend import CopyThreads
from proxy.store.gate import CallGate
from proxy.store.master import MooncakeMaster, fetch, read_metrics
from proxy.store.mooncake import MasterAway, MooncakeHandle
from proxy.store.mooncake_backend import MooncakeBackend, is_wedged, probe_endpoint
from proxy.store.mooncake_writer import MooncakeWriter
from proxy.store.options import StoreOptions
from proxy.store.segments import Segments

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
BEAT_SECONDS = 0.025
ANSWER_SECONDS = (0.06, 0.1)
"""For the master's answer, first and second time; missing both is trouble."""
FROZEN_SECONDS = 2.0
RECONNECT_SECONDS = 5.0
CLOSE_SECONDS = 2.3
EXIT_WEDGED = 70
_LAST_BACKOFF_SECONDS = 10.0


class MooncakeWatch:
    """Owner of the master, of the client, and of the thread that watches them."""

    def __init__(self, options: StoreOptions, copy: CopyThreads) -> None:
        self._is_embedded = options.kind == "embedded"
        self._segments = Segments(
            segment_bytes=options.segment_bytes,
            max_segments=options.ram_size_bytes // options.segment_bytes,
        )
        self._gate = CallGate()
        self.writer = MooncakeWriter(
            get_handle=self._get_handle,
            segments=self._segments,
            copy=copy,
            on_suspicion=self._note_suspicion,
        )
        self.backend = MooncakeBackend(
            gate=self._gate,
            writer=self.writer,
            get_handle=self._get_handle,
            segments=self._segments,
            copy=copy,
            refresh=self._note_usage,
            close=self.close,
        )
        self.master = MooncakeMaster() if self._is_embedded else None
        self._address = f"{options.master_host}:{options.master_port}"
        self._master_host = options.master_host
        self._master_port = options.master_port
        self._metrics_port = options.master_metrics_port
        self._local_host = "127.0.0.1" if self._is_embedded else _local_host(options)
        self._ahead_bytes = options.segment_bytes // 2 if self._is_embedded else 0
        # mutable state
        self._is_stopping = threading.Event()
        self._is_suspect = False
        self.handle: MooncakeHandle | None = None
        self._missed = 0
        self._silent_since: float | None = None
        self._backoff_seconds = BEAT_SECONDS
        self._usage_noted = 0.0
        self._thread = threading.Thread(
            target=self._watch, name="mooncake watch", daemon=True
        )

    def __repr__(self) -> str:
        return f"<MooncakeWatch {self._address} {self._gate!r}>"

    def open(self) -> None:
        """Start everything, in a thread that lives as long as the process.

        Raises StoreError when a master of our own, or its client, does not start;
        ConfigError when the library cannot be imported. A pool that is away is waited
        for in the background.
        """
        try:
            if self.master is not None:
                self.master.start()
            self._connect()
            self._gate.open()
        except (StoreError, ConfigError) as exc:
            if self.master is not None:
                self.master.kill()
            if self.master is not None or isinstance(exc, ConfigError):
                raise
            logger.warning("%s", exc)
            self._gate.fail_all(str(exc))
        self._thread.start()
        threading.Thread(target=self._grow, name="mooncake grow", daemon=True).start()

    def close(self) -> None:
        """Leave the pool, end the master."""
        self._is_stopping.set()
        self._gate.fail_all("the store ends")
        handle = self.handle
        if self.master is not None:
            self.master.kill()  # its client needs no farewell
        elif handle is not None and not self._gate.num_inside:
            leaver = threading.Thread(target=handle.close, daemon=True)
            leaver.start()
            leaver.join(CLOSE_SECONDS)

    # ---- the watching thread

    def _watch(self) -> None:
        while not self._is_stopping.is_set():
            if self._gate.shut_reason is not None:
                self._is_stopping.wait(self._backoff_seconds)
            elif self._gate.wait_for_call(IDLE_SECONDS):
                self._is_stopping.wait(BEAT_SECONDS)
            try:
                self._look()
            except StoreError as exc:
                logger.warning("Mooncake: %s", exc)
                self._back_off()
            except Exception:  # the root of this thread
                logger.exception("watching Mooncake failed")
                self._back_off()

    def _look(self) -> None:
        """Find out how the master is, and act on it."""
        if self._is_stopping.is_set():
            return
        if self._is_suspect and self.handle is not None:
            self._is_suspect = False
            handle = self.handle
            if self._gate.run(lambda: is_wedged(handle), timeout_seconds=5.0):
                self._end_process("the Mooncake client is wedged")
        if self.master is not None and not self.master.is_running:
            self._gate.fail_all("the Mooncake master died")
            self._start_over(self.master)
        elif self._is_master_well():
            self._missed, self._silent_since = 0, None
            if self._gate.shut_reason is not None:
                self._rejoin()
            if time.monotonic() - self._usage_noted > IDLE_SECONDS / 2:
                self._note_usage()
        else:
            self._missed += 1
            if self._silent_since is None:
                self._silent_since = time.monotonic()
            if self._missed >= len(ANSWER_SECONDS):
                self._gate.fail_all("the Mooncake master does not answer")
            silent = time.monotonic() - self._silent_since
            if self.master is not None and silent > FROZEN_SECONDS:
                logger.warning("the Mooncake master is frozen: starting another")
                self._start_over(self.master)

    def _is_master_well(self) -> bool:
        if self.master is not None:
            turn = min(self._missed, len(ANSWER_SECONDS) - 1)
            return self.master.is_well(ANSWER_SECONDS[turn])
        handle = self.handle
        return handle is None or handle.is_connected()

    def _start_over(self, master: MooncakeMaster) -> None:
        """Get a fresh master of our own."""
        master.kill()
        self.writer.used_bytes = 0
        master.start()
        self._missed, self._silent_since = 0, None
        self._rejoin()

    def _rejoin(self) -> None:
        """Open the gate once the client has found back to the master."""
        handle = self.handle
        if handle is None:
            self._connect()
        else:
            deadline = time.monotonic() + RECONNECT_SECONDS
            while not self._has_rejoined(handle):
                if self._is_stopping.wait(0.02):
                    return
                if time.monotonic() > deadline:
                    self._end_process("the Mooncake client does not find its master")
        self._backoff_seconds = BEAT_SECONDS
        self._gate.open()
        logger.warning("Mooncake is back")

    def _has_rejoined(self, handle: MooncakeHandle) -> bool:
        if not handle.is_connected():
            return False
        metrics = self._read_metrics()
        return (
            metrics is None
            or metrics.get("master_total_capacity_bytes", 0)
            >= self._segments.mounted_bytes
        )

    def _connect(self) -> None:
        """Make a client and give it our segments. Raises StoreError."""
        address = self._address
        if self.master is not None:
            address = f"127.0.0.1:{self.master.rpc_port}"
        else:
            self._check_pool()
        handle = MooncakeHandle.connect(address, local_host=self._local_host)
        self.handle = handle
        self.writer.ensure_segments(
            1 if self._is_embedded else self._segments.limit_bytes, touch=False
        )
        self.backend.own_endpoint = probe_endpoint(handle, self._segments)

    def _end_process(self, reason: str) -> NoReturn:
        logger.error("%s: ending, to be started again", reason)
        if self.master is not None:
            self.master.kill()
        os._exit(EXIT_WEDGED)

    def _check_pool(self) -> None:
        """See whether the pool's master answers. Raises StoreError."""
        host, port = self._master_host, self._master_port
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except OSError as exc:
            raise StoreError(f"no pool at {self._address}: {exc}") from exc
        port = self._metrics_port
        if port and fetch(host, port, "/health", 1.0) is None:
            raise StoreError(
                f"the pool's master does not answer on its metrics port {port} "
                "(if it has none: set that to 0)"
            )

    def _note_suspicion(self) -> None:
        self._is_suspect = True

    def _get_handle(self) -> MooncakeHandle:
        if self.handle is None:
            raise MasterAway("there is no Mooncake client yet")
        return self.handle

    def _note_usage(self) -> None:
        """Learn how full the store is."""
        self._usage_noted = time.monotonic()
        metrics = self._read_metrics()
        if metrics is not None:
            self.writer.used_bytes = int(metrics.get("master_allocated_bytes", 0))
            self.backend.num_blocks = int(metrics.get("master_key_count", 0))
            if not self._is_embedded:
                self.backend.pool_bytes = int(
                    metrics.get("master_total_capacity_bytes", 0)
                )

    def _grow(self) -> None:
        """Prepare memory before a put needs it, in a thread of its own."""
        while not self._is_stopping.is_set():
            if self._gate.shut_reason is None:
                try:
                    self._segments.touch()
                    self.writer.ensure_segments(self._ahead_bytes, touch=True)
                except StoreError as exc:
                    logger.warning("the store cannot grow: %s", exc)
            self._is_stopping.wait(IDLE_SECONDS)

    def _read_metrics(self) -> dict[str, float] | None:
        if self.master is not None:
            return read_metrics("127.0.0.1", self.master.http_port, 0.5)
        if not self._metrics_port:
            return None
        return read_metrics(self._master_host, self._metrics_port, 0.5)

    def _back_off(self) -> None:
        self._backoff_seconds = min(
            max(2 * self._backoff_seconds, 0.1), _LAST_BACKOFF_SECONDS
        )


def _local_host(options: StoreOptions) -> str:
    """Return the address that other members reach us at. Raises ConfigError."""
    if options.local_host:
        return options.local_host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((options.master_host, options.master_port))
        except OSError as exc:
            raise ConfigError(
                f"the pool's master {options.master_host} is not reachable: {exc}"
            ) from exc
        return str(probe.getsockname()[0])
