"""Runs a `mooncake_master` of our own, and tells whether it is well.

Rules:
1. It listens on loopback alone, and dies with the thread that started it: `start` is
   called only from threads that live as long as this process.
2. Its ports are chosen once and kept over restarts, since a client of it reconnects
   to the address that it knows.
"""

import contextlib
import http.client
import importlib.util
import logging
import os
import socket
import subprocess
import time
from pathlib import Path

from proxy.errors import ConfigError, StoreError
from proxy.store.process import die_with_parent

logger = logging.getLogger(__name__)

START_SECONDS = 5.0
_PORT_TRIES = 5
LEASE_SECONDS = 10


class MooncakeMaster:
    """One master process on loopback."""

    def __init__(self) -> None:
        self._program = find_program()
        # mutable state
        self._process: subprocess.Popen[bytes] | None = None
        self.rpc_port = 0
        self.http_port = 0

    def __repr__(self) -> str:
        pid = None if self._process is None else self._process.pid
        return f"<MooncakeMaster pid={pid} port={self.rpc_port}>"

    @property
    def is_running(self) -> bool:
        """Whether the process exists (it may be frozen)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process's id, once it was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and wait until it answers. Raises StoreError."""
        for _ in range(_PORT_TRIES):
            if not self.rpc_port:
                self.rpc_port, self.http_port = _choose_ports()
            self._launch()
            deadline = time.monotonic() + START_SECONDS
            while self.is_running and time.monotonic() < deadline:
                if self.is_well(0.5):
                    return
                time.sleep(0.01)
            ended_by_itself = not self.is_running
            self.kill()
            if not ended_by_itself:
                break
            self.rpc_port = 0  # somebody took a port in between
        raise StoreError("mooncake_master does not start")

    def kill(self) -> None:
        """End the process, be it frozen, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def is_well(self, timeout_seconds: float) -> bool:
        """Whether it answers within the time given."""
        return (
            fetch("127.0.0.1", self.http_port, "/health", timeout_seconds) is not None
        )

    def _launch(self) -> None:
        self._process = subprocess.Popen(
            die_with_parent(
                [
                    str(self._program),
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={self.rpc_port}",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={self.http_port}",
                    "--enable_metric_reporting=false",
                    f"--default_kv_lease_ttl={LEASE_SECONDS * 1000}",
                    "--logtostderr=true",
                    "--minloglevel=2",
                ]
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )


def find_program() -> Path:
    """Return the master's path, without importing anything. Raises ConfigError."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        program = Path(folder) / "mooncake_master"
        if os.access(program, os.X_OK):
            return program
    raise ConfigError("mooncake is not installed (mooncake-transfer-engine-non-cuda)")


def fetch(host: str, port: int, path: str, timeout_seconds: float) -> bytes | None:
    """Return the body of a 200 answer over HTTP; None for anything else."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            return None
    return body if response.status == 200 else None


def read_metrics(
    host: str, port: int, timeout_seconds: float
) -> dict[str, float] | None:
    """Return a master's plain gauges and counters by name; None if it is away."""
    body = fetch(host, port, "/metrics", timeout_seconds)
    if body is None:
        return None
    values: dict[str, float] = {}
    for line in body.decode(errors="replace").splitlines():
        name, _, value = line.partition(" ")
        if name.startswith("master_") and "{" not in name:
            with contextlib.suppress(ValueError):
                values[name] = float(value)
    return values


def _choose_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])
